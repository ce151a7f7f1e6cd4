import numpy as np
import pytest

from echo_explore.core import SpecError
from echo_explore.topology import block_seats, device_numbers, mapped_seats

SIZES = [(m, n) for m in (1, 2, 4, 8, 16, 32, 64) for n in (2, 4, 8, 16, 32, 64)]


@pytest.mark.parametrize(("m", "n"), SIZES)
def test_every_step_of_halving_doubling_crosses_on_cables_of_its_own(m: int, n: int) -> None:
    seats = mapped_seats(m, n)
    ranks = np.arange(m * n)
    assert len(set(zip(seats.switch.tolist(), seats.slot.tolist(), strict=True))) == m * n
    assert set(seats.switch) == set(range(n))
    upper = seats.switch < n // 2
    assert np.array_equal(upper, [rank.bit_count() % 2 == 0 for rank in range(m * n)])
    for bit in range((m * n).bit_length() - 1):
        partner = ranks ^ (1 << bit)
        assert (upper != upper[partner]).all()
        assert np.bincount(seats.switch * n + seats.switch[partner]).max() <= max(1, 2 * m // n)


def test_without_mapping_a_step_crowds_one_pair_of_switches() -> None:
    seats, ranks = block_seats(16, 32), np.arange(512)
    worst = max(np.bincount(seats.switch * 32 + seats.switch[ranks ^ (1 << b)]).max() for b in range(4, 9))
    assert worst == 16  # related works: M flows with block placement, 1 with the mapping


@pytest.mark.parametrize("cards_per_host", [1, 2, 8])
def test_ranks_have_devices_of_their_own(cards_per_host: int) -> None:
    devices = device_numbers(mapped_seats(8, 8), 8, 8, cards_per_host=cards_per_host)
    assert sorted(devices) == list(range(64))


@pytest.mark.parametrize(("m", "n"), [(3, 4), (4, 6), (0, 4), (4, 1)])
def test_other_numbers_are_refused(m: int, n: int) -> None:
    with pytest.raises(SpecError, match=r"must be (a power of two|2 or more)"):
        mapped_seats(m, n)
