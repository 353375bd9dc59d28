"""Configuration files of accelerate: what they ask for is done, or refused with its key."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.config.default import write_basic_config

from components.compute.accelerate.config_file import HONOURED, READ, SECTIONS, UNSUPPORTED, LaunchConfig, read
from components.compute.accelerate.spec import AcceleratePlace
from components.compute.runners import StageProcess
from components.compute.torchrun.spec import TorchrunPlace
from components.errors import SpecError
from flows.experiment.compose import compose
from flows.experiment.prerequisites import lacking
from flows.planning.notes import resolved_values

DDP = {"num_processes": 4, "rdzv_backend": "static", "same_network": True}
ZERO = {"gradient_accumulation_steps": 1, "offload_optimizer_device": "none", "offload_param_device": "none",
        "zero3_init_flag": False}  # fmt: skip
FSDP = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT"}  # fmt: skip


def written(folder: Path, kind: str, precision: str = "no", cpu: bool = False, **more) -> Path:
    """Return the path of a file that accelerate writes."""
    path = folder / "accelerate.yaml"
    config = ClusterConfig("LOCAL_MACHINE", kind, precision, cpu, False, **{**DDP, **more})
    config.to_yaml_file(path)
    return path


def changed(path: Path, **values) -> Path:
    """Return the path, after changing keys of the file; `section__key` is a key of a section."""
    data = yaml.safe_load(path.read_text())
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        (data.setdefault(section, {}) if section else data)[key] = value
    path.write_text(yaml.safe_dump(data))
    return path


def test_the_kind_of_training_is_read(tmp_path):
    replicated = {
        ("MULTI_GPU", "fp16"): LaunchConfig(4, "ddp", "float16", False, None),
        ("MULTI_CPU", "no", True): LaunchConfig(4, "ddp", "float32", True, None),
        ("MULTI_GPU", "bf16"): LaunchConfig(4, "ddp", "bfloat16", False, None),
    }
    for arguments, expected in replicated.items():
        assert read(written(tmp_path, *arguments)) == (expected, []), arguments
    for stage, strategy in ((0, "ddp"), (2, "zero2"), (3, "fsdp")):
        zero = {**ZERO, "zero_stage": stage, "gradient_clipping": 0.5}
        mapped = f"zero_stage = {stage} is strategy {strategy} of torch, in place of DeepSpeed's engine"
        expected = LaunchConfig(4, strategy, "float16", False, 0.5, mapped)
        assert read(written(tmp_path, "DEEPSPEED", "fp16", deepspeed_config=zero)) == (expected, [])
    for reshard, strategy in ((True, "fsdp"), (False, "zero2")):
        fsdp = {**FSDP, "fsdp_reshard_after_forward": reshard}
        expected = LaunchConfig(4, strategy, "float32", False, None)
        assert read(written(tmp_path, "FSDP", fsdp_config=fsdp)) == (expected, [])


def test_the_default_file_of_accelerate_is_one_process(tmp_path):
    write_basic_config("no", tmp_path / "default.yaml")
    config, problems = read(tmp_path / "default.yaml")
    assert problems == []
    assert config
    assert (config.processes, config.strategy, config.dtype) == (1, "ddp", "float32")


def test_no_without_quotes_is_one_process(tmp_path):
    """YAML 1.1 reads these words as false, `'NO'` as text."""
    path = tmp_path / "accelerate.yaml"
    for word in ("NO", "No", "no", "off", "false", "'NO'"):
        path.write_text(f"distributed_type: {word}\nmixed_precision: no\ndynamo_config: {{dynamo_backend: no}}\n")
        assert read(path) == (LaunchConfig(1, "ddp", "float32", False, None), []), word


def test_yes_without_quotes_is_refused(tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: YES\nmixed_precision: YES\nnum_processes: 1\n")
    assert read(path)[1] == [
        "distributed_type = true: expected one of NO, MULTI_GPU, MULTI_CPU, DEEPSPEED, FSDP",
        "mixed_precision = true: expected one of 'no', bf16, fp16",
    ]


COURSE_DDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_processes: 4
machine_rank: 0
num_machines: 1
gpu_ids: all
mixed_precision: fp16
"""
COURSE_ZERO2 = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_processes: 4
machine_rank: 0
num_machines: 1
gpu_ids: all
mixed_precision: fp16
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
"""
"""Files of the HelloAgents course."""


@pytest.mark.parametrize("text", [COURSE_DDP, COURSE_ZERO2, COURSE_ZERO2.replace("  ", "")])
def test_the_files_of_the_course_are_accepted_as_published(tmp_path, monkeypatch, text):
    """Also the ZeRO-2 file as text extracted from its page has it, without indentation."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    path = tmp_path / "course.yaml"
    path.write_text(text)
    lines = ["compute=accelerate", f"compute.config_file={path}", "model.dtype=float16", "collect.scenarios=4"]
    spec = compose(["+experiment=smoke", *lines])
    assert list(lacking(spec)) == []
    strategy = "zero2" if "zero_stage" in text else "ddp"
    assert spec.compute.place("train").describe() == f"4 processes, {strategy}"
    notes = [note for note in resolved_values(spec) if "config_file" in note]
    expected = (
        f"compute.places.accelerate.config_file: {path}: zero_stage = 2 is strategy zero2 of torch, in place of "
        "DeepSpeed's engine; gradient_accumulation_steps = 4 has no meaning of its own, because a gradient step sums "
        "exactly over its whole minibatch (algorithm.minibatches), in as many packs as it needs"
    )
    assert notes == ([expected] if strategy == "zero2" else [])


