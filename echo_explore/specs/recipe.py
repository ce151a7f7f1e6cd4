"""How a job trains: batch, sequence, precision, recomputation, and what the software stack does by default."""

from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from echo_explore.core import SpecError
from echo_explore.specs.base import LARGEST, Bytes, FloatTuple, Seconds, StrictModel, StringTuple
from echo_explore.specs.cluster import NodeSpec
from echo_explore.specs.host_modules import HostModulesSpec
from echo_explore.specs.recompute import Recompute
from echo_explore.specs.sharding import BucketSpec, ShardingSpec

Attention = Literal["flash", "unfused"]
Fusion = Literal["eager", "norm", "fused"]
Optimizer = Literal["adam", "muon"]
"""Megatron's --optimizer; its layer-wise dist_muon is not modelled."""
MuonTpMode = Literal["blockwise", "duplicated", "distributed"]
"""How Muon orthogonalises a matrix that is split over tensor-parallel ranks; names of Megatron's muon_tp_mode."""
MUON_DEFAULTS: Final = {"muon_tp_mode": "blockwise", "muon_split_qkv": True}
"""megatron-core 0.16.1, optimizer/optimizer_config.py (2026-12-01)."""
StateType = Literal["fp32", "bf16", "fp16", "fp8"]
"""What Transformer Engine's Adam keeps a moment in (commit 04912bf, 2025, optimizers/fused_adam.py)."""
NOT_WITH_MUON: Final = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
"""Megatron refuses them beside Muon, so a silent recipe has them not: specs.optimizer has the sources."""
LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def _distinct_targets(targets: tuple[str, ...]) -> tuple[str, ...]:
    if not targets:
        raise SpecError("lora_targets", "[]", "must name a layer", "leave it out, or name linear layers")
    twice = next((name for name in targets if targets.count(name) > 1), None)
    if twice:
        raise SpecError("lora_targets", twice, "is given twice", "name each layer once")
    return targets


