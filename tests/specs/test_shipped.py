"""Every shipped file loads, and every figure in it names its source and a date."""

import re
from pathlib import Path

import pytest

from echo_explore.core.home import list_data_files
from echo_explore.specs import load_cluster, load_model, load_space, load_stack

CLUSTERS = (
    *(
        "v100-25gbe",
        "a100-80gb-hdr",
        "a100-40gb-hdr",
        "a100-p4de-efa",
        "h100-ndr",
        "h100-p5-efa",
        "h800-ndr",
        "h200-ndr",
    ),
    *("b200-ndr", "b300-xdr", "gb200-nvl72", "gb300-nvl72", "mi300x-roce", "mi325x-roce", "mi355x-roce"),
    *("v100-pcie-shared-uplinks", "v100-pcie-own-uplinks", "l40s-pcie"),
)
MODELS = (
    *(
        "gpt3-175b",
        "gpt-22b",
        "gpt-530b",
        "gpt-1t",
        "llama2-7b",
        "llama2-70b",
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
    ),
    *(
        "mixtral-8x7b",
        "mixtral-8x22b",
        "deepseek-v3",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "gpt-oss-120b",
        "gpt-oss-20b",
    ),
)
STACKS = (
    *(
        "megatron-core",
        "megatron-fsdp",
        "megatron-2021",
        "megatron-2022",
        "megatron-2023",
        "megatron-deepspeed",
        "aleph-scaling",
        "nemo-megatron",
        "nemo-megatron-2025",
        "rocm-megatron",
        "megatron-bridge",
    ),
    "megatron-bridge-graphs",
    *("nanotron", "nanotron-2025-multi-host"),
    "deepspeed-zero3",
    *("torch-fsdp2", "torchtitan-2025-hopper"),
    *("torchtitan-fsdp2", "torchtitan-eager", "fms-fsdp", "llm-foundry-fsdp", "llm-foundry-fsdp-hopper", "torch-ddp"),
)
CALIBRATIONS = (
    *("a100-sxm4-80gb", "a100-sxm4-40gb", "h100-sxm5-80gb", "h800-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb"),
    *("b300-sxm", "gb200", "gb300", "v100-sxm2-32gb", "mi300x", "mi325x", "mi355x", "l40s"),
)
SOURCED = [
    pytest.param(path, id=f"{kind}/{name}")
    for kind in ("clusters", "models", "stacks")
    for name, path in list_data_files(kind).items()
]
FIGURE = re.compile(r'^\w+ = (?:"?[\d.]|true|false)')
YEAR = re.compile(r"\b(?:19|20)\d\d\b")
FIXED = ("schema", "normalization", "activation", "position_embedding")
"""Keys that hold no figure."""


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster_loads_under_its_name(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device.calibration in CALIBRATIONS
    assert cluster.node.domain_gpus % cluster.node.num_gpus == 0


@pytest.mark.parametrize("name", MODELS)
def test_model_loads_under_its_name(name: str) -> None:
    assert load_model(name).name == name


@pytest.mark.parametrize("name", STACKS)
def test_stack_loads_under_its_name(name: str) -> None:
    assert load_stack(name).name == name


def test_nothing_else_is_shipped_unnoticed() -> None:
    assert set(list_data_files("clusters")) == set(CLUSTERS)
    assert set(list_data_files("models")) == set(MODELS)
    assert set(list_data_files("stacks")) == set(STACKS)


def test_shipped_spaces_name_shipped_models_and_clusters() -> None:
    for name in list_data_files("spaces"):
        space = load_space(name)
        load_model(space.model)
        load_cluster(space.cluster)


@pytest.mark.parametrize("path", SOURCED)
def test_every_figure_has_a_source_and_a_date(path: Path) -> None:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not FIGURE.match(line) or line.split(" ", 1)[0] in FIXED:
            continue
        _, hash_sign, comment = line.partition("# ")
        assert hash_sign, f"{path.name}:{number}: {line} has no source"
        if "cuda_graphs" not in line and "in_network_reduction = false" not in line:
            assert YEAR.search(comment) or re.search(r"arXiv \d{4}\.\d{5}", comment), f"{path.name}:{number}: no date"


def test_h800_has_the_cut_nvlink() -> None:
    # 400 GB/s over both directions: arXiv 2505.09343 (2025), section 4.1
    assert load_cluster("h800-ndr").node.link_bandwidth_bytes_per_s == 200e9


def test_peak_rates_are_dense() -> None:
    # NVIDIA H100 whitepaper v1.04 (2023), table 3: 989.4 TFLOP/s dense, 1,978.9 with sparsity
    assert load_cluster("h100-ndr").device.peak_flop_per_s["bf16"] == pytest.approx(989.4e12)
    # SMs x FLOP a clock and SM x clock give the rate: 1,024 a tensor core of A100, 4 a SM (A100 whitepaper, 2020)
    device = load_cluster("a100-80gb-hdr").device
    assert device.num_sms * 2048 * device.clock_hz == pytest.approx(device.peak_flop_per_s["bf16"], rel=2e-3)
