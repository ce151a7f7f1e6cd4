"""Sweep cluster sizes for one model: best layout, step time, time to train, GPU hours, and cost where there is a price.

python scripts/capacity_plan.py --model gpt3-175b --cluster h800-ndr --global-batch-size 1536 --sequence-length 2048
       --sizes 256:2048:2 --tokens "300 B tokens"
python scripts/capacity_plan.py SPACE.toml --sizes 96,192 --tokens "300 B tokens" --json

The table goes to stdout, progress to stderr. The same command again goes on where it was.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from echo_explore.core import EchoError, SpecError, parse_quantity
from echo_explore.planning import CapacityOptions, capacity_study, default_space
from echo_explore.specs import SearchSpace, load_space


def parse_sizes(text: str) -> tuple[int, ...]:
    """Numbers of GPUs in `256,512,1024` or `256:1024:2` (from, to, factor).

    Raises:
        SpecError: neither of them.
    """
    example = "write 256,512,1024 or 256:1024:2"
    parts = text.split(":") if ":" in text else text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and int(part) > 0 for part in parts):
        raise SpecError("sizes", text, "must hold positive whole numbers", example)
    numbers = [int(part) for part in parts]
    if ":" not in text:
        return tuple(numbers)
    if len(numbers) != 3 or numbers[2] < 2 or numbers[1] < numbers[0]:
        raise SpecError("sizes", text, "must be from:to:factor with a factor of 2 or more", example)
    sizes, size = [], numbers[0]
    while size <= numbers[1]:
        sizes.append(size)
        size *= numbers[2]
    return tuple(sizes)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", nargs="?", help="search space; default: usual layouts of --model on --cluster")
    parser.add_argument("--model")
    parser.add_argument("--cluster")
    parser.add_argument("--global-batch-size", type=int)
    parser.add_argument("--sequence-length", type=int)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--sizes", help="GPUs of the job: 256,512 or 256:2048:2; default: those of the space")
    parser.add_argument("--tokens", required=True, help='tokens to train on: "300 B tokens"')
    parser.add_argument("--address", default="auto", help="auto, local, none or of a Ray cluster")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--calibration")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def space_of(options: argparse.Namespace) -> SearchSpace:
    """The space that the options name or describe.

    Raises:
        SpecError: neither a space nor all of model, cluster, batch and sequence; or both.
    """
    described = {name: getattr(options, name) for name in ("model", "cluster", "global_batch_size", "sequence_length")}
    if options.space is not None:
        given = [name for name, value in described.items() if value is not None]
        if given:
            raise SpecError(given[0], described[given[0]], "stands in the space already", "leave it or the space out")
        return load_space(options.space)
    for name, value in described.items():
        if value is None:
            raise SpecError(name, "(missing)", "must be given where no space is", f"add --{name.replace('_', '-')}")
    return default_space(**described, precision=options.precision)


def main(arguments: list[str]) -> int:
    """Run the sweep and print it; 0 if some size has a layout, 1 if none, 2 for bad input."""
    options = parse_arguments(arguments)
    try:
        space = space_of(options)
        plan = capacity_study(
            CapacityOptions(
                space=space,
                sizes=parse_sizes(options.sizes) if options.sizes else space.cluster_size.num_gpus,
                num_tokens=parse_quantity(options.tokens, unit="tokens", field="tokens"),
                address=options.address,
                workers=options.workers,
                calibration=options.calibration,
            )
        )
    except EchoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(json.dumps(plan.to_json(), allow_nan=False) if options.json else plan.to_text())
    return 0 if any(row.best is not None for row in plan.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
