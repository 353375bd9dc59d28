"""Pruning of a run that is a trial of an Optuna study: it reports each evaluation and stops if the pruner says so."""

from __future__ import annotations

from pathlib import Path

from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.sweep_settings import IN_ROUNDS, OptunaSpec
from flows.recipes.stage_calls import Prune


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
