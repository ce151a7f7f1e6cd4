"""`--set path=value`: changes to the tables of a file before they are validated, in the file's own words and units."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from echo_explore.core import SpecError

ROOTS = ("model", "cluster", "stack", "recipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One change: `root.key.key = value`."""

    root: str
    keys: tuple[str, ...]
    value: Any


def parse_overrides(texts: Sequence[str]) -> tuple[Override, ...]:
    """The changes in `path=value` texts; a value is a JSON number, true, false, a list, or else text.

    Raises:
        SpecError: no `=`, an unknown start, a path given twice.
    """
    overrides: dict[str, Override] = {}
    for text in texts:
        path, equals, value = (part.strip() for part in text.partition("="))
        root, *keys = path.split(".")
        if not equals or not keys or not all(keys):
            raise SpecError("set", text, "must be path=value", "write --set cluster.node.nics=4")
        if root not in ROOTS:
            raise SpecError("set", text, f"unknown start {root!r}", f"start with {', '.join(ROOTS)}")
        if path in overrides:
            raise SpecError("set", text, f"{path} is given twice", "give each path once")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value.strip("\"'")
        overrides[path] = Override(root=root, keys=tuple(keys), value=parsed)
    return tuple(overrides.values())


def overridden(table: dict[str, Any], overrides: Sequence[Override], root: str) -> dict[str, Any]:
    """A copy of `table` with the changes under `root`; validation comes after, and refuses unknown keys.

    Raises:
        SpecError: a path leads through something that has no keys.
    """
    changed = deepcopy(table)
    for override in overrides:
        if override.root != root:
            continue
        current = changed
        for key in override.keys[:-1]:
            current = current.setdefault(key, {})
            if not isinstance(current, dict):
                raise SpecError(
                    f"set {root}.{'.'.join(override.keys)}", override.value, f"{key} has no keys", "correct the path"
                )
        current[override.keys[-1]] = override.value
    return changed
