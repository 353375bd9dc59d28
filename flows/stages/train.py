"""Train: scored and selected trajectories become a new checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from components.algorithms.spec import (
    AlgorithmSpec,
    DecaySpec,
    DistillSpec,
    EWCSpec,
    GRPOSpec,
    PairSpec,
    PolicyGradientSpec,
    PPOSpec,
    ReplaySpec,
    RewardAlgorithmSpec,
)
from components.artifacts import Draft
from components.inference.protocol import BASE_POLICY
from components.models.spec import ModelSpec
from components.trajectories.schema import Trajectory
from flows.stages.base import Context, Inputs, Stage, StageSpec

CHECKPOINT_VERSION = 1
"""Layout of a checkpoint: adapter/, optimizer.safetensors, trainer.json, log.jsonl; of PPO critic/ too; where there
are costs multipliers.json."""
FED = re.compile(r"(trajectories|scores|selection)(\+[1-9]\d*)?")
"""Inputs that a round is trained on; `trajectories+1` are those of its first further collection."""
EARLIER = re.compile(rf"(anchored-)?{FED.pattern}-([1-9]\d*)")
"""Inputs that are those of an earlier round, by how many rounds ago it was: `trajectories-2`. `anchored-`: ago when the
rounds began."""


class TrainStage(StageSpec):
    model: ModelSpec
    algorithm: AlgorithmSpec
    save_every: float = Field(30.0, ge=0)
    """Seconds between two saves of the unfinished training."""
    replay: ReplaySpec | None = None
    ewc: EWCSpec | None = None
    rounds: tuple[int, int] = (1, 1)
    """Number of the round, from 1, and of all rounds: with `algorithm.decay` the learning rate falls over them."""

    def key_part(self) -> dict[str, Any]:
        part: dict[str, Any] = {
            "model": self.model.key_part(),
            "algorithm": self.algorithm.model_dump(mode="json"),
        }
        if isinstance(self.algorithm, DistillSpec):
            part["algorithm"]["teacher"] = self.algorithm.teacher.key_part()
        if self.replay is not None:
            part["replay"] = self.replay.model_dump(mode="json", exclude={"rounds"})  # those are inputs
        if self.ewc is not None:
            part["ewc"] = self.ewc.model_dump(mode="json", exclude={"rounds"})
        if isinstance(self.algorithm, DecaySpec) and self.algorithm.decay != "none":
            part["rounds"] = list(self.rounds)
        return part


def train(spec: TrainStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Writes a checkpoint. Inputs: `trajectories`, `scores`, `selection`, those of further collections `trajectories+K`
    and so on; `start`, the checkpoint to go on from; `reference`, the checkpoint from which the KL is measured (the
    base model where there is none); `trajectories-N`, `scores-N`, `selection-N`, those of N rounds ago; `anchor`, the
    checkpoint that elastic weight consolidation holds on to, and what it was trained on, `anchored-trajectories-N`
    and so on."""
    from components.algorithms.continual.replay import mixed
    from components.algorithms.policy_gradient.cost_constraints import mean_costs
    from components.algorithms.train import policy_digest
    from components.algorithms.train import train as run
    from components.models.weights import prepare

    costs = (spec.algorithm.costs or {}) if isinstance(spec.algorithm, PolicyGradientSpec) else {}
    trajectories = _scored(inputs, components=bool(costs))
    version = policy_digest(inputs["start"].path) if "start" in inputs else BASE_POLICY
    figures: dict[str, float] = {}
    if spec.replay is not None:
        trajectories, figures = mixed(
            spec.replay,
            trajectories,
            [_scored(inputs, f"-{ago}", components=bool(costs)) for ago in _rounds(inputs)],
            version=version,
            compared=compares(spec.algorithm) and not costs,
            seed=context.seed,
        )
    if isinstance(spec.algorithm, PolicyGradientSpec) and (
        others := sum(one.policy != version for one in trajectories)
    ):
        figures["off_policy"] = others / len(trajectories)  # share that another policy than the one in training played
    total = steps(spec.algorithm, len(trajectories), new_critic=not _has_critic(inputs))
    done = 0

    def on_step(values: Mapping[str, float]) -> None:
        nonlocal done
        done += 1
        context.progress(done, max(total, done), values)

    context.progress(0, total)
    teacher_dir = None
    if isinstance(spec.algorithm, DistillSpec):
        teacher_dir = prepare(spec.algorithm.teacher.model(spec.model.max_length), context.cache)
    anchor = None
    if spec.ewc is not None:
        from components.algorithms.continual.ewc import Anchor

        anchored = [one for ago in _rounds(inputs, "anchored-") for one in _renamed(inputs, ago)]
        anchor = Anchor(spec.ewc, inputs["anchor"].path, anchored)
    assert context.scratch is not None
    metrics = run(
        spec.algorithm,
        spec.model,
        prepare(spec.model, context.cache),
        trajectories,
        start=inputs["start"].path if "start" in inputs else None,
        reference=inputs["reference"].path if "reference" in inputs else None,
        out=draft.path,
        scratch=context.scratch,
        seed=context.seed,
        on_step=on_step,
        warm=context.warm.trainer,
        save_every=spec.save_every,
        teacher_dir=teacher_dir,
        mean_costs=mean_costs(costs, _scored(inputs, components=True, selected=False)) if costs else None,
        anchor=anchor,
        strategy=context.strategy,
        rounds=spec.rounds,
    )
    return metrics | figures


