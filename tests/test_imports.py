"""`import echo_explore` stays light: the heavy libraries are loaded by the parts that use them."""

import subprocess
import sys

HEAVY = ("torch", "ray", "optuna", "pandas", "numba", "networkx", "scipy", "transformers", "megatron", "plotly")


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(name.partition('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_no_heavy_library() -> None:
    assert _loaded_by("import echo_explore").isdisjoint(HEAVY)


def test_a_heavy_library_would_be_noticed() -> None:
    assert "networkx" in _loaded_by("import networkx")
