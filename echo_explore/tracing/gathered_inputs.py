"""Products that keep the input they gathered, for frameworks that do not gather it again in the backward."""

from typing import Any

import torch


def keep_gathered_inputs(chunk: torch.nn.Module) -> None:
    """Gather in front of every column-parallel product of a Megatron model, so that autograd keeps the whole input.

    The backward then scatters and reduces the gradient of the input without gathering again, as nanotron does unless
    told to (nanotron 0.4, 2024, parallel/tensor_parallel/functional.py, tp_recompute_allgather). megatron-core's own
    product keeps its shard.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    def gather(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_from_sequence_parallel_region(args[0]), *args[1:]

    for module in chunk.modules():
        if isinstance(module, ColumnParallelLinear) and module.sequence_parallel:
            module.explicit_expert_comm = True  # Megatron's switch for inputs that somebody else communicated
            module.register_forward_pre_hook(gather)
