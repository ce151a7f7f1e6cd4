"""Which line of the program launches what runs now."""

import os
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch

_INSTALLED = ("site-packages/", "dist-packages/")
_NOT_THE_PROGRAM = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[1]}/",
    "<",  # generated code
)
_DECORATORS = ("typing_extensions.py",)
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}/"
_names: dict[CodeType, str | None] = {}


def source_line() -> str:
    """`file:line` of the innermost frame that is neither torch's nor the tracer's; empty without one.

    Installed files are named from their package on (`megatron/core/tensor_parallel/layers.py:1042`), others by their
    name alone, so that a trace says nothing of the machine it was made on. In the backward this is where the program
    called it.
    """
    found = program_frame()
    return "" if found is None else f"{found[0]}:{found[1]}"


def program_frame() -> tuple[str, int, str] | None:
    """File, line and function of that frame."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = _names[code] if code in _names else _names.setdefault(code, _name(code.co_filename))
        if name is not None:
            return name, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None


def raised_at(error: BaseException) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame of the program that an error came through."""
    found: tuple[str, int, str] | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = _name(frame.f_code.co_filename)
        if name is not None:
            found = name, line, frame.f_code.co_name
    return found


def _name(file: str) -> str | None:
    """What to call a file; None: it is not part of the program."""
    if file.startswith(_NOT_THE_PROGRAM):
        return None
    for folder in _INSTALLED:
        _, found, inside = file.rpartition(folder)
        if found:
            return None if inside in _DECORATORS else inside
    return None if file.startswith(_STANDARD_LIBRARY) or "importlib" in file else Path(file).name
