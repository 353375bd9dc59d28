"""What a deployment is started with: an experiment and overrides, and what may stand there.

Prefect keeps the parameters of its runs and shows them to whoever sees its UI. No Prefect here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from components.errors import Problem, SpecError
from flows.spec import ExperimentSpec


def resolve(experiment: str, overrides: Sequence[str], config_dir: str | None = None) -> ExperimentSpec:
    """The spec of one run, as `python -m flows.run` composes it. Raises SpecError with every mistake, also for an
    override that holds a secret, which Prefect would store and show, or is for Hydra's own launcher."""
    from flows.config import compose
    from flows.overrides import refuse_secrets

    refuse_secrets(overrides)
    if refused := list(_refused(overrides)):
        raise SpecError(refused)
    return compose([f"+experiment={experiment}", *overrides], config_dir=config_dir)


def _refused(overrides: Sequence[str]) -> Iterator[Problem]:
    for line in overrides:
        key = line.partition("=")[0].lstrip("+~")
        if key == "experiment":
            yield Problem(key, "is chosen by the parameter `experiment`; expected no such override")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            yield Problem(key, "is for the command line only; expected no such override")
