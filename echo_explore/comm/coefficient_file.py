"""The TOML file that holds the coefficients of collectives: read, check, write.

Tables: `[scale_up.<key>]` with `all_reduce`, `all_gather`, `reduce_scatter`, `switch`, `all_to_all`, `send` below it,
`[network.<key>]`, `[custom.<framework>.<device>]`, `[exchange.<dispatcher>.<device>]` with `dispatch` and `combine`
below it, `[tool.<name>]`. In a calibration file of a user's own the same lie
under `[comm]`. `same_as = "<key>"` repeats another table.
"""

import functools
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from echo_explore.comm.coefficients import (
    CommCoefficients,
    ExchangeCosts,
    NetworkCoefficients,
    OneShotCosts,
    PairCosts,
    RingCosts,
    ScaleUpCoefficients,
    SwitchCosts,
    ToolConstants,
    TunerWeights,
)
from echo_explore.comm.table_reader import TableReader
from echo_explore.core import MissingCalibration, SpecError
from echo_explore.core.home import find_data_file

_T = TypeVar("_T")
_ANY = 1e9
SCHEMA = 2
"""Of the comm tables; 1 had no tuner and one set of protocols for all collectives."""


def shipped_coefficients() -> CommCoefficients:
    """Those of the user's `comm.toml`, else of the shipped one.

    Raises:
        MissingCalibration: there is no file.
    """
    path = find_data_file("calibrations", "comm")
    if path is None:
        raise MissingCalibration("calibration = 'comm': no file comm.toml; fix: reinstall the package")
    return load_coefficients(path)


def load_coefficients(path: Path) -> CommCoefficients:
    """The coefficients in a TOML file.

    Raises:
        SpecError: missing, not TOML, a table or key that is missing or wrong.
    """
    return _loaded(path, _text(path))


@functools.lru_cache(maxsize=8)  # every evaluation of a search asks for them; the text is part of the key
def _loaded(path: Path, text: str) -> CommCoefficients:
    data = _parsed(path, text)
    found = _coefficients(data, path.name)
    if not found.scale_up or not found.network:
        table = "scale_up" if not found.scale_up else "network"
        raise SpecError(f"{path.name}: {table}", data.get(table), "must hold one table a fabric", "fit it again")
    return found


def user_coefficients(path: Path) -> CommCoefficients:
    """The shipped coefficients with what a calibration file has under `[comm]` over them, table by table.

    Raises:
        SpecError: the file or a table under `comm` is wrong.
    """
    shipped = shipped_coefficients()
    own = _read(path).get("comm")
    if own is None:
        return shipped
    if not isinstance(own, dict):
        raise SpecError(f"{path.name}: comm", own, "must be a table", "write [comm]")
    found = _coefficients(own, f"{path.name}: comm")
    return CommCoefficients(
        scale_up={**shipped.scale_up, **found.scale_up},
        network={**shipped.network, **found.network},
        custom={**shipped.custom, **found.custom},
        exchange={**shipped.exchange, **found.exchange},
        tools={**shipped.tools, **found.tools},
    )


def has_comm_tables(path: Path) -> bool:
    """Whether a calibration file holds coefficients of collectives."""
    return "comm" in _read(path)


