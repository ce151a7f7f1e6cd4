"""Messages between a caller and the tracing child: a length of 8 bytes, then JSON. Nothing is ever unpickled."""

import json
import os
import select
import struct
import time
from typing import Any

FOLDER_PREFIX = "echo-explore-trace-"
"""What the name of a folder begins with that a caller makes for an answer and deletes afterwards."""

_LENGTH = struct.Struct(">Q")
MOST_BYTES = 64 * 2**20
"""Longest message; artefacts travel as files."""


class Closed(Exception):
    """The other side has gone."""


class TimedOut(Exception):
    """The other side did not answer in time."""


def send(descriptor: int, message: dict[str, Any]) -> None:
    """Write one message.

    Raises:
        Closed: nobody reads any more.
    """
    data = json.dumps(message, allow_nan=False).encode()
    view = memoryview(_LENGTH.pack(len(data)) + data)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        raise Closed(str(error)) from error


def receive(descriptor: int, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Read one message.

    Args:
        descriptor: of a pipe.
        timeout_s: longest wait for the whole message; None waits for ever.

    Raises:
        Closed: the other side has gone, or sends something else.
        TimedOut: not in time.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read_exactly(descriptor, _LENGTH.size, end))
    if length > MOST_BYTES:
        raise Closed(f"a message of {length} bytes is no message of ours")
    message = json.loads(_read_exactly(descriptor, length, end))
    if not isinstance(message, dict):
        raise Closed("a message must be an object")
    return message


def _read_exactly(descriptor: int, count: int, end: float | None) -> bytes:
    data = bytearray()
    poller = select.poll()  # not select(): it refuses descriptors above 1023
    poller.register(descriptor, select.POLLIN | select.POLLHUP)
    while len(data) < count:
        left_ms = None if end is None else max(0.0, (end - time.monotonic()) * 1e3)
        if not poller.poll(left_ms):
            raise TimedOut
        try:
            part = os.read(descriptor, count - len(data))
        except OSError as error:
            raise Closed(str(error)) from error
        if not part:
            raise Closed("end of file")
        data += part
    return bytes(data)
