"""Sides of a comparison: runs with the same settings and different seeds, and the verdicts on them.

Sides are stated (`A=RUN,RUN B=RUN,RUN`) or follow from the settings: runs that differ in nothing that affects results
but the seed. Runs without sides are compared one by one; the verdict then concerns these policies, not their settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from components.errors import ResourceError
from components.evaluation.power import scenarios_needed
from components.evaluation.sequential import METHOD as SEQUENCE
from components.evaluation.sequential import TITLE as SEQUENCE_TITLE
from components.evaluation.sequential import alpha_of
from components.evaluation.verdict import Verdict, outcome, seeded_verdict

if TYPE_CHECKING:
    from components.pages.comparison import BaselineComparison, ComparedRun
    from components.trajectories.schema import Trajectory
    from flows.history.records import RunRecord

_SIDE = re.compile(r"([A-Za-z][\w.-]*)=(.*)")
EXAMPLE = "A=RUN1,RUN2,RUN3 B=RUN4,RUN5,RUN6"
METHODS = {
    "newcombe": "paired by scenario (Newcombe 1998)",
    "bootstrap": "paired bootstrap over scenarios",
    SEQUENCE: SEQUENCE_TITLE,
}
"""Descriptions of the methods of paired intervals."""


@dataclass(frozen=True)
class Side:
    """Runs of one setting."""

    name: str
    runs: Sequence[ComparedRun]


def stated_sides(arguments: Sequence[str]) -> dict[str, list[str]] | None:
    """Return the references of each side by name; None if the arguments are single runs. Raises ResourceError."""
    matches = [_SIDE.fullmatch(argument) for argument in arguments]
    if not any(matches):
        return None
    sides: dict[str, list[str]] = {}
    for argument, match in zip(arguments, matches, strict=True):
        if match is None:
            raise ResourceError(f"{argument!r} is a run without a side; expected all runs in sides: {EXAMPLE}")
        name, runs = match[1], [run for run in match[2].split(",") if run]
        if name in sides:
            raise ResourceError(f"side {name} is given twice; list its runs once, separated by commas: {EXAMPLE}")
        sides[name] = runs
    for name, runs in sides.items():
        if len(runs) < 2:
            raise ResourceError(
                f"side {name} has {len(runs)} run{'s' * (len(runs) != 1)}: an interval over seeds needs at least 2 "
                "runs with different seeds on each side. Run further seeds ('seeds=[0,1,2]'), or compare single runs: "
                "python -m flows.compare RUN1 RUN2"
            )
    if len(sides) < 2:
        raise ResourceError(f"there is only the side {next(iter(sides))}; expected at least two: {EXAMPLE}")
    return sides


def sides_by_setting(settings: Sequence[Hashable], seeds: Sequence[int]) -> list[list[int]] | None:
    """Return the indices of the runs of each side, in the order of their first runs. None if the settings give no
    sides: all are equal or all differ, or a seed occurs twice with the same setting."""
    groups: dict[Hashable, list[int]] = {}
    for index, setting in enumerate(settings):
        groups.setdefault(setting, []).append(index)
    repeated = any(len({seeds[index] for index in members}) < len(members) for members in groups.values())
    if repeated or not 1 < len(groups) < len(settings):
        return None
    return list(groups.values())


def check_settings(sizes: Mapping[str, int], settings: Mapping[str, Sequence[str]], runs: Sequence[RunRecord]) -> None:
    """Raise ResourceError if a stated side mixes settings or repeats a seed. sizes: number of runs of each side, in the
    order of the runs. settings: differing ones, with the value of each run."""
    start = 0
    for name, size in sizes.items():
        members = range(start, start + size)
        start += size
        for key, values in settings.items():
            if len({values[index] for index in members}) > 1:
                texts = _excerpts([values[index] for index in members])
                listed = ", ".join(
                    f"{text} (run {runs[index].short})" for text, index in zip(texts, members, strict=True)
                )
                raise ResourceError(
                    f"side {name} mixes settings: {key} = {listed}; expected runs that differ in their seed only"
                )
        seeds = [runs[index].seed for index in members]
        if repeated := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
            raise ResourceError(f"side {name} has seed {repeated[0]} twice; expected runs with different seeds")


def _excerpts(values: Sequence[str], width: int = 60) -> list[str]:
    """Return the part of each value around the first difference."""
    shortest = min(map(len, values))
    same = next((index for index in range(shortest) if len({value[index] for value in values}) > 1), shortest)
    start = max(0, same - width // 2)
    texts = [(value[start : start + width], len(value) > start + width) for value in values]
    return [f"{'…' * (start > 0)}{text}{'…' * cut}" for text, cut in texts]


def pairs_of_sides(sides: Sequence[Side]) -> list[tuple[ComparedRun, ComparedRun]]:
    """Return each run of a side with the baseline's run of the same seed, or its first run."""
    first, *others = sides
    by_seed = {run.seed: run for run in first.runs}
    return [(by_seed.get(run.seed, first.runs[0]), run) for side in others for run in side.runs]


def verdicts_of_sides(sides: Sequence[Side]) -> list[Verdict]:
    """Return the verdict on each side against the first. With a run without an evaluation, different evaluations within
    a side, or fewer than two shared scenarios there is no verdict, and its advice is the reason."""
    verdicts = []
    for side in sides[1:]:
        problem = _problem(sides[0]) or _problem(side)
        try:
            if problem:
                raise ResourceError(problem)
            verdicts.append(_verdict(sides[0], side))
        except ResourceError as error:
            seeds = {part.name: sorted(run.seed for run in part.runs) for part in (sides[0], side)}
            verdicts.append(Verdict(side.name, sides[0].name, None, seeds, advice=str(error)))
    return verdicts


