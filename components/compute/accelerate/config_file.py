"""Configuration files of accelerate, as `accelerate config` writes them, read without accelerate.

Each key is honoured or refused: `read` returns what a training group needs, and a problem for each key whose value this
project would have to ignore. Keys with the value that `accelerate config` writes for an unused feature are honoured,
because nothing has to be done for them.

| distributed_type | Strategy |
|---|---|
| NO | one process |
| MULTI_GPU, MULTI_CPU | ddp |
| DEEPSPEED | by zero_stage: 0 ddp, 2 zero2, 3 fsdp |
| FSDP (fsdp_version 2) | by fsdp_reshard_after_forward: false zero2, true fsdp; fsdp_offload_params: fsdp_offload |

DeepSpeed's engine does not run, and need not be installed: its ZeRO stages are those of torch's `fully_shard`
(`components.algorithms.policy`). `LaunchConfig.mapped` says what the settings of such a file become.

YAML 1.1 reads an unquoted `NO` as false. Where accelerate expects NO, false is NO. Below a section without a value, its
keys need no indentation: printed files often lose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from components.compute.training_group import Strategy
from components.specs import nearest

Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS: dict[str, Precision] = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""`model.dtype` by `mixed_precision`."""
ZERO_STAGES: dict[int, Strategy] = {0: "ddp", 2: "zero2", 3: "fsdp"}
DEEPSPEED = "DEEPSPEED"
"""`distributed_type` of files that `accelerate launch` passes to DeepSpeed."""
REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")
SHARDED = (DEEPSPEED, "FSDP")

UNUSED: tuple[Any, ...] = (None, "", [], {})
"""Values of a key that is not used."""
HONOURED: dict[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "debug": (False,),
    "downcast_bf16": (False, "no"),
    "enable_cpu_affinity": (False,),
    "gpu_ids": ("all",),
    "machine_rank": (0,),
    "main_training_function": ("main",),
    "num_machines": (1,),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True, False),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "deepspeed_config.offload_optimizer_device": ("none",),
    "deepspeed_config.offload_param_device": ("none",),
    "deepspeed_config.zero3_init_flag": (False,),
    "deepspeed_config.zero3_save_16bit_model": (False,),
    "deepspeed_config.deepspeed_multinode_launcher": ("standard",),
    "fsdp_config.fsdp_version": (2,),
    "fsdp_config.fsdp_activation_checkpointing": (False,),
    "fsdp_config.fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": (False,),
    "fsdp_config.fsdp_state_dict_type": ("FULL_STATE_DICT",),
    "dynamo_config.dynamo_backend": ("NO", "no", False),
}
"""Values that describe what the training does anyway, by key."""
ADVICE = {
    "compute_environment": "SageMaker starts processes of its own",
    "commands": "TPUs are not supported",
    "command_file": "TPUs are not supported",
    "gpu_ids": "choose GPUs with the environment variable CUDA_VISIBLE_DEVICES",
    "num_machines": "several machines: compute=sky with compute.places.NAME.nodes",
    "machine_rank": "several machines: compute=sky with compute.places.NAME.nodes",
    "main_process_ip": "the processes of one machine find each other; several machines: compute=sky",
    "main_process_port": "the processes of one machine meet at a free port",
    "parallelism_config": "one process computes a history: no context, sequence or tensor parallelism; flows.plan "
    "names the largest model.max_length that fits",
    "fp16": "accelerate's old key; use mixed_precision: fp16",
    "deepspeed_config.deepspeed_config_file": "state zero_stage in deepspeed_config",
    "fsdp_config.fsdp_version": "convert the file: accelerate to-fsdp2 --config_file FILE",
    "fsdp_config.fsdp_state_dict_type": "checkpoints are saved whole",
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "every decoder layer is sharded by itself",
}
"""Advice on a refused key: an alternative, or the reason."""
READ = (
    "distributed_type",
    "num_processes",
    "mixed_precision",
    "use_cpu",
    "deepspeed_config.zero_stage",
    "deepspeed_config.gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping",
    "fsdp_config.fsdp_reshard_after_forward",
    "fsdp_config.fsdp_offload_params",
)
"""Keys that `LaunchConfig` is read from."""
SECTIONS = ("deepspeed_config", "fsdp_config", "dynamo_config")
OF_TYPE = {"deepspeed_config": DEEPSPEED, "fsdp_config": "FSDP"}
"""Type that a section belongs to."""
UNSUPPORTED = (
    "command_file", "commands", "fp16", "fp8_config", "main_process_ip", "main_process_port", "megatron_lm_config",
    "mpirun_config", "parallelism_config", "tpu_env", "tpu_name", "tpu_vm", "tpu_zone",
)  # fmt: skip
"""Other keys of accelerate, which have to be unused."""


