"""Certificate of a model, an engine and a trainer: all checks, one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from components.errors import EspalierError
from components.evaluation.certificate_page import CertificateCheck, check_result, skipped_check
from components.inference.protocol import ModelEngine
from flows.certification import adapter, export, limits, sampler, special_tokens, template, tool_calls
from flows.certification.environment import check_environment
from flows.certification.subject import Subject

CHECKS = (
    template.NAME, tool_calls.NAME, special_tokens.NAME, limits.NAME, sampler.LOGPROBS, sampler.KEPT_MASS, adapter.NAME,
    export.NAME, "solver", "chance",
)  # fmt: skip
"""Checks in their order."""


def certify(
    subject: Subject, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[CertificateCheck]:
    """Return the result of each check. Raises the errors of the engine's construction, ResourceError among them."""
    engine = subject.deliver(None)
    checks: list[CertificateCheck] = []
    for check in _run(subject, engine):
        checks.append(check)
        progress(len(checks), len(CHECKS))
    return checks


def _run(subject: Subject, engine: ModelEngine) -> Iterator[CertificateCheck]:
    yield _guarded(template.NAME, lambda: template.check_template(subject))
    yield _guarded(tool_calls.NAME, lambda: tool_calls.check_tool_calls(subject))
    yield _guarded(special_tokens.NAME, lambda: special_tokens.check_special_tokens(subject, engine))
    yield _guarded(limits.NAME, lambda: limits.check_limits(subject, engine))
    yield from _against_trainer(subject)
    yield from check_environment(subject)


def _against_trainer(subject: Subject) -> Iterator[CertificateCheck]:
    """Yield the checks that need token ids of the engine."""
    names = (sampler.LOGPROBS, sampler.KEPT_MASS, adapter.NAME, export.NAME)
    if not subject.returns_tokens:
        yield from (
            skipped_check(name, "the engine returns no token ids, so nothing can be trained with it") for name in names
        )
        return
    measured = functools.cache(lambda: sampler.Measured.of(subject, subject.deliver(None)))
    yield _guarded(sampler.LOGPROBS, lambda: sampler.check_logprobs(measured()))
    yield _guarded(sampler.KEPT_MASS, lambda: sampler.check_kept_mass(measured()))
    if not subject.loads_policies:
        yield from (skipped_check(name, "the engine loads no trained weights") for name in names[2:])
        return
    yield _guarded(adapter.NAME, lambda: adapter.check_adapter(subject))
    folder = probe_folder(subject)
    if folder is None:
        yield skipped_check(export.NAME, "no probe was made")
    else:
        yield _guarded(export.NAME, lambda: export.check_export(subject, folder))


def probe_folder(subject: Subject) -> Path | None:
    """Return the folder of the trained weights of the first probe, if there is one."""
    folder = subject.trainer.folder(subject.scratch / adapter.PROBES[0].replace(" ", "-"))
    return folder if folder.is_dir() else None


def _guarded(name: str, check: Callable[[], CertificateCheck]) -> CertificateCheck:
    """Run a check. An error of an engine or of the model's files is a failed check."""
    try:
        return check()
    except EspalierError as error:
        return check_result(name, [f"{type(error).__name__}: {error}"], {})


def failures_of(checks: Sequence[CertificateCheck]) -> list[CertificateCheck]:
    """Return the checks that failed."""
    return [check for check in checks if check.status == "failed"]
