"""Hyperparameter search with Optuna: the sweeper of `hydra/sweeper=optuna`.

The study is a SQLite file in the sweep's folder, `<root>/sweeps/<study>`, so the same command resumes it: trials that
were interrupted or failed are retried with the same parameters and use the cache. A study's definition must not change:
with another search space, direction, metric or experiment, resuming is an error.

Hydra's own Optuna sweeper (hydra-optuna-sweeper 1.3) requires Optuna below 3, does not prune, and its handling of
failures is all or nothing per batch. This sweeper calls Optuna's ask-and-tell interface directly.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from components.artifacts import lock_file
from components.errors import Problem, ResourceError, SpecError, WaitTimeout
from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.spec import ExperimentSpec
from flows.experiment.sweep_settings import IN_ROUNDS, TRIAL, HalvingSpec, MedianSpec, OptunaSpec, optuna_settings
from flows.recipes.stage_calls import Prune
from flows.reporting.settings import MISSING, NEUTRAL_KEYS
from flows.sweeps.points import Point, read

if TYPE_CHECKING:
    import optuna
    from hydra.core.config_loader import ConfigLoader
    from hydra.plugins.launcher import Launcher
    from omegaconf import DictConfig
    from optuna.distributions import BaseDistribution

logger = logging.getLogger(__name__)

DATABASE = "study.db"
AGAIN = "again"
"""Trial attribute: number of the trial that it retries."""


def sweep(arguments: Sequence[str], config: DictConfig, loader: ConfigLoader, launcher: Launcher) -> None:
    """Ask Optuna for points, launch them and tell it their outcomes, until there are `n_trials`.

    Outcomes are read from the points' files. Raises ResourceError if another process works on the study.
    """
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    settings = optuna_settings({"sweeper": data})
    assert settings is not None
    folder = Path(config.hydra.sweep.dir)
    parser = OverridesParser.create(loader)
    lines = [*(f"{key}={value}" for key, value in (settings.params or {}).items()), *arguments]
    overrides = {item.get_key_element(): item for item in parser.parse_overrides(lines)}.values()  # the last of a key
    space = {item.get_key_element(): distribution(item) for item in overrides if item.is_sweep_override()}
    fixed = [str(item.input_line) for item in overrides if not item.is_sweep_override()]
    with open(folder / ".study.lock", "a+") as lock:
        try:
            lock_file(lock, f"study {folder.name!r}", 0)
        except WaitTimeout as error:
            raise ResourceError(f"{error}; wait for it, or start another study: hydra.sweeper.study=NAME") from None
        study = load(folder, settings)
        remaining = settings.n_trials - revive(study)
        while remaining > 0:
            trials = [study.ask(space) for _ in range(min(settings.n_jobs, remaining))]
            remaining -= len(trials)
            points = [[*fixed, *_lines(trial.params), f"+hydra.sweeper.{TRIAL}={trial.number}"] for trial in trials]
            launcher.launch(points, initial_job_idx=trials[0].number)
            outcomes = {point.number: point for point in read(folder)}
            for trial in trials:
                tell(study, trial.number, outcomes.get(trial.number), settings)


def distribution(override: Override) -> BaseDistribution:
    """Return the Optuna distribution of a key. Values of a list stay Hydra's strings; `int(interval(1, 5))` includes
    both ends."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sweep = override.value()
    if isinstance(sweep, IntervalSweep):
        whole = isinstance(sweep.start, int) and isinstance(sweep.end, int)
        kind = IntDistribution if whole else FloatDistribution
        return kind(sweep.start, sweep.end, log="log" in sweep.tags)
    assert isinstance(sweep, ChoiceSweep | RangeSweep) or override.is_discrete_sweep()
    values = list(override.sweep_string_iterator())
    if isinstance(sweep, RangeSweep) and not sweep.shuffle and all(isinstance(n, int) for n in sweep.range()):
        first, last = int(values[0]), int(values[-1])
        if first < last:
            return IntDistribution(first, last, step=int(values[1]) - first)
    return CategoricalDistribution(values)


def _lines(params: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in params.items()]


