"""What of an experiment only makes sense together: an algorithm and the episodes that it gets, an environment and the
splits that are asked of it.

Each check names in its signature the parts of `flows.experiment.spec.ExperimentSpec` that it looks at, and is asked
where all of them are valid by themselves. The checks build the environment and the reward, which are light by their
protocols, and nothing else; no model is loaded. Whether weights can be had is not known here:
`components.models.weights.check_weights` looks for them before the first stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from components.errors import Problem
from flows.experiment.checks import computing, deploying, judging, learning, models, playing, worlds

CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    learning.algorithm,
    learning.signal,
    learning.held_out,
    learning.watched,
    playing.inference,
    playing.vllm,
    playing.agent,
    playing.ways,
    learning.weights,
    playing.lengths,
    models.local_model,
    judging.reward,
    judging.others,
    judging.fields,
    judging.judges,
    judging.reward_model,
    judging.refresh,
    learning.overlap,
    judging.filters,
    worlds.environment,
    worlds.demonstrations,
    models.teachers,
    learning.turn_credit,
    learning.scale,
    learning.sequence_ratio,
    learning.costs,
    learning.ewc,
    learning.people,
    computing.places,
    computing.elsewhere,
    computing.together,
    deploying.formats,
)
"""In the order in which their problems are shown."""


def problems(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """All that does not go together in the valid parts of an experiment, by name."""
    for check in CHECKS:
        names = list(inspect.signature(check).parameters)
        if all(name in parts for name in names):
            yield from check(**{name: parts[name] for name in names})
