"""The teacher of a distillation, as a policy of which only the reference is used: a base model, or an adapter on one.

Where it is the student's own base, with an adapter of the same shape or none, the student's model plays its part too,
so that no second copy of the base is held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from components.algorithms.policy.policy import Policy
from components.errors import ResourceError
from components.json_text import read_json
from components.models.spec import LoraSpec, TeacherSpec
from components.models.weights import pick_device, vocabulary


def teacher_of(
    policy: Policy, base_dir: Path, spec: TeacherSpec, teacher_dir: Path, warm: dict[str, Any] | None = None
) -> Policy:
    """base_dir, teacher_dir: local folders of the student's and the teacher's base model. warm may keep a loaded
    teacher for the next call. Raises ResourceError where the vocabularies differ, ArtifactError for an adapter that
    does not fit."""
    refuse_other_vocabulary(base_dir, teacher_dir)
    adapter = spec.adapter_dir()
    if _shares(policy, base_dir, spec, teacher_dir, adapter):
        policy.use_reference(adapter)
        return policy
    model = spec.model(policy.spec.max_length, _lora(adapter))
    recipe = f"{teacher_dir} {model.content()} {model.model_dump_json()}"
    warm = {} if warm is None else warm
    held, teacher = warm.pop("teacher", (None, None))
    if held != recipe:
        teacher = None  # frees the old one before the new one is loaded
        with torch.random.fork_rng():  # an adapter that is not used draws its first numbers
            teacher = Policy(teacher_dir, model, seed=0)
    warm["teacher"] = recipe, teacher
    teacher.use_reference(adapter)
    return teacher


def refuse_other_vocabulary(base_dir: Path, teacher_dir: Path) -> None:
    """Raises ResourceError unless both tokenizers give the same tokens the same ids: the distributions that are
    compared would not be over the same things."""
    if base_dir == teacher_dir:
        return
    own, theirs = vocabulary(base_dir), vocabulary(teacher_dir)
    if own != theirs:
        odd = sorted(token for token in own.keys() | theirs.keys() if own.get(token) != theirs.get(token))
        raise ResourceError(
            f"algorithm.teacher: the vocabularies differ: {len(odd)} tokens have not the same id in both, such as "
            f"{odd[0]!r} ({own.get(odd[0])} in model, {theirs.get(odd[0])} in the teacher). On-policy distillation "
            "compares distributions over one vocabulary: choose a teacher of the same family, or train on the "
            "teacher's episodes with warmup.teacher"
        )


def _shares(policy: Policy, base_dir: Path, spec: TeacherSpec, teacher_dir: Path, adapter: Path | None) -> bool:
    """Whether the student's model can be the teacher too."""
    if policy.adapter is None or policy.spec.lora is None:
        return False
    if teacher_dir != base_dir or spec.dtype != policy.spec.dtype or pick_device(spec.device) != policy.device:
        return False
    if adapter is None:
        return True
    from safetensors import safe_open

    lora, own = _lora(adapter), {name: list(tensor.shape) for name, tensor in policy.adapter.tensors().items()}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  no mapping
    return (lora.rank, lora.alpha) == (policy.spec.lora.rank, policy.spec.lora.alpha) and shapes == own


def _lora(adapter: Path | None) -> LoraSpec:
    """The shape of a saved adapter."""
    if adapter is None:
        return LoraSpec(rank=1)
    saved = read_json(adapter / "adapter_config.json")
    return LoraSpec(rank=saved["r"], alpha=saved["lora_alpha"], target_modules=saved["target_modules"])