def test_every_key_of_accelerate_is_known():
    known = {key.partition(".")[0] for key in (*READ, *HONOURED, *UNSUPPORTED, *SECTIONS)}
    assert {field.name for field in dataclasses.fields(ClusterConfig)} <= known


REFUSED = [
    ({"num_machines": 2}, "num_machines = 2: expected 1 (several machines: compute=sky"),
    ({"machine_rank": 1}, "machine_rank = 1: expected 0"),
    ({"main_process_ip": "10.0.0.1"}, "main_process_ip = 10.0.0.1: expected null"),
    ({"main_process_port": 29501}, "main_process_port = 29501: expected null"),
    ({"mixed_precision": "fp8"}, "mixed_precision = fp8: expected one of 'no', bf16, fp16"),
    ({"num_processes": 0}, "num_processes = 0: expected a whole number from 1"),
    ({"num_processes": None}, "num_processes = null: expected a whole number from 1"),
    ({"num_processes": True}, "num_processes = true: expected a whole number from 1"),
    ({"distributed_type": "MEGATRON_LM"}, "distributed_type = MEGATRON_LM: expected one of NO, MULTI_GPU"),
    ({"distributed_type": "NO"}, "num_processes = 4: but distributed_type: NO"),
    ({"distributed_type": "MULTI_CPU"}, "use_cpu = false: but distributed_type: MULTI_CPU"),
    ({"use_cpu": True}, "use_cpu = true: but distributed_type: MULTI_GPU"),
    ({"gpu_ids": "0,1"}, "gpu_ids = 0,1: expected all (choose GPUs with the environment variable CUDA_VISIBLE"),
    ({"dynamo_config__dynamo_backend": "INDUCTOR"}, "dynamo_config.dynamo_backend = INDUCTOR: expected 'NO'"),
    ({"enable_cpu_affinity": True}, "enable_cpu_affinity = true: expected false"),
    ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment = AMAZON_SAGEMAKER: expected LOCAL"),
    ({"fp8_config": {"backend": "TE"}}, "fp8_config = {backend: TE}: expected null"),
    ({"deepspeed_config__zero_stage": 2}, "deepspeed_config.zero_stage = 2: belongs to distributed_type: DEEP"),
    ({"num_proceses": 2}, "num_proceses = 2: unsupported key; remove it. Did you mean 'num_proc"),
    ({"debug": 0}, "debug = 0: expected false"),
]  # fmt: skip


def test_a_key_that_cannot_be_honoured_is_refused(tmp_path):
    for values, text in REFUSED:
        config, problems = read(changed(written(tmp_path, "MULTI_GPU"), **values))
        assert config is None, values
        assert any(problem.startswith(text) for problem in problems), problems


DEEPSPEED_REFUSED = [
    ({"zero_stage": 1}, "zero_stage = 1: expected one of 0, 2, 3"),
    ({"zero_stage": None}, "zero_stage = null: expected one of 0, 2, 3"),
    ({"zero_stage": [2]}, "zero_stage = [2]: expected one of 0, 2, 3"),
    ({"zero_stage": False}, "zero_stage = false: expected one of 0, 2, 3"),
    ({"offload_optimizer_device": "cpu"}, "offload_optimizer_device = cpu: expected none"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps = 0: expected a whole number from 1, or auto"),
    ({"gradient_clipping": 0}, "gradient_clipping = 0: expected a number above 0"),
    ({"deepspeed_config_file": "zero.json"}, "deepspeed_config_file = zero.json: expected null (state zero_stage"),
    ({"zero3_init_flag": True}, "zero3_init_flag = true: expected false"),
]
FSDP_REFUSED = [
    ({"fsdp_version": 1}, "fsdp_version = 1: expected 2 (convert the file: accelerate to-fsdp2"),
    ({"fsdp_version": None}, "fsdp_version = null: expected 2"),
    ({"fsdp_offload_params": "yes"}, "fsdp_offload_params = 'yes': expected true or false"),
    (
        {"fsdp_offload_params": True, "fsdp_reshard_after_forward": False},
        "fsdp_offload_params = true: but fsdp_reshard_after_forward: false; expected false",
    ),
    ({"fsdp_state_dict_type": "SHARDED_STATE_DICT"}, "fsdp_state_dict_type = SHARDED_STATE_DICT: expected FULL"),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy = SIZE_BASED_WRAP: expected TRANSFORMER"),
    ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "fsdp_transformer_layer_cls_to_wrap = Llama"),
    ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp_reshard_after_forward = FULL_SHARD: expected true or"),
]  # fmt: skip


