"""`echo-explore comm`: bandwidth of a collective over size, by algorithm."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from echo_explore.cli.curve_svg import bandwidth_svg
from echo_explore.core import SpecError, format_bytes, format_seconds, parse_quantity, write_atomic

_Z80 = 1.2816
"""Quantile 0.9 of the normal distribution."""
_DTYPES = ("fp64", "fp32", "bf16", "fp16", "fp8", "int64", "int32", "int8")


def comm_command(
    cluster: Annotated[str, typer.Option("--cluster", help="Cluster name or file.")],
    collective: Annotated[str, typer.Option("--collective", help="all_reduce, all_gather, all_to_all, send ...")],
    ranks: Annotated[int, typer.Option("--ranks", help="GPUs in the group.")],
    size: Annotated[str, typer.Option("--bytes", help="Message size, or first:last, doubling.")] = "1KiB:4GiB",
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", help="GPUs of the group in a scale-up domain; default: all that fit."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help=f"Element type: {', '.join(_DTYPES)}.")] = None,
    algo: Annotated[str | None, typer.Option("--algo", help="Only these algorithms, as NCCL_ALGO does.")] = None,
    proto: Annotated[str | None, typer.Option("--proto", help="Only these protocols: LL, LL128, Simple.")] = None,
    library: Annotated[
        str | None, typer.Option("--library", help="nccl-VERSION, rccl, oneccl, vllm, sglang-VERSION, trtllm.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Calibration file of your own.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a picture here (SVG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Print the bandwidth of a collective over size by algorithm, and name what NCCL would take."""
    from echo_explore.comm.choice import ForcedChoice
    from echo_explore.comm.coefficient_file import shipped_coefficients, user_coefficients
    from echo_explore.comm.curves import collective_curve, group_on, sizes_between
    from echo_explore.comm.libraries import BASE
    from echo_explore.comm.libraries import library as library_named
    from echo_explore.comm.model import HierarchicalModel
    from echo_explore.graph.kinds import Collective, DType
    from echo_explore.specs import load_cluster

    kinds = [kind.name.lower() for kind in Collective if kind != Collective.NONE]
    if collective.lower() not in kinds:
        raise SpecError("collective", collective, f"must be one of {', '.join(kinds)}", "correct the name")
    if dtype is not None and dtype not in _DTYPES:
        raise SpecError("dtype", dtype, f"must be one of {', '.join(_DTYPES)}", "correct the name")
    kind = Collective[collective.upper()]
    spec = load_cluster(cluster)
    first, _, last = size.partition(":")
    low, high = (parse_quantity(text, unit="bytes", field="bytes") for text in (first, last or first))
    sizes = sizes_between(low, high)
    model = HierarchicalModel(
        coefficients=user_coefficients(calibration) if calibration else shipped_coefficients(),
        forced=ForcedChoice(algorithm=algo, protocol=proto),
        library=library_named(library).name if library else BASE,
    )
    group = group_on(spec, ranks, ranks_per_node)
    points = collective_curve(model, spec, kind, group, sizes, DType[dtype.upper()] if dtype else DType.NONE)
    title = f"{collective} on {spec.name}: {ranks} GPUs, {group.ranks_per_node} in a scale-up domain"
    if plot is not None:
        _write_plot(plot, title, kind, ranks, points)
    if as_json:
        facts = {"cluster": spec.name, "collective": collective, "num_ranks": ranks}
        facts |= {"ranks_per_node": group.ranks_per_node, "reference": model.reference, "library": model.library}
        print(json.dumps({**facts, "points": [asdict(p) | {"num_sms": p.plan.num_sms} for p in points]}))
        return 0
    print(title)
    print(_table(kind, ranks, points))
    return 0


def _table(kind: Any, ranks: int, points: Any) -> str:
    """Bus bandwidth in GB/s: one line a size, one column an algorithm under its best protocol."""
    from echo_explore.comm.bandwidth import bus_bandwidth

    names = list(dict.fromkeys(name.partition("/")[0] for p in points for name in p.times_s))
    wide = max(15, *(len(p.chosen) for p in points))
    columns = " ".join(f"{n:>10s}" for n in names)
    lines = [
        f"{'size':>10s} {'time':>10s} {'80 % interval':>23s} {'chosen':>{wide}s} {'SMs':>4s} {'GB/s':>8s}  {columns}"
    ]
    for p in points:
        cells = []
        for name in names:
            times = [t for option, t in p.times_s.items() if option.partition("/")[0] == name]
            rate = bus_bandwidth(kind, p.message_bytes, min(times), ranks) / 1e9 if times else math.nan
            cells.append((f"{rate:.2f}" if times else "").rjust(max(10, len(name))))
        lines.append(
            f"{format_bytes(p.message_bytes):>10s} {format_seconds(p.time_s):>10s} {_interval(p):>23s} "
            f"{p.chosen:>{wide}s} {p.plan.num_sms:4d} {p.bus_bandwidth_bytes_per_s / 1e9:8.2f}  " + " ".join(cells)
        )
    if not all(p.is_measured for p in points):
        lines.append("*: unmeasured: no such collective, size or group between nodes in the fit; the model alone")
    return "\n".join(lines)


def _interval(point: Any) -> str:
    """Of the time; a star where it rests on the model alone."""
    wide = math.exp(_Z80 * point.sigma_log)
    star = "" if point.is_measured else "*"
    return f"{format_seconds(point.time_s / wide)} - {format_seconds(point.time_s * wide)}{star}"


def _write_plot(path: Path, title: str, kind: Any, ranks: int, points: Any) -> None:
    from echo_explore.comm.bandwidth import bus_bandwidth

    names = list(dict.fromkeys(name for p in points for name in p.times_s))
    curves = {
        name: [
            bus_bandwidth(kind, p.message_bytes, p.times_s[name], ranks) if name in p.times_s else math.nan
            for p in points
        ]
        for name in names
    }
    text = bandwidth_svg(
        title, [p.message_bytes for p in points], curves, [p.bus_bandwidth_bytes_per_s for p in points]
    )
    try:
        write_atomic(path, text.encode())
    except OSError as error:
        raise SpecError("plot", str(path), f"cannot be written: {error.strerror}", "give a folder of yours") from None
