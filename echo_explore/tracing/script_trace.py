"""Traces a user's own training step under the fake cluster. It runs the user's code, with the user's rights.

The file is loaded as a module of its own; `function()` is called once and returns the step, a function without
arguments, or the step and the model whose module paths the rows shall carry. The step runs twice: the first time makes
optimizer states and whatever else is lazy, the second is recorded.
"""

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from echo_explore.core import TraceError
from echo_explore.graph import Axis, RankTrace
from echo_explore.tracing import fake_cluster, megatron_shims
from echo_explore.tracing.native_ddp import replicas
from echo_explore.tracing.native_rank import no_global_shapes
from echo_explore.tracing.oracles import Oracles, oracles_of
from echo_explore.tracing.recorded_step import ordered_step
from echo_explore.tracing.recorder import Recorder
from echo_explore.tracing.script_attention import fused_attention, masks_as_on_a_gpu
from echo_explore.tracing.script_data import loaders_on_the_host
from echo_explore.tracing.script_meshes import meshes_with_axes
from echo_explore.tracing.script_phases import phases_told
from echo_explore.tracing.script_pipelines import pipelines_told

_TRACER = f"{Path(__file__).parent}/"


def trace_script(path: Path, function: str, *, world_size: int, rank: int) -> RankTrace:
    """One step of the script.

    Args:
        path: Python file.
        function: its function that returns the step.
        world_size: ranks of the fake cluster.
        rank: that is played.

    Raises:
        TraceError: the file or the function is not there, it returns no step, or it raises; with its own traceback.
    """
    where = f"script = {path.name}:{function}"

    oracles = Oracles({})

    def build() -> Any:
        script = _load(path, where)
        oracles.own.update(oracles_of(script, where))
        made = getattr(script, function, None)
        if not callable(made):
            raise TraceError(f"{where}: there is no such function; fix: name a function of the file")
        return made()

    fake_cluster.start(rank, world_size)
    with _environment(path, rank, world_size), _own_modules(path.parent), _raising(where, path, rank, world_size):
        return trace_step(build, where=where, world_size=world_size, rank=rank, oracles=oracles)


def trace_step(
    build: Callable[[], Any], *, where: str, world_size: int, rank: int, oracles: Oracles | None = None
) -> RankTrace:
    """The second run of the step that `build` returns, as one rank of the fake cluster that runs.

    Args:
        build: returns a function, or a function and the model; it is called on the fake cluster.
        where: what it is, for messages.
        world_size: ranks of the cluster.
        rank: that is played.
        oracles: what the script says of values that only a GPU knows.

    Raises:
        TraceError: it returns no step, or the step runs nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    axes = {dist.group.WORLD.group_name: Axis.DATA}  # type: ignore[union-attr]
    recorder = Recorder(axes, fuse=True)
    recorder.oracles = oracles or Oracles()
    with (
        _unknown_values(recorder.oracles) if oracles is None else contextlib.nullcontext(),
        meshes_with_axes(axes),
        replicas(),
        loaders_on_the_host(),
        fused_attention(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.set_multithreading_enabled(False),
        no_global_shapes(recorder),
    ):
        step = build()
        model: Any = None
        if isinstance(step, tuple) and len(step) == 2:
            step, model = step
        if isinstance(step, torch.nn.Module):
            raise TraceError(
                f"{where}: returned a model, not a function; fix: return a step that runs it, and the model"
            )
        if not callable(step):
            raise TraceError(f"{where}: returned {type(step).__name__}, not a function; fix: return the step, uncalled")
        if isinstance(model, torch.nn.Module):
            for name, module in model.named_modules():
                recorder.name_module(module, name, -1)
        with masks_as_on_a_gpu(), megatron_shims.recording(recorder):
            with phases_told(recorder), pipelines_told(recorder):
                step()
            recorder.flush()
            first = len(recorder.rows)
            recorder.host_syncs.clear()
            recorder.joins.clear()
            with phases_told(recorder), pipelines_told(recorder):
                step()
    if first == len(recorder.rows):
        raise TraceError(f"{where}: its step ran nothing on the GPU; fix: put model and inputs on device 'cuda'")
    return ordered_step(recorder, first, rank=rank, world_size=world_size)


def _load(path: Path, where: str) -> Any:
    if not path.is_file():
        raise TraceError(f"{where}: the file does not exist; fix: check the path")
    spec = importlib.util.spec_from_file_location("echo_explore_user_script", path)
    if spec is None or spec.loader is None:
        raise TraceError(f"{where}: is not a Python file; fix: name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _environment(path: Path, rank: int, world_size: int) -> Iterator[None]:
    """What torchrun sets, for 8 GPUs a host, and the folder of the script to import from."""
    values = {
        "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % 8, "LOCAL_WORLD_SIZE": min(world_size, 8),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in values}
    arguments, paths, real = sys.argv, list(sys.path), dist.init_process_group
    os.environ.update({name: str(value) for name, value in values.items()})
    sys.argv = [str(path)]
    sys.path.insert(0, str(path.parent))
    module: Any = dist
    module.init_process_group = lambda *_, **__: None  # the fake cluster is there already
    try:
        yield
    finally:
        module.init_process_group = real
        sys.argv, sys.path[:] = arguments, paths
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_modules(folder: Path) -> Iterator[None]:
    """Forget the modules that the script imports from its folder: the next one may have others of the same names."""
    before = set(sys.modules)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).is_relative_to(folder) and "site-packages" not in Path(file).parts:
                del sys.modules[name]


@contextlib.contextmanager
def _raising(where: str, path: Path, rank: int, world_size: int) -> Iterator[None]:
    """Show the script's own frames and the rank that it played."""
    try:
        yield
    except TraceError:
        raise
    except BaseException as error:  # KeyboardInterrupt too: the script's own, since Ctrl-C ends the caller
        told = traceback.TracebackException.from_exception(error)
        _only_own_frames(told, path)
        text = "".join(told.format()).removeprefix("Traceback (most recent call last):\n").rstrip()
        raise TraceError(
            f"{where}: raised {type(error).__name__} as rank {rank} of {world_size}; fix: see its traceback\n"
            f"Traceback of {path.name}:\n{text}"
        ) from None


def _only_own_frames(told: traceback.TracebackException, path: Path) -> None:
    """Leave out the tracer's frames and those ahead of the script's, in the causes and the members of a group too."""
    frames = told.stack
    own = next((i for i, frame in enumerate(frames) if Path(frame.filename) == path), len(frames))
    outside = (f for f in frames[own:] or frames if not f.filename.startswith((_TRACER, "<frozen importlib")))
    told.stack = traceback.StackSummary.from_list(list(outside))
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if other is not None:
            _only_own_frames(other, path)


@contextlib.contextmanager
def _unknown_values(oracles: Oracles) -> Iterator[None]:
    """Name the line that reads what a GPU knows where the recorder is not asked: no traceback of a script shows it."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise oracles.unknown_in(error) from error