LoraTargets = Annotated[
    tuple[LoraTarget, ...],
    BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v),
    AfterValidator(_distinct_targets),
]
TrainPrecision = Literal["fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Precisions = Annotated[tuple[TrainPrecision, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
Framework = Literal["megatron", "fsdp2", "torchtitan", "ddp"]
ExpertDispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
"""How tokens travel to experts: Megatron's own exchanges, or the fused kernels of DeepEP or HybridEP (`flex`)."""
ContextExchange = Literal["p2p", "all_gather", "a2a"]
"""How keys and values travel over a context-parallel group; names of Megatron's cp_comm_type (core 0.16.1, 2026)."""
ScheduleName = Literal[
    "auto", "no-pipelining", "1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipev", "dualpipe", "custom"
]
"""`auto`: what Megatron runs with the stages and chunks of the layout; `custom`: the orders in `schedule_lines`."""
SEARCHED_SCHEDULES: Final = tuple(name for name in get_args(ScheduleName) if name != "custom")
"""Those that a search space may offer, in the order that breaks ties."""
OpClassName = Literal[
    "gemm",
    "attention",
    "norm",
    "softmax",
    "elementwise",
    "reduction",
    "embedding",
    "cross_entropy",
    "copy",
    "optimizer",
    "rope",
    "grouped_gemm",
    "permute",
    "other",
    "convolution",
    "batch_norm",
    "quantise",
]
"""Families of kernels, as `graph.OpClass` names them."""


class TrainingRecipe(StrictModel):
    """What the user decides about training; fields that are None follow the stack profile.

    Attributes:
        global_batch_size: sequences a step over all replicas.
        micro_batch_size: sequences a micro-batch on one replica.
        schedule: order of passes on every pipeline stage.
        schedule_lines: of a custom schedule, a line a stage in torch's notation (`0F0,0B0`).
        optimizer: what updates the weights; under `muon` the matrices of linear layers and experts are orthogonalised,
            and embeddings, head, biases and norms stay with Adam (megatron only).
        muon_tp_mode: every rank orthogonalises its part of a matrix (`blockwise`), all the whole of it
            (`duplicated`), or all of them together (`distributed`).
        muon_split_qkv: queries, keys and values of a fused projection are orthogonalised apart.
        precision_aware_optimizer: Adam holds the main weights and reads gradients in the type in which they add up
            (Megatron's use_precision_aware_optimizer); needs the distributed optimizer.
        main_params_dtype: of main weights under it; fp32 of bf16 weights keeps the 16 bits that those have not.
        exp_avg_dtype, exp_avg_sq_dtype: of Adam's moments under it.
        distributed_optimizer: optimizer states sharded over data-parallel ranks (ZeRO-1).
        overlap_grad_reduce: gradients are reduced bucket by bucket during the last backward.
        overlap_param_gather: updated parameters are gathered during the next forward.
        context_exchange: how keys and values travel under context parallelism; Megatron's default is p2p.
        dropout: probability of hidden and attention dropout; 0 leaves the kernels out.
        reshard_after_forward: fsdp2 frees gathered parameters between forward and backward (ZeRO-3) or keeps them
            (ZeRO-2); None: frees them.
        expert_dispatcher: how tokens travel to experts.
        expert_capacity_factor: tokens that an expert takes, over its fair share; None: all (dropless).
        pad_expert_input: every expert's input is filled up to its capacity, so that no size is known to the GPU only.
        expert_load: relative load of each expert, in order; empty: balanced.
        overlap_shared_experts: shared experts run beside the exchanges of routed ones.
        overlap_expert_exchange: exchanges of a forward run beside the backward of another micro-batch, and the
            reverse (Megatron's overlap_moe_expert_parallel_comm).
        overlap_tensor: gathers and scatters of activations over tensor-parallel ranks are decomposed and run beside the
            products that read or make them (Megatron's tp_comm_overlap, PyTorch's AsyncTP); needs sequence parallelism.
        offload_layers: the first so many layers keep what they save for the backward in the memory of the host
            (Megatron's cpu_offloading_num_layers); without pipeline and recomputation.
        lora_rank: width of low-rank adapters; everything else is frozen then. 0: all parameters are trained.
        lora_targets: linear layers with adapters, by Megatron's names; needs lora_rank.
    """

    global_batch_size: int = Field(ge=1, le=LARGEST)
    micro_batch_size: int = Field(ge=1, le=LARGEST)
    sequence_length: int = Field(ge=1, le=LARGEST)
    precision: TrainPrecision = "bf16"
    recompute: Recompute = "none"
    schedule: ScheduleName = "auto"
    schedule_lines: StringTuple = ()
    attention: Attention | None = None
    context_exchange: ContextExchange = "p2p"
    fusion: Fusion | None = None
    optimizer: Optimizer = "adam"
    muon_tp_mode: MuonTpMode | None = None
    muon_split_qkv: bool | None = None
    precision_aware_optimizer: bool = False
    main_params_dtype: Literal["fp32", "fp16"] | None = None
    exp_avg_dtype: StateType | None = None
    exp_avg_sq_dtype: StateType | None = None
    distributed_optimizer: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_p2p: bool | None = None
    gradient_accumulation_fusion: bool | None = None
    dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    reshard_after_forward: bool | None = None
    expert_dispatcher: ExpertDispatcher | None = None
    expert_capacity_factor: float | None = Field(default=None, gt=0.0)
    pad_expert_input: bool = False
    expert_load: FloatTuple = ()
    overlap_shared_experts: bool | None = None
    overlap_expert_exchange: bool | None = None
    overlap_tensor: bool | None = None
    offload_layers: int = Field(default=0, ge=0, le=LARGEST)
    lora_rank: int = Field(default=0, ge=0, le=4096)
    lora_targets: LoraTargets | None = None


GraphScope = Literal["attn", "mlp", "moe", "moe_router", "moe_preprocess"]
"""Parts of layers that Megatron captures as CUDA graphs (core 0.16.1, 2026, cuda_graph_scope)."""
GraphScopes = Annotated[tuple[GraphScope, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class MemorySpec(StrictModel):
    """Memory that no tensor of the program accounts for.

    Attributes:
        context_bytes: CUDA context, cuBLAS workspaces.
        communicator_bytes: NCCL buffers of one communicator.
        fragmentation_fraction: what the caching allocator reserves beyond activations and buffers that come and go.
        pressed_fragmentation_fraction: what is left of that on a full GPU: before it fails, the allocator gives back
            every segment that is free as a whole (torch 2.1, CUDACachingAllocator.cpp, release_cached_blocks). None:
            all of it, as where pipelines hold arrays of many sizes in the same segments.
        frees_stage_outputs: a stage frees its result once the next one has it, and not after its backward.
    """

    context_bytes: Bytes = Field(alias="context")
    communicator_bytes: Bytes = Field(alias="communicator")
    fragmentation_fraction: float = Field(ge=0.0, le=1.0)
    pressed_fragmentation_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    frees_stage_outputs: bool = False


SplitRule = Literal[
    "none", "first-last-light", "balanced", "balanced-or-last", "remainder-first", "by-compute", "modules"
]
Fp8Scales = Literal["known", "tensor", "row"]


class StackProfile(StrictModel):
    """A software stack: what it does where the recipe is silent, and what it costs on the host.

    Attributes:
        framework: the traced framework that stands for it.
        layer_split_rule: how it splits layers that pp * vpp does not divide; `none` refuses.
        host_call_s: host time of one dispatched operator (Python, dispatcher, driver) in a forward or recomputation,
            when no CUDA graph is used.
        host_backward_call_s: the same in a backward, which autograd runs without Python.
        host_step_s: host time once a step (data loader, logging; optimizer bookkeeping where host_parameter is 0).
        host_parameter_s: host time of the optimizer for one parameter tensor of the rank, from the wait for the
            gradient norm to the next forward; Megatron loops over its parameters there, CUDA graphs or not.
        host_sharded_parameter_s: the same with the distributed optimizer, for each parameter of which the rank
            updates a part.
        host_modules: host time of modules whose Python does more than dispatch what a trace counts (megatron only).
        host_collective_s: host time of one collective beyond that of an operator: work objects, streams and events of
            the framework, and NCCL's own launch.
        collective_checks: before every collective the ranks of its group compare over TCP what they are about to run
            (PyTorch's TORCH_DISTRIBUTED_DEBUG=DETAIL).
        attention_kernel: fused attention kernel as tables of kernels name it (`fa3`, `cudnn`); empty: the training
            kernels of the GPU's generation.
        kernel_source: framework and version whose kernels run, as tables name it; empty: the middle of the tables.
        lora_rank: width of adapters where a measured run does not say it.
        lora_targets: linear layers that get adapters when a recipe asks for them without naming any.
        lora_dropout: share of its input that an adapter drops in training; one kernel ahead of each adapter.
        narrow_parameters: weights of 8-bit recipes are kept in 8 bits only, without a 16-bit copy (megatron only).
        keeps_transposed_weights: frozen weights in 8 bits keep the transposed copy that their backward reads; else each
            backward makes it anew (Megatron's disable_parameter_transpose_cache).
        keeps_gathered_inputs: under sequence parallelism the gathered input of a product stays until its backward,
            which else gathers it again (megatron only).
        keeps_model_gradients: beside main gradients of `gradient_dtype` every parameter keeps one of its own type.
        sums_whole_gradients: with the distributed optimizer gradients are summed by one all-reduce after the last
            backward of a stage, not scattered bucket by bucket (megatron only).
        summed_gradient_dtype: type in which those sums travel; empty: that of the main gradients.
        gate_apart: the gate of a dense MLP is a product of its own beside that which it gates (megatron only).
        blocking_input_gradients: tensor-parallel ranks sum the gradient of a product's input, one product after the
            other, when that of its weight is made too; else beside the latter (megatron without sequence parallelism).
        gathered_loss: tensor-parallel ranks gather the logits, and each makes the whole loss in fp32, and the accuracy
            (megatron only).
        reads_sequence_lengths: ahead of each fused attention the host waits for the GPU to read the longest sequence of
            a packed batch (megatron only).
        fused_loss: the cross-entropy is one kernel of a library even where fusion is eager; not for megatron.
        logit_metrics: cross-entropies that the trainer computes on the logits of every micro-batch beside the loss, as
            metrics; not for megatron.
        fp8_scales: when an array is cast to 8 bits its scale is `known` (from steps before, or found by the kernel that
            made it), found by a pass over it for the whole `tensor`, or found for each `row` of each orientation.
        nccl_version: of the collective library; RCCL on AMD's GPUs.
        nccl_algo: what NCCL_ALGO leaves of the algorithms, such as `Ring,Tree`; empty: all.
        nccl_proto: what NCCL_PROTO leaves of LL, LL128 and Simple; empty: all.
        sharding: how FSDP2 shards; counts for fsdp2 and torchtitan only.
        buckets: gradient buckets of ddp; counts for that framework only.
        expert_dispatcher, overlap_shared_experts, overlap_expert_exchange: see TrainingRecipe.
        overlap_tensor: precisions in which it overlaps tensor-parallel communication where the recipe is silent.
        tensor_overlap: how it does so: Transformer Engine's userbuffers, or PyTorch's AsyncTP.
        experts_apart: a grouped product runs as one product an expert, and so does the cast of its input, each launched
            by itself from C++ (Transformer Engine); else as one kernel.
        fused_experts: precisions in which the products of experts add biases, gate, weigh and cast in their own kernels
            (Transformer Engine's op fuser on cuDNN's grouped products, NVTE_CUTEDSL_FUSED_GROUPED_MLP).
        fused_router: the router of a mixture runs as Transformer Engine's fused kernels (Megatron's moe_router_fusion).
        graph_scopes: parts of layers that run as CUDA graphs where whole iterations do not (megatron only).
        launch_blocking: every launch waits for its kernel, as with CUDA_LAUNCH_BLOCKING=1; not with cuda_graphs.
        compute_scale: time factor on kernels by op class name for kernels that differ from the calibrated ones.
    """

    schema_version: Literal[1] = Field(default=1, alias="schema")
    name: str
    description: str = ""
    framework: Framework = "megatron"
    attention: Attention
    fusion: Fusion
    distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_p2p: bool
    gradient_accumulation_fusion: bool
    dropout: float = Field(ge=0.0, lt=1.0)
    layer_split_rule: SplitRule = "none"
    cuda_graphs: bool = False
    graph_scopes: GraphScopes = ()
    launch_blocking: bool = False
    host_call_s: Seconds = Field(alias="host_call")
    host_backward_call_s: Seconds = Field(alias="host_backward_call")
    host_step_s: Seconds = Field(alias="host_step")
    host_parameter_s: Seconds = Field(default=0.0, alias="host_parameter")
    host_sharded_parameter_s: Seconds = Field(default=0.0, alias="host_sharded_parameter")
    host_modules: HostModulesSpec = Field(default_factory=HostModulesSpec)
    host_collective_s: Seconds = Field(default=0.0, alias="host_collective")
    collective_checks: bool = False
    nccl_version: str
    nccl_algo: str = ""
    nccl_proto: str = ""
    bucket_elements: int = Field(default=40_000_000, ge=1)
    gradient_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    attention_kernel: str = ""
    kernel_source: str = ""
    lora_rank: int = Field(default=32, ge=1, le=4096)
    lora_targets: LoraTargets = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    lora_dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    narrow_parameters: bool = False
    keeps_transposed_weights: bool = True
    keeps_gathered_inputs: bool = False
    keeps_model_gradients: bool = False
    sums_whole_gradients: bool = False
    summed_gradient_dtype: Literal["", "fp32", "bf16", "fp16"] = ""
    gate_apart: bool = False
    blocking_input_gradients: bool = False
    gathered_loss: bool = False
    reads_sequence_lengths: bool = False
    fused_loss: bool = False
    logit_metrics: int = Field(default=0, ge=0, le=8)
    fp8_scales: Fp8Scales = "known"
    expert_dispatcher: ExpertDispatcher = "alltoall"
    overlap_shared_experts: bool = False
    overlap_expert_exchange: bool = False
    overlap_tensor: Precisions = ()
    tensor_overlap: Literal["userbuffers", "async-tp"] = "userbuffers"
    fused_experts: Precisions = ()
    fused_router: bool = False
    experts_apart: bool = False
    compute_scale: dict[OpClassName, Annotated[float, Field(gt=0.0)]] = Field(default_factory=dict)
    memory: MemorySpec
    sharding: ShardingSpec = Field(default_factory=ShardingSpec)
    buckets: BucketSpec = Field(default_factory=BucketSpec)

    def main_gradient_dtype(self, precision: str) -> Literal["fp32", "bf16", "fp16"]:
        """Data type in which gradients of several micro-batches add up.

        Stacks that keep them in fp16 do so in fp16 training only: Megatron-LM 3.0 (2022), arguments.py (bf16 implies
        accumulate_allreduce_grads_in_fp32); DeepSpeed 0.6 (2022), bf16_optimizer.py (fp32 gradient buffers).
        """
        if precision == "fp32" or (self.gradient_dtype == "fp16" and precision != "fp16"):
            return "fp32"
        return self.gradient_dtype

    def on_host(self, node: NodeSpec) -> "StackProfile":
        """The profile with the times that operators and modules take on the host of `node`.

        What a host does once a step, and the optimizer's part of each parameter, stay as they are.
        """
        if node.host_operator_factor == node.host_module_factor == 1.0:
            return self
        update = {
            "host_call_s": self.host_call_s * node.host_operator_factor,
            "host_backward_call_s": self.host_backward_call_s * node.host_operator_factor,
            "host_modules": self.host_modules.times(node.host_module_factor),
            "host_collective_s": self.host_collective_s * node.host_operator_factor,
        }
        return self.model_copy(update=update)

    @property
    def fully_sharded(self) -> bool:
        """Whether FSDP2 shards parameters, gradients and optimizer states."""
        return self.framework in ("fsdp2", "torchtitan")

    def resolve(self, recipe: TrainingRecipe) -> TrainingRecipe:
        """The recipe with every None replaced by what this stack does; no targets of adapters where there are none."""
        names = (
            "attention",
            "fusion",
            "distributed_optimizer",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "overlap_p2p",
            "gradient_accumulation_fusion",
            "dropout",
            *(("lora_targets",) if recipe.lora_rank else ()),
            "expert_dispatcher",
            "overlap_shared_experts",
            "overlap_expert_exchange",
        )
        update = {n: getattr(self, n) for n in names if getattr(recipe, n) is None}
        if recipe.optimizer == "muon":
            silent = dict.fromkeys(NOT_WITH_MUON, False) | MUON_DEFAULTS
            update |= {n: value for n, value in silent.items() if getattr(recipe, n) is None}
        if recipe.overlap_tensor is None:
            update["overlap_tensor"] = recipe.precision in self.overlap_tensor
        return recipe.model_copy(update=update)
