"""What must stand in the environment before Ray is imported: it reads its security settings only then."""

import os
import secrets
import sys
from typing import Final

_JOB_VARIABLE: Final = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set in the entrypoint of `ray job submit`, and nowhere else [ray 2.60 job_supervisor.py, 2026-11-30]."""


def in_ray_job() -> bool:
    """Whether this process is the entrypoint of a Ray job."""
    return _JOB_VARIABLE in os.environ and "RAY_ADDRESS" in os.environ


def starts_local(address: str) -> bool:
    """Whether `address` means a Ray of our own on this machine."""
    return address == "local" or (address == "auto" and not in_ray_job())


def prepare(address: str) -> None:
    """No usage reports; and for a Ray of our own only 127.0.0.1 and a throw-away access token.

    With the token other users of the machine cannot run code in it, and Ray does not write one into the user's home.
    Where Ray was imported already its settings stay as they are.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not starts_local(address) or "ray" in sys.modules:
        return
    # Ray 2.60 replaces a node address of 127.0.0.1 by the machine's own, unless it is told not to form clusters.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
