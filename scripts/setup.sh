#!/bin/sh
# Creates .venv and installs the pinned dependencies: scripts/setup.sh STAMP EXTRAS. Run by make from the project's root.
# Safe to interrupt and to run twice at once; the stamp is written last.
set -eu
stamp=$1 extras=$2 venv=.venv
py=${PYTHON:-python3}
say() { printf 'setup: %s\n' "$1" >&2; }
die() { printf 'error: %s\nfix:   %s\n' "$1" "$2" >&2; exit 1; }

command -v "$py" >/dev/null 2>&1 || die "$py not found" "apt-get install -y python3 python3-venv, or make PYTHON=/path/to/python3.11"
"$py" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' ||
  die "Python 3.11, 3.12 or 3.13 is needed; $py is $("$py" -V 2>&1)" "make PYTHON=python3.11 (or 3.12, 3.13) ..."
"$py" -c 'import venv; from ensurepip import version' 2>/dev/null ||
  die "$py cannot make virtual environments" "apt-get install -y python3-venv"
cxx=${CXX:-}
for name in c++ g++ clang++; do
  [ -n "$cxx" ] || ! command -v "$name" >/dev/null 2>&1 || cxx=$name
done
{ [ -n "$cxx" ] && command -v "${cxx%% *}" >/dev/null 2>&1; } ||
  die "no C++ compiler found${cxx:+ (CXX is $cxx)}; the tracer compiles one small file on its first use" "apt-get install -y g++, or set CXX"

# Of two makes at once the second waits. pip inherits the lock: it is held until the last installer is gone, even if this script is killed.
if command -v flock >/dev/null 2>&1; then
  exec 9>"$venv.lock"
  flock -n 9 || { say "another set-up is running in this folder; waiting for it"; flock 9; }
fi
fresh=yes
for file in pyproject.toml setup.py constraints.txt; do
  [ "$stamp" -nt "$file" ] || fresh=no
done
[ $fresh = no ] || exit 0

# A venv holds absolute paths: one that was moved, half made, or whose Python went away is made anew.
# So is one whose install did not end: pip takes a half-unpacked package for a whole one.
size="a few seconds, or more if versions changed"
if [ "$(cat "$venv/.home" 2>/dev/null)" != "$PWD" ] || [ -e "$venv/.installing" ] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  say "creating $venv with $("$py" -V 2>&1)"
  rm -f "$venv/.home"
  "$py" -m venv --clear "$venv"
  pwd > "$venv/.home"
  size="2.4 GB, 2 to 6 minutes"
fi
free=$(df -Pk . | awk 'NR==2 {print int($4 / 1024)}')
[ "$free" -ge 4000 ] || say "only $free MB of disk free; the environment takes about 2,500 MB, with a CUDA build of torch twice that"
say "installing the pinned dependencies ($size); log: $venv/install.log"
: > "$venv/.installing"
: > "$venv/install.log"

# One line every 10 s: the seconds, the size, and what pip does now. It ends with this script, however that ends.
heartbeat() {
  seconds=0
  while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    seconds=$((seconds + 10))
    now=$(grep -E '^ *(Collecting|Downloading|Processing|Using cached|Installing|Building|Requirement|Obtaining|Preparing)' "$venv/install.log" | tail -n 1 | sed 's/ packages: .*/ packages/' | cut -c1-70)
    say "$seconds s, $(du -sm "$venv" 2>/dev/null | cut -f1) MB: ${now:-starting pip}"
  done
}
trap 'exit 130' INT
heartbeat 9>&- &
beat=$!
trap 'kill $beat 2>/dev/null || :' EXIT

pip() { "$venv/bin/python" -m pip "$@" --disable-pip-version-check >> "$venv/install.log" 2>&1; }
{ pip install -c constraints.txt 'setuptools>=77' wheel &&
  pip install --prefer-binary --no-build-isolation -c constraints.txt -e ".[$extras]"; } ||
  { tail -n 12 "$venv/install.log" >&2; die "installing failed (whole log: $venv/install.log)" "run the same make again; it starts the environment anew"; }
pip check || { tail -n 5 "$venv/install.log" >&2; die "installed packages do not fit together" "make clean, then again"; }
rm -f "$venv/.installing"
touch "$stamp"
say "done"
