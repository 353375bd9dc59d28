"""Power of a plan: signal in its groups, detectable gain, and the sizes that show the gain that a user wants.

The success of the policy that starts the rounds comes from the user (`--success`), from the first round of the most
similar earlier run below the root, or else from that run's evaluation before the rounds. An earlier run is similar if
it has the same environment, agent and model; runs with the same warmup and experiment come first. Discordance is that
of the run's evaluations before and after the rounds; without one, the worst case. The deviation over seeds is that of
the gains of earlier runs with the same experiment, overrides and environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import stdev
from typing import Any

from components.errors import EspalierError
from components.evaluation.power import (
    Outcomes,
    detectable_gain,
    group_signal,
    group_size_for,
    sampling_deviation,
    scenarios_for_gain,
    seeds_for_gain,
    signal_share,
)
from components.trajectories.reads import OUTCOME, SCENARIO
from flows.experiment.spec import ExperimentSpec
from flows.history.records import Records, RunRecord
from flows.history.store_reader import StoreReader
from flows.history.trust import recorded_reader
from flows.planning.run_plan import RunPlan

SIGNAL = 0.5
"""Share of groups with signal that a recommended group size reaches."""
LITTLE_SIGNAL = 0.2
"""Share of groups with signal below which a warning is given."""
SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
START = ("evaluate[sft]", "evaluate[start]")
_MEANINGFUL = ("environment", "agent", "model")


@dataclass(frozen=True)
class SizeChange:
    """Changed size with the estimates of a run with it."""

    override: str
    seconds: float | None
    cost: float | None


@dataclass(frozen=True)
class PlanPower:
    """Power of a planned experiment."""

    success: float
    """Success of the policy that starts the rounds."""
    source: str
    signal_share: float | None
    """Expected share of groups that carry a signal; None without rounds."""
    detectable_gain: float | None
    """Smallest gain of one run that its evaluation detects at 80 % power; None if there is none, or if the number of
    held-out scenarios is unknown."""
    scenarios: int | None
    """Held-out scenarios that show the wanted gain; without a wanted gain those of the evaluation."""
    seeds: int | None
    """Seeds that show the wanted gain, given the variation over seeds of earlier runs; if that is unknown, a lower
    bound from the number of scenarios alone. None without a wanted gain, and if more than 100 are needed."""
    seeds_at_least: bool
    """True if `seeds` is a lower bound."""
    discordance: float | None
    """Observed share of scenarios whose outcome changes; None: the worst case is assumed."""
    gain: float | None
    """Wanted gain."""
    group_size: int | None
    """Smallest group size with which at least half of the groups carry a signal."""
    changes: list[SizeChange] = field(default_factory=list)
    """Changes that show the wanted gain, with time and cost."""
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the power as JSON data."""
        return asdict(self)


@dataclass(frozen=True)
class _Evidence:
    outcomes: Sequence[Outcomes]
    source: str
    discordance: float | None = None
    deviation: float | None = None
    """Standard deviation of the gain over seeds."""


def plan_power(
    spec: ExperimentSpec,
    planned: RunPlan,
    replan: Callable[[ExperimentSpec], RunPlan],
    *,
    success: float | None = None,
    gain: float | None = None,
) -> PlanPower | None:
    """Return the power of a plan; None if the success of the policy is unknown. replan: plan another experiment."""
    evidence = _evidence(spec, success)
    if evidence is None:
        return None
    base = sum(item.successes for item in evidence.outcomes) / sum(item.episodes for item in evidence.outcomes)
    base = base if success is None else success
    size, heldout = spec.collect.group_size, _heldout(spec)

    def share(number: int) -> float:
        return group_signal(base, number) if success is not None else signal_share(evidence.outcomes, number)

    alpha = spec.evaluate.alpha if spec.evaluate.stop == "decided" else None
    smallest = None if heldout is None else detectable_gain(heldout, base, evidence.discordance, alpha)
    wanted = None if gain is None else scenarios_for_gain(gain, base, evidence.discordance, alpha)
    deviation = evidence.deviation
    if deviation is None and gain is not None and heldout is not None:
        deviation = sampling_deviation(gain, heldout, base, evidence.discordance)
    seeds = None if gain is None or deviation is None else seeds_for_gain(gain, deviation)
    better_size = (
        next((number for number in SIZES if share(number) >= SIGNAL), None)
        if success is not None
        else group_size_for(evidence.outcomes, SIGNAL, SIZES)
    )
    result = PlanPower(
        success=base,
        source=evidence.source,
        signal_share=share(size) if spec.rounds else None,
        detectable_gain=smallest,
        scenarios=heldout if wanted is None else wanted,
        seeds=seeds,
        seeds_at_least=seeds is not None and evidence.deviation is None,
        discordance=evidence.discordance,
        gain=gain,
        group_size=better_size,
    )
    result.changes.extend(_changes(spec, planned, replan, result, heldout))
    if success is not None or spec.model.source != "random":  # random weights test the flow, and learn nothing
        result.warnings.extend(_little_signal(spec, result))
    result.warnings.extend(_gain_warnings(result, heldout))
    return result


