"""Which experts tokens visit, as far as sizes depend on it: an explicit oracle, balanced or after a given load.

Symbols: t tokens of a rank, k experts a token visits, E experts, n of them on one unit (a rank or a host), G groups of
experts of which a token may visit g (group-limited routing, arXiv 2412.19437 (2024), section 2.1.2).
"""

import math
from dataclasses import dataclass

from echo_explore.core import SpecError

_LARGEST_LOAD = 1e9
"""Loads are relative: beyond this one is a slip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The oracle.

    Attributes:
        num_experts: E.
        experts_per_token: k.
        num_groups: G; 0: not limited.
        groups_per_token: g.
        load: relative load of each expert; empty: balanced.
    """

    num_experts: int
    experts_per_token: int
    num_groups: int = 0
    groups_per_token: int = 0
    load: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.load:
            return
        if len(self.load) != self.num_experts:
            rule = f"needs one entry an expert, moe.num_experts = {self.num_experts}"
            raise SpecError("recipe.expert_load", f"({len(self.load)} entries)", rule, "give one load an expert")
        bad = next((x for x in self.load if not 0 <= x <= _LARGEST_LOAD), None)
        if bad is not None or sum(self.load) < 1 / _LARGEST_LOAD:
            rule = f"loads must be from 0 to {_LARGEST_LOAD:g}, and not all 0"
            raise SpecError("recipe.expert_load", 0.0 if bad is None else bad, rule, "correct the load")
        share, largest = max(self.load) / sum(self.load), 1.0 / self.experts_per_token
        if share > largest * (1 + 1e-9):
            rule = f"no expert can get more than every token, a share of 1/{self.experts_per_token}"
            raise SpecError("recipe.expert_load", f"(largest share {share:.3g})", rule, "give a flatter load")

    def counts(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of `num_tokens` that each expert gets, shape (E,); they add up to k * num_tokens."""
        load = self.load or (1.0,) * self.num_experts
        total = num_tokens * self.experts_per_token
        exact = [total * x / sum(load) for x in load]
        whole = [math.floor(x) for x in exact]
        order = sorted(range(len(load)), key=lambda i: (whole[i] - exact[i], i))
        for i in order[: total - sum(whole)]:
            whole[i] += 1
        return tuple(whole)

    def visits(self, num_units: int) -> tuple[float, ...]:
        """Probability that a token visits each of `num_units` equal units of neighbouring experts, (num_units,).

        Balanced, a token visits any k experts with one probability: 1 - C(E - n, k) / C(E, k); group-limited, any g
        groups, then any k of their experts. Under a load experts are taken as independent, each visited with
        probability k * share (# Approximation: over-estimates units of several loaded experts slightly).
        """
        size = self.num_experts // num_units
        if self.load:
            each = [min(1.0, self.experts_per_token * x / sum(self.load)) for x in self.load]
            units = [each[i * size : (i + 1) * size] for i in range(num_units)]
            return tuple(1.0 - math.prod(1.0 - p for p in unit) for unit in units)
        return (self._balanced_visit(size),) * num_units

    def _balanced_visit(self, size: int) -> float:
        k, groups = self.experts_per_token, self.num_groups
        if not groups:
            return 1.0 - math.comb(self.num_experts - size, k) / math.comb(self.num_experts, k)
        per_group, chosen = self.num_experts // groups, self.groups_per_token
        open_experts = chosen * per_group
        if size <= per_group:  # a part of one group
            inside = 1.0 - math.comb(open_experts - size, k) / math.comb(open_experts, k)
            return chosen / groups * inside
        whole = size // per_group
        missed = 0.0
        for hit in range(min(whole, chosen) + 1):
            weight = math.comb(whole, hit) * math.comb(groups - whole, chosen - hit) / math.comb(groups, chosen)
            missed += weight * math.comb(open_experts - hit * per_group, k) / math.comb(open_experts, k)
        return 1.0 - missed

    def shares(self, num_units: int) -> tuple[float, ...]:
        """Share of all tokens that the experts of each unit get, (num_units,)."""
        load, size = self.load or (1.0,) * self.num_experts, self.num_experts // num_units
        return tuple(sum(load[i * size : (i + 1) * size]) / sum(load) for i in range(num_units))

    def alike(self, num_units: int, *, by_total: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Classes of units with the same load: class of each unit, (num_units,), and the first unit of each class.

        Class 0 is that of the busiest unit; the others are numbered as they come.

        Args:
            num_units: units.
            by_total: units whose experts get as much together are alike; else their experts must have the same loads.
        """
        size, total = self.num_experts // num_units, sum(self.load) or 1.0
        loads = [sorted(self.load[i * size : (i + 1) * size]) for i in range(num_units)]
        keys = [tuple(round(x / total, 12) for x in ([sum(own)] if by_total else own)) for own in loads]
        busiest = self.busiest(num_units)
        classes = {key: number for number, key in enumerate(dict.fromkeys([keys[busiest], *keys]))}
        first = [busiest, *(keys.index(key) for key in list(classes)[1:])]
        return tuple(classes[key] for key in keys), tuple(first)

    def busiest(self, num_units: int) -> int:
        """The unit whose experts get the most tokens; the first on ties."""
        if not self.load:
            return 0
        size = self.num_experts // num_units
        sums = [sum(self.load[i * size : (i + 1) * size]) for i in range(num_units)]
        return max(range(num_units), key=lambda i: (sums[i], -i))
