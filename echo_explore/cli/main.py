"""The `echo-explore` command: dispatch, and errors as one line with the right exit code."""

import os
import signal
import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException
from typer.main import get_command

from echo_explore.cli import (
    calibrate_app,
    calibrate_kernels,
    calibrate_nccl,
    calibrate_overlap,
    catalog,
    comm,
    convert,
    dashboard,
    predict,
    search,
    trace,
    usage,
    validate,
    validate_overlap,
)
from echo_explore.core import EchoError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="echo-explore",
    help="Predict how fast a model trains on a GPU cluster, and search for the fastest layout, without a GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("predict")(predict.predict_command)
app.command("trace")(trace.trace_command)
app.command("convert")(convert.convert_command)
app.command("search")(search.search_command)
app.command("dashboard")(dashboard.dashboard_command)
app.command("comm")(comm.comm_command)
validate.app.command("overlap")(validate_overlap.overlap)
app.add_typer(validate.app, name="validate")
calibrate_app.app.command("kernels")(calibrate_kernels.kernels)
calibrate_app.app.command("nccl-tests")(calibrate_nccl.nccl_tests)
calibrate_app.app.command("overlap")(calibrate_overlap.overlap)
app.add_typer(calibrate_app.app, name="calibrate")
for _kind in catalog.KINDS:
    app.command(_kind, help=f"List {_kind}, or print one with its sources.")(catalog.command_for(_kind))


def main() -> NoReturn:
    """Run the command line and exit: 0 found, 1 nothing feasible, 2 bad input, 130 interrupted."""
    try:
        code = _run()
    except KeyboardInterrupt:  # once more, while the first was being handled
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say("interrupted; what was finished is kept, the same command goes on from there")
    sys.exit(code)


def _run() -> int:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        code = get_command(app).main(args=sys.argv[1:], prog_name="echo-explore", standalone_mode=False)
        sys.stdout.flush()
    except EchoError as error:
        _say(str(error))
        code = EXIT_BAD_INPUT
    except TyperException as error:  # what typer itself refuses: unknown flags, missing options, wrong types
        _say(str(usage.translate(error, sys.argv[1:])))
        code = EXIT_BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:  # a full disk, a folder that went away
        where = error.filename or "stdout"
        _say(f"{where} = {error.strerror}: cannot be read or written; fix: check space, path and rights")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BAD_INPUT
    return code if isinstance(code, int) else 0


def _say(text: str) -> None:
    print("error: " + " ".join(text.split()), file=sys.stderr)
