"""GPipe, ZB-H1, ZBV and DualPipeV run in the order of torch.distributed.pipelining's own generators."""

import importlib.util
import json
import subprocess
import sys

import pytest

from echo_explore.specs.schedules import build_schedule
from echo_explore.specs.schedules.checks import pass_name

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs the extra `trace`"),
]

CASES = [
    *[("gpipe", p, 1, m) for p, m in ((2, 1), (4, 6))],
    *[("zb-h1", p, 1, m) for p, m in ((2, 2), (4, 4), (4, 8), (3, 9), (8, 16))],
    *[("zbv", p, 2, m) for p, m in ((2, 1), (2, 3), (3, 4), (4, 8), (4, 20), (8, 32))],
    *[("dualpipev", p, 2, m) for p, m in ((2, 4), (3, 7), (4, 8), (4, 20), (8, 17))],
]

SCRIPT = """
import json, sys
from torch.distributed.pipelining import schedules as s

KIND = {"gpipe": s.ScheduleGPipe, "zb-h1": s.ScheduleInterleavedZeroBubble, "zbv": s.ScheduleZBVZeroBubble,
        "dualpipev": s.ScheduleDualPipeV}

def flat(actions):
    for action in actions:
        if action is None or str(action.computation_type.value) == "REDUCE_GRAD":
            continue
        yield from flat(action.sub_actions) if action.sub_actions else [str(action)]

def orders(name, p, v, m):
    schedule = KIND[name].__new__(KIND[name])
    schedule.pp_group_size, schedule._n_microbatches, schedule.n_local_stages = p, m, v
    schedule._num_stages = schedule.num_stages = p * v
    if name == "gpipe":
        return [list(flat(stage)) for stage in schedule._get_pipeline_order().values()]
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    return [list(flat(schedule._calculate_single_rank_operations(rank))) for rank in range(p)]

print(json.dumps([orders(*case) for case in json.loads(sys.argv[1])]))
"""


def test_same_orders() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)], capture_output=True, text=True, check=True
    )
    for (name, p, v, m), theirs in zip(CASES, json.loads(done.stdout), strict=True):
        schedule = build_schedule(name, pipeline_parallel=p, virtual_pipeline=v, num_micro_batches=m)
        ours = [
            [
                pass_name(kind, micro_batch, int(schedule.placement[stage, chunk]))
                for kind, micro_batch, chunk in zip(order.phase, order.micro_batch, order.chunk, strict=True)
            ]
            for stage, order in enumerate(schedule.orders)
        ]
        assert ours == theirs, (name, p, m)
