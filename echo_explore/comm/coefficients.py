"""Measured coefficients of collectives by scale-up fabric and network kind, and the file that holds them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo_explore.core import MissingCalibration, SpecError, parse_quantity
from echo_explore.core.home import find_data_file
from echo_explore.specs import ClusterSpec

PROTOCOLS: Final = ("LL", "LL128", "Simple")
"""NCCL's protocols, in the order of every triple below: flags in 8-byte words, flags in 128-byte lines, fences."""
SIZE_BANDS_BYTES: Final = (256.0 * 1024, 16.0 * 1024 * 1024)
"""Message sizes that part the three bands of `sigma_log`: latency, protocol change, bandwidth."""
DEFAULT: Final = "default"
Triple = tuple[float, float, float]
Pair = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleUpCoefficients:
    """A scale-up fabric as NCCL drives it.

    Attributes:
        key: name in the file; `default` where the fabric was not measured.
        base_s: launch and set-up of a collective, by protocol.
        hop_factor: time of one step between neighbours over NodeSpec.link_latency_s, by protocol.
        efficiency: of the link in rings, by protocol.
        local_efficiency: rate at which a rank handles its own share, over the link bandwidth.
        tree_efficiency: of the link in chains of trees, for reduce and broadcast at once.
        switch_base_s: launch and set-up with reduction in the switch (NVLS).
        switch_efficiency: of the link with reduction in the switch.
        pair_base_s: launch and set-up of a send, by (LL, Simple).
        pair_message_s: each further message of an all-to-all.
        pair_efficiency: of the link in sends and all-to-all, by (LL, Simple).
        sigma_log: standard deviation of the log of measured over modelled time, by size band.
    """

    key: str
    base_s: Triple
    hop_factor: Triple
    efficiency: Triple
    local_efficiency: float
    tree_efficiency: float
    switch_base_s: float
    switch_efficiency: float
    pair_base_s: Pair
    pair_message_s: float
    pair_efficiency: Pair
    sigma_log: Triple


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCoefficients:
    """A kind of network between nodes as NCCL drives it.

    Attributes:
        base_s: what a collective over nodes takes beyond one inside a node, once.
        hop_factor: time of one step between nodes over FabricSpec.latency_s, by protocol.
        protocol_efficiency: share of the cards' bandwidth that a protocol leaves to data.
        ring_efficiency: of the cards in rings.
        tree_efficiency: of the cards in trees.
        pair_efficiency: of the cards in all-to-all.
        rail_efficiency: of the cards for groups with one rank a node, which use only the card next to it, and sends.
        sigma_log: for all-reduce, by size band.
        unmeasured_sigma_log: for collectives that were not measured between nodes.
    """

    key: str
    base_s: float
    hop_factor: Triple
    protocol_efficiency: Triple
    ring_efficiency: float
    tree_efficiency: float
    pair_efficiency: float
    rail_efficiency: float
    sigma_log: Triple
    unmeasured_sigma_log: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommCoefficients:
    """All coefficients of one file."""

    scale_up: Mapping[str, ScaleUpCoefficients]
    network: Mapping[str, NetworkCoefficients]

    def scale_up_of(self, cluster: ClusterSpec) -> ScaleUpCoefficients:
        """Those of `<link>-<architecture>`, else of `<link>`, else `default`.

        Raises:
            MissingCalibration: the file has none of these.
        """
        link = cluster.node.link
        for key in (f"{link}-{cluster.device.architecture}", link, DEFAULT):
            if key in self.scale_up:
                return self.scale_up[key]
        raise MissingCalibration(f"scale_up.{link}: no coefficients in the comm calibration; fix: add scale_up.default")

    def network_of(self, cluster: ClusterSpec) -> NetworkCoefficients:
        """Those of the fabric's kind, else `default`.

        Raises:
            MissingCalibration: the file has neither.
        """
        for key in (cluster.fabric.kind, DEFAULT):
            if key in self.network:
                return self.network[key]
        raise MissingCalibration(
            f"network.{cluster.fabric.kind}: no coefficients in the comm calibration; fix: add network.default"
        )


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
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError("calibration", str(path), f"cannot be read ({error.strerror})", "check the path") from None
    except ValueError as error:
        raise SpecError("calibration", str(path), f"is not valid TOML: {error}", "correct that line") from None
    if data.get("schema") != 1:
        raise SpecError(f"{path.name}: schema", data.get("schema"), "must be 1", "write schema = 1 at the top")
    return CommCoefficients(
        scale_up={k: _scale_up(k, v, path.name) for k, v in _tables(data, "scale_up", path.name).items()},
        network={k: _network(k, v, path.name) for k, v in _tables(data, "network", path.name).items()},
    )


