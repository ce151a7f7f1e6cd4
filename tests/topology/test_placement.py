import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_explore.core import SpecError
from echo_explore.graph import Axis
from echo_explore.specs import ClusterSpec, ParallelConfig, load_cluster
from echo_explore.topology import GroupShape, domain_size, group_shape, pipeline_boundary
from tests.examples import examples

H100 = load_cluster("h100-ndr")
RACK = load_cluster("gb200-nvl72")
AXES = [axis for axis in Axis if axis not in (Axis.NONE, Axis.PIPELINE, Axis.HOST)]


def groups_by_hand(axis: Axis, layout: ParallelConfig) -> list[list[int]]:
    """The groups by their definition: ranks that agree in every other coordinate."""
    tensor, context, data = layout.tensor_parallel, layout.context_parallel, layout.data_parallel
    stage_gpus, expert, split = tensor * context * data, layout.expert_parallel, layout.expert_tensor_ranks
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.num_gpus):
        t, c, d = rank % tensor, rank // tensor % context, rank // (tensor * context) % data
        stage, inner = divmod(rank, stage_gpus)
        key = {
            Axis.TENSOR: (c, d, stage),
            Axis.CONTEXT: (t, d, stage),
            Axis.DATA: (t, stage),
            Axis.EXPERT: (inner % split, inner // (split * expert), stage),
            Axis.EXPERT_TENSOR: (inner // split, stage),
            Axis.EXPERT_MODEL: (inner // (split * expert), stage),
            Axis.EXPERT_DATA: (inner % (split * expert), stage),
            Axis.EMBEDDING: (inner,),
            Axis.MODEL: (c, d),
        }[axis]
        if axis != Axis.EMBEDDING or stage in (0, layout.pipeline_parallel - 1):
            found.setdefault(key, []).append(rank)
    return list(found.values())


@st.composite
def layouts(draw: st.DrawFn) -> ParallelConfig:
    tensor = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    context, data = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3, 6, 8]))
    split = draw(st.sampled_from([0, 1, 2, tensor]))
    whole = tensor * context * data
    fit = [e for e in (1, 2, 4, 8, 16) if whole % e == 0 and whole % (max(split, 1) * e) == 0]
    if not fit:
        split, fit = 0, [1]
    return ParallelConfig(
        tensor_parallel=tensor,
        context_parallel=context,
        data_parallel=data,
        pipeline_parallel=draw(st.sampled_from([1, 2, 3, 5, 8])),
        expert_parallel=draw(st.sampled_from(fit)),
        expert_tensor_parallel=split,
    )


def domains(ranks: list[int], domain: int) -> set[int]:
    return {rank // domain for rank in ranks}


@examples(150)
@given(layouts(), st.sampled_from(AXES), st.sampled_from([H100, RACK]))
def test_shape_is_the_worst_group_by_definition(layout: ParallelConfig, axis: Axis, cluster: ClusterSpec) -> None:
    shape, domain = group_shape(axis, layout, cluster), domain_size(layout, cluster)
    groups = groups_by_hand(axis, layout)
    assert {len(g) for g in groups} == {shape.num_ranks}
    assert shape.num_nodes >= max(len(domains(g, domain)) for g in groups)
    fewest = {min(sum(r // domain == d for r in g) for d in domains(g, domain)) for g in groups}
    even = {tuple(sorted(sum(r // domain == d for r in g) for d in domains(g, domain))) for g in groups}
    if len(even) == 1 and len(set(next(iter(even)))) == 1:  # every group lies evenly: nothing is rounded
        assert shape.ranks_per_node == fewest.pop()
        assert shape.num_nodes == len(domains(groups[0], domain))
    per_domain: dict[int, int] = {}
    for group in groups:
        for d in domains(group, domain):
            per_domain[d] = per_domain.get(d, 0) + 1
    if axis != Axis.EMBEDDING:  # only two stages have such groups; the others do not communicate
        assert shape.groups_per_node >= min(max(per_domain.values()), domain // shape.ranks_per_node)


@examples(100)
@given(layouts(), st.integers(0, 7))
def test_boundary_lies_inside_a_node_only_if_every_pair_does(layout: ParallelConfig, stage: int) -> None:
    stage %= layout.pipeline_parallel
    shape = pipeline_boundary(layout, H100, stage)
    size = layout.num_gpus // layout.pipeline_parallel
    target = (stage + 1) % layout.pipeline_parallel
    if target == stage:
        assert shape.num_ranks == 1
        return
    crossing = [i for i in range(size) if (stage * size + i) // 8 != (target * size + i) // 8]
    assert shape.num_ranks == 2
    assert shape.ranks_per_node == (1 if crossing else 2)
    assert 1 <= shape.groups_per_node <= 8


def test_the_shapes_of_a_usual_job() -> None:
    layout = ParallelConfig(tensor_parallel=8, pipeline_parallel=4, data_parallel=16)
    assert group_shape(Axis.TENSOR, layout, H100) == GroupShape(num_ranks=8, ranks_per_node=8, groups_per_node=1)
    assert group_shape(Axis.DATA, layout, H100) == GroupShape(num_ranks=16, ranks_per_node=1, groups_per_node=8)
    assert group_shape(Axis.MODEL, layout, H100) == GroupShape(num_ranks=32, ranks_per_node=8, node_stride=16)
    assert group_shape(Axis.EMBEDDING, layout, H100).num_nodes == 2
    boundary = GroupShape(num_ranks=2, ranks_per_node=1, groups_per_node=8, node_stride=16)
    assert pipeline_boundary(layout, H100, 0) == boundary


def test_small_stages_share_a_node() -> None:
    layout = ParallelConfig(tensor_parallel=2, pipeline_parallel=8, data_parallel=1)
    inside = [pipeline_boundary(layout, H100, stage).ranks_per_node for stage in range(8)]
    assert inside == [2, 2, 2, 1, 2, 2, 2, 1]


def test_a_rack_is_used_in_equal_blocks() -> None:
    def size(num_gpus: int) -> int:
        return domain_size(ParallelConfig(data_parallel=num_gpus), RACK)

    assert size(8) == size(72) == size(144) == 72
    assert size(256) == 64
    assert size(4 * 23) == 72  # no block of half a rack or more divides it


def test_placement_does_not_depend_on_how_the_rest_is_called() -> None:
    layout = ParallelConfig(tensor_parallel=4, pipeline_parallel=2, data_parallel=6)
    renamed = H100.model_copy(update={"name": "other", "max_nodes": 7})
    for axis in AXES:
        assert group_shape(axis, layout, H100) == group_shape(axis, layout, renamed)


def test_experts_that_do_not_divide_the_replicas_are_refused() -> None:
    layout = ParallelConfig(tensor_parallel=4, data_parallel=2, expert_parallel=16)
    with pytest.raises(SpecError, match=r"layout.ep = 16: etp\*ep = 16 must divide tp\*cp\*dp = 8"):
        group_shape(Axis.EXPERT, layout, H100)


def test_what_has_no_groups_is_refused() -> None:
    layout = ParallelConfig(tensor_parallel=4)
    with pytest.raises(SpecError, match=r"layout.dp = 0: is not known yet"):
        group_shape(Axis.TENSOR, layout, H100)
    with pytest.raises(SpecError, match="axis = 'NONE'"):
        group_shape(Axis.NONE, ParallelConfig(data_parallel=1), H100)
    with pytest.raises(SpecError, match=r"from_stage = 3: must lie in 0..0"):
        pipeline_boundary(ParallelConfig(data_parallel=1), H100, 3)