def _problem(side: Side) -> str:
    """Return the reason why the runs of a side are not comparable; empty if they are."""
    names = {}
    for run in side.runs:
        if run.last is None:
            return f"side {side.name}: run {run.short} has no finished evaluation: {'; '.join(run.notes)}"
        if "sequence" in run.last.summary:
            return (
                f"side {side.name}: run {run.short} may stop its evaluation early (evaluate.stop=decided), and an "
                "interval over seeds needs a fixed number of scenarios; run its command with evaluate.stop=never, "
                "which repeats only its last evaluations"
            )
        names[list(run.evaluations)[-1]] = run.short
    if len(names) > 1:
        listed = ", ".join(f"{name} of run {short}" for name, short in names.items())
        return f"side {side.name} has different evaluations: {listed}; finish the runs, or leave them out"
    return ""


def _verdict(baseline: Side, side: Side) -> Verdict:
    """Return the verdict on a side. Raises ResourceError if the runs share fewer than two scenarios."""
    runs = [*baseline.runs, *side.runs]
    rates = {run.id: success_by_scenario(run.last.trajectories if run.last else ()) for run in runs}
    shared = sorted(set.intersection(*(set(rate) for rate in rates.values())))
    if len(shared) < 2:
        raise no_shared_scenario(baseline.name, side.name, [baseline.runs[0], side.runs[0]], len(shared))
    before, after = (
        {run.seed: [rates[run.id][key] for key in shared] for run in members.runs} for members in (baseline, side)
    )
    if min(len(before), len(after)) < 2:
        return _one_seed(baseline, side, before, after)
    return seeded_verdict((baseline.name, side.name), before, after)


def _one_seed(
    baseline: Side, side: Side, before: Mapping[int, Sequence[float]], after: Mapping[int, Sequence[float]]
) -> Verdict:
    """Return the verdict if a side that follows from the settings has a single seed."""
    lacking = " and ".join(member.name for member, rates in ((baseline, before), (side, after)) if len(rates) < 2)
    means = [sum(map(sum, rates.values())) / sum(map(len, rates.values())) for rates in (before, after)]
    return Verdict(
        side.name,
        baseline.name,
        "undecided",
        {baseline.name: sorted(before), side.name: sorted(after)},
        means[1] - means[0],
        scenarios=len(next(iter(before.values()))),
        advice=f"{lacking} has one seed, so its variation over seeds is unknown: run at least one more seed",
    )


def success_by_scenario(trajectories: Sequence[Trajectory]) -> dict[tuple[str, str], float]:
    """Return the success rate of finished episodes by scenario: its id and content."""
    from components.trajectories.stored import episodes_of

    episodes = episodes_of(trajectories)
    columns = episodes.columns
    outcomes: dict[str, list[bool]] = {}
    for name, failed, success in zip(
        columns.group_texts, columns.failed_N.tolist(), columns.success_N.tolist(), strict=True
    ):
        if not failed:
            outcomes.setdefault(name, []).append(success)
    scenarios = episodes.scenarios()
    contents = {name: json.dumps(asdict(scenarios[name]), sort_keys=True, default=str) for name in outcomes}
    return {(name, contents[name]): fmean(successes) for name, successes in outcomes.items()}


def no_shared_scenario(baseline: str, side: str, runs: Sequence[ComparedRun], count: int = 0) -> ResourceError:
    """Return the error of two sides without scenarios in common. runs: an example of each."""
    examples = " and ".join(
        f"{run.name} plays {run.last.trajectories[0].group}" for run in runs if run.last and run.last.trajectories
    )
    number = "no held-out scenario that both finished" if not count else "only one held-out scenario"
    return ResourceError(
        f"{side} and {baseline} share {number} (for example, {examples}): a verdict needs evaluations of the same "
        "environment, with the same evaluate.split and evaluate.scenarios"
    )


def verdicts_of_runs(runs: Sequence[ComparedRun], against: Sequence[BaselineComparison]) -> list[Verdict]:
    """Return the verdict on each single run against the first; runs without a common scenario have none."""
    baseline, *others = runs
    return [_verdict_of_run(baseline, run, comparison) for run, comparison in zip(others, against, strict=True)]


def _verdict_of_run(baseline: ComparedRun, run: ComparedRun, against: BaselineComparison) -> Verdict:
    """Return the verdict on a single run against the baseline, over scenarios."""
    seeds = {baseline.letter: [baseline.seed], run.letter: [run.seed]}
    paired = against.difference
    if paired is None:
        evaluated = baseline.last is not None and run.last is not None
        reason = [str(no_shared_scenario(baseline.letter, run.letter, [baseline, run]))] if evaluated else against.notes
        return Verdict(run.letter, baseline.letter, None, seeds, advice="; ".join(reason))
    result = outcome(paired["low"], paired["high"])
    advice = "one seed of each: it concerns these two policies, not their settings"
    if result == "undecided":
        changed = (len(paired["improved"]) + len(paired["regressed"])) / paired["n"]
        effect = paired["difference"]
        if effect:
            alpha = alpha_of(*(side.last.summary for side in (baseline, run) if side.last))
            enough = scenarios_needed(effect, changed, alpha)
            needed = f"about {enough} scenarios would decide an effect of this size"
            advice = f"{advice}; {needed} (80 % power)"
        advice += "; to compare settings, run several seeds of each"
    return Verdict(
        run.letter,
        baseline.letter,
        result,
        seeds,
        paired["difference"],
        paired["low"],
        paired["high"],
        paired["n"],
        METHODS[paired["method"]],
        advice=advice,
    )
