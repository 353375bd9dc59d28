"""Places that cannot run what is asked of them are refused before a run."""

from __future__ import annotations

import pytest

from components.compute.sky.task import TaskTemplate, render
from components.errors import SpecError
from flows.execution.executor import Execution
from flows.experiment.compose import compose
from flows.experiment.prerequisites import lacking
from flows.planning.notes import resolved_values
from flows.stages import STAGES
from flows.stages.base import Context
from tests.refusals import wrong_problems

TORCHRUN, FSDP, PLACE = "compute.places.torchrun", "compute.places.fsdp", "compute.places.sky_slurm"
SLURM = ["compute=sky", "compute.default=local", "compute.stages.train=sky_slurm", "store=file:///shared"]
EIGHT = ["compute=sky", "compute.default=local", "compute.stages.collect=sky_l4_x8", "store=s3://b"]
EIGHT += ["compute.stage_shards.collect=2"]


REFUSED = [
    (["compute=torchrun", f"{TORCHRUN}.processes=0"], f"{TORCHRUN}.processes", "at least 1"),
    (["compute=torchrun", f"{TORCHRUN}.processes=9"], f"{TORCHRUN}.processes", "expected at most 8"),
    (["compute=torchrun", f"{TORCHRUN}.strategy=fsdp3"], f"{TORCHRUN}.strategy", "fsdp"),
    (["compute=torchrun", "compute.stages.collect=torchrun"], "compute.stages.collect",
     "which only train and reward_model support"),
    ([*SLURM, f"{PLACE}.nodes=2", f"{PLACE}.processes=5"], f"{PLACE}.processes", "5 on each of 2 nodes"),
    ([*SLURM, f"{PLACE}.processes=2", f"{PLACE}.strategy=fsdp", "model.quantization=nf4"], f"{PLACE}.strategy", "ddp"),
    (["compute=fsdp", "model.quantization=nf4"], f"{FSDP}.strategy", "expected ddp"),
    (["compute=fsdp", "model.lora=null", "algorithm=ppo"], f"{FSDP}.strategy",
     "ppo does not support sharded training"),
    ([*EIGHT, "inference=embedded"], "compute.places.sky_l4_x8.accelerators",
     "8 GPUs: each shard of collect has a machine of its own, and the embedded engine uses one GPU; expected machines "
     "with one GPU, or inference=vllm"),
]  # fmt: skip
"""Overrides, the key that is refused, and why."""


def test_a_place_that_cannot_run_a_stage_is_refused():
    assert wrong_problems(REFUSED, compose) == []
    for changes in (["inference=vllm"], ["compute.places.sky_l4_x8.accelerators=L4:1"]):
        assert compose([*EIGHT, *changes]).compute.shards_of("collect") == 2


def test_only_the_training_runs_in_several_processes():
    for lines in (["compute=zero2", "model.lora=null"], ["compute=torchrun", "algorithm=ppo"]):
        compute = compose(lines).compute
        assert compute.place("train").name == "torchrun"
        assert compute.place("collect").name == compute.place("reward_model").name == "local"


def test_the_runner_of_a_place_knows_the_stages_that_several_processes_train(tmp_path, screen):
    spec = compose([*SLURM, f"{PLACE}.processes=2", f"root={tmp_path}"])
    execution = Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "log")
    process = execution.runner("train")._process
    template = TaskTemplate(
        compute := spec.compute.places["sky_slurm"], "name", tmp_path, distributed=process.distributed
    )
    for stage in STAGES.values():
        task = render(template, {"stage": stage.name})
        assert (f"--processes {compute.processes}" in task["run"]) is stage.distributed


def test_a_place_that_is_no_place_is_refused_with_those_that_are():
    with pytest.raises(SpecError, match=r"compute: 'horovod': expected one of accelerate, .*local, .*torchrun"):
        compose(["compute=horovod"])
    with pytest.raises(SpecError, match=r"places\.torchrun\.name: 'torchrn': .*Did you mean 'torchrun'"):
        compose(["compute=torchrun", f"{TORCHRUN}.name=torchrn"])


