"""A search by Optuna: the sweeper behind `hydra/sweeper=optuna`.

The study is a SQLite file in the sweep's folder, `<root>/sweeps/<study>`, so the same command goes on with it: trials
that were under way when it was killed, and those that failed, are tried again with the same parameters, and find what
they had finished. What a study measures must not change under it: with another search space, direction, metric or
experiment it is refused.

Hydra's own sweeper for Optuna (hydra-optuna-sweeper 1.3) holds Optuna below 3, prunes nothing, and ends with the first
failure in a batch or none; so this one asks and tells Optuna itself.
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
from flows.experiment.spec import ExperimentSpec
from flows.experiment.sweep_settings import TRIAL, HalvingSpec, MedianSpec, OptunaSpec, optuna_settings
from flows.reporting.comparison import MISSING, NOT_DECISIVE
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
"""Attribute of a trial: the number of the one that it tries again."""


def sweep(arguments: Sequence[str], config: DictConfig, loader: ConfigLoader, launcher: Launcher) -> None:
    """Asks Optuna for points, has them launched and tells it what they came to, until there are `n_trials`.

    What became of a point stands in its note. Raises ResourceError where another process works on the study.
    """
    from omegaconf import OmegaConf

    data: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
    settings = optuna_settings({"sweeper": data})
    assert settings is not None
    folder = Path(config.hydra.sweep.dir)
    parser = OverridesParser.create(loader)
    lines = [*(f"{key}={value}" for key, value in (settings.params or {}).items()), *arguments]
    parsed = {one.get_key_element(): one for one in parser.parse_overrides(lines)}.values()  # of each key the last
    space = {one.get_key_element(): distribution(one) for one in parsed if one.is_sweep_override()}
    fixed = [str(one.input_line) for one in parsed if not one.is_sweep_override()]
    with open(folder / ".study.lock", "a+") as lock:
        try:
            lock_file(lock, f"study {folder.name!r}", 0)
        except WaitTimeout as error:
            raise ResourceError(f"{error}; wait for it, or begin another: hydra.sweeper.study=NAME") from None
        study = load(folder, settings)
        left = settings.n_trials - revive(study)
        while left > 0:
            trials = [study.ask(space) for _ in range(min(settings.n_jobs, left))]
            left -= len(trials)
            points = [[*fixed, *_lines(trial.params), f"+hydra.sweeper.{TRIAL}={trial.number}"] for trial in trials]
            launcher.launch(points, initial_job_idx=trials[0].number)
            notes = {point.number: point for point in read(folder)}
            for trial in trials:
                tell(study, trial.number, notes.get(trial.number), settings)


def distribution(override: Override) -> BaseDistribution:
    """Where Optuna draws the values of a key. Those of a list stay the words that Hydra makes of them;
    `int(interval(1, 5))` holds both ends."""
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
    """Makes the study, or looks whether the one that is there measures the same. Raises SpecError where it does not.

    spec: of any point."""
    import optuna
    from optuna.distributions import distribution_to_json

    space = {one.get_key_element(): distribution(one) for one in overrides if one.is_sweep_override()}
    now = {
        "space": {key: distribution_to_json(one) for key, one in space.items()},
        "metric": settings.metric,
        "direction": settings.direction,
        "experiment": _measured(spec, space),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _quiet(optuna)
    study = optuna.create_study(
        study_name=folder.name, storage=_storage(folder), direction=settings.direction, load_if_exists=True
    )
    before = study.user_attrs
    if not study.get_trials(deepcopy=False):
        for name, value in now.items():
            study.set_user_attr(name, value)
    elif before.keys() >= now.keys():
        changed = [
            f"{place}: {old} → {new}" for name in now for place, old, new in _changes(name, before[name], now[name])
        ]
        if changed:
            more = f"; for another study: hydra.sweeper.study=NAME; to begin this one anew, delete {folder}"
            message = f"{folder.name!r} has trials of another search ({', '.join(changed[:5])}){more}"
            raise SpecError([Problem("hydra.sweeper.study", message)])


def load(folder: Path, settings: OptunaSpec) -> optuna.Study:
    """The study that `prepare` made, to ask and tell. The sampler is seeded by the trials that there are: it does not
    draw the same again."""
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
    """Sets trials that are to be tried again on the list: those that were under way in a process that is gone, and
    those that failed. Returns how many have come to their end."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
    trials = study.get_trials(deepcopy=False)
    tried = {trial.user_attrs.get(AGAIN) for trial in trials}
    for trial in trials:
        if trial.state == TrialState.FAIL and trial.number not in tried:
            study.enqueue_trial(trial.params, user_attrs={AGAIN: trial.number})
    return sum(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in trials)


def tell(study: optuna.Study, number: int, point: Point | None, settings: OptunaSpec) -> None:
    """Tells what became of a trial. point: its note; None where it has none."""
    from optuna.trial import TrialState

    value = point.value(settings.metric) if point else None
    if point is not None and point.status == "pruned":
        study.tell(number, state=TrialState.PRUNED)
    elif point is not None and point.status == "finished" and value is not None:
        study.tell(number, value)
    else:
        if point is not None and point.status == "finished":
            logger.warning("trial %d has no %s", number, settings.metric)
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


def _measured(spec: ExperimentSpec, space: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the value of a trial beside the space: the experiment without what is searched, and without what
    says where it runs. Nothing of it where whole experiments are searched."""
    data = spec.model_dump(mode="json", by_alias=True, exclude=set(NOT_DECISIVE | {"name"}))
    for key in space:
        *parents, last = key.lstrip("+~").partition("@")[0].replace("/", ".").split(".")
        if [*parents, last] == ["experiment"]:
            return {}
        inside: Any = data
        for part in parents:
            inside = inside.get(part) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            inside.pop(last, None)
    return data


def _changes(place: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """(key, before, now) of what is not the same."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            change
            for key in dict.fromkeys([*before, *now])
            for change in _changes(
                key if place in ("space", "experiment") else f"{place}.{key}",
                before.get(key, MISSING),
                now.get(key, MISSING),
            )
        ]
    return [] if before == now else [(place, before, now)]


def _quiet(optuna: Any) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
