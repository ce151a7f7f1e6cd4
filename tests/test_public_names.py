"""What a package exports: `__all__` is sorted and is exactly the public names that its `__init__` binds."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import echo_explore

ROOT = Path(echo_explore.__file__).parent
PACKAGES = ["echo_explore", *(m.name for m in pkgutil.walk_packages([str(ROOT)], "echo_explore.") if m.ispkg)]
LIGHT = [name for name in PACKAGES if name.rpartition(".")[2] not in ("pool", "study")]
"""Packages without Ray or Optuna, which need not be imported for this."""


def _source(package: str) -> ast.Module:
    return ast.parse((ROOT.parent / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))


def _bound(tree: ast.Module, package: str) -> set[str]:
    """Public names that the package binds from its own modules; those of the whole come when they are used."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If) and package == "echo_explore":
            names |= _bound(ast.Module(body=node.body, type_ignores=[]), package)
    return {name for name in names if not name.startswith("_")}


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            value: list[str] = ast.literal_eval(node.value)
            return value
    return []


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each by name."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_what_is_public(package: str) -> None:
    tree = _source(package)
    exported, private = _exported(tree), {"PACKAGE_VERSION"} if package == "echo_explore" else set()
    assert exported == sorted(exported, key=_order)
    assert {name for name in exported if not name.startswith("__")} == _bound(tree, package) - private


@pytest.mark.parametrize("package", LIGHT)
def test_every_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    missing = [name for name in _exported(_source(package)) if not hasattr(module, name)]
    assert missing == []


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = echo_explore.nothing
