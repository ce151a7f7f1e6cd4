"""A what-if beside the step without it."""

from dataclasses import dataclass
from typing import Any

from echo_explore.core import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was asked and what it changes.

    Attributes:
        what_if: the texts of `--what-if`.
        baseline_step_time_s: without them.
        step_time_s: with them.
    """

    what_if: tuple[str, ...]
    baseline_step_time_s: float
    step_time_s: float

    @property
    def change_s(self) -> float:
        """What the step takes longer; below 0: less."""
        return self.step_time_s - self.baseline_step_time_s

    def to_json(self) -> dict[str, Any]:
        """Key `what_if` of `predict --json`."""
        return {
            "what_if": {
                "given": list(self.what_if),
                "baseline_step_time_s": self.baseline_step_time_s,
                "change_s": self.change_s,
            }
        }

    def line(self) -> str:
        """What-if, the step without, the step with, and the difference."""
        sign = "-" if self.change_s < 0 else "+"
        return (
            f"  what if     {', '.join(self.what_if)}: {format_seconds(self.step_time_s)} instead of "
            f"{format_seconds(self.baseline_step_time_s)} ({sign}{format_seconds(abs(self.change_s))}, "
            f"{self.change_s / self.baseline_step_time_s:+.1%})"
        )


def with_comparison(text: str, compared: Comparison | None) -> str:
    """The text of a prediction with the comparison below its first line."""
    if compared is None:
        return text
    first, *rest = text.split("\n")
    return "\n".join([first, compared.line(), *rest])
