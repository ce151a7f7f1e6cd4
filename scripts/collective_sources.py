"""What the fits of collectives know beside the measured rows: sources, order, what a fabric is held near."""

from collections.abc import Mapping

from echo_explore.comm.coefficients import ToolConstants

TOOLS = {
    "nccl-tests": ToolConstants(key="nccl-tests"),
    "xla": ToolConstants(key="xla", launch_s=12e-6),
    "xla-grace": ToolConstants(key="xla-grace", launch_s=4e-6),
    "kineto": ToolConstants(key="kineto", floor_s=30e-6),
    "kineto-send": ToolConstants(key="kineto-send"),
    "lut": ToolConstants(key="lut"),
}
"""From fits with this constant left free where the data show it, rounded by judgement (2026-11-30)."""
TOOL_SOURCES = {
    "nccl-tests": "A loop of calls: launch hidden behind the previous call; nccl-tests doc/PERFORMANCE.md (2023)",
    "xla": "openxla collective_perf_table_gen on x86 hosts: launch included; from free fits on H100 and B200, rounded",
    "xla-grace": "openxla collective_perf_table_gen on Grace hosts: launch included; from free fits, rounded",
    "kineto": "vidur's kernel times of all-reduces: waiting for peers up to about this floor; judged from small rows",
    "kineto-send": "vidur's kernel times of sends: kernel alone",
    "lut": "vTrain's nccl-tests table: as nccl-tests; its latencies lie in the fabric's own table",
}
BASES = {
    "nvswitch-a100-sxm4-40gb": "nvswitch-a100-sxm4-80gb", "lut-a100": "nvswitch-a100-sxm4-80gb",
    "kineto-a100": "nvswitch-a100-sxm4-80gb", "kineto-a100-bridge": "nvswitch-a100-sxm4-80gb",
    "kineto-h100": "nvswitch-h100-sxm5-80gb", "kineto-h100-bridge": "nvswitch-h100-sxm5-80gb",
    "kineto-a40-bridge": "nvswitch-a100-sxm4-80gb", "nvswitch-h200-sxm-141gb": "nvswitch-h100-sxm5-80gb",
    "nvswitch-gb200": "nvswitch-b200-sxm-180gb", "nvswitch-gb300": "nvswitch-b200-sxm-180gb",
    "nvlink-v100-sxm2-32gb": "nvswitch-a100-sxm4-80gb",
}  # fmt: skip
"""Where a fabric's unmeasured collectives come from, and near which values its fit is held."""
NETWORK_BASES = {
    "infiniband-hopper": "infiniband-ampere", "efa-ampere": "infiniband-ampere", "slingshot": "infiniband-hopper",
    "efa-hopper": "infiniband-hopper", "efa-hopper-k8s": "efa-hopper", "kineto-a100": "infiniband-ampere",
    "kineto-a100-bridge": "kineto-a100", "kineto-h100": "kineto-a100",
}  # fmt: skip
"""The same for networks; the order of fits."""
NETWORK_STARTS = 8
"""Of a network's fit, whose rows are few and whose choices are many."""
EFA_STEPS = (1.0, 1.0, 1.15)
"""Start of steps over EFA on the cluster file's 20 us: 3 us more under Simple, whose completions reach the host
[aws-ofi-nccl 1.9 (2024) include/nccl_ofi_tuner.h, OFI_NCCL_TUNER_NET_COMP_OVERHEAD]."""
SIMPLE_ONLY = ("efa-ampere",)
"""EFA on p4d and p4de keeps no order of bytes: NCCL runs Simple only [aws-ofi-nccl issue 76, 2021]."""
RING_SHARE = {
    # DGX-1V's mesh: one edge-disjoint ring (both ways: two) for each pair of links that a ring can use, out of six;
    # NVIDIA DGX-1 with V100 system architecture WP-08437 (2017), figure 4. Five GPUs hold no ring of NVLinks: measured.
    "nvlink-v100-sxm2-32gb": {2: 1 / 6, 3: 2 / 6, 4: 4 / 6, 5: 0.275, 6: 2 / 6, 7: 4 / 6},
    # Four GPUs in two bridged pairs: rings cross PCIe, 24 of the pair's 195 GB/s (vidur, 2024).
    "kineto-a100-bridge": {4: 0.1215},
}
SOURCES = {
    "nvswitch-a100-sxm4-80gb": "nccl-tests on A100: aiconfigurator-core 0.12.0 tables (Apache-2.0)",
    "nvswitch-a100-sxm4-40gb": "nccl-tests, Azure ND A100 v4: NetX-lab/Echo logs (MIT); all-reduce only",
    "lut-a100": "vTrain's all-reduce table of 8 A100",
    "kineto-a100": "vidur's profiles of DGX A100 (MIT)",
    "kineto-a100-bridge": "vidur's profiles of A100 with NVLink bridges (MIT)",
    "kineto-a40-bridge": "vidur's profiles of A40 with NVLink bridges (MIT); sends only",
    "nvswitch-h100-sxm5-80gb": "nccl-tests on H100: aiconfigurator-core 0.12.0, openxla tables, AWS and NVIDIA READMEs",
    "kineto-h100": "vidur's profiles of DGX H100 (MIT)",
    "kineto-h100-bridge": "vidur's profiles of H100 with NVLink bridges (MIT)",
    "nvswitch-h200-sxm-141gb": "nccl-tests on H200: aiconfigurator-core 0.12.0 (Apache-2.0)",
    "nvswitch-b200-sxm-180gb": "nccl-tests on B200: aiconfigurator-core 0.12.0, openxla tables (Apache-2.0)",
    "nvswitch-gb200": "nccl-tests on GB200: aiconfigurator-core 0.12.0, openxla tables (Apache-2.0)",
    "nvswitch-gb300": "nccl-tests on GB300: aiconfigurator-core 0.12.0, openxla tables (Apache-2.0)",
    "nvlink-v100-sxm2-32gb": "vTrain's all-reduce table of 8 V100",
    "pcie-rtx-pro-6000": "nccl-tests on RTX PRO 6000: aiconfigurator-core 0.12.0 (Apache-2.0)",
    "pcie-arc-b60": "oneCCL on Arc Pro B60: aiconfigurator-core 0.12.0 (Apache-2.0)",
    "infiniband-ampere": "nccl-tests: NetX-lab/Echo logs, ND A100 v4, 2-16 nodes (MIT)",
    "infiniband-hopper": "nccl-tests: NVIDIA/nccl-tests issue 309, 8 H100 nodes of 8 x 400 Gbit/s",
    "efa-ampere": "nccl-tests: AWS awsome-distributed-training README, p4de, 2 nodes",
    "efa-hopper": "nccl-tests: AWS awsome-distributed-training README, p5, 2 nodes; EFA_P5, 2 to 32 nodes",
    "efa-hopper-k8s": "nccl-tests: AWS awsome-distributed-training README, p5 under Kubernetes, 2 nodes",
    "slingshot": "nccl-tests on Kestrel (NREL), 16 nodes of 4 H100",
}
OF_LIBRARY = {
    # Means over jobs on 2 to 64 p5 hosts at 256 MB, GB/s of bus bandwidth: all-gather 184.6, 119.0, 69.0, 55.0, 28.0,
    # 11.0, reduce-scatter 181.6, 115.8, 68.6, 54.5, 27.9, 11.1; the step that fits them best in the log (15 % left).
    # Spread: 5th to 95th percentile of bandwidth, 0.41 to 0.60 of the log from 4 hosts on (all-reduce 0.47 to 0.81).
    "efa-hopper-nccl-2.18": ("efa-hopper", 38e-6, 0.5),
}
"""Networks under an older library: base, least step of rings, sigma of the log."""
OF_LIBRARY_SOURCE = (
    "As efa-hopper, steps of rings and spread from 12 means of all-gather and reduce-scatter on p5: the ultra-scale "
    "playbook's figure of bandwidth by nodes (Hugging Face, 2025-02)"
)
ALIASES = (
    ("scale_up.nvswitch-ampere", "nvswitch-a100-sxm4-80gb"),
    ("scale_up.nvswitch-hopper", "nvswitch-h100-sxm5-80gb"),
    ("scale_up.nvswitch-blackwell", "nvswitch-b200-sxm-180gb"),
    ("network.infiniband", "infiniband-hopper"),
    ("network.efa", "efa-hopper"),
)
DEFAULT_SIGMA = (0.45, 0.40, 0.30)
"""Spread where nothing was measured: what fabrics differ by among those measured, judged from their coefficients."""
HEADER = """# Coefficients of collectives by scripts/fit_collectives.py, {date}; meaning: docs/collectives.md.
# Triples are for NCCL's protocols LL, LL128, Simple, pairs for LL, Simple.
# sigma_log: for messages under 256 KiB, under 16 MiB, above.
# Fitted to all rows; judged on curves held back in three parts by --folds 3 --seed {seed}: docs/collectives.md.
schema = 2
"""

