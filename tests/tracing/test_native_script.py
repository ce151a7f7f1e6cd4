"""Scripts of users: the shipped examples, and what goes wrong."""

import time
from pathlib import Path

import numpy as np
import pytest

from echo_explore.core import SpecError, TraceError
from echo_explore.graph import Axis, Collective, ExecutionGraph, OpClass, OpKind, Phase
from echo_explore.simulate.ddp_buckets import ddp_buckets
from echo_explore.tracing import TraceService

pytestmark = pytest.mark.torch
EXAMPLES = Path(__file__).parents[2] / "examples"


def traffic(graph: ExecutionGraph) -> list[tuple[str, str, float]]:
    rows = np.flatnonzero(graph.is_collective)
    return [
        (Collective(int(graph.collective[r])).name, Axis(int(graph.axis[r])).name, float(graph.message_bytes[r]))
        for r in rows
    ]


def run(service: TraceService, name: str, world_size: int, rank: int) -> ExecutionGraph:
    return service.trace_script(EXAMPLES / name, "build", world_size=world_size, rank=rank)


def test_fsdp2_example(service: TraceService) -> None:
    graph = run(service, "train_step.py", 1024, 517)
    kinds = [kind for kind, _, _ in traffic(graph)]
    assert (kinds.count("ALL_GATHER"), kinds.count("REDUCE_SCATTER"), kinds.count("ALL_REDUCE")) == (5 + 4, 5, 1)
    assert {axis for _, axis, _ in traffic(graph)} == {"DATA"}
    assert (graph.op_class == OpClass.OPTIMIZER).sum() == 1
    assert graph.phase[graph.op_class == OpClass.OPTIMIZER].tolist() == [Phase.OPTIMIZER]
    assert "1.up" in graph.strings
    # The root is reduced when autograd is done; gradients are clipped before the optimizer is called.
    assert set(graph.phase[graph.collective == Collective.REDUCE_SCATTER].tolist()) == {Phase.BACKWARD}
    assert graph.phase[graph.collective == Collective.ALL_REDUCE].tolist() == [Phase.OPTIMIZER]


@pytest.mark.parametrize("rank", [0, 15])
def test_ddp_example_has_the_buckets_of_the_simulator(service: TraceService, rank: int) -> None:
    graph = run(service, "ddp_step.py", 16, rank)
    sizes = [4096 * 1024 * 4, 4096 * 4, 1024 * 4096 * 4, 1024 * 4]
    buckets = ddp_buckets(sizes, first_bytes=2**20, others_bytes=25 * 2**20)
    assert traffic(graph) == [("ALL_REDUCE", "DATA", float(sum(sizes[i] for i in bucket))) for bucket in buckets]


def test_tensor_parallel_example(service: TraceService) -> None:
    graph = run(service, "tensor_parallel_step.py", 64, 9)
    assert traffic(graph) == [("ALL_REDUCE", "TENSOR", 512 * 1024 * 4.0)]
    waits = np.flatnonzero(graph.kind == OpKind.WAIT)
    assert graph.awaits[waits].tolist() == np.flatnonzero(graph.is_collective).tolist()
    products = graph.dims[graph.op_class == OpClass.GEMM]
    assert 512 in products[:, 1:4]  # 4096 / 8 of the inner width


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_next_script_has_helpers_of_its_own(service: TraceService, tmp_path: Path) -> None:
    products = []
    for name, count in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        path = script(tmp_path / name, "import torch, helper\n\ndef build():\n    return helper.step\n")
        work = "    x @ x\n" * count
        (path.parent / "helper.py").write_text(
            f"import torch\n\ndef step():\n    x = torch.ones(8, 8, device='cuda')\n{work}", encoding="utf-8"
        )
        graph = service.trace_script(path, "build", world_size=8, rank=0)
        products.append(int((graph.op_class == OpClass.GEMM).sum()))
    assert products == [1, 2]


def test_a_raising_script_shows_its_traceback_and_its_rank(service: TraceService, tmp_path: Path) -> None:
    path = script(tmp_path, "def build():\n    raise ValueError('boom')\n")
    with pytest.raises(TraceError, match=r"mine\.py:build: raised ValueError as rank 3 of 8; fix") as error:
        service.trace_script(path, "build", world_size=8, rank=3)
    note = error.value.__notes__[0]
    assert "line 2, in build" in note
    assert "ValueError: boom" in note
    assert "echo_explore" not in note


def raised(service: TraceService, path: Path) -> str:
    with pytest.raises(TraceError, match=r"as rank 3 of 8; fix: see its traceback") as error:
        service.trace_script(path, "build", world_size=8, rank=3)
    return str(error.value.__notes__[0])


