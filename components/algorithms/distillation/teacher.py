"""The teacher of a distillation: a base model or an adapter on one, as a policy of which only the reference is used.

If the teacher is the student's own base, with an adapter of the same shape or none, the student's model serves as the
teacher too, so that no second copy of the base is in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.algorithms.policy.policy import Policy
from components.errors import ResourceError
from components.json_text import read_json
from components.models.spec import LoraSpec, TeacherSpec
from components.models.weights import pick_device, vocabulary


def load_teacher(
    policy: Policy, base_dir: Path, spec: TeacherSpec, teacher_dir: Path, warm: dict[str, Any] | None = None
) -> Policy:
    """Return the teacher's policy. base_dir, teacher_dir: local folders of the student's and the teacher's base model.
    warm may cache a loaded teacher for the next call. Raises ResourceError if the vocabularies differ, ArtifactError
    for an adapter that does not fit."""
    require_same_vocabulary(base_dir, teacher_dir)
    adapter = spec.adapter_dir()
    if _shares(policy, base_dir, spec, teacher_dir, adapter):
        policy.use_reference(adapter)
        return policy
    model = spec.model(policy.spec.max_length, _lora(adapter))
    recipe = f"{teacher_dir} {model.content()} {model.model_dump_json()}"
    warm = {} if warm is None else warm
    cached_recipe, teacher = warm.pop("teacher", (None, None))
    if cached_recipe != recipe:
        teacher = None  # free the old teacher before the new one is loaded
        teacher = Policy(teacher_dir, model, seed=0)
    warm["teacher"] = recipe, teacher
    teacher.use_reference(adapter)
    return teacher


def require_same_vocabulary(base_dir: Path, teacher_dir: Path) -> None:
    """Raise ResourceError unless both tokenizers map the same tokens to the same ids: otherwise the compared
    distributions are over different tokens."""
    if base_dir == teacher_dir:
        return
    student_ids, teacher_ids = vocabulary(base_dir), vocabulary(teacher_dir)
    if student_ids != teacher_ids:
        differing = sorted(
            token
            for token in student_ids.keys() | teacher_ids.keys()
            if student_ids.get(token) != teacher_ids.get(token)
        )
        raise ResourceError(
            f"algorithm.teacher: the vocabularies differ: {len(differing)} tokens do not have the same id in both, "
            f"such as {differing[0]!r} ({student_ids.get(differing[0])} in model, {teacher_ids.get(differing[0])} in "
            "the teacher). On-policy distillation compares distributions over one vocabulary: choose a teacher of the "
            "same family, or train on the teacher's episodes with warmup.teacher"
        )


def _shares(policy: Policy, base_dir: Path, spec: TeacherSpec, teacher_dir: Path, adapter: Path | None) -> bool:
    """Return True if the student's model can also serve as the teacher."""
    if policy.adapter is None or policy.spec.lora is None:
        return False
    if teacher_dir != base_dir or spec.dtype != policy.spec.dtype or pick_device(spec.device) != policy.device:
        return False
    if adapter is None:
        return True
    from safetensors import safe_open

    lora, own_shapes = _lora(adapter), {name: list(tensor.shape) for name, tensor in policy.adapter.tensors().items()}
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  safe_open is not a mapping
    return (lora.rank, lora.alpha) == (policy.spec.lora.rank, policy.spec.lora.alpha) and shapes == own_shapes


def _lora(adapter: Path | None) -> LoraSpec:
    """Return the LoRA spec of a saved adapter; rank 1 if there is none."""
    if adapter is None:
        return LoraSpec(rank=1)
    saved = read_json(adapter / "adapter_config.json")
    return LoraSpec(rank=saved["r"], alpha=saved["lora_alpha"], target_modules=saved["target_modules"])
