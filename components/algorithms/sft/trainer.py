"""Supervised fine-tuning on assistant tokens, with TRL's SFTTrainer over prefix-trie packs.

Demonstrations are tokenized like rollouts (`ChatFormat.streams`); sampled trajectories keep their sampled tokens. Only
tokens that the policy would generate are trained on, never those of system, user or tools.

TRL provides the loop, the schedule and the logs. The loss is TRL's own (mean negative log-likelihood over the batch's
trained tokens, arXiv:2203.02155), but computed on a pack instead of padded rows: prompts that demonstrations share are
computed once, and logits are computed only for trained tokens, which saves most of the memory of the padded form. In
distributed training each process runs the whole loop, and the packs of each batch are shared between them
(`distributed`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.algorithms.loop import checkpoint, distributed, schedule
from components.algorithms.loop.guards import TrainingGuards
from components.algorithms.loop.metrics import mean_metrics, token_counts
from components.algorithms.policy import sharded
from components.algorithms.policy.packing import Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient.gradient_steps import scale_metrics
from components.algorithms.spec import SFTSpec
from components.models.distribution import Cut
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.parts import CORRECTION
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from accelerate import PartialState

log = logging.getLogger(__name__)


def train_sft(
    spec: SFTSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    base_dir: Path,
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    seed: int,
    scratch: Path,
    on_step: Callable[[dict[str, float]], None],
    earlier_steps: Sequence[dict[str, float]] = (),
) -> tuple[int, dict[str, float]]:
    """Take `spec.epochs` passes over the trajectories. Return the new step count and the mean metrics.

    earlier_steps: metrics of the steps that an interrupted run took after step `step`; policy and optimizer are in the
    state after those steps.

    Raises TrainingDiverged if a guard stops the training (`guards`).
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(base_dir)
    weights = reward_weights(trajectories, spec.weight_temperature)
    training_trajectories = [trajectory for trajectory in trajectories if trajectory.id in weights]
    rows = examples(ChatFormat(tokenizer), training_trajectories, policy.spec.max_length)
    if not rows:
        return step, {"skipped": 1.0}
    steps = list(earlier_steps)
    batches = list(_batches(rows, spec, seed))
    if len(earlier_steps) == len(batches):
        return step + len(earlier_steps), {**mean_metrics(steps), "examples": float(len(rows))}
    clock = [0.0]
    computed: list[dict[str, float]] = []
    guards = TrainingGuards(scratch)
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    random_state: list[dict[str, torch.Tensor]] = []

    skipped: list[bool] = []
    ewc_penalty = [0.0]
    loss_scale_metrics: dict[str, float] = {}

    def backward(rows: list[dict[str, Any]]) -> float:
        """Add the gradient of the rows' loss to the parameters; return the loss."""
        sequences = [Sequence_(row["input_ids"], row["targets"], weight=weights[row["trajectory_id"]]) for row in rows]
        target_count = sum(len(sequence.targets) for sequence in sequences)
        packs = pack(sequences, spec.pack_tokens, padded=policy.padded)
        total = 0.0
        for packed, real in distributed.share_with_dropout(packs):
            logprob_S, _ = policy.logprobs(packed, Cut())
            loss = -(logprob_S * packed.weight_S.to(policy.device)).sum() / target_count
            policy.loss_scale.backward(loss if real else loss * 0)
            total += loss.item() if real else 0.0
        distributed.sum_gradients(policy.parameters.values())
        policy.loss_scale.unscale(policy.parameters.values())
        computed.append(token_counts(packs))
        return distributed.sums({"loss": total})["loss"]

    def grad_norm() -> float:
        return sharded.norm(policy.parameters.values())

    def clear_gradients() -> None:
        for parameter in policy.parameters.values():
            parameter.grad = None

    class PackedSFTTrainer(SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if random_state:  # the data loader of TRL's trainer draws a random number before the first step
                checkpoint.set_random_states(random_state.pop())
            total = backward(inputs["rows"])
            ewc_penalty[0] = policy.add_penalty()
            skipped.clear()
            measured = {"loss": total, "grad_norm": grad_norm()}
            loss_scale_metrics.clear()
            loss_scale_metrics.update(scale_metrics(policy.loss_scale, measured))
            if policy.loss_scale.overflowed(measured):
                policy.loss_scale.update(True)
                clear_gradients()
                skipped.append(True)
            elif all(map(math.isfinite, measured.values())):
                policy.loss_scale.update(False)
            else:
                batch = list({row["trajectory_id"]: None for row in inputs["rows"]})

                def measure(trajectory: Trajectory) -> dict[str, float]:
                    clear_gradients()
                    loss = backward([row for row in inputs["rows"] if row["trajectory_id"] == trajectory.id])
                    return {"loss": loss, "grad_norm": grad_norm()}

                guards.strike(
                    *("non_finite", spec.non_finite, step + len(steps) + 1, measured),
                    [by_id[name] for name in batch],
                    measure,
                    by="grad_norm",
                    advice=policy.loss_scale.advice("Lower the learning rate"),
                )
                clear_gradients()  # without gradients, the optimizer changes nothing
                skipped.append(True)
                total = 0.0
            return torch.tensor(total, device=policy.device)

        def _send_telemetry(self):
            """Send no telemetry."""

    class StepMetrics(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if not logs or "loss" not in logs:
                return
            number = step + len(steps) + 1
            names = ("learning_rate",) if skipped else ("loss", "grad_norm", "learning_rate")
            metrics = {name: float(logs[name]) for name in names}
            metrics |= {"ewc": ewc_penalty[0]} if policy.penalty else {}
            metrics["skipped_steps"] = float(len(skipped))
            metrics |= loss_scale_metrics
            metrics["seconds"] = time.monotonic() - clock[0]
            metrics |= {name: sum(counts[name] for counts in computed) for name in ("tokens", "computed_tokens")}
            metrics = {"step": float(number), **metrics}
            clock[0] = time.monotonic()
            computed.clear()
            steps.append(metrics)
            on_step(metrics)

    def share(scheduler_step: int) -> float:
        """Return the learning rate factor after `scheduler_step` steps; the warm-up continues from the checkpoint."""
        steps_done = len(earlier_steps) + scheduler_step
        warmup = schedule.warmup_share(spec, step + steps_done + 1)
        return warmup * (1 - steps_done / len(batches)) if spec.schedule == "linear" else warmup

    class OneProcess(SFTConfig):
        @cached_property
        def _setup_devices(self):
            self.distributed_state, self._n_gpu = _one_process(policy.device), 1
            return self.distributed_state.device

    config = OneProcess(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=1,  # each row of the dataset is a batch
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=spec.learning_rate,
        max_grad_norm=spec.max_grad_norm,
        max_length=None,
        seed=seed,
        use_cpu=policy.device == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,  # the filter would replace a loss that is not finite by an earlier one
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    with _restore_after_construction(policy):
        trainer = PackedSFTTrainer(
            model=policy.model,
            args=config,
            data_collator=lambda batches: {"rows": batches[0]["rows"]},
            train_dataset=Dataset.from_list([{"rows": rows} for rows in batches[len(earlier_steps) :]]),
            processing_class=tokenizer,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)),
            callbacks=[StepMetrics()],
        )
        trainer.remove_callback(PrinterCallback)  # it prints every log line to stdout
    clock[0] = time.monotonic()
    random_state.append(checkpoint.random_states())
    trainer.train()
    return step + len(steps), {**mean_metrics(steps), "examples": float(len(rows))}


def _batches(rows: list[dict[str, Any]], spec: SFTSpec, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each gradient step; each epoch has its own order."""
    for epoch in range(spec.epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for start in range(0, len(order), spec.batch_size):
            yield [rows[index] for index in order[start : start + spec.batch_size]]


def _one_process(device: str) -> PartialState:
    """Return the process state for accelerate: this process is the only one, whatever other processes and devices
    exist. Otherwise accelerate would give each process another part of the batches and average their gradients."""
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._shared_state.update(
        _cpu=device == "cpu",
        backend=None,
        debug=False,
        device=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device),
        distributed_type=DistributedType.NO,
        num_processes=1,
        process_index=0,
        local_process_index=0,
    )
    return PartialState()


@contextlib.contextmanager
def _restore_after_construction(policy: Policy) -> Iterator[None]:
    """Restore what the constructor of TRL's trainer changes: it seeds every random generator of the process, replaces
    the forward method of the model with one that can also fuse the loss, and rounds adapters on a quantised base to
    bfloat16. The random state must be the checkpoint's, and a warm policy must be the same after any number of
    trainings."""
    import numpy

    model = policy.base
    overridden = "forward" in vars(model)
    tensors = [(parameter, parameter.data) for parameter in policy.parameters.values()]
    forward = model.forward
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        if overridden:
            model.forward = forward
        else:
            vars(model).pop("forward", None)
        for parameter, data in tensors:
            parameter.data = data
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def examples(chat: ChatFormat, trajectories: Sequence[Trajectory], max_length: int) -> list[dict[str, Any]]:
    """Return one row per history with `input_ids`, `targets` (indices of the tokens to train on) and `trajectory_id`.
    Histories longer than `max_length` tokens are left out entirely, because a truncated history would teach the model
    to stop in the middle. Failed episodes are left out too."""
    rows = []
    for trajectory in trajectories:
        if trajectory.failure is not None:
            continue
        for history in trajectory.histories:
            if history.token_ids:
                targets = [index for index, sampled in enumerate(history.sampled_mask()) if sampled]
                rows.append(_row(list(history.token_ids), targets, trajectory))
                continue
            streams = chat.streams([to_openai(message) for message in history.messages], trajectory.tools)
            corrected = trajectory.policy == CORRECTION
            for stream in streams[-1:] if corrected else streams:
                spans = stream.spans[-1:] if corrected else stream.spans
                targets = [index for start, end in spans for index in range(start, end)]
                rows.append(_row(stream.token_ids, targets, trajectory))
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


def _row(token_ids: list[int], targets: list[int], trajectory: Trajectory) -> dict[str, Any]:
    return {"input_ids": token_ids, "targets": targets, "trajectory_id": trajectory.id}
