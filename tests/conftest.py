"""Settings of the whole test run: a state folder of its own, and which tests share a worker of pytest-xdist."""

import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and nothing that a busy machine decides: a red run means a change.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")

_GROUPED = ("ray", "torch")
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
    for item in items:
        for name in _GROUPED:
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.xdist_group(name))
                break