def test_secrets_of_a_place_in_use_are_a_prerequisite(monkeypatch):
    monkeypatch.delenv("A_TOKEN", raising=False)
    spec = compose([*SLURM, f"{PLACE}.secrets=[A_TOKEN]"])
    message = f"{PLACE}.secrets: environment variable A_TOKEN is not set on this machine; set it"
    assert list(lacking(spec)) == [message]
    assert list(lacking(compose([*SLURM, f"{PLACE}.secrets=[A_TOKEN]", "compute.stages.train=local"]))) == []
    monkeypatch.setenv("A_TOKEN", "x")
    assert list(lacking(spec)) == []


H100 = "compute.places.sky_h100"
CLOUD = ["inference=vllm", "compute=sky", "compute.default=local", "store=s3://b"]
GENERATED_THERE = ["compute.stages.collect=sky_h100", "compute.stages.evaluate=sky_h100"]
ENGINES = [
    ([*CLOUD, *GENERATED_THERE], None),  # the setup of the machine installs vLLM
    ([*CLOUD, *GENERATED_THERE, "inference.python=/on/the/machine/bin/python"], None),
    ([*CLOUD, "compute.stages.collect=sky_h100"], "inference.python: vLLM's environment is not there"),
    ([*CLOUD, *GENERATED_THERE, f"{H100}.python=/opt/bin/python"],
     f"inference.python: null, but {H100}.python = /opt/bin/python, so nothing installs vllm on its machines"),
    ([*CLOUD, *GENERATED_THERE, f"{H100}.python=/opt/bin/python", "inference.python=/opt/vllm/bin/python"], None),
    ([*CLOUD, *GENERATED_THERE, "inference.urls=[https://example.org/v1]", "inference.key_variable=A_KEY"],
     f"{H100}.secrets: lacks A_KEY of inference.key_variable"),
    (["inference=vllm", "compute=ray", "compute.places.ray.address=ray://h:1", "store=s3://b"], None),
]  # fmt: skip
"""Overrides, and the beginning of the only missing prerequisite."""


def test_an_engine_is_checked_where_its_stages_run(monkeypatch, tmp_path):
    monkeypatch.setattr("components.inference.engines.vllm.VLLM_PYTHON", tmp_path / "nowhere")
    monkeypatch.setenv("A_KEY", "x")
    for overrides, refusal in ENGINES:
        lacks = [text for text in lacking(compose(overrides)) if "the package prefect-ray" not in text]
        expected = [] if refusal is None else [refusal]
        assert [text[: len(start)] for text, start in zip(lacks, expected, strict=True)] == expected, overrides


JUDGE = ["reward=ruler", "judge_model@reward.model=embedded", "reward.model.model.name=some/judge"]
EMBEDDED = ["compute=sky", "store=s3://b", *JUDGE]
JUDGES = [
    (EMBEDDED, "judge loads some/judge on this machine, while other stages run on sky_h100; to judge there: "
     "compute.stages.judge=sky_h100"),
    ([*EMBEDDED[:3], "judge_model@reward.model=policy"], "judge loads policy on this machine, while"),
    (["compute=sky", "store=s3://b", "reward_model=bradley_terry"], "judge loads reward models on"),
    ([*EMBEDDED, "compute.stages.judge=sky_h100"], None),
    ([*EMBEDDED[:3], "reward.model.url=http://a/v1", "reward.model.model=m"], None),  # a service
    (JUDGE, None),
]  # fmt: skip
"""Overrides, and the beginning of the note on the place of the judge."""


def test_a_plan_notes_a_judge_that_loads_a_model_on_this_machine_beside_remote_stages():
    for overrides, expected in JUDGES:
        notes = [note for note in resolved_values(compose(overrides)) if note.startswith("judge loads")]
        assert [note[: len(expected or "")] for note in notes] == ([] if expected is None else [expected]), overrides
