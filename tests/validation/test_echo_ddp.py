"""The batch that explains a measured time."""

from scripts.echo_ddp import BATCHES, nearest_batch


def test_the_batch_nearest_to_a_time_is_found() -> None:
    for wanted_ms, batch in ((10.0, 1), (62.0, 6), (69.0, 6), (70.0, 8), (1e6, BATCHES[-1])):
        assert nearest_batch(lambda b: 10.0 * b, wanted_ms) == batch