def prepare(folder: Path, settings: OptunaSpec, overrides: Sequence[Override], spec: ExperimentSpec) -> None:
    """Create the study, or check that the existing one has the same definition. Raises SpecError if it has not.

    spec: spec of any point.
    """
    import optuna
    from optuna.distributions import distribution_to_json

    space = {item.get_key_element(): distribution(item) for item in overrides if item.is_sweep_override()}
    definition = {
        "space": {key: distribution_to_json(value) for key, value in space.items()},
        "metric": settings.metric,
        "direction": settings.direction,
        "experiment": _fixed_experiment(spec, space),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _quiet(optuna)
    study = optuna.create_study(
        study_name=folder.name, storage=_storage(folder), direction=settings.direction, load_if_exists=True
    )
    stored = study.user_attrs
    if not study.get_trials(deepcopy=False):
        for name, value in definition.items():
            study.set_user_attr(name, value)
    elif stored.keys() >= definition.keys():
        changes = [
            f"{path}: {old} → {new}"
            for name in definition
            for path, old, new in _changes(name, stored[name], definition[name])
        ]
        if changes:
            remedy = f"use another study, hydra.sweeper.study=NAME, or delete {folder} to restart this one"
            message = f"{folder.name!r} has trials of a different search ({', '.join(changes[:5])}); {remedy}"
            raise SpecError([Problem("hydra.sweeper.study", message)])


def load(folder: Path, settings: OptunaSpec) -> optuna.Study:
    """Load the study that `prepare` created. The sampler's seed depends on the number of trials, so that a resumed
    study does not draw the same values again."""
    import optuna

    _quiet(optuna)
    study = optuna.load_study(study_name=folder.name, storage=_storage(folder), pruner=_pruner(settings))
    seed = settings.seed + len(study.get_trials(deepcopy=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if settings.sampler == "tpe":
            study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=settings.startup_trials)
        elif settings.sampler == "gp":
            study.sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=settings.startup_trials)
        elif settings.sampler == "qmc":
            study.sampler = optuna.samplers.QMCSampler(seed=settings.seed)
        else:
            study.sampler = optuna.samplers.RandomSampler(seed=seed)
    return study


def revive(study: optuna.Study) -> int:
    """Enqueue retries of failed trials and of trials whose process died. Return the number of completed trials."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    retried = {trial.user_attrs.get(AGAIN) for trial in trials}
    for trial in trials:
        if trial.state == TrialState.FAIL and trial.number not in retried:
            study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
    return sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)


def tell(study: optuna.Study, number: int, point: Point | None, settings: OptunaSpec) -> None:
    """Tell Optuna the outcome of a trial. point: recorded outcome; None if there is none."""
    from optuna.trial import TrialState

    value = point.value(settings.metric) if point else None
    if point is not None and point.status == "pruned":
        study.tell(number, state=TrialState.PRUNED)
    elif point is not None and point.status == "finished" and value is not None:
        study.tell(number, value)
    else:
        if point is not None and point.status == "finished":
            logger.warning("trial %d: its result has no metric %s; the trial counts as failed", number, settings.metric)
        study.tell(number, state=TrialState.FAIL)


def _storage(folder: Path) -> str:
    return f"sqlite:///{folder / DATABASE}"


def _pruner(settings: OptunaSpec) -> optuna.pruners.BasePruner:
    from optuna import pruners

    if isinstance(settings.pruner, MedianSpec):
        return pruners.MedianPruner(settings.pruner.startup_trials, settings.pruner.warmup_steps)
    if isinstance(settings.pruner, HalvingSpec):
        return pruners.SuccessiveHalvingPruner(settings.pruner.min_steps, settings.pruner.reduction)
    return pruners.NopPruner()


def _fixed_experiment(spec: ExperimentSpec, space: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that determine a trial's value and are not searched, without those of where it runs. The
    result is empty if the search covers whole experiments."""
    data = spec.model_dump(mode="json", by_alias=True, exclude=set(NEUTRAL_KEYS | {"name"}))
    for key in space:
        *parents, last = key.lstrip("+~").partition("@")[0].replace("/", ".").split(".")
        if [*parents, last] == ["experiment"]:
            return {}
        section: Any = data
        for part in parents:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(last, None)
    return data


def _changes(path: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """Return (path, old value, new value) of each difference."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            change
            for key in dict.fromkeys([*old, *new])
            for change in _changes(
                key if path in ("space", "experiment") else f"{path}.{key}",
                old.get(key, MISSING),
                new.get(key, MISSING),
            )
        ]
    return [] if old == new else [(path, old, new)]


def _quiet(optuna: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def pruning(folder: Path, settings: OptunaSpec, number: int) -> Prune:
    """Return the callback that a run calls with each evaluation before its last round.

    The callback returns the reason to stop, or None to continue. folder: the sweep's folder, which has the study.
    number: number of the trial.
    """
    from optuna.trial import Trial

    from flows.sweeps.study import load

    study = load(folder, settings)
    trial = Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
    metric = settings.metric

    def prune(measured: EvaluatedPolicy) -> str | None:
        value = measured.value(metric) if metric in IN_ROUNDS else None  # type: ignore[arg-type]  # narrowed by the check
        if value is None:
            return None
        trial.report(value, measured.step)
        if not trial.should_prune():
            return None
        where = f"after round {measured.step}" if measured.step else "at the start of the rounds"
        return f"pruned {where}: held-out {metric} {value:.3f} is behind the other trials of study {folder.name}"

    return prune
