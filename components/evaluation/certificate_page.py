"""Certificate of a model and an engine as data and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from components.evaluation.page import page
from components.evaluation.qualification_page import FAILED, PASSED, SKIPPED
from components.redaction import mask_text

WARNED = "warned"
DESCRIPTIONS = {
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
"""Property that each check holds."""
REMEDIES = {
    "template": "Use another chat template: copy the model's folder, change chat_template.jinja in the copy, and set "
    "model.name to it; or choose another model.",
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
"""Action after each check fails, if the check gives none of its own."""


@dataclass(frozen=True)
class CertificateCheck:
    """Result of one check."""

    name: str
    status: str
    """`passed`, `warned`, `failed` or `skipped`."""
    reason: str = ""
    """Cause of a status other than `passed`; for a check that passed, a fact worth knowing."""
    remedy: str = ""
    """Action for a check that failed or warned."""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON data."""
        return {**asdict(self), "reason": mask_text(self.reason), "figures": dict(self.figures)}


def check_result(
    name: str, failures: Sequence[str], figures: Mapping[str, Any], *, warnings: Sequence[str] = (), note: str = ""
) -> CertificateCheck:
    """Return a check that fails with the failures, warns with the warnings, or passes with the note."""
    problems = [*failures, *warnings]
    status = FAILED if failures else WARNED if warnings else PASSED
    reason = problems[0] if problems else note
    if len(problems) > 1:
        reason += f" (and {len(problems) - 1} more)"
    return CertificateCheck(name, status, reason, REMEDIES[name] if problems else "", figures)


def skipped_check(name: str, reason: str) -> CertificateCheck:
    """Return a check that was skipped."""
    return CertificateCheck(name, SKIPPED, reason)


def certified(checks: Sequence[CertificateCheck]) -> bool:
    """Return True if no check failed."""
    return all(check.status != FAILED for check in checks)


def render(subject: Mapping[str, Any], checks: Sequence[CertificateCheck], overrides: Sequence[str] = ()) -> str:
    """Return the page as HTML text. subject: facts about what was certified, by name."""
    return page(
        "certificate.html.j2",
        subject=dict(subject),
        passed=certified(checks),
        rows=[(check, DESCRIPTIONS[check.name]) for check in checks],
        overrides=[mask_text(override) for override in overrides],
    )