EFA_P5: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    # Hosts, then GB/s of an all-reduce of 32 MiB, 64 MiB, ..., 8 GiB.
    "all_reduce": {
        2: (78.57, 110.40, 162.74, 194.38, 211.20, 232.08, 237.36, 248.43, 254.78),
        4: (49.23, 78.66, 118.44, 141.08, 143.70, 144.67, 179.39, 182.94, 184.25),
        8: (44.06, 52.75, 79.40, 117.88, 138.48, 139.41, 141.28, 178.45, 180.50),
        16: (37.72, 46.56, 65.11, 74.64, 112.78, 135.67, 136.52, 154.28, 179.54),
        32: (33.30, 41.97, 58.12, 69.26, 78.73, 110.47, 135.26, 152.0, 161.18),
    },
    # The same of an all-to-all, up to 2 GiB.
    "alltoall": {
        2: (47.78, 66.30, 73.38, 79.21, 80.87, 82.91, 84.53),
        4: (35.56, 44.53, 54.26, 56.03, 55.57, 55.49, 55.82),
        8: (29.13, 35.24, 36.77, 45.11, 47.31, 49.08, 50.41),
        16: (24.83, 26.29, 31.69, 35.04, 40.39, 42.70, 44.58),
        32: (19.79, 23.01, 27.13, 30.32, 33.19, 38.83, 40.94),
    },
}
"""Algorithm bandwidths of NCCL on hosts p5.48xlarge over EFA [crazyguitar/aws-gpu-communication-benchmark, data/*.csv,
2025]: the only public curves of more than two such hosts (looked for on 2026-12-01)."""


def published_rows() -> list[Mapping[str, str]]:
    """They, as rows of a measured table; they take part in every fit and are never judged."""
    return [
        {
            "gpu": "H100-SXM5-80GB", "fabric": "EFA (p5)", "collective": collective, "dtype": "float32",
            "num_gpus": str(8 * hosts), "nodes": str(hosts), "size_bytes": str(2 ** (25 + place)),
            "latency_us": str(2 ** (25 + place) / bandwidth / 1e3), "algo": "auto", "proto": "auto", "lib": "NCCL",
            "tool": "nccl-tests",
        }
        for collective, curves in EFA_P5.items()
        for hosts, curve in curves.items()
        for place, bandwidth in enumerate(curve)
    ]  # fmt: skip