def test_a_key_of_deepspeed_or_fsdp_that_cannot_be_honoured_is_refused(tmp_path):
    sections = {
        "DEEPSPEED": ("deepspeed_config", {**ZERO, "zero_stage": 2}, DEEPSPEED_REFUSED),
        "FSDP": ("fsdp_config", FSDP, FSDP_REFUSED),
    }
    for kind, (section, valid, cases) in sections.items():
        for values, text in cases:
            _, problems = read(written(tmp_path, kind, **{section: {**valid, **values}}))
            assert [problem.startswith(f"{section}.{text}") for problem in problems] == [True], problems


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "accelerate.yaml"
    contents = {None: "cannot be read", "a: [": "is not valid YAML", "- a": "is not a mapping", "": "is not a mapping"}
    contents |= {"a: 2024-13-45": "is not valid YAML", "[" * 2000: "is not valid YAML"}
    for content, text in contents.items():
        if content is not None:
            path.write_text(content)
        (message,) = messages(f"compute.config_file={path}")
        assert message.startswith("compute.places.accelerate.config_file: ")
        assert text in message, content


def messages(*lines: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=smoke", "compute=accelerate", *lines])
    return [f"{problem.path}: {problem.message}" for problem in caught.value.problems]


def test_the_settings_of_the_file_have_to_be_those_of_the_experiment(tmp_path):
    zero = {**ZERO, "zero_stage": 2, "gradient_clipping": 0.5}
    path = written(tmp_path, "DEEPSPEED", "fp16", num_processes=2, deepspeed_config=zero)
    texts = messages(f"compute.config_file={path}", "model.device=cpu", "model.quantization=nf4")
    assert all(text.startswith(f"compute.places.accelerate.config_file: {path}: ") for text in texts)
    joined = "\n".join(texts)
    assert "mixed_precision = fp16: is model.dtype=float16, but model.dtype=float32" in joined
    assert "use_cpu = false: but model.device=cpu" in joined
    assert "gradient_clipping = 0.5: is algorithm.max_grad_norm, but that is 1" in joined
    assert "distributed_type: zero2: cannot shard a quantized model" in joined
    lines = ["compute=accelerate", f"compute.config_file={path}", "model.dtype=float16", "algorithm.max_grad_norm=0.5"]
    spec = compose(["+experiment=smoke", *lines])
    place = spec.compute.place("train")
    assert place.describe() == "2 processes, zero2"
    assert spec.compute.place("collect").name == "local"


def test_more_processes_than_groups_are_refused_with_the_key_of_the_file(tmp_path):
    path = written(tmp_path, "MULTI_CPU", cpu=True)
    (text,) = messages(f"compute.config_file={path}", "model.device=cpu")
    assert "num_processes: 4, but a round has collect.scenarios=2 groups" in text


def test_gpus_are_a_prerequisite(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    path = written(tmp_path, "MULTI_GPU", num_processes=2)
    (text,) = lacking(compose(["+experiment=smoke", "compute=accelerate", f"compute.config_file={path}"]))
    assert "num_processes = 2: this machine has 1 GPUs" in text


def test_a_file_that_no_place_reads_is_refused():
    with pytest.raises(SpecError, match=r"compute\.config_file: 'ddp\.yaml': no place reads it"):
        compose(["+experiment=smoke", "compute.config_file=ddp.yaml"])
    with pytest.raises(SpecError, match=r"compute\.config_file=FILE"):
        compose(["+experiment=smoke", "compute=accelerate"])


def test_accelerate_sees_the_processes_of_the_file(tmp_path):
    place = AcceleratePlace(config_file=str(written(tmp_path, "MULTI_CPU", cpu=True, num_processes=2)))
    assert place.group
    process = StageProcess(tmp_path, tmp_path / "log.txt", {}, module="tests.compute.accelerate_state", options=())
    command = TorchrunPlace(processes=place.group.processes, strategy=place.group.strategy).command(process)
    command = command[: command.index("tests.compute.accelerate_state") + 1]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    assert sorted(done.stdout.splitlines()) == ["MULTI_CPU gloo 2 0 3", "MULTI_CPU gloo 2 1 3"]
    assert command[0] == sys.executable