def _changes(
    spec: ExperimentSpec,
    planned: RunPlan,
    replan: Callable[[ExperimentSpec], RunPlan],
    result: PlanPower,
    heldout: int | None,
) -> list[SizeChange]:
    """Return the changes of sizes that the plan needs, with the estimates of a run with each."""
    changes = []
    size = result.group_size
    if result.signal_share is not None and result.signal_share < SIGNAL and size and size > spec.collect.group_size:
        collect = spec.collect.model_copy(update={"group_size": size})
        other = replan(spec.model_copy(update={"collect": collect}))
        changes.append(SizeChange(f"collect.group_size={size}", other.seconds, other.cost))
    if result.gain is not None and result.scenarios and heldout is not None and result.scenarios > heldout:
        evaluate = spec.evaluate.model_copy(update={"scenarios": result.scenarios})
        other = replan(spec.model_copy(update={"evaluate": evaluate}))
        changes.append(SizeChange(f"evaluate.scenarios={result.scenarios}", other.seconds, other.cost))
    if result.seeds is not None:
        override = f"seeds=[{','.join(map(str, range(result.seeds)))}]"
        seconds, cost = planned.seconds, planned.cost
        changes.append(
            SizeChange(
                override,
                None if seconds is None else seconds * result.seeds,
                None if cost is None else cost * result.seeds,
            )
        )
    return changes


def _little_signal(spec: ExperimentSpec, result: PlanPower) -> list[str]:
    """Return a warning if few groups carry a signal."""
    if result.signal_share is None or result.signal_share >= LITTLE_SIGNAL:
        return []
    warmup = "use a warmup" if spec.warmup is None else f"raise warmup.demonstrations={spec.warmup.demonstrations}"
    size = result.group_size
    advice = f"set collect.group_size={size}" if size else f"{warmup}, or choose easier tasks"
    text = f"only {result.signal_share:.0%} of the groups are expected to differ in success; {advice}"
    return [text.replace("%", " %")]


def _gain_warnings(result: PlanPower, heldout: int | None) -> list[str]:
    """Return the warnings about the gain that the evaluation can show."""
    warnings = []
    if result.gain is not None and result.success + result.gain > 1:
        warnings.append(f"a gain of {result.gain:g} is impossible from a success of {result.success:.2f}")
    elif heldout is not None and result.gain is not None and heldout < (result.scenarios or 0):
        warnings.append(
            f"the evaluation cannot show a gain of {result.gain:g}: {heldout} held-out scenarios, and it needs "
            f"{result.scenarios}; set evaluate.scenarios, and the number of held-out scenarios of the environment"
        )
    elif heldout is not None and result.gain is None and result.detectable_gain is None:
        warnings.append(f"{heldout} held-out scenarios cannot show any gain from a success of {result.success:.2f}")
    if result.seeds_at_least:
        warnings.append(
            "the number of seeds is a lower bound: no two earlier runs of this experiment show the variation over seeds"
        )
    return warnings


def _heldout(spec: ExperimentSpec) -> int | None:
    """Return the number of held-out scenarios of an evaluation; None if the environment does not list them."""
    from flows.stages.base import Context
    from flows.stages.episodes import scenarios_of

    context = Context.at(spec.root, spec.store)
    try:
        return len(scenarios_of(spec.required_environment, spec.evaluate.split, context)[: spec.evaluate.scenarios])
    except EspalierError:
        return spec.evaluate.scenarios
    finally:
        context.warm.close()


def _evidence(spec: ExperimentSpec, success: float | None) -> _Evidence | None:
    """Return the success of the policy before the rounds, with its source."""
    records = Records(spec.root)
    data = spec.model_dump(mode="json", by_alias=True)
    runs = sorted(_similar(records.all(), data), key=lambda run: -_likeness(run, data))  # stable: latest first
    measured = None
    for run in runs:
        reader = recorded_reader(records.root, run, trust=False, own=spec.store)
        if (measured := measure_start(run, reader)) is not None:
            break
    if success is not None:
        discordance = measured.discordance if measured else None
        outcomes = [Outcomes(round(success * 10_000), 10_000)]
        return _Evidence(outcomes, "--success", discordance, _deviation(runs, data))
    if measured is None:
        return None
    return _Evidence(measured.outcomes, measured.source, measured.discordance, _deviation(runs, data))


