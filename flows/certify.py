r"""`python -m flows.certify +experiment=NAME [overrides]`: checks that chat template, engine, trainer and export agree.

    python -m flows.certify +experiment=NAME                            nine checks, as a table
    python -m flows.certify +experiment=NAME inference=vllm             the same with another engine
    python -m flows.certify +experiment=NAME --scenarios 16 --samples 4 --json --html page.html

The checks: the chat template continues conversations, tool calls survive tokenization, responses end where the
template ends them, the trainer computes the log-probabilities of the sampler, the sampling cut keeps most of the mass,
the engine answers with the weights that it was given, the export equals the policy, the environment's solver succeeds
and chance fails. docs/guides/certify.md describes each. A certificate without a failure is cached: it is the stage with
which a run begins with certify=true.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import CertificateFailed
from flows.evaluation.checks_command import CheckedSubject, ChecksCommand, Count
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec


def certify(spec: ExperimentSpec, counts: Mapping[str, int], overrides: Sequence[str]) -> CheckedSubject:
    """Certify model and engine of an experiment. Raises SpecError, ResourceError, and errors of environment and
    engine."""
    from components.json_text import read_json
    from components.models.weights import check_weights
    from flows.experiment.prerequisites import check_keys, check_model
    from flows.experiment.requests import Requests
    from flows.stages import STAGES
    from flows.stages.base import Context
    from flows.stages.certify import FILE, certificate_page
    from flows.stages.execute import run_stage
    from flows.terminal.console import Console, duration, logging_to
    from flows.terminal.interrupt import Interruption

    check_keys(spec)
    with ExitStack() as stack:
        stack.enter_context(Interruption())
        root = Path(spec.root)
        context = Context.created(root, spec.store, lock_timeout=spec.compute.lock_timeout)
        context.store.check()
        stack.callback(context.warm.close)
        spec.inference.check_prerequisites()
        check_weights(spec.model, context.cache)
        check_model(spec, context.cache)
        console = Console()
        log = root / "logs" / f"certify-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        request, start = Requests(spec).certify(**counts), time.monotonic()
        try:
            with console.stage("certify", STAGES["certify"].unit) as view:
                artifact, status = run_stage(request, replace(context, progress=view))
            data: dict[str, Any] = read_json(artifact.path / FILE)
        except CertificateFailed as failure:
            data, status = failure.data, "ran"
        console.line(f"certify {status} in {duration(time.monotonic() - start)}")
    page = certificate_page(data, overrides)
    data |= {"experiment": spec.name, "status": status}
    return CheckedSubject(data, spec.name, spec.name, page, data["subject"])


COMMAND = ChecksCommand(
    "certify",
    "Checks that chat template, engine, trainer and export of an experiment agree.",
    {"scenarios": Count(4, 1, "scenarios as prompts"), "samples": Count(1, 1, "completions per prompt")},
    certify,
)
main = COMMAND.main

if __name__ == "__main__":
    leave(main)
