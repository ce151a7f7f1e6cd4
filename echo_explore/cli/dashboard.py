"""`echo-explore dashboard`: Optuna Dashboard over a study."""

import ipaddress
import sys
from pathlib import Path
from typing import Annotated

import typer

from echo_explore.core import MissingExtra, SpecError, check_name, nearest
from echo_explore.core.home import home


def dashboard_command(
    storage: Annotated[str | None, typer.Option("--storage", help="Journal file or database URL.")] = None,
    study: Annotated[str | None, typer.Option("--study", help="A study of this home; default: the latest.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=1, max=65535)] = 8080,
) -> int:
    """Show a study in Optuna Dashboard; Ctrl-C ends it."""
    where = storage or str(_journal(study))
    try:
        from echo_explore.search.study.dashboard import serve
    except ImportError as error:
        raise MissingExtra("the dashboard", "search") from error
    if not _is_loopback(host):
        print(f"warning: {host} can be reached by others, and the dashboard asks for no password", file=sys.stderr)
    print(f"dashboard of {where if storage is None else 'the given storage'}: http://{host}:{port}/", file=sys.stderr)
    serve(where, host=host, port=port)
    return 0


def _journal(study: str | None) -> Path:
    """The journal of the named study, or of the one that was written last."""
    folder = home() / "studies"
    journals = {path.parent.name: path for path in folder.glob("*/study.log")}
    if not journals:
        raise SpecError("study", study or "(latest)", f"there is none in {folder}", "run a search, or give --storage")
    if study is None:
        return max(journals.values(), key=lambda path: path.stat().st_mtime)
    if check_name(study, field="study") not in journals:
        raise SpecError("study", study, f"is not in {folder}", f"did you mean {', '.join(nearest(study, journals))}?")
    return journals[study]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
