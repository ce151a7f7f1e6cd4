"""What-ifs that change nothing of a job: traffic that it does not have, a GPU that it is on already."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from echo_explore.simulate.what_if import WhatIf, parse_what_if
from echo_explore.timeline import InterferenceModel, PipelineJob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobUnder:
    """What the timeline gets under a what-if."""

    job: PipelineJob
    interference: InterferenceModel

    def takes_as_long_as(self, other: "JobUnder") -> bool:
        """Whether both have the same ops with the same times and slowdowns."""
        if self.job.content != other.job.content:
            return False
        one, two = self.interference.pair_table(), other.interference.pair_table()
        return np.array_equal(one.compute, two.compute) and np.array_equal(one.collective, two.collective)


def without_effect(what_if: WhatIf, given: JobUnder, under: Callable[[WhatIf], JobUnder]) -> tuple[str, ...]:
    """A line for each text of the what-if without which the job is the same.

    Args:
        what_if: as `parse_what_if` gives it.
        given: the job under it.
        under: the job under another.
    """
    lines = []
    for turn, text in enumerate(what_if.given):
        rest = parse_what_if([*what_if.given[:turn], *what_if.given[turn + 1 :]])
        if given.takes_as_long_as(under(rest)):
            lines.append(f"what-if {text} changes nothing: the job has no time that depends on it")
    return tuple(lines)
