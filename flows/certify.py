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

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import CertificateFailed, EspalierError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.console import printable_lines
from flows.terminal.exit_codes import print_error
from flows.terminal.interrupt import leave
from flows.terminal.pages import write_page

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec

FOLDER = "certify"


def certify(
    spec: ExperimentSpec,
    *,
    scenarios: int = 4,
    samples: int = 1,
    overrides: Sequence[str] = (),
    html: Path | None = None,
) -> dict[str, Any]:
    """Certify model and engine of an experiment and write the page. Return the result as JSON data. Raises SpecError,
    ResourceError, and errors of environment and engine."""
    from components.evaluation.certificate_page import CertificateCheck, render
    from components.json_text import read_json
    from components.models.weights import check_weights
    from flows.experiment.prerequisites import check_keys
    from flows.experiment.requests import Requests
    from flows.stages import STAGES
    from flows.stages.base import Context
    from flows.stages.certify import FILE
    from flows.stages.execute import run_stage
    from flows.terminal.console import Console, duration, hush, logging_to
    from flows.terminal.interrupt import Interruption

    check_keys(spec)
    hush()
    with ExitStack() as stack:
        stack.enter_context(Interruption())
        stack.enter_context(redirect_stdout(sys.stderr))  # stdout carries the result only
        root = Path(spec.root)
        context = Context.created(root, spec.store, lock_timeout=spec.compute.lock_timeout)
        context.store.check()
        stack.callback(context.warm.close)
        spec.inference.check_prerequisites()
        check_weights(spec.model, context.cache)
        console = Console()
        log = root / "logs" / f"certify-{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        stack.enter_context(logging_to(log, console))
        request, start = Requests(spec).certify(scenarios=scenarios, samples=samples), time.monotonic()
        try:
            with console.stage("certify", STAGES["certify"].unit) as view:
                artifact, status = run_stage(request, replace(context, progress=view))
            data: dict[str, Any] = read_json(artifact.path / FILE)
        except CertificateFailed as failure:
            data, status = failure.data, "ran"
        console.line(f"certify {status} in {duration(time.monotonic() - start)}")
    checks = [CertificateCheck(**check) for check in data["checks"]]
    page = html or root / FOLDER / f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}.html"
    page = write_page(page, render(data["subject"], checks, overrides))
    return {**data, "experiment": spec.name, "status": status, "html": str(page)}


def show(data: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [", ".join(f"{name} {value}" for name, value in data["subject"].items())]
    for check in data["checks"]:
        figures = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in check["figures"].items()
        )
        lines.append(f"{check['status']:8}{check['name']:15}{figures}".rstrip())
        lines += [f"{'':23}{text}" for text in (check["reason"], check["remedy"]) if text]
    lines += [f"page: {data['html']}", f"{data['experiment']}: {'passed' if data['passed'] else 'failed'}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 1 if a check fails; 2 for a user error; 130 if interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.certify",
        description="Checks that chat template, engine, trainer and export of an experiment agree.",
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.run: +experiment=NAME key=value")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--scenarios", type=int, default=4, metavar="N", help="scenarios as prompts (default: 4)")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="completions per prompt (default: 1)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file of the page")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    for name in ("scenarios", "samples"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    out = sys.stdout
    from flows.experiment.compose import check
    from flows.terminal.overrides import mask_overrides

    try:
        spec = check(options.overrides, config_dir=options.config_dir)[0]
        data = certify(
            spec,
            scenarios=options.scenarios,
            samples=options.samples,
            overrides=mask_overrides(options.overrides),
            html=options.html,
        )
    except EspalierError as error:
        return print_error(error)
    except KeyboardInterrupt:
        return 130
    print(json.dumps(data) if options.json else printable_lines(show(data).splitlines()), file=out, flush=True)
    return 0 if data["passed"] else 1


if __name__ == "__main__":
    leave(main)
