"""Units, errors, versions, hashing, files and the jit wrapper: what every other package may use."""

from echo_explore.core.errors import (
    EchoError,
    InfeasibleCandidate,
    MissingCalibration,
    MissingExtra,
    OutOfDeviceMemory,
    PlacementError,
    SpecError,
    StudyError,
    TraceError,
    UnitError,
)
from echo_explore.core.files import plain_bytes, write_atomic
from echo_explore.core.hashing import canonical_json, content_hash
from echo_explore.core.names import check_name, nearest
from echo_explore.core.units import format_bytes, format_seconds, parse_quantity

__all__ = [
    "EchoError",
    "InfeasibleCandidate",
    "MissingCalibration",
    "MissingExtra",
    "OutOfDeviceMemory",
    "PlacementError",
    "SpecError",
    "StudyError",
    "TraceError",
    "UnitError",
    "canonical_json",
    "check_name",
    "content_hash",
    "format_bytes",
    "format_seconds",
    "nearest",
    "parse_quantity",
    "plain_bytes",
    "write_atomic",
]
