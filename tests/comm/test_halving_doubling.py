import numpy as np
import pytest

from echo_explore.comm.halving_doubling import halving_doubling_steps, halving_doubling_time, mapped_bound_s
from echo_explore.core import SpecError
from echo_explore.topology import (
    LinkKind,
    Network,
    NetworkBuilder,
    VertexKind,
    block_seats,
    device_numbers,
    mapped_seats,
)
from echo_explore.topology.bigraph import add_bigraph
from echo_explore.topology.fabrics import Cable

CARD = 12.5e9


def bigraph(m: int, n: int) -> Network:
    """A card a device, one cable of a card's bandwidth between each upper and lower switch."""
    builder = NetworkBuilder()
    cards = []
    for i in range(m * n):
        gpu = builder.vertex(f"gpu/{i}", VertexKind.DEVICE, host=i)
        card = builder.vertex(f"nic/{i}", VertexKind.CARD, host=i)
        builder.link(gpu, card, LinkKind.PCIE, 4 * CARD)
        cards.append([card])
    cable = Cable(bandwidth_bytes_per_s=CARD)
    assert add_bigraph(builder, cards, cable, cards_per_switch=m, pair_bytes_per_s=CARD) == n
    return builder.build()


@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 4), (4, 8), (8, 8), (8, 16), (16, 4)])
def test_mapped_ranks_reach_the_closed_form_and_others_do_not(m: int, n: int) -> None:
    network = bigraph(m, n)
    devices = {
        name: device_numbers(seats, m, n, cards_per_host=1)
        for name, seats in (("mapped", mapped_seats(m, n)), ("block", block_seats(m, n)))
    }
    times = {name: halving_doubling_time(network, at, 1e9) for name, at in devices.items()}
    bound = mapped_bound_s(1e9, m, n, bandwidth_bytes_per_s=CARD)
    assert times["mapped"] <= bound * (1 + 1e-9)
    if 2 * m <= n:
        assert times["mapped"] == pytest.approx(bound, rel=1e-9)
    assert times["mapped"] <= times["block"] * (1 + 1e-9)
    if m == n // 2 and m >= 4:
        assert times["block"] > 2 * times["mapped"]


def test_steps_move_every_byte_once_each_way() -> None:
    steps = halving_doubling_steps(range(16), 1.0)
    assert len(steps) == 8
    sent = np.zeros(16)
    for step in steps:
        np.add.at(sent, step.sources, step.num_bytes)
    assert sent == pytest.approx(np.full(16, 2 * 15 / 16))
    with pytest.raises(SpecError, match="needs a power of two"):
        halving_doubling_steps(range(12), 1.0)
