"""What this project does with the flags of megatron-core: says by itself, has one way, has no use for, refuses.

The table is `megatron_flags.toml`; tests/tracing/test_megatron_flags.py compares it with the fields of the installed
megatron-core, so that a new flag fails until somebody has decided about it.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Standing = Literal["ours", "fixed", "no_part", "refused"]
STANDINGS: tuple[Standing, ...] = ("ours", "fixed", "no_part", "refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlag:
    """A field of one of megatron-core's configurations.

    Attributes:
        standing: a field of ours says the same, a trace has it one way, it has no part in a step, or it is refused.
        note: our field; how a trace has it; why it has no part; what it would change.
    """

    name: str
    standing: Standing
    note: str

    @property
    def rule(self) -> str:
        """What is wrong with giving it here."""
        return {
            "ours": "is megatron-core's name",
            "fixed": f"is a flag of megatron-core that cannot be chosen here ({self.note})",
            "no_part": f"is a flag of megatron-core without a part in time or memory ({self.note})",
            "refused": f"is a flag of megatron-core that is not modelled ({self.note})",
        }[self.standing]

    @property
    def fix(self) -> str:
        """What to write instead."""
        return f"use {self.note}" if self.standing == "ours" else "leave it out"


@cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """All flags of the version that `megatron_flags.toml` names, by name."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        name: MegatronFlag(name=name, standing=standing, note=note)
        for standing in STANDINGS
        for name, note in tables[standing].items()
    }
