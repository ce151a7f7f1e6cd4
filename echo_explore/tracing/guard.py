"""The no-op CUDA device that lets autograd run on fake `cuda` tensors in a process without a GPU.

Its C++ source (`fakecuda.cpp`) is compiled on first use against the installed torch, because C++ classes of torch have
no stable ABI, into a per-user cache. It can't be taken back, so only the tracing child installs it.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import IO

from echo_explore.core import TraceError

SOURCE = Path(__file__).with_name("fakecuda.cpp")
_ABI = 1
_NUM_DEVICES = 8
_LOCK_TIMEOUT_S = 180.0
_COMPILE_TIMEOUT_S = 300.0


def cache_folder() -> Path:
    """The private folder of compiled guards: in the user's cache, else under the temporary folder.

    Raises:
        TraceError: neither can be written.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir(), f"echo-explore-{os.getuid()}")
    candidates = (Path(base, "echo-explore", "guard"), temporary / "guard")
    for path in candidates:
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = path.stat()
        except OSError:
            continue
        # Code is loaded from here, so nobody else may write to it.
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(path, os.W_OK):
            return path
    raise TraceError(
        f"cache folder = {candidates[0]}: must be private and writable, for the compiled tracing helper; "
        "fix: set XDG_CACHE_HOME to a folder of yours"
    )


def _key(torch: ModuleType) -> str:
    compiler = os.environ.get("CXX", "default")
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    parts = [str(torch.__version__), str(torch.version.git_version), str(torch._C._GLIBCXX_USE_CXX11_ABI), compiler]
    parts += [platform.system(), platform.machine(), str(_ABI), source]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> list[str]:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise TraceError(
        f"C++ compiler = {' or '.join(names)}: not found, and tracing compiles a small helper once; "
        "fix: apt-get install -y g++ (Debian, Ubuntu), or set CXX"
    )


def _lock(file: IO[str]) -> None:
    end = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TraceError(
                    f"lock = {file.name}: held by another process for {_LOCK_TIMEOUT_S:.0f} s; fix: end it and retry"
                ) from None
            time.sleep(0.05)
        except OSError:  # a file system without locks: the rename keeps readers safe, the work is done twice
            return
        else:
            return


def _compile(torch: ModuleType, library: Path) -> None:
    root = Path(torch.__file__ or "").parent
    include, libraries = root / "include", root / "lib"
    if not (include / "ATen/detail/CUDAHooksInterface.h").is_file():
        raise TraceError(f"torch = {root}: has no C++ headers; fix: pip install torch")
    handle, temporary = tempfile.mkstemp(prefix=library.name, suffix=".tmp", dir=library.parent)
    os.close(handle)
    command = [
        *_compiler(), "-O1", "-g0", "-shared", "-fPIC", "-std=c++20", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-isystem", str(include), str(SOURCE),
        "-o", temporary, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=_COMPILE_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            log = library.with_suffix(".log")
            log.write_text(shlex.join(command) + "\n" + done.stdout)
            first = next((line for line in done.stdout.splitlines() if "error" in line), done.stdout[:200])
            raise TraceError(
                f"compiler = {command[0]}: could not compile the tracing helper ({first.strip()}); "
                f"fix: use g++ 10 or clang 12 or later; log: {log}"
            )
        os.chmod(temporary, 0o755)
        os.replace(temporary, library)
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"compiler = {command[0]}: still running after {error.timeout:.0f} s; fix: retry") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def build(torch: ModuleType) -> Path:
    """The compiled guard for this torch; compiles it unless a process of this user has.

    Raises:
        TraceError: no compiler, no headers, no folder to write to, or the compiler fails.
    """
    folder = cache_folder()
    library = folder / f"fakecuda-{_key(torch)}.so"
    if library.exists():
        return library
    with open(folder / f"{library.name}.lock", "w") as lock:
        _lock(lock)
        if not library.exists():  # another process may have compiled it meanwhile
            _compile(torch, library)
    return library


def _load(torch: ModuleType) -> ctypes.CDLL:
    for last in (False, True):
        path = build(torch)
        try:
            library = ctypes.CDLL(str(path))
            if library.echo_guard_abi() == _ABI:
                return library
        except (OSError, AttributeError) as error:  # damaged, for example by a full disk: made anew, once
            if last:
                raise TraceError(
                    f"tracing helper = {path}: cannot be loaded ({error}); "
                    "fix: set XDG_CACHE_HOME to a folder that is not mounted noexec"
                ) from error
        path.unlink(missing_ok=True)
    raise TraceError(f"tracing helper = {path}: is of another version; fix: delete it and retry")


def install(torch: ModuleType) -> None:
    """Give this process the no-op CUDA device, for good.

    Raises:
        TraceError: it cannot be compiled or loaded, or this torch does not accept it.
    """
    _load(torch).echo_guard_install(_NUM_DEVICES)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        raise TraceError(f"torch = {torch.__version__}: did not accept the no-op CUDA device; fix: see constraints.txt")
