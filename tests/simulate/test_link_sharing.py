"""Which axes hold each other back."""

import pytest

from echo_explore.graph import Axis
from echo_explore.simulate import jobs
from echo_explore.simulate.link_sharing import shared_links
from tests.simulate.support import candidate, simulator


def test_axes_in_one_domain_split_its_links_in_two() -> None:
    links = shared_links(candidate(layout="tp=4,dp=2", global_batch_size=16))
    assert [(found.first, found.second) for found in links] == [(Axis.TENSOR, Axis.DATA)]
    assert links[0].first_slowdown == pytest.approx(2.0)
    assert links[0].second_slowdown == pytest.approx(2.0)


def test_one_axis_shares_with_nobody() -> None:
    assert shared_links(candidate(layout="tp=8,pp=4")) == ()


def test_sharing_holds_a_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = candidate(layout="tp=4,dp=2", global_batch_size=16)
    shared = simulator().predict(job).step_time_s
    monkeypatch.setattr(jobs, "shared_links", lambda _: ())
    alone = simulator().predict(job).step_time_s
    assert alone <= shared <= alone * 1.1


def test_experts_share_links_with_dense_layers() -> None:
    """Gradients of experts are reduced by another communicator over the same network cards."""
    links = shared_links(
        candidate(
            model="mixtral-8x7b",
            layout="tp=1,ep=8,dp=32",
            num_gpus=32,
            global_batch_size=32,
            overrides=("stack.dropout=0",),
        )
    )
    found = {(pair.first, pair.second): pair for pair in links}
    assert (Axis.EXPERT, Axis.DATA) in found or (Axis.DATA, Axis.EXPERT_DATA) in found
    assert found[Axis.DATA, Axis.EXPERT_DATA].first_slowdown > 1.2
