"""Which layers each pipeline chunk holds."""

from echo_explore.core import SpecError
from echo_explore.specs.layout import ParallelConfig
from echo_explore.specs.model import ModelSpec


def layers_of_chunks(model: ModelSpec, layout: ParallelConfig, rule: str, *, num_copies: int = 1) -> tuple[int, ...]:
    """Layers of every chunk of the model in order.

    Args:
        model: gives num_layers.
        layout: an explicit layer_split wins.
        rule: of the stack, for layers that pp * vpp does not divide: `none` refuses; `balanced` counts embedding and
            loss as a layer each, so the first and the last chunk hold one less where the sum divides (Megatron's
            account_for_embedding_in_pipeline_split); `first-last-light` gives the shortfall to the first and last
            chunks; `balanced-or-last` is `balanced` where that divides, else all chunks hold the same and the last what
            is left, beside loss and multi-token prediction; `remainder-first` gives the surplus layers to the first
            chunks. `by-compute` splits always, by matrix sizes of layers and output layer (nanotron), and may leave
            chunks before the last without a layer. `modules` splits always: embedding, every layer, the last norm and
            the output layer count one each, and the first chunks hold the surplus (Aleph Alpha scaling, 2024,
            pipeline_partitioning.py, pipe_partition_uniform).
        num_copies: copies of the model that the pp * vpp chunks hold.

    Raises:
        SpecError: the layers do not divide and there is neither a split nor a rule, or a chunk would be empty.
    """
    split = _split(model, layout, rule, num_copies)
    empty = [chunk for chunk, count in enumerate(split[1:-1], start=1) if count == 0]
    if empty and (layout.layer_split or rule not in ("by-compute", "modules")):
        raise SpecError(
            "layer_split",
            str(list(split)),
            f"chunk {empty[0]} would hold nothing: only the first and the last have embedding or loss",
            "give every chunk between them a layer, or use fewer stages",
        )
    return split


def _split(model: ModelSpec, layout: ParallelConfig, rule: str, num_copies: int) -> tuple[int, ...]:
    layers, chunks = model.num_layers, layout.num_chunks // num_copies
    if layout.layer_split and num_copies > 1:
        rule = f"the schedule holds {num_copies} copies of the model, split alike over pp = {chunks} stages"
        raise SpecError("layer_split", str(list(layout.layer_split)), rule, "leave it out, or use another schedule")
    if layout.layer_split:
        if sum(layout.layer_split) != layers:
            raise SpecError(
                "layer_split",
                str(list(layout.layer_split)),
                f"sums to {sum(layout.layer_split)}, not num_layers = {layers}",
                "correct the list",
            )
        return layout.layer_split
    if rule == "by-compute":
        return _by_compute(model, chunks)
    if rule == "modules" and chunks > 1:
        return _by_modules(layers, chunks)
    each, rest = divmod(layers, chunks)
    if rest == 0:
        return (each,) * chunks
    full, over = divmod(layers + 2, chunks)
    if rule in ("balanced", "balanced-or-last") and chunks > 1 and over == 0:
        return (full - 1, *([full] * (chunks - 2)), full - 1)
    if rule == "balanced-or-last" and (each + 1) * (chunks - 1) <= layers:
        return (*([each + 1] * (chunks - 1)), layers - (each + 1) * (chunks - 1))
    if rule in ("balanced", "balanced-or-last", "first-last-light") and chunks > 1:
        return _light_ends(layers, chunks)
    if rule == "remainder-first":
        return tuple(each + (i < rest) for i in range(chunks))
    raise SpecError(
        "num_layers",
        layers,
        f"is not divisible by {_name(num_copies)} = {chunks} and the stack has no rule for it",
        f"choose a {_name(num_copies)} that divides {layers}, or give --layer-split",
    )


def _name(num_copies: int) -> str:
    return "pp*vpp" if num_copies == 1 else "pp"


def _by_compute(model: ModelSpec, chunks: int) -> tuple[int, ...]:
    """Blocks go to a chunk until their cumulative cost passes its share of the total; the last one over stays.

    A layer costs 4 a d h + 3 f h, the output layer V h, the rest nothing (nanotron 0.4, 2024, models/base.py and
    models/llama.py, get_block_compute_costs).
    """
    hidden, matrices = model.hidden_size, 3 if model.gated else 2
    layer = 4 * model.num_attention_heads * model.head_dim * hidden + matrices * model.ffn_hidden_size * hidden
    total = model.num_layers * layer + model.vocab_size * hidden
    split, chunk = [0] * chunks, 0
    for number in range(1, model.num_layers + 1):
        split[chunk] += 1
        if number * layer > total * ((chunk + 1) / chunks):
            chunk += 1
    return tuple(split)


def _by_modules(layers: int, chunks: int) -> tuple[int, ...]:
    """Equal numbers of modules, one more on each of the first chunks; norm and output layer are the last two."""
    each, rest = divmod(layers + 3, chunks)
    split = [each + (chunk < rest) for chunk in range(chunks)]
    split[0] -= 1
    split[-1] -= 2
    if split[-1] < 0:
        rule = f"with embedding, norm and output layer leaves less than two modules for each of {chunks} chunks"
        raise SpecError("num_layers", layers, f"{rule}, and norm and output layer would lie apart", "use fewer stages")
    return tuple(split)


def _light_ends(layers: int, chunks: int) -> tuple[int, ...]:
    """ceil(layers / chunks) everywhere, the shortfall taken off the last, the first, the last but one, ..."""
    each = -(-layers // chunks)
    split = [each] * chunks
    order = [i for pair in zip(range(chunks - 1, -1, -1), range(chunks), strict=True) for i in pair]
    for position in range(each * chunks - layers):
        split[order[position % len(order)]] -= 1
    return tuple(split)
