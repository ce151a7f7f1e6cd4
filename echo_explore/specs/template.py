"""Commented files to start from: what `clusters --new FILE` and its likes write. Each is valid as it stands."""

from echo_explore.specs.load import Kind


def template(kind: Kind) -> str:
    """The text of a commented TOML file of this kind, which loads without a change."""
    return _TEMPLATES[kind]


_CLUSTER = """\
# A cluster: one kind of host, how its GPUs are joined, how hosts are joined, how many there are.
# docs/add_a_cluster.md leads through every line with nvidia-smi and nccl-tests. Quantities carry their unit;
# bandwidths are one direction; rates are dense (half of what a data sheet prints "with sparsity").
# Write behind each figure where it comes from and when: predictions are only as good as these lines.
schema = 1
name = "my-cluster"
description = "H100 80 GB, 8 GPUs a host, 8 x 400 Gbit/s InfiniBand"
max_nodes = 16                   # hosts that a job may use; its size is chosen with --num-gpus

[device]                         # one GPU
name = "H100-SXM5-80GB"
# Whose measured kernels apply: a100-sxm4-80gb, a100-sxm4-40gb, h100-sxm5-80gb, h800-sxm5-80gb, h200-sxm-141gb,
# b200-sxm-180gb, b300-sxm, gb200, gb300, v100-sxm2-32gb, mi300x, mi325x, mi355x; or one of your calibration files.
calibration = "h100-sxm5-80gb"
architecture = "hopper"          # volta, ampere, ada, hopper, blackwell, cdna3, cdna4
num_sms = 132                    # streaming multiprocessors or compute units; data sheet
clock = "1830 MHz"               # boost clock at which the rates below hold; data sheet
memory = "81559 MiB"             # nvidia-smi --query-gpu=memory.total --format=csv
memory_bandwidth = "3350 GB/s"   # data sheet
l2_cache = "50 MiB"              # data sheet
power = "700 W"                  # nvidia-smi --query-gpu=power.limit --format=csv
# exponentials_per_clock = 32    # of one SM; default 16, as from Volta to Blackwell; 32 on Blackwell Ultra
# clock_spread_fraction = 0.016  # standard deviation over your GPUs of the clock held under load, over its mean

[device.peak]                    # matrix rates without sparsity; leave out what the GPU does not have
bf16 = "989.4 TFLOP/s"           # data sheet
fp16 = "989.4 TFLOP/s"           # data sheet
fp8 = "1978.9 TFLOP/s"           # data sheet
tf32 = "494.7 TFLOP/s"           # data sheet
fp32 = "66.9 TFLOP/s"            # data sheet

[node]                           # one host
gpus = 8                         # nvidia-smi --list-gpus | wc -l
# scale_up_gpus = 72             # only where the fast links join several hosts, as in an NVL72 rack
link = "nvswitch"                # nvswitch, nvlink (direct links), infinity-fabric, pcie; nvidia-smi topo -m
link_bandwidth = "450 GB/s"      # of one GPU, one direction: links x rate of one; nvidia-smi nvlink --status
link_latency = "0.6 us"          # keep, or fit to small messages of all_reduce_perf on one host
in_network_reduction = true      # NVLink SHARP: NCCL_DEBUG=INFO prints "NVLS multicast support is available"
nics = 8                         # cards for training traffic; nvidia-smi topo -m lists them
nic_bandwidth = "400 Gbit/s"     # of one card; ibstat or ethtool
pcie_bandwidth = "63 GB/s"       # of one GPU; PCIe 5.0 x16: 63, 4.0: 31.5, 3.0: 15.75 GB/s
# gpus_per_pcie_switch = 4       # GPUs that share a PCIe switch and its uplink; default: those of one card
# nic_place = "root"             # cards lie at the root complex, behind the uplinks; default: under the switches

[fabric]                         # between hosts
kind = "infiniband"              # infiniband, roce, ethernet, efa, none
topology = "rail-optimised"      # rail-optimised, fat-tree, single-switch, dragonfly, torus, mesh, bigraph, none
latency = "2.7 us"               # keep, or fit to small messages of sendrecv_perf between two hosts
oversubscription = 1.0           # host bandwidth over bandwidth above the leaves; 1 is non-blocking
nodes_per_leaf = 32              # hosts under one leaf switch (or group of rails)
# hop_latency = "0.3 us"         # of each further cable between switches; default: counted in latency
# leaves_per_pod = 16            # leaves (a dragonfly's routers) in a pod under core switches; default: no cores
# core_oversubscription = 2.0    # bandwidth below over bandwidth above a pod's spines
# dims = [8, 8]                  # of a torus or mesh: hosts along each dimension
in_network_reduction = false     # SHARP in the switches, and used: NCCL_COLLNET_ENABLE=1

# [price]                        # optional: for searches that minimise cost
# gpu_hour = "2.50 USD/h"        # what one GPU costs an hour
"""

