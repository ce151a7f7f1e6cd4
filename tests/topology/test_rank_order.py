from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import PlacementError, SpecError
from echo_explore.graph import Axis
from echo_explore.specs import ParallelConfig, Placement, load_cluster, placement_from_pairs
from echo_explore.topology import axis_groups, group_shape, pipeline_boundary
from tests.examples import examples
from tests.topology.test_placement import AXES, groups_by_hand, layouts

H100 = load_cluster("h100-ndr")
ORDERS = ["-".join(order) for order in permutations(("tp", "cp", "ep", "dp", "pp"))]


@examples(100)
@given(layouts(), st.sampled_from(AXES))
def test_groups_of_the_default_order_are_megatrons(layout: ParallelConfig, axis: Axis) -> None:
    found = {tuple(sorted(group)) for group in axis_groups(axis, layout).tolist()}
    assert found == {tuple(sorted(set(group))) for group in groups_by_hand(axis, layout)}


@examples(150)
@given(layouts(), st.sampled_from(AXES))
def test_the_identity_map_is_the_default(layout: ParallelConfig, axis: Axis) -> None:
    same = Placement(device_of_rank=tuple(range(layout.num_gpus)))
    if layout.num_gpus <= H100.max_gpus:
        assert group_shape(axis, layout, H100, same) == group_shape(axis, layout, H100)
        for stage in range(layout.pipeline_parallel):
            assert pipeline_boundary(layout, H100, stage, same) == pipeline_boundary(layout, H100, stage)


@examples(100)
@given(layouts(), st.sampled_from(ORDERS), st.sampled_from(AXES))
def test_groups_of_every_order_part_the_ranks(layout: ParallelConfig, order: str, axis: Axis) -> None:
    layout = layout.model_copy(update={"expert_parallel": 1, "expert_tensor_parallel": 0})
    ranks = np.sort(axis_groups(axis, layout, order), axis=None)
    if axis == Axis.EMBEDDING and layout.pipeline_parallel > 2:
        assert len(set(ranks)) == len(ranks) == 2 * layout.num_gpus // layout.pipeline_parallel
    else:
        assert ranks.tolist() == list(range(layout.num_gpus))


def test_the_order_decides_what_shares_a_host() -> None:
    layout = ParallelConfig(tensor_parallel=4, pipeline_parallel=4, data_parallel=4)
    inner_pipeline = Placement(order="pp-tp-cp-ep-dp")
    assert group_shape(Axis.TENSOR, layout, H100).ranks_per_node == 4
    assert group_shape(Axis.TENSOR, layout, H100, inner_pipeline).ranks_per_node == 2
    assert pipeline_boundary(layout, H100, 0).ranks_per_node == 1
    assert pipeline_boundary(layout, H100, 0, inner_pipeline).ranks_per_node == 2


def test_a_scattered_map_spreads_tensor_groups() -> None:
    layout = ParallelConfig(tensor_parallel=8, data_parallel=8)
    scattered = Placement(device_of_rank=tuple(r % 8 * 8 + r // 8 for r in range(64)))
    assert group_shape(Axis.TENSOR, layout, H100, scattered).num_nodes == 8
    assert group_shape(Axis.DATA, layout, H100, scattered).num_nodes == 1


def test_bad_placements_are_named_in_one_line() -> None:
    with pytest.raises(SpecError, match="ranks 0 and 2 are both mapped to it"):
        Placement(device_of_rank=(3, 1, 3))
    with pytest.raises(SpecError, match="the rank is mapped twice, to GPU 0 and to 5"):
        placement_from_pairs([(0, 0), (1, 1), (0, 5)])
    with pytest.raises(SpecError, match=r"device_of_rank = 1: the rank is not mapped"):
        placement_from_pairs([(0, 0), (2, 1)])
    with pytest.raises(SpecError, match="must name tp, cp, ep, dp, pp once each"):
        Placement(order="tp-pp-dp")
    layout = ParallelConfig(tensor_parallel=2, data_parallel=2)
    with pytest.raises(PlacementError, match=r"\(3 ranks\)': the layout has 4"):
        group_shape(Axis.TENSOR, layout, H100, Placement(device_of_rank=(0, 1, 2)))
    with pytest.raises(PlacementError, match="the cluster has GPUs"):
        group_shape(Axis.TENSOR, layout, H100, Placement(device_of_rank=(0, 1, 2, 10**6)))
    experts = ParallelConfig(pipeline_parallel=2, data_parallel=4, expert_parallel=2)
    with pytest.raises(PlacementError, match="with experts the pipeline must come last"):
        group_shape(Axis.EXPERT, experts, H100, Placement(order="tp-cp-ep-pp-dp"))
