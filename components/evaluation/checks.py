"""Checks of a certificate (model, engine and trainer) and of a qualification (an environment): results and verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from components.redaction import mask_text
from components.trajectories.schema import Trajectory

PASSED, WARNED, FAILED, SKIPPED = "passed", "warned", "failed", "skipped"
CERTIFICATE = {
    "template": "Each prompt extends the tokens so far, or a new history begins with the whole conversation",
    "tool_calls": "Tool calls are written, tokenized and parsed back without a change",
    "special_tokens": "Responses end with the token that the chat template puts after an assistant message",
    "limits": "First prompts fit the context, and answers end before their token limit",
    "logprobs": "The trainer computes the log-probabilities that the sampler reports",
    "kept_mass": "Sampler and trainer cut the distribution alike, and the cut keeps most of its mass",
    "adapter": "The engine answers with the weights that it was given last, not with others",
    "export": "The exported model has the log-probabilities of the policy",
    "solver": "The environment's own solutions succeed",
    "chance": "Random actions rarely succeed",
}
"""Property that each check of a certificate holds."""
QUALIFICATION = {
    "solver": CERTIFICATE["solver"],
    "chance": CERTIFICATE["chance"],
    "replay": "Equal actions give equal observations, rewards and outcomes",
    "isolation": "Two instances whose episodes alternate do not influence each other",
    "restore": "A saved state continues as the episode did",
    "splits": "Held-out scenarios are no training scenarios, and no training solution solves them",
    "exploits": "Cheap exploits earn nothing",
    "agreement": "The recorded actions give the same success in a new instance",
    "length": "Solutions fit model.max_length and agent.max_turns",
}
"""The same of a qualification."""
REMEDIES = {
    "template": "Use another chat template: model.chat_template=FILE; or choose another model.",
    "tool_calls": "Choose another agent.format (react or code), or a chat template that writes calls as JSON in "
    "<tool_call>.",
    "special_tokens": "Correct eos_token_id in generation_config.json of a copy of the model's folder, and set "
    "model.name to it.",
    "limits": "Raise model.max_length for prompts, agent.max_tokens for answers.",
    "logprobs": "Set the sampling options of the server to those of `collect` (vLLM: --logprobs-mode "
    "processed_logprobs, --generation-config vllm), serve the model of model.name in model.dtype, or use "
    "inference=embedded.",
    "kept_mass": "Raise collect.top_p, collect.top_k or lower collect.min_p: collect.top_p=1 collect.top_k=0 "
    "collect.min_p=0 keeps all of it.",
    "adapter": "Check that the server loads adapters from the run folder under the same path, and replaces an adapter "
    "whose name it knows; restart it, or use inference=embedded.",
    "export": "Compare the packages of export and sampling (transformers, peft); set deploy.mode=none to train without "
    "an export.",
    "solver": "Correct solve(scenario) of the environment: python -m flows.qualify shows the episodes.",
    "chance": "Make the success condition stricter: python -m flows.qualify shows the episodes.",
}
"""Action after a check of a certificate fails or warns."""


@dataclass(frozen=True)
class PropertyCheck:
    """Result of one check."""

    name: str
    status: str
    """`passed`, `warned`, `failed` or `skipped`."""
    reason: str = ""
    """Cause of a status other than `passed`; for a check that passed, a fact worth knowing."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    examples: Sequence[Trajectory] = ()
    """Episodes that show it, on the page of a qualification."""

    @property
    def remedy(self) -> str:
        """Action after the check of a certificate failed or warned; else empty."""
        return REMEDIES[self.name] if self.status in (FAILED, WARNED) else ""

    def to_json(self, **more: Any) -> dict[str, Any]:
        """Return the check as JSON data. more: further fields."""
        return {
            "name": self.name,
            "status": self.status,
            "reason": mask_text(self.reason),
            **more,
            "figures": dict(self.figures),
        }


def check_result(
    name: str,
    failures: Sequence[str],
    figures: Mapping[str, Any],
    *,
    warnings: Sequence[str] = (),
    note: str = "",
    examples: Sequence[Trajectory] = (),
) -> PropertyCheck:
    """Return a check that fails with the failures, warns with the warnings, or passes with the note."""
    problems = [*failures, *warnings]
    status = FAILED if failures else WARNED if warnings else PASSED
    reason = problems[0] if problems else note
    if len(problems) > 1:
        reason += f" (and {len(problems) - 1} more)"
    return PropertyCheck(name, status, reason, figures, examples)


def skipped_check(name: str, reason: str) -> PropertyCheck:
    """Return a check that was skipped."""
    return PropertyCheck(name, SKIPPED, reason)


def all_passed(checks: Sequence[PropertyCheck]) -> bool:
    """Return True if no check failed."""
    return all(check.status != FAILED for check in checks)
