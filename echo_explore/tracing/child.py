"""The tracing process: `python -m echo_explore.tracing.child`, started by `TraceService` only.

Requests come on stdin, answers go to the stdout it was started with; everything printed meanwhile goes to stderr. It
ends when stdin does, and when its parent is gone.
"""

import os
import queue
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from echo_explore.core import EchoError, MissingExtra
from echo_explore.tracing import wire
from echo_explore.tracing.versions import framework_versions

_PARENT_CHECK_S = 1.0
_answers: list[Path] = []
"""The folder of the answer that is made now."""


def _prepare(_: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.tracing import runtime

    return {"prepare_s": runtime.prepare()}


def _trace(request: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.graph import save_trace
    from echo_explore.tracing import runtime

    prepare_s = runtime.prepare()
    from echo_explore.tracing import megatron_pieces, native_pieces, torchtitan_pieces
    from echo_explore.tracing.request import request_from_json

    started = time.perf_counter()
    wanted = request_from_json(request["request"])
    tracers = {"megatron": megatron_pieces.trace_pieces, "torchtitan": torchtitan_pieces.trace_pieces}
    trace = tracers.get(wanted.framework, native_pieces.trace_pieces)(wanted, framework_versions())
    save_trace(Path(request["path"]), trace)
    return {"key": trace.key, "trace_s": time.perf_counter() - started, "prepare_s": prepare_s}


def _trace_rank(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.graph import save_rank_trace
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing import megatron_rank, native_rank, torchtitan_rank
    from echo_explore.tracing.rank_request import rank_request_from_json

    wanted = rank_request_from_json(arguments["request"])
    tracers = {"megatron": megatron_rank.trace_rank, "torchtitan": torchtitan_rank.trace_rank}
    trace = tracers.get(wanted.trace.framework, native_rank.trace_rank)(wanted)
    save_rank_trace(Path(arguments["path"]), trace)
    return {"num_ops": trace.graph.num_ops}


def _trace_script(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.graph import save_rank_trace
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing.script_trace import trace_script

    script, function = Path(arguments["script"]), str(arguments["function"])
    trace = trace_script(script, function, world_size=arguments["world_size"], rank=arguments["rank"])
    save_rank_trace(Path(arguments["path"]), trace)
    return {"num_ops": trace.graph.num_ops}


def _trace_transformers(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.graph import save_rank_trace
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing import fake_cluster
    from echo_explore.tracing.script_trace import trace_step
    from echo_explore.tracing.transformers_model import build_step
    from echo_explore.tracing.transformers_request import TransformersJob

    job = TransformersJob(**arguments["job"])
    where = f"model = {job.config['model_type']}"
    fake_cluster.start(arguments["rank"], job.world_size)
    trace = trace_step(lambda: build_step(job), where=where, world_size=job.world_size, rank=arguments["rank"])
    save_rank_trace(Path(arguments["path"]), trace)
    return {"num_ops": trace.graph.num_ops}


def _check_layout(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing.megatron_checks import check_layout
    from echo_explore.tracing.request import request_from_json

    return {"text": check_layout(**arguments | {"request": request_from_json(arguments["request"])})}


def _schedule_order(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing.megatron_checks import schedule_order

    return {"order": schedule_order(**arguments)}


def _bucket_layout(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing.megatron_checks import bucket_layout

    return {"buckets": bucket_layout(**arguments)}


def _process_groups(arguments: dict[str, Any]) -> dict[str, Any]:
    from echo_explore.tracing import runtime

    runtime.prepare()
    from echo_explore.tracing.megatron_checks import process_groups

    return {"groups": process_groups(**arguments)}


OPERATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "prepare": _prepare,
    "trace": _trace,
    "trace_rank": _trace_rank,
    "trace_script": _trace_script,
    "trace_transformers": _trace_transformers,
    "check_layout": _check_layout,
    "schedule_order": _schedule_order,
    "bucket_layout": _bucket_layout,
    "process_groups": _process_groups,
}


def leave_deleted_folder() -> None:
    """Go to the temporary folder if the working directory was deleted: frameworks ask for its name, and would raise."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir(tempfile.gettempdir())


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    leave_deleted_folder()
    try:
        return {"id": request["id"], "ok": OPERATIONS[request["operation"]](request["arguments"])}
    except MissingExtra as error:
        return {"id": request["id"], "missing_extra": [error.what, error.extra]}
    except EchoError as error:
        return {"id": request["id"], "error": str(error)}
    except (ImportError, ModuleNotFoundError) as error:
        return {"id": request["id"], "error": f"import = {error.name}: {error}; fix: pip install 'echo-explore[trace]'"}
    except OSError as error:  # what the machine refuses, not the framework
        traceback.print_exc()
        arguments = request["arguments"]
        path = error.filename or str(Path(arguments.get("path", tempfile.gettempdir())).parent)
        return {"id": request["id"], "os_error": [str(path), error.strerror or f"{type(error).__name__} {error}"]}
    except Exception as error:  # whatever a framework raises: the caller gets one line, stderr the rest
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
        text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]  # a heading says nothing alone
        return {"id": request["id"], "error": f"the framework raised {type(error).__name__}: {text}"}


def _leave() -> NoReturn:
    """End, for the caller has gone: whatever runs is of no use, and nobody else deletes the folder of its answer."""
    if _answers and _answers[-1].name.startswith(wire.FOLDER_PREFIX):
        shutil.rmtree(_answers[-1], ignore_errors=True)
    os._exit(0)


def _read_requests(descriptor: int, requests: "queue.Queue[dict[str, Any]]") -> None:
    while True:
        try:
            requests.put(wire.receive(descriptor))
        except wire.Closed:
            _leave()


def _watch_parent(parent: int) -> None:
    while True:  # end of file is not enough: a fork of the caller may hold the pipe open
        time.sleep(_PARENT_CHECK_S)
        if os.getppid() != parent:
            _leave()


def main() -> None:
    """Serve requests until the caller goes."""
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_read_requests, args=(0, requests), daemon=True).start()
    while True:
        try:
            request = requests.get()
            _answers[:] = [Path(request["arguments"]["path"]).parent] if "path" in request["arguments"] else []
            wire.send(answers, _answer(request))
            _answers.clear()  # it is the caller's from here on
        except wire.Closed:
            _leave()


if __name__ == "__main__":
    main()
