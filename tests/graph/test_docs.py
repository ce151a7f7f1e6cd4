"""docs/execution_graph.md names every column with its type, and every code."""

import re
from pathlib import Path

import numpy as np
import pytest

from echo_explore.graph import Axis, Collective, DType, OpClass, OpKind, Phase
from echo_explore.graph.execution_graph import COLUMNS

TEXT = (Path(__file__).parents[2] / "docs/execution_graph.md").read_text(encoding="utf-8")


def test_columns() -> None:
    (section,) = re.findall(r"^## Columns$(.*?)^Beside them:$", TEXT, re.M | re.S)
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\S[^|]*) \| (\S[^|]*) \|$", section, re.M)
    assert [(name, dtype) for name, dtype, _, _ in rows] == [(name, np.dtype(t).name) for name, t in COLUMNS.items()]


@pytest.mark.parametrize("kind", [OpKind, OpClass, Phase, Axis, Collective, DType])
def test_codes(kind: type[OpKind]) -> None:
    (section,) = re.findall(rf"^## {kind.__name__}$(.*?)(?=^## )", TEXT, re.M | re.S)
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", section, re.M)
    assert [(int(code), name) for code, name in rows] == [(member.value, member.name) for member in kind]
