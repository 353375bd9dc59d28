"""Stages: plain functions over artifacts, each declared once, as `STAGE` of its module in this package."""

import importlib
import pkgutil

from flows.stages.base import Stage

STAGES: dict[str, Stage] = {}
"""All stages that a request can name, by name."""


def _declared() -> list[Stage]:
    """Return the stages that modules of this package declare, in their order."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    stages = [module.STAGE for module in modules if hasattr(module, "STAGE")]
    return sorted(stages, key=lambda stage: (stage.order, stage.name))


STAGES.update({stage.name: stage for stage in _declared()})
PLACED = [stage.name for stage in STAGES.values() if stage.placed]
"""Stages that `compute` can place."""
SHARDED = [stage.name for stage in STAGES.values() if stage.sharding is not None]
"""Stages that can be split into shards."""
DISTRIBUTED = [stage.name for stage in STAGES.values() if stage.distributed]
"""Stages in which several processes can train together."""
PLAYING = [stage.name for stage in STAGES.values() if stage.plays and stage.placed]
"""Stages that play episodes, for which they start the engine."""
EPISODE_KINDS = [stage.kind for stage in STAGES.values() if stage.plays]
"""Kinds of artifacts with episodes of a policy."""
ROUND_STAGES = [stage.name for stage in STAGES.values() if stage.part_of_round]
"""Stages that each round runs."""