def _rounds(inputs: Inputs, when: str = "") -> list[int]:
    """How many rounds ago those were that there are inputs of."""
    found = [EARLIER.fullmatch(name) for name in inputs]
    return sorted({int(one[4]) for one in found if one is not None and (one[1] or "") == when})


def _renamed(inputs: Inputs, ago: int) -> list[Trajectory]:
    """What the anchor was trained on so many rounds ago, under names of its own: rounds may share scenarios."""
    return [replace(one, id=f"{one.id}@-{ago}") for one in _scored(inputs, f"-{ago}", when="anchored-")]


def _scored(
    inputs: Inputs, ago: str = "", *, components: bool = False, selected: bool = True, when: str = ""
) -> list[Trajectory]:
    """The trajectories of this round, or of the one that the ending of the inputs' names says; all, or those that were
    selected. components: with those of their scores among their metrics."""
    from components.trajectories.store import load_scored

    found: list[Trajectory] = []
    for more in ["", *(f"+{number}" for number in range(1, len(inputs)))]:
        if f"{when}trajectories{more}{ago}" not in inputs:
            break
        trajectories, scores, selection = (
            inputs[f"{when}{name}{more}{ago}"].path / f"{name}.parquet"
            for name in ("trajectories", "scores", "selection")
        )
        found += load_scored(trajectories, scores, selection if selected else None, components=components)
    return found


def compares(algorithm: AlgorithmSpec) -> bool:
    """Whether a group whose judged rewards are equal teaches an algorithm nothing."""
    if isinstance(algorithm, GRPOSpec):
        return algorithm.credit == "episode" and algorithm.baseline in ("group", "leave_one_out")
    return isinstance(algorithm, PairSpec)


def _has_critic(inputs: Inputs) -> bool:
    from components.algorithms.loop.checkpoint import CRITIC

    return "start" in inputs and (inputs["start"].path / CRITIC).is_dir()


def steps(algorithm: AlgorithmSpec | RewardAlgorithmSpec, trajectories: int, *, new_critic: bool = True) -> int:
    """Return the gradient steps that a train stage takes at most, for the progress that is shown. new_critic: PPO has
    no critic to go on with, and pretrains one."""
    if isinstance(algorithm, PolicyGradientSpec):
        alone = algorithm.value_pretraining_steps if isinstance(algorithm, PPOSpec) and new_critic else 0
        return alone + algorithm.epochs * algorithm.minibatches
    return algorithm.epochs * -(-trajectories // algorithm.batch_size)


STAGE = Stage("train", 6, TrainStage, "checkpoint", CHECKPOINT_VERSION, train, volatile=("log.jsonl",))
