"""Optuna Dashboard over a mirrored study, on the loopback address unless told otherwise."""

import socket

import optuna_dashboard

from echo_explore.core import SpecError
from echo_explore.search.storage_name import resolve_storage
from echo_explore.search.study.storage import open_storage


def serve(storage: str, *, host: str, port: int) -> None:
    """Serve the dashboard of `storage` until interrupted.

    Raises:
        SpecError: the storage cannot be opened, or the port is taken.
    """
    opened = open_storage(resolve_storage(storage))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SpecError(
                "port", port, f"cannot be bound on {host}: {error.strerror}", "give another --port"
            ) from None
    optuna_dashboard.run_server(opened, host=host, port=port)
