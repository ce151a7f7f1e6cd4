"""A clean Python child that traces; the caller never imports torch, whether it has done so already or not."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from echo_explore.core import MissingExtra, SpecError, TraceError, write_atomic
from echo_explore.graph import ExecutionGraph, RankTrace, Trace, load_rank_trace, load_trace
from echo_explore.specs import Candidate
from echo_explore.tracing import wire
from echo_explore.tracing.rank_request import RankRequest, rank_request_of
from echo_explore.tracing.request import TraceRequest
from echo_explore.tracing.transformers_request import TransformersJob
from echo_explore.tracing.versions import framework_versions

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 300.0  # imports on a loaded machine, and one compilation
_TAIL_BYTES = 2000
_MOST_RANKS = 2**20  # groups list their ranks; the largest training cluster known has some 10^5 GPUs (2026-12)


class _Ended(TraceError):
    """The child ended while it worked."""


class TraceService:
    """Serves traces from a child process, which starts with the first request and is started anew if it dies.

    It may be used from several threads; requests run one after the other.
    """

    def __init__(self, *, timeout_s: float = 900.0) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._owner = os.getpid()
        self._number = 0
        self._closed = False
        self._not_kept: set[str] = set()  # reasons that were told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child; later requests are refused."""
        with self._lock:
            self._closed = True
            self._stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._stop()

    @property
    def child_pid(self) -> int | None:
        """Process id of the child, None while there is none."""
        return None if self._child is None else self._child.pid

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepare(self) -> float:
        """Start the child and let it import the frameworks; the seconds of its imports."""
        return float(self.call("prepare", {})["prepare_s"])

    def trace(self, request: TraceRequest, path: Path | None = None) -> Trace:
        """The trace of a request.

        Args:
            request: what to trace.
            path: where to keep it; None keeps no file. Where it can't be written that is a warning: the trace is there.

        Raises:
            TraceError: it can't be traced.
            MissingExtra: torch or megatron-core is not installed.
            SpecError: a folder for temporary files can't be written.
        """
        with _temporary_folder() as folder:
            made = folder / "trace.npz"
            self.call("trace", {"request": request.to_json(), "path": str(made)})
            trace = load_trace(made)
            if path is not None:
                self._keep(made, path)
            return trace

    def _keep(self, made: Path, path: Path) -> None:
        try:
            write_atomic(path, made.read_bytes())
        except OSError as error:
            why = error.strerror or str(error)
            if why not in self._not_kept:  # a full disk would say so for every trace
                self._not_kept.add(why)
                logger.warning("traces are used but not kept: %s cannot be written (%s)", path, why)

    def trace_rank(self, candidate: Candidate, rank: int) -> ExecutionGraph:
        """One whole iteration of one rank of a candidate, with its gradient reduction and optimizer.

        Raises:
            TraceError: it can't be traced.
            MissingExtra: torch or megatron-core is not installed.
            SpecError: the job has no such rank.
        """
        return self.rank_step(candidate, rank).graph

    def rank_step(self, candidate: Candidate, rank: int) -> RankTrace:
        """As trace_rank, with the ranks of every group and transfer, and the peak memory."""
        return self.rank_step_request(rank_request_of(candidate, rank))

    def trace_rank_request(self, request: RankRequest) -> ExecutionGraph:
        """As trace_rank, from a request of its own."""
        return self.rank_step_request(request).graph

    def rank_step_request(self, request: RankRequest) -> RankTrace:
        """As rank_step, from a request of its own."""
        with _temporary_folder() as folder:
            path = folder / "rank.npz"
            self.call("trace_rank", {"request": request.to_json(), "path": str(path)})
            return load_rank_trace(path)

    def trace_script(self, script: Path, function: str, *, world_size: int, rank: int) -> ExecutionGraph:
        """The rows of `script_step`."""
        return self.script_step(script, function, world_size=world_size, rank=rank).graph

    def script_step(self, script: Path, function: str, *, world_size: int, rank: int) -> RankTrace:
        """One step of a user's own program as one rank of a fake cluster; it runs the user's code in the child.

        Args:
            script: Python file.
            function: its function that returns the step; see examples/train_step.py.
            world_size: ranks of the cluster.
            rank: that is played.

        Raises:
            TraceError: the script raised (its traceback is the error's note), or can't be traced.
            MissingExtra: torch is not installed.
            SpecError: there is no such rank, or more ranks than any cluster has.
        """
        if not 0 <= rank < world_size:
            raise SpecError("rank", rank, f"must be 0 to {world_size - 1}", "choose a rank of the world")
        if world_size > _MOST_RANKS:
            raise SpecError("world", world_size, f"must be at most {_MOST_RANKS:,}", "give a smaller world")
        with _temporary_folder() as folder:
            path = folder / "step.npz"
            arguments = {"script": str(script.absolute()), "function": function, "path": str(path)}
            try:  # once: a script that ends the process must not run again
                self.call("trace_script", arguments | {"world_size": world_size, "rank": rank}, attempts=1)
            except _Ended as error:
                where = f"script = {script.name}:{function}"
                raise TraceError(f"{where}: as rank {rank} of {world_size}, {error}") from None
            except TraceError as error:
                line, _, rest = str(error).partition("\n")
                told = TraceError(line)
                if rest:
                    told.add_note(rest)
                raise told from None
            return load_rank_trace(path)

    def transformers_step(self, job: TransformersJob, rank: int = 0) -> RankTrace:
        """One step of a model of the transformers package as one rank of its job.

        Raises:
            TraceError: transformers does not know the family, or has no plan for the layout.
            MissingExtra: torch or transformers is not installed.
            SpecError: there is no such rank.
        """
        if not 0 <= rank < job.world_size:
            raise SpecError("rank", rank, f"must be 0 to {job.world_size - 1}", "choose a rank of the job")
        with _temporary_folder() as folder:
            path = folder / "step.npz"
            self.call("trace_transformers", {"job": job.to_json(), "rank": rank, "path": str(path)})
            return load_rank_trace(path)

    def check_layout(
        self,
        request: TraceRequest,
        layout: Mapping[str, int],
        *,
        global_batch_size: int,
        num_gpus: int | None = None,
        chunk_layers: Sequence[int] = (),
    ) -> str:
        """`ok`, or the text with which megatron-core refuses a layout.

        Args:
            request: model, batch, sequence, kernels; its degrees count for nothing but sequence_parallel.
            layout: tp, pp, vpp, dp, cp, ep; 1 where left out, dp what num_gpus allows.
            global_batch_size: sequences a step.
            num_gpus: of the job; default what the degrees make.
            chunk_layers: layers of each chunk, for uneven splits; default: equal.
        """
        arguments = {
            "request": request.to_json(),
            "layout": dict(layout),
            "global_batch_size": global_batch_size,
            "num_gpus": num_gpus,
            "chunk_layers": list(chunk_layers),
        }
        return str(self.call("check_layout", arguments)["text"])

    def schedule_order(
        self, pipeline_parallel: int, virtual_pipeline: int, num_micro_batches: int, rank: int
    ) -> list[tuple[str, int, int]]:
        """(`forward` or `backward`, micro-batch, chunk) of all that a stage runs, from Megatron's own schedule."""
        names = ("pipeline_parallel", "virtual_pipeline", "num_micro_batches", "rank")
        values = (pipeline_parallel, virtual_pipeline, num_micro_batches, rank)
        answer = self.call("schedule_order", dict(zip(names, values, strict=True)))
        return [(str(phase), int(micro_batch), int(chunk)) for phase, micro_batch, chunk in answer["order"]]

    def process_groups(self, layout: Mapping[str, int], rank: int) -> dict[str, list[int]]:
        """Ranks of every process group of a rank as megatron-core makes them, by name of its axis; none of one rank.

        Args:
            layout: tp, pp, vpp, cp, ep, etp and dp; 1 where left out.
            rank: of the job.

        Raises:
            TraceError: Megatron refuses the layout.
            MissingExtra: torch or megatron-core is not installed.
        """
        answer = self.call("process_groups", {"layout": dict(layout), "rank": rank})
        return {str(axis): [int(r) for r in ranks] for axis, ranks in answer["groups"].items()}

    def bucket_layout(
        self,
        num_elements: Sequence[int],
        data_parallel: int,
        *,
        distributed_optimizer: bool,
        overlap_grad_reduce: bool,
        bucket_elements: int | None = None,
        own_bucket: Sequence[int] = (),
        pipeline_rank: int = 0,
    ) -> list[dict[str, Any]]:
        """Gradient buckets of Megatron's own DistributedDataParallel, in launch order.

        Args:
            num_elements: elements of each parameter in module order.
            data_parallel: ranks that reduce together.
            distributed_optimizer: shards optimizer states, which pads the buckets.
            overlap_grad_reduce: cuts buckets at all.
            bucket_elements: elements after which a bucket is closed; None: Megatron's default.
            own_bucket: positions of shared embeddings.
            pipeline_rank: stage; only stage 0 cuts buckets.

        Returns:
            For each bucket `num_elements` (padded) and `parameters` (positions, in buffer order).
        """
        arguments = {
            "num_elements": list(num_elements),
            "data_parallel": data_parallel,
            "distributed_optimizer": distributed_optimizer,
            "overlap_grad_reduce": overlap_grad_reduce,
            "bucket_elements": bucket_elements,
            "own_bucket": list(own_bucket),
            "pipeline_rank": pipeline_rank,
        }
        buckets = self.call("bucket_layout", arguments)["buckets"]
        return [dict(bucket) for bucket in buckets]

    def call(
        self, operation: str, arguments: dict[str, Any], *, timeout_s: float | None = None, attempts: int = 2
    ) -> dict[str, Any]:
        """One request to the child and its answer.

        Args:
            operation: one of `child.OPERATIONS`.
            arguments: of the operation.
            timeout_s: longest wait; None: that of the service.
            attempts: processes that may die of it.

        Raises:
            TraceError: the child refuses, fails, dies in every attempt or does not answer in time.
            MissingExtra: torch or megatron-core is not installed.
            SpecError: the machine refuses a file or process (space, rights).
        """
        framework_versions()
        with self._lock:
            for attempt in range(1, attempts + 1):
                try:
                    return self._once(operation, arguments, timeout_s or self._timeout_s)
                except wire.Closed:
                    how = f"{self._exit_text()}, {self._tail()}"
                    self._stop()
                    if attempt == attempts:
                        raise _Ended(f"tracing process: ended while it worked ({how}); fix: see its message") from None
                except wire.TimedOut:
                    self._stop()
                    limit = f"timeout_s = {timeout_s or self._timeout_s:.0f}"
                    raise TraceError(
                        f"{limit}: the tracing process did not answer {operation} in time; "
                        "fix: allow more, or trace fewer micro-batches"
                    ) from None
                except BaseException:  # Ctrl-C in the middle of an answer: the next request must not read its rest
                    if self._child is not None and not self._idle:
                        self._stop()
                    raise
        raise AssertionError("unreachable")

    _idle = True

    def _once(self, operation: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        self._number += 1
        self._idle = False
        wire.send(child.stdin.fileno(), {"id": self._number, "operation": operation, "arguments": arguments})
        answer = wire.receive(child.stdout.fileno(), timeout_s=timeout_s)
        self._idle = True
        if answer.get("id") != self._number:
            raise wire.Closed("the answer belongs to another request")
        if "missing_extra" in answer:
            raise MissingExtra(*answer["missing_extra"])
        if "os_error" in answer:
            raise _refused(*answer["os_error"])
        if "error" in answer:
            raise TraceError(answer["error"])
        result = answer["ok"]
        assert isinstance(result, dict)
        return result

    # -- the child ----------------------------------------------------------------------------------------------------

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise TraceError("trace service: is closed; fix: make a new one")
        if self._owner != os.getpid():  # a fork: the child belongs to the other process
            self._child, self._log, self._owner = None, None, os.getpid()
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()
        environment = dict(os.environ)
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])])
        for name in (
            "PYTHONSTARTUP",
            "PYTHONINSPECT",
            "TORCH_LOGS",
            "TORCH_COMPILE_DEBUG",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
        ):
            environment.pop(name, None)
        try:
            self._log = tempfile.TemporaryFile(prefix="echo-explore-child-")  # noqa: SIM115 - lives as the child does
        except OSError as error:
            raise _refused(_temporary_place(), error.strerror or str(error)) from error
        try:
            self._child = subprocess.Popen(
                # -P: a torch.py in the caller's folder is not torch.
                [sys.executable, "-P", "-m", "echo_explore.tracing.child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0, env=environment,
                start_new_session=True,  # Ctrl-C is for the caller, who ends the child
            )  # fmt: skip
        except OSError as error:
            raise SpecError(
                "tracing process", sys.executable, f"cannot be started ({error})", "check the interpreter"
            ) from error
        return self._child

    def _exit_text(self) -> str:
        """How the child ended."""
        try:
            status = None if self._child is None else self._child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            status = None
        if status is None:
            return "exit status unknown"
        return f"exit status {status}" if status >= 0 else f"signal {_signal_name(-status)}"

    def _tail(self) -> str:
        if self._log is None:
            return "no message"
        with contextlib.suppress(OSError, ValueError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _TAIL_BYTES))
            lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return "no message"

    def _stop(self) -> None:
        child, log = self._child, self._log
        self._child = self._log = None
        self._idle = True
        if self._owner != os.getpid():
            return
        if child is not None:
            for pipe in _pipes(child):
                with contextlib.suppress(OSError):
                    pipe.close()
            child.kill()
            child.wait()
            with contextlib.suppress(OSError):  # what a script started: it leads a session of its own
                os.killpg(child.pid, signal.SIGKILL)
        if log is not None:
            log.close()


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    try:
        folder = tempfile.TemporaryDirectory(prefix=wire.FOLDER_PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise _refused(_temporary_place(), error.strerror or str(error)) from error
    with folder as name:
        yield Path(name).absolute()


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def _temporary_place() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # no folder at all can be written
        return os.environ.get("TMPDIR", "/tmp")


def _refused(path: str, why: str) -> SpecError:
    return SpecError("file", path, f"cannot be read or written ({why})", "free space, check path and rights")


def _pipes(child: subprocess.Popen[bytes]) -> Iterator[IO[bytes]]:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            yield pipe