@dataclass(frozen=True)
class LaunchConfig:
    """Training that a configuration file describes."""

    processes: int
    strategy: Strategy
    dtype: Precision
    """Required `model.dtype`."""
    cpu: bool
    """True if the file asks for a CPU."""
    clipping: float | None
    """Required `algorithm.max_grad_norm`; None if the file does not say."""
    mapped: str | None = None
    """Message on what DeepSpeed's settings become; None for a file without DeepSpeed."""


def read(path: Path) -> tuple[LaunchConfig | None, list[str]]:
    """Return the configuration, and the problems of the file, each with its key and value; without problems the
    configuration is complete."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return None, [f"cannot be read: {error}"]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2024-13-45
        return None, [f"is not valid YAML: {' '.join(str(error).split())}"]
    if not isinstance(data, Mapping):
        return None, ["is not a mapping; expected the keys that `accelerate config` writes"]
    values = dict(_flat(data))
    if values.get("distributed_type") is False:
        values["distributed_type"] = "NO"
    problems = list(_problems(values))
    return (None if problems else _config(values)), problems


def _flat(data: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key with its value, those of sections as `section.key`."""
    empty = next((section for section in SECTIONS if section in data and data[section] is None), None)
    for key, value in data.items():
        if key in SECTIONS and isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        elif (unindented := f"{empty}.{key}") in (*READ, *HONOURED):
            yield unindented, value
        else:
            yield str(key), value


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    kind = values.get("distributed_type")
    if kind not in (*REPLICATED, *SHARDED):
        yield _text("distributed_type", kind, f"expected one of {', '.join((*REPLICATED, *SHARDED))}")
    for key, value in values.items():
        section = key.partition(".")[0]
        if OF_TYPE.get(section, kind) != kind and value not in UNUSED:
            yield _text(key, value, f"belongs to distributed_type: {OF_TYPE[section]}, but that is {kind}")
        elif key in READ or (key in SECTIONS and value in UNUSED):
            continue
        elif key in HONOURED:
            if value is not None and not _among(value, HONOURED[key]):
                yield _text(key, value, _expected(key, " or ".join(map(_yaml, HONOURED[key]))))
        elif key in UNSUPPORTED or key in ADVICE:
            if value not in UNUSED:
                yield _text(key, value, _expected(key, "null"))
        else:
            near = nearest(key, (*READ, *HONOURED, *UNSUPPORTED))
            hint = f". Did you mean '{near}'?" if near else ""
            yield _text(key, value, f"unsupported key; remove it{hint}")
    yield from _of_processes(values, kind)
    precision = values.get("mixed_precision")
    if _precision(precision) is None:
        yield _text("mixed_precision", precision, f"expected one of {', '.join(map(_yaml, PRECISIONS))}")
    if not isinstance(values.get("use_cpu", False), bool):
        yield _text("use_cpu", values["use_cpu"], "expected true or false")
    if kind == "MULTI_CPU" and values.get("use_cpu", True) is False:
        yield _text("use_cpu", False, "but distributed_type: MULTI_CPU; expected true")
    if kind == "MULTI_GPU" and values.get("use_cpu") is True:
        yield _text("use_cpu", True, "but distributed_type: MULTI_GPU; expected false, or MULTI_CPU")
    stage = values.get("deepspeed_config.zero_stage")
    if kind == DEEPSPEED and not _among(stage, tuple(ZERO_STAGES)):
        yield _text("deepspeed_config.zero_stage", stage, f"expected one of {', '.join(map(str, ZERO_STAGES))}")
    steps = values.get("deepspeed_config.gradient_accumulation_steps", 1)
    if steps != "auto" and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        yield _text("deepspeed_config.gradient_accumulation_steps", steps, "expected a whole number from 1, or auto")
    clipping = values.get("deepspeed_config.gradient_clipping")
    if clipping is not None and (isinstance(clipping, bool) or not isinstance(clipping, int | float) or clipping <= 0):
        yield _text("deepspeed_config.gradient_clipping", clipping, "expected a number above 0")
    if kind == "FSDP":
        if values.get("fsdp_config.fsdp_version") is None:
            yield _text("fsdp_config.fsdp_version", None, _expected("fsdp_config.fsdp_version", "2"))
        reshard = values.get("fsdp_config.fsdp_reshard_after_forward", True)
        offload = values.get("fsdp_config.fsdp_offload_params", False)
        for name, value in (("reshard_after_forward", reshard), ("offload_params", offload)):
            if not isinstance(value, bool):
                yield _text(f"fsdp_config.fsdp_{name}", value, "expected true or false")
        if offload is True and reshard is False:
            yield _text(
                "fsdp_config.fsdp_offload_params", True, "but fsdp_reshard_after_forward: false; expected false"
            )


