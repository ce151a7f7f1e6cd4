"""Strict, frozen models of what users write, and one-line errors for what is wrong with it."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from echo_explore.core import SpecError, UnitError, nearest, parse_quantity
from echo_explore.specs.megatron_flags import megatron_flags


class StrictModel(BaseModel):
    """Frozen, no coercion, unknown keys refused; fields of files may have an alias without the SI suffix."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, protected_namespaces=()
    )


def _quantity(unit: str) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_quantity(value, unit=unit, field="quantity"))


Bytes = Annotated[float, _quantity("bytes")]
BytesPerSecond = Annotated[float, _quantity("bytes_per_s")]
FlopPerSecond = Annotated[float, _quantity("flop_per_s")]
Seconds = Annotated[float, _quantity("s")]
Hertz = Annotated[float, _quantity("hz")]
Watts = Annotated[float, _quantity("w")]
UsdPerHour = Annotated[float, _quantity("usd_per_h")]
StringTuple = Annotated[tuple[str, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
IntTuple = Annotated[tuple[int, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]
FloatTuple = Annotated[
    tuple[float, ...],
    BeforeValidator(lambda v: tuple(float(x) if isinstance(x, int) else x for x in v) if isinstance(v, list) else v),
]
BoolTuple = Annotated[tuple[bool, ...], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]

LARGEST = 10**9
"""No count in a file is larger; beyond it a figure is a slip."""

M = TypeVar("M", bound=StrictModel)


def _field_names(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Keys that a file may use where `loc` points."""
    current: Any = model
    for step in loc[:-1]:
        fields = getattr(current, "model_fields", {})
        field = fields.get(step) or next((f for f in fields.values() if f.alias == step), None)
        annotation = getattr(field, "annotation", None)
        args = [annotation, *getattr(annotation, "__args__", ())]
        current = next((a for a in args if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return [f.alias or name for name, f in getattr(current, "model_fields", {}).items()]


def translate(error: ValidationError, model: type[BaseModel], *, where: str = "") -> SpecError:
    """The first complaint of pydantic as a SpecError; a mistyped key goes before the missing one that it stands for."""
    complaints = error.errors()
    first = next((c for c in complaints if c["type"] == "extra_forbidden"), complaints[0])
    loc = tuple(step for step in first["loc"] if step not in ("function-before", "tuple"))
    field = where + ".".join(str(step) for step in loc)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UnitError):
        field = field if cause.field == "quantity" else where + cause.field
        return UnitError(field, cause.value, cause.rule, cause.fix.replace("quantity =", f"{loc[-1]} ="))
    if isinstance(cause, SpecError):
        return SpecError(where + cause.field, cause.value, cause.rule, cause.fix)
    if first["type"] == "extra_forbidden":
        if flag := megatron_flags().get(str(loc[-1])):
            return SpecError(field, first["input"], flag.rule, flag.fix)
        known = _field_names(model, loc)
        hint = ", ".join(nearest(str(loc[-1]), known))
        return SpecError(field, first["input"], "is not a known key", f"did you mean {hint}?" if hint else "remove it")
    if first["type"] == "missing":
        return SpecError(field, "(missing)", "must be given", f"add {loc[-1]}")
    rule, fix = _plain_words(first)
    return SpecError(field, first["input"], rule, fix)


def _plain_words(complaint: Any) -> tuple[str, str]:
    """Rule and fix for what pydantic says of a value."""
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind in ("greater_than_equal", "greater_than"):
        bound = context.get("ge", context.get("gt"))
        return f"must be {bound} or more" if "ge" in context else f"must be above {bound}", "give a larger number"
    if kind in ("less_than_equal", "less_than"):
        bound = context.get("le", context.get("lt"))
        return f"must be {bound} or less" if "le" in context else f"must be below {bound}", "give a smaller number"
    if kind == "literal_error":
        return f"must be {context['expected']}", "use one of them"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}", f"write it as {_KINDS[kind]}"
    return str(complaint["msg"]).rstrip("."), "correct the value"


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def validate(model: type[M], data: object, *, where: str = "") -> M:
    """`data` as a `model`.

    Raises:
        SpecError: the first thing that is wrong with it.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise translate(error, model, where=where) from None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        SpecError: missing, unreadable, or not TOML; the message names line and column.
    """
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(str(path), "(TOML)", f"is not valid TOML: {error}", "correct that line") from None
    except UnicodeDecodeError as error:
        raise SpecError(str(path), "(TOML)", f"is not UTF-8: {error.reason}", "save it as UTF-8") from None
    except (ValueError, RecursionError):  # numbers of thousands of digits, thousands of brackets
        raise SpecError(str(path), "(TOML)", "holds a number too long or tables too deep", "correct the file") from None
    except OSError as error:
        raise SpecError("file", str(path), f"cannot be read: {error.strerror}", "check its permissions") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        SpecError: missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SpecError("file", str(path), "does not exist", "check the path") from None
    except (ValueError, RecursionError, OSError) as error:
        raise SpecError(str(path), "(JSON)", f"cannot be read as JSON: {error}", "correct the file") from None
    if not isinstance(value, dict):
        raise SpecError(str(path), "(JSON)", "must hold one object", "give a config.json of a model")
    return value


def load_spec(model: type[M], path: Path, change: Callable[[dict[str, Any]], dict[str, Any]] = lambda data: data) -> M:
    """The spec in a TOML file, its tables passed through `change` first.

    Raises:
        SpecError: see `read_toml` and `validate`; fields are named `file: table.key`.
    """
    data = change(read_toml(path))
    schema = data.get("schema")
    if schema != 1 or isinstance(schema, bool):
        raise SpecError(
            f"{path.name}: schema", schema, "must be 1, the only version so far", "write schema = 1 at the top"
        )
    return validate(model, data, where=f"{path.name}: ")


def positive(value: int, *, field: str) -> int:
    """`value`, checked to be 1 or more."""
    if value < 1:
        raise SpecError(field, value, "must be 1 or more", "give a positive whole number")
    return value
