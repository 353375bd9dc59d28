"""Generations: what recipes share that train on the episodes of several rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from components.algorithms.spec import AlgorithmSpec
from components.errors import Problem, SpecError
from flows.recipes.episodes import Episodes
from flows.recipes.rounds import Round
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

EvolveFrom = Literal["base", "start", "last"]
"""Policy that each training starts from: the base model, the policy before the first round, or that of the round
before."""


def evolve(
    run: Run, gather: Callable[[Round], list[Episodes]], *, evolve_from: EvolveFrom, keep: int | None
) -> PolicyVersion:
    """Warm up; in each round gather episodes and train on those of the last rounds. Return the last policy.

    Demonstrations of the warmup are generation 0; algorithms that compare episodes leave them out. keep: generations to
    train on; None: all. Raises SpecError for a policy gradient on episodes of earlier policies."""
    algorithm = run.spec.algorithm
    if algorithm.needs_sampled_tokens and (problems := list(_off_policy(algorithm, evolve_from, keep))):
        raise SpecError(problems)
    start, demonstrations = run.warm_up(run.begin())
    generations = [[] if algorithm.compares else demonstrations]
    for round in run.rounds(start):
        generations.append(gather(round))
        window = generations[-keep:] if keep else generations
        policies = {"base": PolicyVersion(), "start": start, "last": round.policy}
        round.train([episodes for generation in window for episodes in generation], start=policies[evolve_from])
    return run.policy


def _off_policy(algorithm: AlgorithmSpec, evolve_from: EvolveFrom, keep: int | None) -> Iterator[Problem]:
    """Yield the problem of each setting by which a policy gradient trains on episodes of another policy."""
    text = f"{algorithm.name} learns from tokens of the current policy"
    if evolve_from != "last":
        yield Problem("flow.evolve_from", f"{evolve_from}: {text}, so a training starts from it; expected last")
    if keep != 1:
        expected = "expected 1, algorithm=sft, or a preference algorithm"
        yield Problem(
            "flow.keep_generations", f"{keep or 'null'}: {text}, and generations are of earlier ones; {expected}"
        )
