"""GPUs of training processes, shards, background stages and vLLM, on a machine that seems to have eight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from components.compute.process.spec import ProcessPlace
from components.compute.runners import RunnerContext, StageProcess
from components.compute.sky.spec import SkyPlace
from components.compute.torchrun.spec import TorchrunPlace
from components.errors import SpecError
from components.inference.engines.vllm import VllmSpec
from components.inference.vllm.server import options
from components.models import gpus
from components.models.spec import ModelSpec
from components.specs import validate
from flows.execution.executor import Execution
from flows.experiment.compose import compose
from flows.stages.base import Context
from flows.terminal.console import Console


@pytest.fixture
def eight(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    for index in range(8):
        (tmp_path / "dev" / f"nvidia{index}").touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def device_of(runner):
    """The GPU that a stage of this runner sees, by its process."""
    program = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    environment = runner._process.environment
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    return done.stdout.strip()


def lanes(count):
    process = StageProcess(Path("root"), Path("log"))
    shared = dict.fromkeys(["execute", "say"], print) | {"run": "r", "log": Path("log"), "code": Path(), "packages": []}
    contexts = [RunnerContext(**shared, process=process, lane=lane) for lane in range(count)]
    return [device_of(ProcessPlace().runner("process", context)) for context in contexts]


def test_each_shard_worker_has_a_gpu(eight):
    assert lanes(10) == [*"01234567", "0", "1"]
    eight.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert lanes(3) == ["4", "6", "4"]
    eight.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert lanes(2) == ["5", "5"]


def test_background_stages_leave_the_first_gpu_to_the_flow(eight, tmp_path):
    execution = Execution(compose([f"root={tmp_path}"]), Context.at(tmp_path), Console(), None, tmp_path / "log")
    runners = [execution.background(lane) for lane in (0, 1)]
    assert [device_of(runner) for runner in runners] == ["1", "2"]


PROCESSES = [
    (TorchrunPlace(processes="auto"), None, 8),
    (TorchrunPlace(processes="auto"), "2,3", 2),
    (TorchrunPlace(processes="auto"), "", 1),
    (TorchrunPlace(processes=3), None, 3),
    (SkyPlace(accelerators="L4:8", nodes=2), "", 16),
    (SkyPlace(accelerators="H100"), None, 1),
    (SkyPlace(cpus="8+"), None, 1),
    (SkyPlace(accelerators="L4:8", processes=4), None, 4),
]


def test_training_has_a_process_for_each_gpu(eight):
    for place, visible, count in PROCESSES:
        if visible is None:
            eight.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            eight.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert place.group.size == count, (place, visible)
    with pytest.raises(SpecError, match=r"accelerators"):
        validate(SkyPlace, {"accelerators": "L4:many"})


RANKS = [
    ({}, False, 8),
    ({"tensor-parallel-size": 2}, False, 4),
    ({"tensor-parallel-size": 4, "pipeline-parallel-size": 2}, False, None),
    ({"data-parallel-size": 3}, False, 3),
    ({}, True, None),
]


def test_vllm_has_a_rank_on_each_gpu(eight, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for arguments, on_cpu, ranks in RANKS:
        line = options(
            VllmSpec(arguments=arguments), ModelSpec(name="m", source="hub", dtype="bfloat16"), tmp_path, 8000, on_cpu
        )
        option = "--data-parallel-size"
        assert (int(line[line.index(option) + 1]) if option in line else None) == ranks, arguments