def _of_processes(values: Mapping[str, Any], kind: Any) -> Iterator[str]:
    count = values.get("num_processes", 1 if kind == "NO" else None)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        yield _text("num_processes", count, "expected a whole number from 1")
    elif kind == "NO" and count > 1:
        yield _text("num_processes", count, "but distributed_type: NO; expected 1, or MULTI_GPU or MULTI_CPU")


def _config(values: Mapping[str, Any]) -> LaunchConfig:
    kind = values["distributed_type"]
    strategy: Strategy = "ddp"
    mapped = None
    if kind == DEEPSPEED:
        stage = values["deepspeed_config.zero_stage"]
        steps = values.get("deepspeed_config.gradient_accumulation_steps")
        strategy = ZERO_STAGES[stage]
        mapped = f"zero_stage = {stage} is strategy {strategy} of torch, in place of DeepSpeed's engine"
        if steps not in (None, 1, "auto"):
            mapped += (
                f"; gradient_accumulation_steps = {steps} has no meaning of its own, because a gradient step sums "
                "exactly over its whole minibatch (algorithm.minibatches), in as many packs as it needs"
            )
    elif kind == "FSDP":
        strategy = "fsdp" if values.get("fsdp_config.fsdp_reshard_after_forward", True) else "zero2"
        if values.get("fsdp_config.fsdp_offload_params", False):
            strategy = "fsdp_offload"
    precision = _precision(values.get("mixed_precision"))
    assert precision is not None
    clipping = values.get("deepspeed_config.gradient_clipping")
    return LaunchConfig(
        values.get("num_processes", 1),
        strategy,
        precision,
        kind == "MULTI_CPU" or values.get("use_cpu", False),
        None if clipping is None else float(clipping),
        mapped,
    )


def _precision(value: Any) -> Precision | None:
    """Return `model.dtype` of a value of `mixed_precision`; None for an unknown one."""
    return PRECISIONS.get("no" if value is None or value is False else str(value))


def _among(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Return True if a value is among these; 0 and 1 are no truth values."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed)


def _expected(key: str, values: str) -> str:
    advice = f" ({ADVICE[key]})" if key in ADVICE else ""
    return f"expected {values}{advice}"


def _text(key: str, value: Any, message: str) -> str:
    return f"{key} = {_yaml(value)}: {message}"


def _yaml(value: Any) -> str:
    """Return a value as it is written in the file."""
    return " ".join(yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").split())