_MODEL = """\
# A decoder-only transformer. A Hugging Face config.json works as well: give its path as the model.
schema = 1
name = "my-model"
architecture = "llama"           # gpt, llama, mixtral, qwen3, qwen3-moe, deepseek-v3, gpt-oss
num_layers = 32
hidden_size = 4096
ffn_hidden_size = 14336
num_attention_heads = 32
num_key_value_heads = 8          # leave out when every head has its own
# head_dim = 128                 # when it is not hidden_size / num_attention_heads
vocab_size = 128256              # as published; Megatron pads it to a multiple of 128 * tp
max_sequence_length = 8192
normalization = "rmsnorm"        # layernorm, rmsnorm
activation = "swiglu"            # gelu, swiglu, quick-geglu, relu, squared-relu
position_embedding = "rope"      # learned, rope, alibi, none
tied_embeddings = false          # input and output embedding are one matrix
# activation_func_clamp_value = 7.0  # of quick-geglu: both halves are clamped
# glu_linear_offset = 1.0        # of quick-geglu: is added to the half that is not the gate
linear_bias = false              # all linear layers have biases, experts and routers too
qkv_bias = false                 # only query, key and value have
qk_norm = false                  # norms on queries and keys
# embedding_norm = true          # a norm behind the word embedding (BLOOM)
# attention_window = 4096        # a token sees so many, itself included; default: all before it
# full_attention_every = 2       # with a window: every n-th layer sees all (GPT-OSS 2, Gemma 3 6)
# yarn_scaling_factor = 32.0     # YaRN stretches rotary positions by it (GPT-OSS)
# attention_sink = true          # each head has a learnt logit beside the scores (GPT-OSS)
# multi_token_prediction_layers = 1  # behind the last layer (DeepSeek-V3)

# [moe]                          # mixture of experts
# num_experts = 8
# experts_per_token = 2
# ffn_hidden_size = 14336        # of one expert
# shared_ffn_hidden_size = 0     # of the shared experts together
# first_dense_layers = 0
# layer_frequency = 1            # every n-th layer has experts
# score_function = "sigmoid"     # of the router: softmax, sigmoid
# num_groups = 8                 # group-limited routing: groups, and how many of them a token may use
# groups_per_token = 4
# selection_bias = true          # experts are balanced by a bias instead of a loss (DeepSeek-V3)
# balancing_loss = "batch"       # batch, sequence, none

# [mla]                          # multi-latent attention: these five widths replace head_dim
# q_lora_rank = 1536             # 0: queries have no latent
# kv_lora_rank = 512
# qk_nope_head_dim = 128
# qk_rope_head_dim = 64
# v_head_dim = 128
"""

_SPACE = """\
# What a search looks at; see docs/search.md.
schema = 1
model = "llama3-8b"              # a name of `echo-explore models`, a TOML file, or a config.json
cluster = "h100-ndr"             # a name of `echo-explore clusters`, or a TOML file

[cluster_size]
num_gpus = 64                    # or [64, 128], or {from = 64, to = 512, factor = 2}

[recipe]
sequence_length = 8192
global_batch_size = 512          # sequences a step
precision = "bf16"

[search]
tensor_parallel = [1, 2, 4, 8]
pipeline_parallel = "divisors"   # of the layers; or a list
virtual_pipeline = [1, 2, 4]
micro_batch_size = [1, 2, 4]
recompute = ["none", "selective", "full"]
sequence_parallel = [true, false]

[constraints]
rules = ["tensor_parallel <= gpus_per_node"]

[objective]
minimize = ["step_time_s"]
"""

_STACK = """\
# A software stack: what it does where a recipe is silent, and what it costs on the host; see docs/stacks.md.
# Write behind each line where it comes from and when.
schema = 1
name = "my-stack"
description = "Megatron-core with Transformer Engine, our fork"
framework = "megatron"                # the traced framework that stands for it: megatron, fsdp2, torchtitan or ddp
attention = "flash"                   # flash (one fused kernel) or unfused
fusion = "fused"                      # elementwise kernels: fused, norm (only norm and rotary embedding are), or eager
distributed_optimizer = true          # optimizer states sharded over data-parallel ranks
overlap_grad_reduce = true            # gradients reduced beside the last backward
overlap_param_gather = true           # parameters gathered beside the first forward
overlap_p2p = true                    # pipeline transfers beside compute (interleaved schedule)
gradient_accumulation_fusion = true   # weight gradients accumulate inside the matrix product
dropout = 0.0
layer_split_rule = "none"             # for layers that pp * vpp does not divide: none, balanced, first-last-light, ...
cuda_graphs = false
host_call = "25 us"                   # host time of one operator in a forward: interpreter, modules, dispatcher, launch
host_backward_call = "8 us"           # the same in a backward
host_collective = "80 us"             # of a collective beyond that: work object, streams, events, NCCL's launch
host_step = "1.2 ms"                  # host time once a step: data, logging
host_parameter = "13 us"              # of the optimizer, for each parameter tensor
host_sharded_parameter = "19 us"      # the same with the distributed optimizer
nccl_version = "2.21"
bucket_elements = 40000000            # gradient bucket
gradient_dtype = "fp32"               # of main gradients

[memory]
context = "1 GiB"                     # CUDA context, cuBLAS workspaces
communicator = "150 MiB"              # NCCL buffers of one communicator
fragmentation_fraction = 0.15         # reserved beyond activations and buffers that come and go
# pressed_fragmentation_fraction = 0.03 # what is left of it on a full GPU; without this line all of it
# frees_stage_outputs = true          # a stage frees its result once it is sent; without this line after its backward
"""

_TEMPLATES: dict[Kind, str] = {"clusters": _CLUSTER, "models": _MODEL, "spaces": _SPACE, "stacks": _STACK}
