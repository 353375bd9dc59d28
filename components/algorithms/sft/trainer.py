"""Supervised fine-tuning on assistant tokens.

Demonstrations are tokenized like rollouts (`ChatFormat.streams`); sampled trajectories keep their sampled tokens. Only
tokens that the policy would generate are trained on, never those of system, user or tools.

The loss of a gradient step is the mean negative log-likelihood over its trained tokens (arXiv:2203.02155), each times
the weight of its trajectory. It is computed on packs: prompts that demonstrations share are computed once, and logits
are computed only for trained tokens. Batches, loss, gradient and weights equal those of TRL's SFTTrainer, which
computes padded rows (tests/algorithms/test_sft.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from components.algorithms.loop import schedule
from components.algorithms.loop.epochs import GuardedStep, StepMeasures, add_mean_gradient, take_gradient_steps
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.policy.packing import Pack, TokenSequence, pack
from components.algorithms.trainer import TrainingContext, TrainingResult
from components.models.distribution import Cut
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.parts import CORRECTION
from components.trajectories.roles import tools_of
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from components.algorithms.sft.spec import SFTSpec

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""History of a trajectory to train on: `input_ids`, `targets` (indices of the tokens to train on), `trajectory_id`,
`role`."""


def train_sft(spec: SFTSpec, context: TrainingContext) -> TrainingResult:
    """Take `spec.epochs` passes over the trajectories. Return the new step count and the mean metrics.

    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    policy = context.policy
    weights = reward_weights(context.trajectories, spec.weight_temperature)
    by_id = {trajectory.id: trajectory for trajectory in context.trajectories}
    weighted = [trajectory for trajectory in context.trajectories if trajectory.id in weights]
    rows = examples(ChatFormat(load_tokenizer(context.base_dir)), weighted, policy.spec.max_length)
    if not rows:
        return context.step, {"skipped": 1.0}

    def token_losses(packed: Pack) -> torch.Tensor:
        logprob_S, _ = policy.logprobs(packed, Cut())
        return -logprob_S * packed.weight_S.to(policy.device)

    def backward(batch: Sequence[Row]) -> StepMeasures:
        sequences = [
            TokenSequence(row["input_ids"], row["targets"], weight=weights[row["trajectory_id"]], role=row["role"])
            for row in batch
        ]
        packs = pack(sequences, spec.pack_tokens, padded=policy.padded, by_role=policy.by_role)
        return add_mean_gradient(policy, packs, token_losses, spec.max_grad_norm)

    def share(number: int, done: float) -> float:
        return schedule.warmup_share(spec, number) * (1 - done if spec.schedule == "linear" else 1.0)

    logs = take_gradient_steps(
        context,
        list(_batches(rows, spec, context.seed)),
        GuardedStep(spec, context, backward, lambda row: by_id[row["trajectory_id"]]),
        [spec.learning_rate],
        share,
    )
    return context.step + len(logs), {**mean_metrics(logs), "examples": float(len(rows))}


def _batches(rows: list[Row], spec: SFTSpec, seed: int) -> Iterator[list[Row]]:
    """Yield the rows of each gradient step; each epoch has its own order."""
    for epoch in range(spec.epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for start in range(0, len(order), spec.batch_size):
            yield [rows[index] for index in order[start : start + spec.batch_size]]


def examples(chat: ChatFormat, trajectories: Sequence[Trajectory], max_length: int) -> list[Row]:
    """Return one row per history. Histories longer than `max_length` tokens are left out entirely, because a truncated
    history would teach the model to stop in the middle. Failed episodes are left out too. Messages with `trained=False`
    are context."""
    rows = []
    for trajectory in trajectories:
        if trajectory.failure is not None:
            continue
        for history in trajectory.histories:
            if history.token_ids:
                targets = [index for index, sampled in enumerate(history.sampled_mask()) if sampled]
                rows.append(_row(list(history.token_ids), targets, trajectory, history.agent))
                continue
            messages = [to_openai(message) for message in history.messages]
            streams = chat.streams(messages, tools_of(trajectory, history), final=True)
            turns = iter([message.trained for message in history.messages if message.role == "assistant"])
            trained = [[span for span in stream.spans if next(turns)] for stream in streams]
            corrected = trajectory.policy == CORRECTION
            for stream, spans in list(zip(streams, trained, strict=True))[-1 if corrected else 0 :]:
                spans = stream.spans[-1:] if corrected else spans
                targets = [index for start, end in spans for index in range(start, end)]
                rows.append(_row(stream.token_ids, targets, trajectory, history.agent))
    rows = [row for row in rows if row["targets"]]
    short_rows = [row for row in rows if len(row["input_ids"]) <= max_length]
    if len(short_rows) < len(rows):
        log.warning(
            "histories left out of training because they are longer than model.max_length=%d tokens: %d of %d",
            max_length,
            len(rows) - len(short_rows),
            len(rows),
        )
    return short_rows


def reward_weights(trajectories: Sequence[Trajectory], temperature: float | None) -> dict[str, float]:
    """Return softmax(reward / temperature) over all scored trajectories, times their number, by trajectory; unscored
    trajectories are left out. Without a temperature, return 1 for each trajectory."""
    if temperature is None:
        return {trajectory.id: 1.0 for trajectory in trajectories}
    scored = {
        trajectory.id: trajectory.reward / temperature
        for trajectory in trajectories
        if trajectory.reward is not None and not trajectory.failure
    }
    highest = max(scored.values(), default=0.0)
    powers = {name: math.exp(value - highest) for name, value in scored.items()}
    total = math.fsum(powers.values())
    return {name: len(powers) * power / total for name, power in powers.items()}


def _row(token_ids: list[int], targets: list[int], trajectory: Trajectory, role: str) -> Row:
    return {"input_ids": token_ids, "targets": targets, "trajectory_id": trajectory.id, "role": role}