def _tables(data: Mapping[str, Any], name: str, file: str) -> dict[str, Any]:
    tables = data.get(name)
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise SpecError(f"{file}: {name}", tables, "must hold one table a fabric", f"add [{name}.{DEFAULT}]")
    return tables


class _Reader:
    """Reads the keys of one table with its name in every error."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table, self._where = table, where

    def _get(self, key: str) -> Any:
        if key not in self._table:
            raise SpecError(f"{self._where}.{key}", "(missing)", "must be given", f"add {key}")
        return self._table[key]

    def seconds(self, key: str) -> float:
        return parse_quantity(self._get(key), unit="s", field=f"{self._where}.{key}")

    def number(self, key: str, *, most: float) -> float:
        return self._checked(key, self._get(key), most)

    def _checked(self, key: str, value: object, most: float) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
            raise SpecError(f"{self._where}.{key}", value, f"must be a number from 0 to {most:g}", "fit it again")
        return float(value)

    def numbers(self, key: str, *, most: float) -> Triple:
        first, second, third = (self._checked(key, value, most) for value in self._list(key, 3))
        return first, second, third

    def number_pair(self, key: str, *, most: float) -> Pair:
        first, second = (self._checked(key, value, most) for value in self._list(key, 2))
        return first, second

    def times(self, key: str) -> Triple:
        first, second, third = self._times(key, 3)
        return first, second, third

    def time_pair(self, key: str) -> Pair:
        first, second = self._times(key, 2)
        return first, second

    def _times(self, key: str, count: int) -> list[float]:
        return [parse_quantity(v, unit="s", field=f"{self._where}.{key}") for v in self._list(key, count)]

    def _list(self, key: str, count: int) -> list[object]:
        values = self._get(key)
        if not isinstance(values, list) or len(values) != count:
            names = "LL, LL128, Simple" if count == len(PROTOCOLS) else "LL, Simple"
            raise SpecError(f"{self._where}.{key}", values, f"needs {count} entries", f"give one each for {names}")
        return values


def _scale_up(key: str, table: Mapping[str, Any], file: str) -> ScaleUpCoefficients:
    read = _Reader(table, f"{file}: scale_up.{key}")
    return ScaleUpCoefficients(
        key=key,
        base_s=read.times("base"),
        hop_factor=read.numbers("hop_factor", most=1e3),
        efficiency=read.numbers("efficiency", most=1.0),
        local_efficiency=read.number("local_efficiency", most=1e3),
        tree_efficiency=read.number("tree_efficiency", most=1.0),
        switch_base_s=read.seconds("switch_base"),
        switch_efficiency=read.number("switch_efficiency", most=1.0),
        pair_base_s=read.time_pair("pair_base"),
        pair_message_s=read.seconds("pair_message"),
        pair_efficiency=read.number_pair("pair_efficiency", most=1.0),
        sigma_log=read.numbers("sigma_log", most=3.0),
    )


def _network(key: str, table: Mapping[str, Any], file: str) -> NetworkCoefficients:
    read = _Reader(table, f"{file}: network.{key}")
    return NetworkCoefficients(
        key=key,
        base_s=read.seconds("base"),
        hop_factor=read.numbers("hop_factor", most=1e3),
        protocol_efficiency=read.numbers("protocol_efficiency", most=1.0),
        ring_efficiency=read.number("ring_efficiency", most=1.0),
        tree_efficiency=read.number("tree_efficiency", most=1.0),
        pair_efficiency=read.number("pair_efficiency", most=1.0),
        rail_efficiency=read.number("rail_efficiency", most=1.0),
        sigma_log=read.numbers("sigma_log", most=3.0),
        unmeasured_sigma_log=read.number("unmeasured_sigma_log", most=3.0),
    )
