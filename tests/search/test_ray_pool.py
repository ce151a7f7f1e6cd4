"""The Ray pool: the same study as without Ray, whatever processes do."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo_explore.core import SpecError
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import Completed
from echo_explore.search.ray_environment import prepare
from echo_explore.search.space import enumerate_points
from echo_explore.testing.fakes import FakeFactory, Faults
from tests.search.support import MAIN_SPACE, ROOT, fake_search, ledger_lines, resolved, write_space

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    prepare("local")
    from echo_explore.search.pool.cluster import connect

    connection = connect("local", num_cpus=2)
    yield
    connection.close()


def _evaluate(factory: FakeFactory, points: list[SearchPoint], **options: float) -> dict[int, Completed]:
    """All points through a pool, as the driver would."""
    from echo_explore.search.pool import PoolOptions, RayPool

    pool = RayPool(
        factory,
        factory.build(factory.shared()),
        address="local",
        num_workers=2,
        options=PoolOptions(**options),  # type: ignore[arg-type]
    )
    try:
        for trial, point in enumerate(points):
            pool.submit(trial, point)
        done: dict[int, Completed] = {}
        limit = time.monotonic() + 120
        while len(done) < len(points) and time.monotonic() < limit:
            for completed in pool.wait(0.5):
                assert completed.trial not in done
                done[completed.trial] = completed
        assert pool.status().num_running == 0
        return done
    finally:
        pool.close()


@pytest.mark.parametrize("sampler", ["enumerate", pytest.param("tpe", marks=pytest.mark.slow)])
def test_same_ledger_as_without_ray(local_ray: None, tmp_path: Path, sampler: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    serial = fake_search(MAIN_SPACE, study=f"serial-{sampler}", sampler=sampler)
    on_ray = fake_search(
        MAIN_SPACE, study=f"ray-{sampler}", sampler=sampler, address="local", workers=2, cache=str(cache)
    )
    assert ledger_lines(on_ray) == ledger_lines(serial)
    made = Counter(path.name.partition(".")[0] for path in cache.glob("*.made"))
    assert made
    assert set(made.values()) == {1}


def test_faults_cost_no_trial(local_ray: None, tmp_path: Path) -> None:
    space = resolved(write_space(tmp_path))
    points = list(enumerate_points(space))
    keys = [point.key for point in points]
    once = tmp_path / "once"
    once.mkdir()
    faults = Faults(
        exit_on=frozenset(keys[2:5]),
        hang_on=frozenset({keys[7]}),
        raise_on=frozenset({keys[9]}),
        once_folder=str(once),
        log=str(tmp_path / "log"),
    )
    done = _evaluate(FakeFactory(space=space, faults=faults), points, deadline_s=4.0)
    assert sorted(done) == list(range(len(points)))
    failed = {trial: completed.cause for trial, completed in done.items() if completed.outcome is None}
    assert list(failed) == [9]
    assert "ZeroDivisionError: fake crash" in failed[9]
    healthy = FakeFactory(space=space).build(tuple(("none", "selective", "full")))
    assert all(done[i].outcome == healthy.evaluate(points[i]) for i in done if i != 9)
    assert {path.name for path in once.iterdir()} == {keys[i] for i in (2, 3, 4, 7, 9)}


@pytest.mark.slow
def test_a_point_that_always_kills_its_evaluator_fails_alone(local_ray: None, tmp_path: Path) -> None:
    space = resolved(write_space(tmp_path))
    points = list(enumerate_points(space))[:12]
    faults = Faults(exit_on=frozenset({points[5].key}))
    done = _evaluate(FakeFactory(space=space, faults=faults), points)
    assert [trial for trial, completed in sorted(done.items()) if completed.outcome is None] == [5]
    assert "its evaluator died 3 times" in done[5].cause


def test_what_is_wrong_with_the_search_is_raised(local_ray: None, tmp_path: Path) -> None:
    space = resolved(write_space(tmp_path))
    with pytest.raises(SpecError, match="fake = 1: is wrong; fix: correct it"):
        _evaluate(FakeFactory(space=space, faults=Faults(fatal=True)), list(enumerate_points(space))[:3])


def test_a_full_disk_is_no_failed_trial(local_ray: None, tmp_path: Path) -> None:
    space = resolved(write_space(tmp_path))
    points = list(enumerate_points(space))[:3]
    faults = Faults(no_space_on=frozenset(point.key for point in points))
    with pytest.raises(SpecError, match="No space left on device"):
        _evaluate(FakeFactory(space=space, faults=faults), points)


def test_retries_give_the_same_ledger_as_without_ray(local_ray: None, tmp_path: Path) -> None:
    space = write_space(tmp_path)
    points = [record.point for record in fake_search(space, study="rayretry-healthy").best]
    for study, address in (("serial", "none"), ("on-ray", "local")):
        faults = Faults(raise_on=frozenset({points[1].key}))
        options: dict[str, Any] = {"study": study, "sampler": "tpe", "address": address, "workers": 2}
        assert fake_search(space, faults=faults, **options).counts.num_failed == 1
        healed = fake_search(space, resume=True, **options)
        assert healed.certified
    folder = healed.folder.parent
    assert (folder / "on-ray/ledger.jsonl").read_bytes() == (folder / "serial/ledger.jsonl").read_bytes()


SCRIPT = """
import sys
from pathlib import Path
from typing import Any
from tests.search.support import fake_search
result = fake_search(Path(sys.argv[1]), study=sys.argv[2], address=sys.argv[3])
print(result.folder)
"""


def test_ray_of_our_own_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "127.0.0.1:1"}
    command = [sys.executable, "-c", SCRIPT, str(write_space(tmp_path)), "own-ray", "auto"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    session = f"_{process.pid}/"
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert ledger_lines(fake_search(tmp_path / "small.toml", study="own-serial")) == (
        Path(stdout.strip(), "ledger.jsonl").read_text().splitlines()
    )
    assert not (tmp_path / ".ray").exists()
    assert [line for line in _command_lines() if "ee-ray-" in line and session in line] == []
    assert not list(Path("/tmp").glob(f"ee-ray-*/session_*{process.pid}"))


def _command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines


def test_address_that_cannot_be_reached(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_gcs_rpc_server_reconnect_timeout_s": "1"}
    command = [sys.executable, "-c", SCRIPT, str(write_space(tmp_path)), "unreachable", "ray://127.0.0.1:1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "SpecError: address = 'ray://127.0.0.1:1'" in done.stderr
