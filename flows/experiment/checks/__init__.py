"""Cross-field validation of an experiment, such as an algorithm against the group size, or an environment against the
splits that the run uses.

The parameters of a check are names of fields of `flows.experiment.spec.ExperimentSpec`. A check runs only if each of
these fields is valid on its own, and null only if its parameter may be None. The checks build the environment and the
reward, which are light by their protocols, and nothing else; no model is loaded. The checks do not look for model
weights: `components.models.weights.check_weights` does, before the first stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from components.errors import Problem
from flows.experiment.checks import (
    computing,
    importing,
    judging,
    learning,
    models,
    playing,
    role_adapters,
    worlds,
)

CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    learning.algorithm,
    learning.signal,
    learning.thresholds,
    learning.held_out,
    learning.stopped_evaluations,
    learning.stopping_guards,
    playing.tokens,
    playing.engine,
    playing.agent,
    playing.role_rewards,
    playing.players,
    learning.weights,
    playing.lengths,
    playing.template,
    models.local_model,
    judging.reward,
    judging.other_rewards,
    judging.fields,
    judging.tools,
    judging.forbidden,
    judging.judges,
    judging.ahead,
    judging.reward_model,
    judging.refresh,
    judging.drift,
    learning.overlap,
    judging.filters,
    judging.filtered_scenarios,
    worlds.environment,
    worlds.no_environment,
    worlds.demonstrations,
    worlds.program,
    models.frozen,
    learning.settings,
    learning.replay,
    learning.ewc,
    importing.data,
    importing.heldout,
    importing.preferences,
    importing.offline_algorithm,
    learning.feedback,
    computing.stages,
    computing.places,
    computing.budget,
    computing.remote_store,
    computing.parallel,
    computing.config_file,
    computing.shards,
    computing.several_processes,
    models.formats,
    role_adapters.roles,
    role_adapters.training,
    role_adapters.playing,
    role_adapters.exports,
)
"""All checks, in the order in which their problems are reported."""


def problems(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the cross-field problems of an experiment. parts: its valid fields by name."""
    for check in CHECKS:
        parameters = inspect.signature(check).parameters
        if all(name in parts and _accepts(parts[name], parameter) for name, parameter in parameters.items()):
            yield from check(**{name: parts[name] for name in parameters})


def _accepts(value: Any, parameter: inspect.Parameter) -> bool:
    """Return False for None in place of a parameter that is never None, such as the environment that a check plays."""
    return value is not None or "None" in str(parameter.annotation)
