"""Writes coefficients of collectives as TOML tables, each under a line that says where it comes from."""

import math
from collections.abc import Iterable

from echo_explore.comm.coefficients import (
    ExchangeCosts,
    NetworkCoefficients,
    OneShotCosts,
    PairCosts,
    RingCosts,
    ScaleUpCoefficients,
    ToolConstants,
)


def _us(seconds: float) -> str:
    return f'"{seconds * 1e6:.4g} us"'


def _list(values: Iterable[float]) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in values) + "]"


def _sizes(values: Iterable[float]) -> str:
    return "[" + ", ".join(f'"{v:.0f} B"' for v in values) + "]"


def _times(values: Iterable[float]) -> str:
    return "[" + ", ".join(_us(v) for v in values) + "]"


def scale_up_table(c: ScaleUpCoefficients, source: str, *, prefix: str = "") -> str:
    """The tables of a fabric."""
    name = f"{prefix}scale_up.{c.key}"
    switch = c.switch
    text = f"""
# {source}
[{name}]
tree_efficiency = {c.tree_efficiency:.4g}
sigma_log = {_list(c.sigma_log)}
"""
    for kind, costs in (
        ("all_reduce", c.all_reduce),
        ("all_gather", c.all_gather),
        ("reduce_scatter", c.reduce_scatter),
    ):
        text += f"# as {c.key}\n[{name}.{kind}]\n{_ring(costs)}"
    text += f"""# as {c.key}
[{name}.switch]
launch = {_us(switch.launch_s)}
efficiency = {switch.efficiency:.4g}
tuner_latency = {switch.tuner_latency:.4g}
tuner_stream = {switch.tuner_stream:.4g}
"""
    for kind, pairs in (("all_to_all", c.all_to_all), ("send", c.send)):
        text += f"# as {c.key}\n[{name}.{kind}]\n{_pairs(pairs)}"
    if c.ring_share:
        text += f"# as {c.key}\n[{name}.ring_share]\n"
        text += "".join(f"{count} = {share:.4g}\n" for count, share in sorted(c.ring_share.items()))
    return text


def _ring(c: RingCosts) -> str:
    return f"""launch = {_times(c.launch_s)}
hop_factor = {_list(c.hop_factor)}
efficiency = {_list(c.efficiency)}
hidden_fraction = {_list(c.hidden_fraction)}
local_efficiency = {c.local_efficiency:.4g}
byte_slowdown = {c.byte_slowdown:.4g}
tuner_latency = {_list(c.tuner.latency)}
tuner_stream = {_list(c.tuner.stream)}
"""


def _pairs(c: PairCosts) -> str:
    return f"""launch = {_times(c.launch_s)}
message = {_times(c.message_s)}
efficiency = {_list(c.efficiency)}
hidden_fraction = {_list(c.hidden_fraction)}
parallel_messages = {c.parallel_messages:.4g}
local_efficiency = {c.local_efficiency:.4g}
ll_message = ["{c.ll_message_bytes[0]:.0f} B", "{c.ll_message_bytes[1]:.0f} B"]
uneven = "{c.uneven_bytes:.0f} B"
"""


def network_table(c: NetworkCoefficients, source: str, *, prefix: str = "") -> str:
    """The table of a network."""
    return f"""
# {source}
[{prefix}network.{f'"{c.key}"' if "." in c.key else c.key}]
base = {_us(c.base_s)}
hop_factor = {_list(c.hop_factor)}
protocol_efficiency = {_list(c.protocol_efficiency)}
ring_efficiency = {c.ring_efficiency:.4g}
tree_efficiency = {c.tree_efficiency:.4g}
pair_efficiency = {c.pair_efficiency:.4g}
rail_efficiency = {c.rail_efficiency:.4g}
ring_tuner_latency = {_list(c.ring_tuner.latency)}
ring_tuner_stream = {_list(c.ring_tuner.stream)}
tree_tuner_latency = {_list(c.tree_tuner.latency)}
tree_tuner_stream = {_list(c.tree_tuner.stream)}
switch_tuner = {_list(c.switch_tuner)}
sigma_log = {_list(c.sigma_log)}
unmeasured_sigma_log = {c.unmeasured_sigma_log:.4g}{_measured(c)}
{"simple_only = true" if c.simple_only else ""}{f"ring_step = {_us(c.ring_step_s)}" if c.ring_step_s else ""}"""


def _measured(c: NetworkCoefficients) -> str:
    """The lines of what was measured; none where that is not known."""
    if not math.isfinite(c.measured_bytes[1]):
        return ""
    low, high = (f'"{size:.0f} B"' for size in c.measured_bytes)
    least, most = (f"{ranks:.0f}" for ranks in c.measured_ranks)
    return f"\nmeasured_bytes = [{low}, {high}]\nmeasured_ranks = [{least}, {most}]"


def alias_table(name: str, other: str, source: str) -> str:
    """A table that repeats another."""
    return f'\n# {source}\n[{name}]\nsame_as = "{other}"\n'


def custom_table(framework: str, key: str, c: OneShotCosts, source: str) -> str:
    """The table of a framework's own kernels on a fabric."""
    return f"""
# {source}
[custom.{framework}.{key}]
launch = {_times(c.launch_s)}
rank = {_times(c.rank_s)}
efficiency = {_list(c.efficiency)}
eager = {_us(c.eager_s)}
eager_rank = {_us(c.eager_rank_s)}
eager_copy_efficiency = {c.eager_copy_efficiency:.4g}
own = {_sizes(c.own_bytes)}
switch = {_sizes(c.switch_bytes)}
switch_launch = {_us(c.switch_launch_s)}
switch_efficiency = {c.switch_efficiency:.4g}
most_ranks = {c.most_ranks}
sigma_log = {c.sigma_log:.4g}
"""


def exchange_table(name: str, dispatch: ExchangeCosts, combine: ExchangeCosts, source: str) -> str:
    """The tables of a fused exchange on a device."""
    text = ""
    for phase, c in (("dispatch", dispatch), ("combine", combine)):
        text += f"""
# {source}
[exchange.{name}.{phase}]
launch = {_us(c.launch_s)}
byte = "{c.byte_s * 1e9:.4g} ns"
visit = "{c.visit_s * 1e9:.4g} ns"
sm_bandwidth = "{c.sm_bytes_per_s / 1e9:.4g} GB/s"
link_efficiency = {c.link_efficiency:.4g}
node = {_us(c.node_s)}
network_efficiency = {c.network_efficiency:.4g}
num_sms = {c.num_sms}
sigma_log = {c.sigma_log:.4g}
"""
    return text


def tool_table(c: ToolConstants, source: str) -> str:
    """The table of a tool."""
    return f"\n# {source}\n[tool.{c.key}]\nlaunch = {_us(c.launch_s)}\nfloor = {_us(c.floor_s)}\n"
