"""A real two-node cluster: both nodes work, traces travel, and losing a node loses no trial."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_explore.search.ports import Completed
from echo_explore.search.ray_environment import prepare
from echo_explore.search.space import enumerate_points
from echo_explore.testing.fakes import FakeEvaluator, FakeFactory, Faults
from tests.search.support import MAIN_SPACE, resolved

pytestmark = pytest.mark.ray

NUM_POINTS = 150


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs, where the driver is, and two nodes that work; their caches are folders of their own."""
    prepare("local")
    import ray
    from ray.cluster_utils import Cluster

    assert not ray.is_initialized()
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    for _ in range(2):
        started.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    started.wait_for_nodes()
    yield started
    started.shutdown()  # type: ignore[no-untyped-call]


def test_losing_a_node_loses_no_trial(cluster: Any, tmp_path: Path) -> None:
    from echo_explore.search.pool import RayPool

    space = resolved(MAIN_SPACE)
    cache = tmp_path / "cache"
    cache.mkdir()
    factory = FakeFactory(space=space, faults=Faults(slow_s=0.03), cache=str(cache), cache_by_process=True)
    evaluator = factory.build(factory.shared())
    points = enumerate_points(space)[::17][:NUM_POINTS]
    pool = RayPool(factory, evaluator, address=cluster.address, num_workers=2)
    done: dict[int, Completed] = {}
    removed = False
    try:
        for trial, point in enumerate(points):
            pool.submit(trial, point)
        while len(done) < len(points):
            for completed in pool.wait(0.5):
                assert completed.trial not in done
                done[completed.trial] = completed
            if not removed and len(done) > NUM_POINTS // 4 and pool.status().num_workers == 2:
                cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
                removed = True
        assert removed
        pool.bring_trace(points[0])
        assert evaluator.load_trace(evaluator.trace_request(points[0])) is not None
    finally:
        pool.close()
    healthy = FakeEvaluator(space=space)
    assert {trial: completed.outcome for trial, completed in done.items()} == {
        trial: healthy.evaluate(point) for trial, point in enumerate(points)
    }
    assert list(cache.glob("*/*.came"))
    assert not list(cache.glob(f"{os.getpid()}/*.made"))
