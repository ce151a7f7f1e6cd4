"""Launch arguments say what was predicted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from echo_explore.search.note import megatron_arguments, pipeline_layout
from echo_explore.search.point import SearchPoint
from echo_explore.search.ports import TrialRecord
from echo_explore.search.space import enumerate_points
from tests.search.support import SMALL, resolved, write_space


def arguments(folder: Path, text: str = SMALL, **choices: object) -> str:
    point = SearchPoint(num_gpus=96, tensor_parallel=8, **choices)  # type: ignore[arg-type]
    record = TrialRecord(trial=0, point=point, state="evaluated", values=(1.0,))
    return "\n".join(megatron_arguments(record, resolved(write_space(folder, text))))


def test_even_stages_use_the_arguments_of_old(tmp_path: Path) -> None:
    text = arguments(tmp_path, pipeline_parallel=12, virtual_pipeline=2)
    assert "--num-layers-per-virtual-pipeline-stage 4" in text
    assert "layout" not in text
    assert "schedule" not in text


def test_uneven_stages_are_spelled_out(tmp_path: Path) -> None:
    uneven = SMALL.replace("[6, 12, 24]", "[10]").replace(
        "sequence_length", 'stack = "nemo-megatron-2025"\nsequence_length', 1
    )
    space = uneven.replace("num_gpus = 96", "num_gpus = 80").replace("[search]", "[search]\nuneven_stages = true")
    space = space.replace("global_batch_size = 192", "global_batch_size = 200")
    point = SearchPoint(num_gpus=80, tensor_parallel=8, pipeline_parallel=10)
    found = resolved(write_space(tmp_path, space))
    assert point.pipeline_parallel in {p.pipeline_parallel for p in enumerate_points(found)}
    record = TrialRecord(trial=0, point=point, state="evaluated", values=(1.0,))
    layers = found.candidate(point).chunk_layers
    assert len(set(layers)) > 1
    assert f"--pipeline-model-parallel-layout '{pipeline_layout(layers)}'" in megatron_arguments(record, found)


def test_a_schedule_that_megatron_has_not_is_said(tmp_path: Path) -> None:
    text = arguments(tmp_path, pipeline_parallel=12, schedule="zb-h1")
    assert "# schedule zb-h1: not Megatron's" in text


def test_a_forced_choice_of_nccl_goes_into_the_environment(tmp_path: Path) -> None:
    space = resolved(write_space(tmp_path))
    forced = replace(space, stack=space.stack.model_copy(update={"nccl_algo": "Ring,Tree"}))
    point = SearchPoint(num_gpus=96, tensor_parallel=8, pipeline_parallel=12)
    record = TrialRecord(trial=0, point=point, state="evaluated", values=(1.0,))
    assert "# NCCL_ALGO=Ring,Tree in the environment" in megatron_arguments(record, forced)
    assert not any("NCCL" in line for line in megatron_arguments(record, space))


@pytest.mark.parametrize(("layers", "text"), [((2, 3), "Et*2|t*3L"), ((0, 4, 1), "E|t*4|t*1L"), ((7,), "Et*7L")])
def test_layouts_as_megatron_writes_them(layers: tuple[int, ...], text: str) -> None:
    assert pipeline_layout(layers) == text


READ = """
import json, sys
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
found = []
for text, num_stages, num_layers in json.loads(sys.argv[1]):
    made = PipelineParallelLayerLayout(text, num_stages)
    made.validate_layer_layout(num_layers, None)
    found.append([[[t.name for t in chunk] for chunk in stage] for stage in made.layout])
print(json.dumps(found))
"""
LAYOUTS = (((2, 3, 3, 2), 4), ((2, 3, 3, 2), 2), ((0, 4, 4, 1), 4))


@pytest.mark.torch
def test_megatron_reads_them_so() -> None:
    asked = [(pipeline_layout(layers), num_stages, sum(layers)) for layers, num_stages in LAYOUTS]
    done = subprocess.run([sys.executable, "-c", READ, json.dumps(asked)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for (layers, num_stages), stages in zip(LAYOUTS, found, strict=True):
        for chunk, count in enumerate(layers):
            assert stages[chunk % num_stages][chunk // num_stages].count("decoder") == count
