"""Nodes of an ExecutionTraceObserver's file: calls of operators with the tensors that they touch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo_explore.core import SpecError, plain_bytes

_BACKWARD = 1
"""RecordScope::BACKWARD_FUNCTION (pytorch 2.13, aten/src/ATen/record_function.h)."""
_NO_KERNEL = ("aten::empty", "aten::new_empty", "aten::detach_")
_GROUPS = "## process_group:init ##"
_GROUP_NAMES = ("pg_name", "process_group_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor: the bytes [start, stop) of its storage from first to last element, and those it has itself."""

    storage: int
    start: int
    stop: int
    nbytes: int
    device: str
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One node.

    Attributes:
        number: its id.
        parent: id of the node that called it.
        order: number of its start.
        sequence: ties the operators of a backward to their forward; -1 without one.
        in_backward: a function of a backward.
        schema: of an operator.
        inputs: values, shapes and types of arguments.
        tensors: of each argument.
        results: tensors that it returned.
        group: name of the process group of a collective; empty where the file does not say.
    """

    number: int
    name: str
    parent: int
    order: int
    sequence: int
    in_backward: bool
    schema: str
    inputs: tuple[tuple[Any, Any, str], ...]
    tensors: tuple[tuple[Tensor, ...], ...]
    results: tuple[Tensor, ...]
    group: str

    @property
    def is_operator(self) -> bool:
        """An operator with a schema, not a function of Python or autograd."""
        return bool(self.schema)

    def argument(self, position: int) -> tuple[Tensor, ...]:
        """Tensors of one argument."""
        return self.tensors[position] if position < len(self.tensors) else ()

    def reads(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return [t for tensors in self.tensors for t in tensors]

    def writes(self) -> list[Tensor]:
        """Arguments that the schema says are written, and results that are no views of arguments."""
        changed = [t for position in _written(self.schema) for t in self.argument(position)]
        given = {t.storage for t in self.reads()}
        return changed + [t for t in self.results if t.storage not in given]

    def launches_nothing(self) -> bool:
        """A view, or an allocation."""
        return not self.writes() or self.name.startswith(_NO_KERNEL)

    def asynchronous(self) -> bool:
        """The argument `async_op` of a collective; True where it has none."""
        names = [argument.split("=")[0].split()[-1] for argument in _arguments(self.schema)]
        position = names.index("async_op") if "async_op" in names else -1
        value = self.inputs[position][0] if 0 <= position < len(self.inputs) else True
        return bool(value) if self.name != "c10d::barrier" else False

    def kineto_arguments(self) -> dict[str, Any]:
        """Shapes, types and values as a trace of the profiler has them."""
        return {
            "Input Dims": [shape for _, shape, _ in self.inputs],
            "Input type": [_inside(kind) for _, _, kind in self.inputs],
            "Concrete Inputs": ["" if kind.startswith("Tensor") else str(value) for value, _, kind in self.inputs],
        }


def read_calls(path: Path) -> tuple[dict[int, Call], dict[str, tuple[str, tuple[int, ...]]]]:
    """Nodes by id in the order of their starts, and description and ranks of every process group by name.

    Raises:
        SpecError: the file is no such trace or breaks off.
    """
    nodes = observer_nodes(path)
    if nodes is None:
        raise SpecError("file", str(path), "is no trace of ExecutionTraceObserver", "give the file that it wrote")
    calls: list[Call] = []
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    comms: dict[int, str] = {}
    for position, node in enumerate(nodes):
        try:
            attrs = {str(a["name"]).lower().replace(" ", "_"): a["value"] for a in node["attrs"]}
            if node["name"] == _GROUPS:
                groups |= _groups(node["inputs"]["values"][0])
            call = _call(node, attrs)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            what = node.get("name", "?") if isinstance(node, dict) else node
            rule = f"breaks at entry {position} of nodes ({what}): {type(error).__name__} {error}"
            raise SpecError("file", str(path), rule, "record it anew") from None
        if call.group:
            comms[call.parent] = call.group
        calls.append(call)
    calls.sort(key=lambda call: call.order)
    named = (_with_group(call, comms.get(call.number, "")) for call in calls)
    return {call.number: call for call in named}, groups


def observer_nodes(path: Path) -> list[Any] | None:
    """Entries of the file; None if it is JSON of another kind.

    Raises:
        SpecError: it can't be read or is cut off.
    """
    try:
        data = path.read_bytes()
        trace = json.loads(plain_bytes(data))
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except (OSError, ValueError, RecursionError) as error:
        rule = f"is no JSON trace: {error}"
        raise SpecError(
            "file", str(path), rule, "export it with export_chrome_trace or ExecutionTraceObserver"
        ) from None
    if not isinstance(trace, dict) or "chakra" not in str(trace.get("schema")):
        return None
    nodes = trace.get("nodes")
    return nodes if isinstance(nodes, list) else None


def _call(node: Mapping[str, Any], attrs: Mapping[str, Any]) -> Call:
    inputs, outputs = node["inputs"], node["outputs"]
    return Call(
        number=int(node["id"]),
        name=str(node["name"]),
        parent=int(node["ctrl_deps"]),
        order=int(attrs.get("rf_id", node["id"])),
        sequence=int(attrs.get("seq_id", -1)),
        in_backward=attrs.get("scope") == _BACKWARD,
        schema=str(attrs.get("op_schema", "")),
        inputs=tuple(zip(inputs["values"], inputs["shapes"], inputs["types"], strict=True)),
        tensors=tuple(tuple(_tensors(*parts)) for parts in _columns(inputs)),
        results=tuple(t for parts in _columns(outputs) for t in _tensors(*parts)),
        group=next((str(attrs[name]) for name in _GROUP_NAMES if attrs.get(name)), ""),
    )


def _with_group(call: Call, group: str) -> Call:
    return replace(call, group=group) if group and not call.group else call


def _columns(side: Mapping[str, Any]) -> list[tuple[Any, Any, str, Any]]:
    strides = side.get("strides") or [None] * len(side["values"])
    return list(zip(side["values"], side["shapes"], side["types"], strides, strict=True))


def _tensors(value: Any, shape: Any, kind: str, stride: Any) -> list[Tensor]:
    """Tensors of one argument or result, in lists too."""
    if kind.startswith("Tensor("):
        _, storage, offset, count, width, device = value
        extent = int(count)
        if stride and len(stride) == len(shape) and count:
            extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        start = int(offset) * int(width)
        return [
            Tensor(
                storage=int(storage),
                start=start,
                stop=start + extent * int(width),
                nbytes=int(count) * int(width),
                device=str(device),
                dtype=_inside(kind),
            )
        ]
    if not kind.startswith("GenericList[") or not isinstance(value, list):
        return []
    kinds = _split(kind[len("GenericList[") : -1])
    strides = stride if isinstance(stride, list) and len(stride) == len(value) else [None] * len(value)
    return [t for parts in zip(value, shape, kinds, strides, strict=False) for t in _tensors(*parts)]


def _inside(kind: str) -> str:
    """`c10::BFloat16` of `Tensor(c10::BFloat16)`; others as they are."""
    return kind[len("Tensor(") : -1] if kind.startswith("Tensor(") else kind


def _groups(text: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for group in json.loads(text):
        ranks = tuple(int(rank) for rank in group["ranks"]) or tuple(range(int(group["group_size"])))
        found[str(group["pg_name"])] = (str(group.get("pg_desc", "")), ranks)
    return found


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    parts, depth, last = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(text[last:position].strip())
            last = position + 1
    return [*parts, text[last:].strip()] if text.strip() else []


def _arguments(schema: str) -> list[str]:
    """Arguments of a schema, without the star before those that need a name."""
    inside = schema[schema.find("(") + 1 : schema.rfind(") -> ")]
    return [argument for argument in _split(inside) if argument != "*"]


def _written(schema: str) -> Sequence[int]:
    """Positions of the arguments that an operator writes."""
    return [position for position, argument in enumerate(_arguments(schema)) if "!" in argument.split(" ")[0]]