def _similar(runs: Sequence[RunRecord], data: Mapping[str, Any]) -> list[RunRecord]:
    return [run for run in runs if all(run.spec.get(name) == data[name] for name in _MEANINGFUL)]


def _likeness(run: RunRecord, data: Mapping[str, Any]) -> int:
    return 2 * (run.spec.get("warmup") == data["warmup"]) + (run.name == data["name"])


def _deviation(runs: Sequence[RunRecord], data: Mapping[str, Any]) -> float | None:
    """Return the standard deviation of the gain over the seeds of finished runs of the same experiment."""
    gains: dict[int, float] = {}
    for run in runs:
        same = all(run.spec.get(name) == data[name] for name in ("warmup", "algorithm", "rounds", "collect", "filter"))
        gain = (run.result or {}).get("gain")
        if same and run.name == data["name"] and isinstance(gain, float):
            gains.setdefault(run.seed, gain)
    return stdev(gains.values()) if len(gains) > 1 else None


def measure_start(run: RunRecord, reader: StoreReader) -> _Evidence | None:
    """Return what a run shows of the policy before its rounds: outcomes of its first round, or of its evaluation, and
    the discordance of its evaluations. None if neither is in the store."""
    keys = {stage.label: stage.key for stage in run.stages}
    labels = START[:1] if run.spec.get("warmup") is not None else START  # an interrupted run may lack the warmup
    start = next((label for label in labels if label in keys), None)
    before = successes_of(reader, keys[start]) if start else {}
    after = successes_of(reader, keys["evaluate[final]"]) if "evaluate[final]" in keys else {}
    shared = [name for name in before if name in after]
    changed = sum(before[name][0] != after[name][0] for name in shared)
    discordance = changed / len(shared) if shared else None
    label = "collect[1]" if "collect[1]" in keys else start
    groups = successes_of(reader, keys[label]) if label else {}
    if not groups and start:
        label, groups = start, before
    if not groups:
        return None
    outcomes = [Outcomes(sum(group), len(group), name[1]) for name, group in groups.items()]
    return _Evidence(outcomes, f"{label} of run {run.short} ({run.name} seed {run.seed})", discordance)


def successes_of(reader: StoreReader, key: str) -> dict[tuple[str, str], list[bool]]:
    """Return the successes of the finished episodes of a collection or evaluation, by group and its stratum."""
    from components.trajectories.sources import read_unscored

    groups: dict[tuple[str, str], list[bool]] = {}
    with reader.opened(key) as artifact:
        if artifact is None or not (artifact.path / "trajectories.parquet").is_file():
            return groups
        for episodes in read_unscored(artifact.path / "trajectories.parquet", frozenset({OUTCOME, SCENARIO})):
            strata = map("{} {}".format, episodes.types, episodes.difficulties)
            successes = episodes.success_N.tolist()
            for place, name in enumerate(zip(episodes.group_texts, strata, strict=True)):
                if not episodes.failed_N[place]:
                    groups.setdefault(name, []).append(successes[place])
    return groups


def show(power: PlanPower) -> list[str]:
    """Return the power as lines of text."""
    from flows.terminal.console import duration

    lines = [f"power: success before the rounds {power.success:.3f} ({power.source})"]
    if power.signal_share is not None:
        lines.append(f"  groups expected to differ in success: {power.signal_share:.0%}".replace("%", " %"))
    basis = "if all outcomes may change"
    if power.discordance is not None:
        basis = f"if {power.discordance:.0%} of the outcomes change, as in an earlier run".replace("%", " %")
    if power.detectable_gain is not None:
        lines.append(f"  smallest gain detected at 80 % power: {power.detectable_gain:.3f} ({basis})")
    if power.gain is not None:
        seeds = "more than 100" if power.seeds is None else f"{'at least ' * power.seeds_at_least}{power.seeds}"
        lines.append(f"  for a gain of {power.gain:g}: {power.scenarios} held-out scenarios, {seeds} seeds")
    for change in power.changes:
        time = "unknown time" if change.seconds is None else duration(change.seconds)
        cost = "unknown cost" if change.cost is None else f"cost {change.cost:.2f}"
        lines.append(f"  {change.override}: {time}, {cost}")
    return lines + [f"warning: {text}" for text in power.warnings]
