"""Whole-file writes that readers never see half done, and files that may be compressed."""

import contextlib
import gzip
import os
import tempfile
import zlib
from pathlib import Path


def plain_bytes(data: bytes) -> bytes:
    """What a file holds that may be compressed by gzip.

    Raises:
        OSError: it is a gzip file that is cut off or damaged.
    """
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, OSError) as error:
        raise OSError(f"its gzip stream is damaged or cut off: {error}") from error


def write_atomic(path: Path, data: bytes | bytearray, *, overwrite: bool = True) -> None:
    """Write `data` to a temporary file beside `path`, sync it, and rename it into place.

    Raises:
        FileExistsError: `path` exists and `overwrite` is false.
        OSError: the folder cannot be written.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        if overwrite:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
