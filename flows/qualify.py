r"""`python -m flows.qualify environment=NAME [overrides]`: checks whether an environment is fit for training.

    python -m flows.qualify environment=shop                            nine checks, as a table
    python -m flows.qualify +experiment=NAME --scenarios 32             the environment of an experiment, more episodes
    python -m flows.qualify environment=maze agent.max_turns=72 --json --html maze.html

The checks: the solver succeeds, chance fails, a replay is identical, instances are isolated, a saved state continues,
the splits are disjoint in substance, cheap exploits earn nothing, a new instance agrees on success, and solutions fit
`model.max_length` and `agent.max_turns`. No model is sampled from. docs/guides/qualify.md describes each check.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flows.evaluation.checks_command import CheckedSubject, ChecksCommand, Count
from flows.terminal.interrupt import leave

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec


def qualify(spec: ExperimentSpec, counts: Mapping[str, int], overrides: Sequence[str]) -> CheckedSubject:
    """Check the environment of an experiment."""
    from components.evaluation.checks import QUALIFICATION, all_passed
    from components.pages.page import page
    from flows.qualification.qualification import qualify as run_checks
    from flows.stages.base import Context

    environment = spec.required_environment.target
    checks = run_checks(spec, counts["scenarios"], Context.created(spec.root, spec.store).cache)
    data = {
        "environment": environment,
        "passed": all_passed(checks),
        "checks": [check.to_json(examples=[example.id for example in check.examples]) for check in checks],
    }
    html = page(
        "checks.html.j2",
        kind="Qualification of an environment",
        name="qualification",
        title=environment,
        facts=[time.strftime("%Y-%m-%d %H:%M:%S")],
        data=data,
        descriptions=QUALIFICATION,
        examples={check.name: check.examples for check in checks if check.examples},
        subject={},
        overrides=overrides,
    )
    return CheckedSubject(data, environment, environment.rpartition(".")[2], html)


COMMAND = ChecksCommand(
    "qualify",
    "Checks whether an environment is fit for training.",
    {"scenarios": Count(16, 2, "scenarios to play")},
    qualify,
)
main = COMMAND.main

if __name__ == "__main__":
    leave(main)
