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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from components.algorithms.loop import schedule
from components.algorithms.loop.epochs import (
    GuardedStep,
    StepBatches,
    StepMeasures,
    add_mean_gradient,
    take_gradient_steps,
)
from components.algorithms.loop.metrics import mean_metrics
from components.algorithms.loop.token_rows import TokenRow, TokenRows, tokenized
from components.algorithms.policy.packing import Pack, pack
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
    weights = reward_weights(context.trajectories, spec.weight_temperature) if spec.weight_temperature else None
    rows = token_rows(context, weights)
    if not rows:
        return context.step, {"skipped": 1.0}

    def token_losses(packed: Pack) -> torch.Tensor:
        logprob_S, _ = policy.logprobs(packed, Cut())
        return -logprob_S * packed.weight_S.to(policy.device)

    def backward(batch: Sequence[TokenRow]) -> StepMeasures:
        sequences = [row.sequence() for row in batch]
        packs = pack(sequences, spec.pack_size, padded=policy.padded, by_role=policy.by_role)
        return add_mean_gradient(policy, packs, token_losses, spec.max_grad_norm)

    def order(epoch: int) -> Any:
        return torch.randperm(len(rows), generator=torch.Generator().manual_seed(context.seed + epoch)).numpy()

    def share(number: int, done: float) -> float:
        return schedule.warmup_share(spec, number) * (1 - done if spec.schedule == "linear" else 1.0)

    logs = take_gradient_steps(
        context,
        StepBatches(rows, spec.epochs, spec.batch_size, order),
        GuardedStep(spec, context, backward, lambda row: context.trajectories[row.place]),
        [spec.learning_rate],
        share,
    )
    return context.step + len(logs), {**mean_metrics(logs), "examples": float(len(rows))}


def token_rows(context: TrainingContext, weights: Mapping[str, float] | None = None) -> TokenRows:
    """Return the rows of `histories` of all trajectories, in files, without those longer than the model's limit.
    weights: by trajectory, which leave out the others."""
    chat, longest, long_rows = ChatFormat(load_tokenizer(context.base_dir)), context.policy.spec.max_length, 0

    def rows_of(place: int, trajectory: Trajectory) -> Iterator[TokenRow]:
        nonlocal long_rows
        if weights is not None and trajectory.id not in weights:
            return
        for row in histories(chat, trajectory):
            if len(row["input_ids"]) > longest:
                long_rows += 1
                continue
            weight = weights[trajectory.id] if weights is not None else 1.0
            yield TokenRow(place, row["input_ids"], row["targets"], weight, row["role"])

    rows = tokenized(context.scratch, context.trajectories, rows_of)
    _warn_of_long_rows(long_rows, long_rows + len(rows), longest)
    return rows


def examples(chat: ChatFormat, trajectories: Iterable[Trajectory], max_length: int) -> list[Row]:
    """Return the rows of `histories` of all trajectories. Histories longer than `max_length` tokens are left out
    entirely, because a truncated history would teach the model to stop in the middle."""
    rows = [row for trajectory in trajectories for row in histories(chat, trajectory)]
    short_rows = [row for row in rows if len(row["input_ids"]) <= max_length]
    _warn_of_long_rows(len(rows) - len(short_rows), len(rows), max_length)
    return short_rows


def _warn_of_long_rows(count: int, total: int, max_length: int) -> None:
    if count:
        log.warning(
            "histories left out of training because they are longer than model.max_length=%d tokens: %d of %d",
            *(max_length, count, total),
        )


def histories(chat: ChatFormat, trajectory: Trajectory) -> Iterator[Row]:
    """Yield one row per history. A failed episode has none. Messages with `trained=False` are context."""
    if trajectory.failure is not None:
        return
    for history in trajectory.histories:
        if history.token_ids:
            targets = [index for index, sampled in enumerate(history.sampled_mask()) if sampled]
            if targets:
                yield _row(list(history.token_ids), targets, trajectory, history.agent)
            continue
        messages = [to_openai(message) for message in history.messages]
        streams = chat.streams(messages, tools_of(trajectory, history), final=True)
        turns = iter([message.trained for message in history.messages if message.role == "assistant"])
        trained = [[span for span in stream.spans if next(turns)] for stream in streams]
        corrected = trajectory.policy == CORRECTION
        for stream, spans in list(zip(streams, trained, strict=True))[-1 if corrected else 0 :]:
            spans = stream.spans[-1:] if corrected else spans
            if targets := [index for start, end in spans for index in range(start, end)]:
                yield _row(stream.token_ids, targets, trajectory, history.agent)


def reward_weights(trajectories: Iterable[Trajectory], temperature: float) -> dict[str, float]:
    """Return softmax(reward / temperature) over all scored trajectories, times their number, by trajectory; unscored
    trajectories are left out."""
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