def test_a_traceback_has_its_causes_and_the_members_of_a_group(service: TraceService, tmp_path: Path) -> None:
    chained = """
def build():
    try:
        return {}["weights"]
    except KeyError as error:
        raise RuntimeError("no checkpoint") from error
"""
    note = raised(service, script(tmp_path, chained))
    assert note.index("KeyError: 'weights'") < note.index("direct cause") < note.index("RuntimeError: no checkpoint")
    assert ("line 4, in build" in note, "line 6, in build" in note, "echo_explore" in note) == (True, True, False)
    group = "def build():\n    raise ExceptionGroup('many', [ValueError('a'), TypeError('b')])\n"
    note = raised(service, script(tmp_path, group))
    assert "ValueError: a" in note
    assert "TypeError: b" in note
    assert "importlib" not in raised(service, script(tmp_path, "def build(:\n"))
    assert "KeyboardInterrupt" in raised(service, script(tmp_path, "def build():\n    raise KeyboardInterrupt\n"))


@pytest.mark.parametrize(
    ("line", "how"), [("os._exit(3)", "exit status 3"), ("os.kill(os.getpid(), 11)", "signal SIGSEGV")]
)
def test_a_script_that_ends_the_process_runs_once(service: TraceService, tmp_path: Path, line: str, how: str) -> None:
    runs = tmp_path / "runs"
    path = script(tmp_path, f"import os\ndef build():\n    open({str(runs)!r}, 'a').write('x')\n    {line}\n")
    with pytest.raises(TraceError, match=rf"mine\.py:build: as rank 3 of 8, tracing process: ended .*\({how}, "):
        service.trace_script(path, "build", world_size=8, rank=3)
    assert runs.read_text() == "x"


