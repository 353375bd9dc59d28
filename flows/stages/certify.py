"""Certify stage: checks that chat template, engine, trainer and export agree, before anything is trained.

A certificate with a failed check is no artifact: the stage raises `CertificateFailed`, and the next attempt checks
again.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.errors import CertificateFailed
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.rollout.collect_spec import CollectSpec
from components.rollout.spec import AgentSpec
from components.specs import Target
from flows.stages.base import Context, Inputs, Request, Stage, StageSpec

log = logging.getLogger(__name__)

FILE, PAGE = "certificate.json", "certificate.html"
SPLIT = "train"
PLAYED = 16
"""Number of scenarios that solver and chance play."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Keys of `collect` that determine the sampling distribution."""
PACKAGES = ("peft", "torch", "transformers")
"""Packages whose versions are part of a certificate's key."""


def installed_versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES`."""
    return {package: version(package) for package in PACKAGES}


class CertifyStage(StageSpec):
    model: ModelSpec
    environment: Target
    agent: AgentSpec
    inference: InferenceSpec = EmbeddedSpec()
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    scenarios: int = Field(4, ge=1)
    """Number of scenarios whose first messages are prompts."""
    samples: int = Field(1, ge=1)
    """Completions of each prompt."""
    timeout: float = Field(600.0, gt=0)
    """Maximum time of the environment's episodes of one check, in seconds; not part of the key."""
    versions: dict[str, str] = {}
    """Versions of the packages that compute: another version is certified anew."""

    def key_part(self) -> dict[str, Any]:
        return {
            "model": self.model.key_part(),
            "environment": self.environment.resolved(),
            "agent": self.agent.key_part(),
            **self.inference.key_part(),
            **{name: getattr(self, name) for name in (*SAMPLING, "scenarios", "samples", "versions")},
        }


def certify(spec: CertifyStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `certificate.json` and `certificate.html`. No inputs.

    Raises CertificateFailed if a check fails."""
    from components.evaluation.checks import WARNED, all_passed
    from components.models.weights import prepare
    from flows.certification.certificate import certify as run_checks
    from flows.certification.subject import Subject, draw, open_episodes
    from flows.stages.episodes import scenarios_of, warm_engine

    scenarios = draw(scenarios_of(spec.environment, SPLIT, context), max(PLAYED, spec.scenarios))
    make = spec.environment.build
    with tempfile.TemporaryDirectory(prefix="certify-", dir=context.scratch) as scratch:
        subject = Subject(
            model=spec.model,
            agent=spec.agent,
            sampling=CollectSpec(**{name: getattr(spec, name) for name in SAMPLING}).sampling(
                spec.agent.max_tokens, spec.agent.max_thinking_tokens
            ),
            base_dir=prepare(spec.model, context.cache),
            openings=open_episodes(make, scenarios[: spec.scenarios], spec.timeout),
            deliver=lambda folder: warm_engine(spec.model, None, context, spec.inference, folder),
            in_process=spec.inference.in_process,
            returns_tokens=spec.inference.returns_tokens,
            loads_policies=spec.inference.loads_policies,
            scratch=Path(scratch),
            make_environment=make,
            played=scenarios,
            timeout=spec.timeout,
            samples=spec.samples,
        )
        try:
            checks = run_checks(subject, context.progress)
        finally:
            if subject.returns_tokens and subject.loads_policies:
                subject.deliver(None).release()
    data = {
        "passed": all_passed(checks),
        "subject": facts(spec),
        "checks": [check.to_json(remedy=check.remedy) for check in checks],
    }
    for check in checks:
        if check.status == WARNED:
            log.warning("certify, %s: %s. %s", check.name, check.reason, check.remedy)
    if not data["passed"]:
        raise CertificateFailed(data)
    (draft.path / FILE).write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    (draft.path / PAGE).write_text(certificate_page(data), encoding="utf-8")
    return _metrics(data)


def certificate_page(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> str:
    """Return the page of a certificate as HTML text. data: content of `certificate.json`."""
    from components.evaluation.checks import CERTIFICATE
    from components.pages.page import page

    subject = data["subject"]
    return page(
        "checks.html.j2",
        kind="Certificate of a model and an engine",
        name="certificate",
        title=subject["model"],
        facts=[f"engine {subject['engine']}"],
        data=data,
        descriptions=CERTIFICATE,
        examples={},
        subject=subject,
        overrides=overrides,
    )


def facts(spec: CertifyStage) -> dict[str, Any]:
    """Return what is certified, for the page."""
    cuts = ", ".join(f"{name}={getattr(spec, name):g}" for name in SAMPLING)
    lora = spec.model.lora
    return {
        "model": Path(spec.model.name).name,
        "dtype": spec.model.dtype,
        "trained": f"LoRA of rank {lora.rank}" if lora else "all weights",
        "engine": spec.inference.name,
        "sampling": cuts,
        "environment": spec.environment.target,
        "agent format": spec.agent.format,
        **spec.versions,
    }


def _metrics(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the number of checks by status, and the main figures."""
    checks = {check["name"]: check for check in data["checks"]}
    metrics = {
        status: float(sum(check["status"] == status for check in checks.values()))
        for status in ("passed", "warned", "skipped")
    }
    for name, check, figure in (
        ("logprob_max", "logprobs", "max"),
        ("logprob_mean", "logprobs", "mean"),
        ("kept_mass", "kept_mass", "mean_kept"),
    ):
        if figure in checks[check]["figures"]:
            metrics[name] = checks[check]["figures"][figure]
    return metrics


def summary(metrics: Mapping[str, float]) -> str:
    """Return the counts of checks as text."""
    return "  ".join(f"{name} {metrics[name]:.0f}" for name in ("passed", "warned", "skipped") if metrics.get(name))


def checks_of(request: Request) -> int:
    """Return the number of checks."""
    from components.evaluation.checks import CERTIFICATE

    return len(CERTIFICATE)


STAGE = Stage(
    "certify",
    2,
    CertifyStage,
    "certificate",
    1,
    certify,
    files={FILE: "result of each check", PAGE: "the same as a page"},
    order=5,
    unit="checks",
    size=checks_of,
    summary=summary,
)
