"""One tracing process for all tests of this folder."""

from collections.abc import Iterator

import pytest

from echo_explore.tracing import TraceService


@pytest.fixture(scope="session")
def service() -> Iterator[TraceService]:
    with TraceService() as running:
        yield running