def test_what_a_script_starts_ends_with_the_service(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    text = f"""
import os, subprocess, torch
def build():
    started = subprocess.Popen(["sleep", "600"])
    open({str(pid)!r}, "w").write(str(started.pid))
    x = torch.ones(4, 4, device="cuda")
    return lambda: x @ x
"""
    with TraceService() as own:
        own.trace_script(script(tmp_path, text), "build", world_size=8, rank=3)
    status = Path(f"/proc/{pid.read_text()}/status")
    end = time.monotonic() + 20
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < end:
        time.sleep(0.1)
    assert not status.exists() or "State:\tZ" in status.read_text()


STEP = """
import torch
ECHO_ORACLES = {"mine.py:step": 1.0}
def build():
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        for _ in range(2):
            loss = model(torch.ones(8, 64, device="cuda")).sum()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
    return step
"""


def test_all_behind_the_last_backward_is_the_optimizer(service: TraceService, tmp_path: Path) -> None:
    trace = service.script_step(script(tmp_path, STEP), "build", world_size=8, rank=3)
    graph = trace.graph
    last = int(np.flatnonzero(graph.phase == Phase.BACKWARD)[-1])
    norms = [r for r in range(graph.num_ops) if graph.strings[graph.name[r]] == "aten.linalg_vector_norm"]
    assert norms
    assert min(norms) > last
    assert set(graph.phase[last + 1 :].tolist()) == {Phase.OPTIMIZER}
    assert (graph.phase[:last] == Phase.OPTIMIZER).sum() == 0
    assert [oracle["phase"] for oracle in trace.oracles] == ["OPTIMIZER"]


OWN_GPU = """
import os, torch, torch.distributed as dist
def build():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    model = torch.nn.Linear(64, 8).cuda()
    ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])
    scaler = torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.zeros(16, 64, device="cuda"), torch.tensor([0] * 16, device=f"cuda:{local}")
    def step():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(ddp(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return step
"""
SPARSE = """
import torch
def build():
    table = torch.nn.EmbeddingBag(100, 8, sparse=True, device="cuda")
    ids = torch.zeros(4, 2, dtype=torch.long, device="cuda")
    def step():
        table(ids).sum().backward()
    return step
"""
SYNCED = """
import torch
def build():
    norm = torch.nn.SyncBatchNorm(4).cuda()
    def step():
        norm(torch.zeros(8, 4, 16, device="cuda"))
    return step
"""
HOOK = """
import torch, torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
def build():
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, device="cuda"))
    ddp.register_comm_hook(None, bf16_compress_hook)
"""


def test_a_program_selects_its_gpu(service: TraceService, tmp_path: Path) -> None:
    """As most do under torchrun: set_device, device_ids, and "cuda" for what is selected."""
    graph = service.trace_script(script(tmp_path, OWN_GPU), "build", world_size=16, rank=13)
    assert traffic(graph) == [("ALL_REDUCE", "DATA", 4.0 * (64 * 8 + 8))]
    assert (graph.kind == OpKind.HOST_SYNC).sum() == 1  # whether a gradient is infinite


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SPARSE, r"at mine\.py:7 = \(sparse\): sparse arrays and gradients are not traced; fix: .* sparse=False"),
        (
            SYNCED,
            r"aten\.batch_norm_stats at mine\.py:6 = \(unknown\): PyTorch has no fake kernel .*; fix: use another",
        ),
        (HOOK, r"register_comm_hook = bf16_compress_hook: hooks .* are not traced.*; fix: leave it out"),
    ],
)
def test_what_is_not_traced_is_refused_by_name(service: TraceService, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        service.trace_script(script(tmp_path, text), "build", world_size=8, rank=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "no such function"),
        ("def build():\n    return 3\n", "returned int, not a function"),
        ("import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n", "returned a model, not a function"),
        ("def build():\n    return lambda: None\n", "ran nothing on the GPU"),
        ("import sys\ndef build():\n    sys.exit(1)\n", "raised SystemExit"),
        ("def build(:\n", "raised SyntaxError"),
    ],
)
def test_what_is_no_step_is_refused(service: TraceService, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        service.trace_script(script(tmp_path, text), "build", world_size=8, rank=0)


def test_a_rank_outside_of_the_world_is_refused(service: TraceService, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="rank = 8: must be 0 to 7"):
        service.trace_script(script(tmp_path, ""), "build", world_size=8, rank=8)


LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def build():
    model = torch.nn.Linear(64, 8).cuda()
    data = TensorDataset(torch.randn(96, 64), torch.zeros(96, dtype=torch.int64))
    batches = iter(DataLoader(data, 32, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True))

    def step():
        inputs, labels = (t.to("cuda", non_blocking=True) for t in next(batches))
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()

    return step, model
"""


def test_a_data_loader_with_workers_gives_its_batches(service: TraceService, tmp_path: Path) -> None:
    graph = service.trace_script(script(tmp_path, LOADER), "build", world_size=8, rank=3)
    products = graph.dims[graph.op_class == OpClass.GEMM]
    assert products[0].tolist()[:4] == [1, 32, 8, 64]
    assert (graph.kind == OpKind.HOST_SYNC).sum() == 0


MASKED = """
import torch

def build():
    model = torch.nn.Linear(64, 8).cuda()
    def step():
        out = model(torch.randn(32, 64, device="cuda"))
        torch.unique(out.argmax(-1))
        out[torch.randn(32, device="cuda") > 0].sum().backward()
    return step
"""


def test_sizes_of_masks_and_of_distinct_values_have_oracles(service: TraceService, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"aten\._unique2 at mine\.py:8 = \(unknown\).*fix: add ECHO_ORACLES = "):
        service.trace_script(script(tmp_path, MASKED), "build", world_size=8, rank=0)
    known = MASKED + 'ECHO_ORACLES = {"mine.py:8": 5, "mine.py:9": 13}\n'
    trace = service.script_step(script(tmp_path, known), "build", world_size=8, rank=0)
    assert [oracle["assumed"] for oracle in trace.oracles] == [5, 13]
    text = MASKED.replace("torch.unique(", "torch.unique_consecutive(")
    with pytest.raises(
        TraceError, match=r"unique_consecutive at mine\.py:8 .*oracles are for aten.nonzero.*fix: choose"
    ):
        service.trace_script(script(tmp_path, text), "build", world_size=8, rank=0)


def test_a_step_that_wants_arguments_shows_no_line_of_the_tracer(service: TraceService, tmp_path: Path) -> None:
    path = script(tmp_path, "def build():\n    return lambda batch: None\n")
    with pytest.raises(TraceError, match="raised TypeError as rank 3 of 8") as error:
        service.trace_script(path, "build", world_size=8, rank=3)
    note = error.value.__notes__[0]
    assert "missing 1 required positional argument: 'batch'" in note
    assert "echo_explore" not in note


def test_a_list_that_is_read_is_one_wait(service: TraceService, tmp_path: Path) -> None:
    text = """
import torch
ECHO_ORACLES = {"mine.py:step": 3}
def build():
    def step():
        sums = torch.ones(4, 8, device="cuda").sum(-1)
        assert sums.tolist() == [3] * 4
        assert sums.mean().item() == 3
    return step
"""
    graph = service.trace_script(script(tmp_path, text), "build", world_size=8, rank=0)
    assert (graph.kind == OpKind.HOST_SYNC).sum() == 2
