"""BiGraph: two halves of switches, each switch joined to all of the other half; and its ranks for halving-doubling.

BiGraph(M, N) has N switches with M cards each. Between a card of the upper and one of the lower half there is one
shortest path, over one cable between switches, so no flow hashing decides. Rank mapping places ranks so that every
exchange of halving-doubling goes from one half to the other, over cables that few others use.

References: Dong et al., "EFLOPS: Algorithm and system co-design for a high performance distributed training platform"
(HPCA 2020); the mapping as published in the simulator of Huang et al., "Communication algorithm-architecture co-design
for distributed deep learning" (ISCA 2021), written anew as closed formulas.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_explore.core import SpecError
from echo_explore.topology.fabrics import Cable, Cards, check_at_least
from echo_explore.topology.network import NetworkBuilder, VertexKind

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seats:
    """Where ranks sit.

    Attributes:
        switch: of each rank; 0..N/2-1 is the upper half. Shape (M * N,).
        slot: of each rank at its switch, 0..M-1.
    """

    switch: Numbers
    slot: Numbers


def mapped_seats(cards_per_switch: int, num_switches: int) -> Seats:
    """Seats of ranks 0..MN-1 for halving-doubling with rank mapping.

    With rank r = j N + 2 i + b, slot j and h = N/2: r sits on the upper half exactly if popcount(r) is even, at switch
    (i + j) mod h there, else at switch i of the lower half. Ranks that differ in one bit lie on opposite halves. A step
    of halving-doubling puts at most max(1, 2M/N) flows on a directed pair of switches.

    Raises:
        SpecError: M or N is not a power of two, or N < 2.
    """
    m, n = cards_per_switch, num_switches
    _check_power_of_two("cards_per_switch", m)
    _check_power_of_two("num_switches", n)
    check_at_least("num_switches", n, 2)
    rank, half = np.arange(m * n), n // 2
    pair, slot = rank % n // 2, rank // n
    upper = np.bitwise_count(rank) % 2 == 0
    return Seats(switch=np.where(upper, (pair + slot) % half, half + pair), slot=slot)


def block_seats(cards_per_switch: int, num_switches: int) -> Seats:
    """Seats in order: ranks 0..M-1 at switch 0, the next M at switch 1; what one has without a mapping."""
    rank = np.arange(cards_per_switch * num_switches)
    return Seats(switch=rank // cards_per_switch, slot=rank % cards_per_switch)


def _check_power_of_two(field: str, value: int) -> None:
    if value < 1 or value & (value - 1):
        raise SpecError(field, value, "must be a power of two for halving-doubling", "use for example 16")


def device_numbers(seats: Seats, cards_per_switch: int, num_switches: int, *, cards_per_host: int) -> Numbers:
    """Device of each rank: upper switch p and lower switch h + p serve the same hosts, each card of a pair to one half.

    With one card a host, hosts of the upper half count first.
    """
    half = num_switches // 2
    if cards_per_host == 1:
        return seats.switch * cards_per_switch + seats.slot
    lower = (seats.switch >= half).astype(np.int64)
    return 2 * ((seats.switch - lower * half) * cards_per_switch + seats.slot) + lower


def add_bigraph(
    builder: NetworkBuilder, cards: Cards, cable: Cable, *, cards_per_switch: int, pair_bytes_per_s: float
) -> int:
    """Add a BiGraph; returns its number of switches, which have at most `cards_per_switch` cards each.

    Every upper switch is joined to every lower one by `pair_bytes_per_s`. Cards 0, 2, 4, ... of a host go to the upper
    half, the others to the lower one; single cards by host, the first half of hosts to the upper half.

    Raises:
        SpecError: hosts have an odd number of cards other than 1, or do not share the switches evenly.
    """
    check_at_least("cards_per_switch", cards_per_switch, 1)
    per_host = max(len(host) for host in cards)
    if per_host > 1 and per_host % 2:
        raise SpecError("nics", per_host, "must be even on a BiGraph: one half of them to each side", "use 2, 4 or 8")
    number = sum(len(host) for host in cards)
    half, rest = divmod(number, 2 * cards_per_switch)
    if rest:
        raise SpecError(
            "cards_per_switch", cards_per_switch, f"{number} cards do not fill pairs of switches", "change the hosts"
        )
    switches = [builder.vertex(f"{side}/{p}", VertexKind.SWITCH) for side in ("upper", "lower") for p in range(half)]
    flat = [card for host in cards for card in host]
    for i, card in enumerate(flat):
        single = i // cards_per_switch
        place = single if per_host == 1 else i // 2 // cards_per_switch + i % 2 * half
        cable.attach(builder, card, switches[place])
    for upper in switches[:half]:
        for lower in switches[half:]:
            cable.join(builder, upper, lower, pair_bytes_per_s)
    return 2 * half