def _read(path: Path) -> dict[str, Any]:
    return _parsed(path, _text(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError("calibration", str(path), f"cannot be read ({error.strerror})", "check the path") from None
    except ValueError as error:
        raise SpecError("calibration", str(path), f"is not valid TOML: {error}", "correct that line") from None


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise SpecError("calibration", str(path), f"is not valid TOML: {error}", "correct that line") from None


def _coefficients(data: Mapping[str, Any], file: str) -> CommCoefficients:
    if data.get("schema") != SCHEMA:
        raise SpecError(f"{file}: schema", data.get("schema"), f"must be {SCHEMA}", "fit it again")
    custom = {}
    for framework, devices in _tables(data, "custom", file).items():
        for key, table in _tables({"devices": devices}, "devices", f"{file}: custom.{framework}").items():
            custom[f"{framework}/{key}"] = _one_shot(TableReader(table, f"{file}: custom.{framework}.{key}"))
    exchange = {}
    for dispatcher, devices in _tables(data, "exchange", file).items():
        for key, table in _tables({"devices": devices}, "devices", f"{file}: exchange.{dispatcher}").items():
            for phase in ("dispatch", "combine"):
                read = TableReader(table, f"{file}: exchange.{dispatcher}.{key}").inner(phase)
                exchange[f"{dispatcher}/{key}/{phase}"] = _exchange(read)
    return CommCoefficients(
        exchange=exchange,
        scale_up=_each(data, "scale_up", file, _scale_up),
        network=_each(data, "network", file, _network),
        custom=custom,
        tools=_each(data, "tool", file, _tool),
    )


def _tables(data: Mapping[str, Any], name: str, file: str) -> dict[str, Mapping[str, Any]]:
    tables = data.get(name, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SpecError(f"{file}: {name}", tables, "must hold one table a name", "fit it again")
    return tables


def _each(data: Mapping[str, Any], name: str, file: str, read: Callable[[str, TableReader], _T]) -> dict[str, _T]:
    tables = _tables(data, name, file)
    found = {}
    for key, table in tables.items():
        other = table.get("same_as")
        if other is not None and ("same_as" in tables.get(other, {"same_as": 1})):
            raise SpecError(f"{file}: {name}.{key}.same_as", other, "names no table with values", "name one")
        found[key] = read(key, TableReader(table if other is None else tables[other], f"{file}: {name}.{key}"))
    return found


def _scale_up(key: str, read: TableReader) -> ScaleUpCoefficients:
    return ScaleUpCoefficients(
        key=key,
        all_reduce=_ring(read.inner("all_reduce")),
        all_gather=_ring(read.inner("all_gather")),
        reduce_scatter=_ring(read.inner("reduce_scatter")),
        tree_efficiency=read.number("tree_efficiency", most=1.0),
        switch=_switch(read.inner("switch")),
        all_to_all=_pairs(read.inner("all_to_all")),
        send=_pairs(read.inner("send")),
        ring_share=read.shares("ring_share"),
        sigma_log=read.numbers("sigma_log", most=3.0),
    )


def _ring(read: TableReader) -> RingCosts:
    return RingCosts(
        launch_s=read.times("launch"),
        hop_factor=read.numbers("hop_factor", most=_ANY),
        efficiency=read.numbers("efficiency", most=1.0),
        hidden_fraction=read.numbers("hidden_fraction", most=0.5),
        local_efficiency=read.number("local_efficiency", most=_ANY),
        byte_slowdown=read.number("byte_slowdown", most=_ANY),
        tuner=TunerWeights(
            latency=read.numbers("tuner_latency", most=_ANY), stream=read.numbers("tuner_stream", most=_ANY)
        ),
    )


def _switch(read: TableReader) -> SwitchCosts:
    return SwitchCosts(
        launch_s=read.seconds("launch"),
        efficiency=read.number("efficiency", most=1.0),
        tuner_latency=read.number("tuner_latency", most=_ANY),
        tuner_stream=read.number("tuner_stream", most=_ANY),
    )


def _pairs(read: TableReader) -> PairCosts:
    return PairCosts(
        launch_s=read.time_pair("launch"),
        message_s=read.time_pair("message"),
        efficiency=read.number_pair("efficiency", most=1.0),
        hidden_fraction=read.number_pair("hidden_fraction", most=1.0),
        parallel_messages=read.number("parallel_messages", most=_ANY),
        local_efficiency=read.number("local_efficiency", most=_ANY),
        ll_message_bytes=read.byte_pair("ll_message"),
        uneven_bytes=read.bytes("uneven"),
    )


def _network(key: str, read: TableReader) -> NetworkCoefficients:
    return NetworkCoefficients(
        key=key,
        base_s=read.seconds("base"),
        hop_factor=read.numbers("hop_factor", most=_ANY),
        protocol_efficiency=read.numbers("protocol_efficiency", most=1.0),
        ring_efficiency=read.number("ring_efficiency", most=1.0),
        tree_efficiency=read.number("tree_efficiency", most=1.0),
        pair_efficiency=read.number("pair_efficiency", most=1.0),
        rail_efficiency=read.number("rail_efficiency", most=1.0),
        ring_tuner=TunerWeights(
            latency=read.numbers("ring_tuner_latency", most=_ANY), stream=read.numbers("ring_tuner_stream", most=_ANY)
        ),
        tree_tuner=TunerWeights(
            latency=read.numbers("tree_tuner_latency", most=_ANY), stream=read.numbers("tree_tuner_stream", most=_ANY)
        ),
        switch_tuner=read.number_pair("switch_tuner", most=_ANY),
        sigma_log=read.numbers("sigma_log", most=3.0),
        unmeasured_sigma_log=read.number("unmeasured_sigma_log", most=3.0),
        measured_bytes=read.byte_pair("measured_bytes") if read.has("measured_bytes") else (0.0, math.inf),
        measured_ranks=read.number_pair("measured_ranks", most=_ANY) if read.has("measured_ranks") else (0.0, math.inf),
        simple_only=read.flag("simple_only"),
        ring_step_s=read.seconds("ring_step") if read.has("ring_step") else 0.0,
    )


def _one_shot(read: TableReader) -> OneShotCosts:
    return OneShotCosts(
        launch_s=read.time_pair("launch"),
        rank_s=read.time_pair("rank"),
        efficiency=read.number_pair("efficiency", most=1.0),
        eager_s=read.seconds("eager"),
        eager_rank_s=read.seconds("eager_rank"),
        eager_copy_efficiency=read.number("eager_copy_efficiency", most=_ANY),
        own_bytes=read.byte_triple("own"),
        switch_bytes=read.byte_triple("switch"),
        switch_launch_s=read.seconds("switch_launch"),
        switch_efficiency=read.number("switch_efficiency", most=1.0),
        most_ranks=int(read.number("most_ranks", most=_ANY)),
        sigma_log=read.number("sigma_log", most=3.0),
    )


def _exchange(read: TableReader) -> ExchangeCosts:
    return ExchangeCosts(
        launch_s=read.seconds("launch"),
        byte_s=read.seconds("byte"),
        visit_s=read.seconds("visit"),
        sm_bytes_per_s=read.bytes_per_s("sm_bandwidth"),
        link_efficiency=read.number("link_efficiency", most=1.0),
        node_s=read.seconds("node"),
        network_efficiency=read.number("network_efficiency", most=1.0),
        num_sms=int(read.number("num_sms", most=_ANY)),
        sigma_log=read.number("sigma_log", most=3.0),
    )


def _tool(key: str, read: TableReader) -> ToolConstants:
    return ToolConstants(key=key, launch_s=read.seconds("launch"), floor_s=read.seconds("floor"))
