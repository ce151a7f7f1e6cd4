"""Content hashes of plain data: equal contents give equal hashes on every machine and Python."""

import hashlib
import json
import math
from pathlib import Path


def canonical_json(value: object) -> str:
    """The one JSON text of `value`: sorted keys, no spaces, no NaN or infinity.

    Raises:
        ValueError: for NaN or infinity, which have no JSON form.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def content_hash(value: object, *, num_hex: int = 16) -> str:
    """The first `num_hex` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:num_hex]


def bytes_hash(data: bytes, *, num_hex: int = 64) -> str:
    """The first `num_hex` hex digits of the SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()[:num_hex]


def file_hash(path: Path, *, num_hex: int = 16) -> str:
    """The first `num_hex` hex digits of the SHA-256 of the file's bytes."""
    return bytes_hash(path.read_bytes(), num_hex=num_hex)


def finite_or_none(value: float) -> float | None:
    """`value`, or None where JSON has no form for it (NaN, infinity)."""
    return value if math.isfinite(value) else None
