"""What PyTorch's own data parallelism shards over replicas, and how."""

from typing import Literal

from pydantic import Field

from echo_explore.specs.base import Bytes, Seconds, StrictModel


class SliceSpec(StrictModel):
    """Collectives over a list of one slice a rank, one parameter at a time, as DeepSpeed's ZeRO-3 of 2021 ran them.

    The host makes a view of every rank's slice, and the collective copies every slice out of or into one array, so its
    time grows with ranks times parameters.

    Attributes:
        view_s: host time of the view of one slice, made in Python.
        copy_s: host time of the copy of one slice, launched from C++.
        bucket_elements: gradients are copied into two buffers of so many elements to be reduced; larger ones are not.
        kept_elements: parameters of fewer elements stay whole and are gathered once a step, after the optimizer.
    """

    view_s: Seconds = Field(alias="view")
    copy_s: Seconds = Field(alias="copy")
    bucket_elements: int = Field(default=500_000_000, ge=1)  # DeepSpeed 0.3, 2021, reduce_bucket_size
    kept_elements: int = Field(default=0, ge=0)


class ShardingSpec(StrictModel):
    """Fully sharded data parallelism of a stack: every layer is a unit, embedding and head are one more, the root.

    Attributes:
        wrapper: whose code shards: PyTorch's `fully_shard`, or Megatron-FSDP; what `trace --rank` runs.
        group: ranks over which a parameter is sharded: all replicas, or those of one host, with copies on every host
            whose gradients are summed too (hybrid sharding).
        gather_dtype: in which parameters are gathered and used; sharded ones stay in fp32.
        flat_parameters: the parameters of a unit are one flat array (FSDP1), so that gathered ones need no copy and
            gradients are divided before they are reduced; else each is sharded by itself (FSDP2).
        reshard_last_layer: the last layer's parameters are freed after its forward although its backward comes next.
        root_reduced_at_end: gradients of embedding and head wait for the end of the backward; else they are reduced as
            they are made.
        ahead_elements: layers that hold so many elements together are gathered ahead of the one that runs; 0: one.
        regathers: under full recomputation a layer's parameters are freed between its recomputation and its backward.
        slices: parameters are gathered and reduced one by one in slices; None: a layer in one collective.
    """

    wrapper: Literal["torch", "megatron"] = "torch"
    group: Literal["all", "host"] = "all"
    gather_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    flat_parameters: bool = False
    reshard_last_layer: bool = True
    root_reduced_at_end: bool = True
    ahead_elements: int = Field(default=0, ge=0)
    regathers: bool = False
    slices: SliceSpec | None = None


def layers_ahead(spec: ShardingSpec, layer_elements: int) -> int:
    """Layers that are gathered ahead of the one that runs: the first so many that hold `ahead_elements`."""
    return max(1, -(-spec.ahead_elements // max(layer_elements, 1)))


def shard_ranks(spec: ShardingSpec, *, replicas: int, tensor_parallel: int, gpus_per_host: int) -> int:
    """Ranks over which fsdp2 shards a parameter."""
    if spec.group == "all":
        return replicas
    return min(replicas, max(1, gpus_per_host // tensor_parallel))


class BucketSpec(StrictModel):
    """Gradient buckets of DistributedDataParallel; defaults of torch 2.13, nn/parallel/distributed.py.

    Attributes:
        first_bytes: size at which the first bucket is closed, so that reduction starts early.
        bucket_bytes: size at which the others are.
    """

    first_bytes: Bytes = Field(default=2.0**20, alias="first")
    bucket_bytes: Bytes = Field(default=25 * 2.0**20, alias="others")
