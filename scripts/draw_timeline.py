"""Draw a predicted step as a small SVG picture: one row a pipeline stage.

By default the picture of the README: `python scripts/draw_timeline.py --out docs/images/timeline.svg`.
"""

import argparse
import sys
from pathlib import Path

from echo_explore.core import EchoError, format_seconds, write_atomic
from echo_explore.results import timeline_svg
from echo_explore.simulate import default_simulator
from echo_explore.specs import JobOptions, candidate_of
from echo_explore.tracing import CachedTracer


def main() -> int:
    """Predict and draw; 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="SVG file; overwritten")
    parser.add_argument("--model", default="gpt3-175b")
    parser.add_argument("--cluster", default="h800-ndr")
    parser.add_argument("--layout", default="tp=8,pp=12,sp=1")
    parser.add_argument("--global-batch-size", type=int, default=24, help="few, so that the picture can be read")
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--stack")
    given = parser.parse_args()
    try:
        candidate = candidate_of(JobOptions(**{name: value for name, value in vars(given).items() if name != "out"}))
        with CachedTracer() as tracer:
            step = default_simulator(tracer=tracer).timeline(candidate)
        title = (
            f"{candidate.model.name} on {candidate.num_gpus} x {candidate.cluster.device.name}, "
            f"{candidate.layout.label()}, {candidate.num_micro_batches} micro-batches: "
            f"{format_seconds(step.step_time_s)} a step, predicted"
        )
        picture = timeline_svg(step, title=title)
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_atomic(given.out, picture.encode())
    print(f"{given.out.absolute()}: {len(picture) / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
