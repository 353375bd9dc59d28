"""Specs of the sections of an experiment that belong to no component: warmup, reward model, serve, notify, budget."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from components.algorithms.choices import AnyRewardAlgorithmSpec
from components.algorithms.sft.spec import SFTSpec
from components.data.spec import DataSpec
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import FrozenModelSpec
from components.rewards.spec import LearnedSpec
from components.specs import Spec, Target
from components.specs.marks import ENV_VARIABLE
from components.specs.served import VARIABLE

_KEY = re.compile(r"[A-Za-z_]\w*([./]\w+)*(@[A-Za-z_]\w*(\.\w+)*)?", re.ASCII)
Event = Literal["ended", "failed", "approval", "guard", "budget"]
EVENTS: tuple[Event, ...] = ("ended", "failed", "approval", "guard", "budget")
"""All events: the end, a failure, the wait for approval, a triggered guard, 80 % of the budget spent."""


class WarmupTeacherSpec(Spec):
    """Teacher model that produces the demonstrations of the warmup, on this machine or on a server."""

    model: FrozenModelSpec | None = None
    """Model, for `inference.name: embedded`; null for a server, whose model `inference.model` names."""
    inference: InferenceSpec = EmbeddedSpec()
    """Engine of the teacher, as `inference`. A server need not return tokens (`tokens`): its text is tokenized for
    `model`."""
    samples: int = Field(1, ge=1, le=10_000)
    """Episodes per scenario."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature of the teacher, as collect.temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling threshold of the teacher, as collect.top_p."""


class WarmupSpec(Spec):
    """Supervised training on the environment's own solutions, or on a teacher's episodes, before the first round."""

    demonstrations: int = Field(64, ge=1)
    """Number of train scenarios that the environment's solver or the teacher demonstrates."""
    teacher: WarmupTeacherSpec | None = None
    """Teacher that produces the demonstrations (see warmup=teacher); null: the environment's solver."""
    filter: Target
    """Filter that chooses the demonstrations to train on."""
    algorithm: SFTSpec = SFTSpec()


class RewardModelPartSpec(LearnedSpec):
    """Reward model of the declared reward, or of preferences of one's own, trained before the first round. It scores
    the rounds; evaluations use the declared reward."""

    data: DataSpec = DataSpec()
    """Preferences of one's own that the model learns from, in place of episodes of the run: pairs or ranked answers,
    for a process reward model labelled steps. Without `path` and `dataset` there are none."""
    every: int = Field(0, ge=0)
    """Interval in rounds: the model is retrained after rounds `every`, 2 · `every` and so on, except the last, on new
    episodes of the current policy: as many as at first, of unused scenarios while there are any. 0: trained once."""
    keep: Literal["all", "none"] = "all"
    """Episodes that retraining uses besides the new ones: those of all earlier collections, or none."""
    adversarial: bool = False
    """With `every`: retraining also uses adversarial examples. The declared reward judges the episodes of all rounds
    before it too. Scenarios in which the models gave a worse episode the higher reward are added. The first training,
    before the rounds, has none."""
    scenarios: int = Field(32, ge=1)
    """Number of train scenarios whose episodes the model learns from, without `data`."""
    group_size: int = Field(4, ge=1, le=10_000)
    """Episodes per scenario, sampled from the policy with the settings of `collect`, without reflection or teacher."""
    continuations: int = Field(0, ge=0)
    """Continuations that the policy plays from each step of an episode. The share of successes is the step's label,
    which the head `continued` of a process reward model learns. 0: none."""
    models: int = Field(1, ge=1)
    """Size of the ensemble: models trained from different seeds, whose scores `combine` combines."""
    algorithm: AnyRewardAlgorithmSpec

    def refreshed(self, rounds: int) -> list[int]:
        """Return the rounds after which the model is retrained, in a run of `rounds` rounds."""
        return [number for number in range(1, rounds) if self.every and number % self.every == 0]

    def learned(self) -> LearnedSpec:
        """Return the settings with which the model scores the rounds."""
        return LearnedSpec(**{name: getattr(self, name) for name in LearnedSpec.model_fields})


class ServeSpec(Spec):
    """Settings of `python -m flows.serve` and `flows.mcp_server` for users and agents that start runs of the
    experiment; other commands ignore them."""

    overrides: list[str] = []
    """Keys that a run of the deployment may set, and groups of which it may choose an option: `[rounds, model,
    algorithm.learning_rate]`. A key does not include the keys below it. Anyone who can start a run controls the listed
    keys: list a command, a `_target_`, a path or a URL only if that is intended."""

    @field_validator("overrides")
    @classmethod
    def _keys(cls, value: list[str]) -> list[str]:
        for key in value:
            if not _KEY.fullmatch(key):
                raise ValueError(f"keys such as algorithm.learning_rate, or groups such as model; {key!r} is neither")
            if key.partition(".")[0].partition("/")[0] in ("experiment", "task", "hydra", "serve"):
                raise ValueError(f"keys of the experiment; {key!r} can be set only by the serving command")
        return value


class NotifySpec(Spec):
    """Destinations of the events of a run. They do not affect results, so they are in no stage key."""

    url_variable: Annotated[str | None, ENV_VARIABLE] = Field(None, pattern=VARIABLE)
    """Environment variable that holds the URL of a webhook, which gets a POST with a JSON body for each event. The URL
    is a secret, so the configuration names only its variable. null: no webhook."""
    prefect: bool = False
    """Emit each event to your own Prefect server (`PREFECT_API_URL`), as `espalier.run.EVENT`, for its automations."""
    events: list[Event] = Field(list(EVENTS), min_length=1)
    """Events to report: ended, failed, approval, guard, budget."""


class BudgetSpec(Spec):
    """Maximum cost and time of a run. The run ends before a stage that is expected to exceed it. It does not affect
    results, so it is in no stage key."""

    cost: float | None = Field(None, gt=0)
    """Maximum cost of machines, judges and teachers, in the currency of `compute.price`. null: no limit."""
    hours: float | None = Field(None, gt=0)
    """Maximum time of the stages, in hours. null: no limit."""

    @property
    def is_set(self) -> bool:
        """True if there is a limit."""
        return self.cost is not None or self.hours is not None
