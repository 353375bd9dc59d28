"""Self-evolution: the policy attempts scenarios, its attempts are evaluated and selected, and it learns from them.

    variation g ─▶ k attempts ─▶ evaluation ─▶ selection ─▶ last generations ─▶ SFT or DPO ─▶ policy g ─▶ …

Evaluation is the experiment's `reward`, which may be the policy as its own judge, or `reward_model`, which is trained
from the policy. Selection is `filter`: rejection sampling, the best share, a threshold, or both sides of a preference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from components.errors import SpecError
from components.specs import Target, validate
from flows.experiment.checks import worlds
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.episodes import Episodes
from flows.recipes.generations import EvolveFrom, evolve
from flows.recipes.rounds import Round
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

Variation = dict[str, Any]
"""Arguments of the environment, by name, that replace those of the experiment."""


@recipe("rounds", "early_stopping", "warmup", "data", "fork", "reward_model")
def self_evolve(
    run: Run,
    spec: ExperimentSpec,
    *,
    evolve_from: EvolveFrom = "last",
    keep_generations: Annotated[int, Field(ge=1)] | None = 3,
    variations: Annotated[list[Variation], Field(min_length=1)] | None = None,
) -> PolicyVersion:
    """In each generation attempt scenarios with the current policy, select attempts, and train on those of the last
    generations. Demonstrations of a warmup are generation 0; algorithms that compare attempts leave them out.

    evolve_from: policy that each training starts from: the base model, the policy before the first generation, or that
    of the generation before. keep_generations: generations to train on; null: all. variations: arguments of the
    environment for each generation, in turn: more scenarios from another seed, other difficulties, paraphrased tasks.
    Evaluations and the warmup are on the environment without them."""
    if variations:
        run.refuse_overlap()
    environments = list(_environments(spec, variations or [{}]))

    def gather(round: Round) -> list[Episodes]:
        environment = environments[(round.number - 1) % len(environments)]
        return round.gather(run.using(environment=environment) if variations else None)

    return evolve(run, gather, evolve_from=evolve_from, keep=keep_generations)


def _environments(spec: ExperimentSpec, variations: list[Variation]) -> Iterator[Target]:
    """Yield the environment of each variation. Raises SpecError for an invalid one."""
    data = spec.required_environment.model_dump(mode="json")
    for number, variation in enumerate(variations):
        path = f"flow.variations.{number}"
        environment = validate(Target, {**data, **variation}, path=path, allow=spec.allow)
        needs = (spec.evaluate, spec.collect, spec.rounds, None, None, spec.data, spec.flow)
        if problems := [replace(problem, path=path) for problem in worlds.environment(environment, *needs)]:
            raise SpecError(problems)
        yield environment
