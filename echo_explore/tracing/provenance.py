"""Where a row belongs: the module that runs, and for a backward the forward op that its autograd node was made by."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from echo_explore.graph import Phase
from echo_explore.tracing.storages import Kept


@dataclass(frozen=True, slots=True)
class Home:
    """Where a row belongs: module path with layer numbers replaced by N, and the layer (-1: none)."""

    path: str
    layer: int


@dataclass(frozen=True, slots=True)
class Context:
    """What runs now.

    Attributes:
        home: the innermost named module.
        phase: part of the step.
        forward_op: row of the forward op whose backward this is, -1 if unknown.
        region: number of the fused region whose backward this is, -1 outside one.
    """

    home: Home
    phase: Phase
    forward_op: int = -1
    region: int = -1


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of the forward: entering or leaving a layer.

    Attributes:
        kept: alive of what was made since the forward began.
    """

    what: str
    home: Home
    row: int
    kept: Kept


@dataclass(slots=True)
class _Origin:
    """What an autograd node was made by."""

    row: int
    home: Home
    region: int


OUTSIDE = Home("", -1)
"""Of what runs in no named module."""


class Provenance:
    """The named modules that run, and which op made which autograd node."""

    def __init__(self) -> None:
        self._homes: weakref.WeakKeyDictionary[torch.nn.Module, Home] = weakref.WeakKeyDictionary()
        self._marked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._parameter_homes: dict[int, Home] = {}
        self._stack: list[Home] = []
        self._origins: dict[int, _Origin] = {}
        self._recent = OUTSIDE

    def name_module(self, module: torch.nn.Module, path: str, layer: int, *, mark: bool) -> None:
        """What runs inside `module` (and in no deeper named one) belongs to this path and layer."""
        home = Home(path, layer)
        self._homes[module] = home
        for parameter in module.parameters(recurse=False):
            self._parameter_homes[id(parameter)] = home
        if mark:
            self._marked.add(module)

    def is_marked(self, module: torch.nn.Module) -> bool:
        """Whether entering and leaving the module is noted."""
        return module in self._marked

    def enter(self, module: torch.nn.Module) -> Home:
        """A module begins; its home."""
        home = self._homes.get(module) or self.home
        self._stack.append(home)
        return home

    def leave(self) -> Home:
        """The innermost module ends; its home."""
        return self._stack.pop()

    @property
    def home(self) -> Home:
        """The innermost named module that runs."""
        return self._stack[-1] if self._stack else OUTSIDE

    @contextmanager
    def inside(self, home: Home) -> Iterator[None]:
        """Run what belongs to `home` without being a module."""
        self._stack.append(home)
        try:
            yield
        finally:
            self._stack.pop()

    def context(self, phase: Phase) -> Context:
        """What runs now; `phase` is that of the schedule, which holds outside of modules and autograd."""
        node: Any = torch._C._current_autograd_node()
        if self._stack:
            return Context(self._stack[-1], Phase.FORWARD if node is None else Phase.RECOMPUTE)
        if node is None:
            self._recent = OUTSIDE
            return Context(OUTSIDE, phase)
        variable = getattr(node, "variable", None)
        if variable is not None:
            # A leaf that is no parameter is an input of a recomputed part, which ran just now.
            return Context(self._parameter_homes.get(id(variable), self._recent), Phase.BACKWARD)
        origin = self._origins.get(node._sequence_nr())
        if origin is None:
            return Context(self._recent, Phase.BACKWARD)
        self._recent = origin.home
        return Context(origin.home, Phase.BACKWARD, origin.row, origin.region)

    def remember(self, row: int, region: int) -> None:
        """Tie the autograd node of the op that just ran to its row: its backward then knows where it belongs.

        Args:
            row: of the op, -1 if it has none yet.
            region: number of the fused region that it is in, -1 outside one.
        """
        if not self._stack and torch._C._current_autograd_node() is not None:
            return
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        origin = self._origins.get(number)
        if origin is None:
            self._origins[number] = _Origin(row, self.home, region)
        elif origin.row < 0:
            origin.row = row
