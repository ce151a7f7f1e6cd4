"""Settings of the whole test run: its state folder, its tracing process, which tests share a worker of pytest-xdist."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.shared_service import SharedService

# The same examples in every run, and nothing that a busy machine decides: a red run means a change.
# `make test` takes fewer examples than `make test-all`, which loads the profile `full`; see also tests/examples.py.
settings.register_profile("full", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("full"), max_examples=40)
settings.load_profile("quick")

_home = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # an xdist worker inherits the folder from the process that started it
        return
    config.stash[_home] = tempfile.mkdtemp(prefix="echo-explore-test-")
    os.environ["ECHO_EXPLORE_HOME"] = config.stash[_home]


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_home, None):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray share a worker; those of a file that import torch do, and what it sets up for them."""
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.xdist_group("ray"))
        elif item.get_closest_marker("torch") is not None:
            item.add_marker(pytest.mark.xdist_group(f"torch-{item.path.stem}"))


@pytest.fixture(scope="session")
def service() -> Iterator["SharedService"]:
    """The tracing process of all tests of this worker."""
    from tests.shared_service import SharedService

    running = SharedService()
    yield running
    running.end()
