"""Supervised fine-tuning on assistant tokens, with TRL's SFTTrainer over prefix-trie packs.

Demonstrations are laid out as a rollout would lay them out (`ChatFormat.streams`), sampled trajectories keep the
tokens that were sampled. Only tokens that the policy would write are learned, never those of system, user or tools.

TRL keeps the loop, the schedule and the logs. The loss is TRL's own (mean negative log-likelihood over the batch's
learned tokens, arXiv:2203.02155), but computed on a pack instead of padded rows: prompts that demonstrations share are
computed once, and logits are made for learned tokens only, which is where the padded form spends its memory. Of several
processes each runs the whole loop, and they share the packs of each batch (`distributed`).
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
from components.algorithms.loop.guards import Guards
from components.algorithms.loop.metrics import of_packs, over_steps
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
    taken: Sequence[dict[str, float]] = (),
) -> tuple[int, dict[str, float]]:
    """`spec.epochs` passes over the trajectories. Returns the new step count and the mean metrics.

    taken: metrics of the steps that an earlier try took after step `step`; policy and optimizer are those after them.

    Raises TrainingDiverged where a guard stops (`guards`).
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(base_dir)
    weights = reward_weights(trajectories, spec.weight_temperature)
    learned_from = [one for one in trajectories if one.id in weights]
    rows = examples(ChatFormat(tokenizer), learned_from, policy.spec.max_length)
    if not rows:
        return step, {"skipped": 1.0}
    steps = list(taken)
    batches = list(_batches(rows, spec, seed))
    if len(taken) == len(batches):
        return step + len(taken), {**over_steps(steps), "examples": float(len(rows))}
    clock = [0.0]
    computed: list[dict[str, float]] = []
    guards = Guards(scratch)
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    random_state: list[dict[str, torch.Tensor]] = []

    skipped: list[bool] = []
    held = [0.0]
    scaling: dict[str, float] = {}

    def backward(rows: list[dict[str, Any]]) -> float:
        """Adds the gradient of the rows' loss to the parameters; returns the loss."""
        sequences = [Sequence_(row["input_ids"], row["targets"], weight=weights[row["trajectory_id"]]) for row in rows]
        learned = sum(len(sequence.targets) for sequence in sequences)
        packs = pack(sequences, spec.pack_tokens, padded=policy.padded)
        total = 0.0
        for part, real in distributed.share_drawing(packs):
            logprob_S, _ = policy.logprobs(part, Cut())
            loss = -(logprob_S * part.weight_S.to(policy.device)).sum() / learned
            policy.loss_scale.backward(loss if real else loss * 0)
            total += loss.item() if real else 0.0
        distributed.sum_gradients(policy.parameters.values())
        policy.loss_scale.unscale(policy.parameters.values())
        computed.append(of_packs(packs))
        return distributed.sums({"loss": total})["loss"]

    def grad_norm() -> float:
        return sharded.norm(policy.parameters.values())

    def forget() -> None:
        for parameter in policy.parameters.values():
            parameter.grad = None

    class PackedSFTTrainer(SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            if random_state:  # the loader of TRL's trainer draws a number before the first step
                checkpoint.set_random_states(random_state.pop())
            total = backward(inputs["rows"])
            held[0] = policy.add_penalty()
            skipped.clear()
            measured = {"loss": total, "grad_norm": grad_norm()}
            scaling.clear()
            scaling.update(scale_metrics(policy.loss_scale, measured))
            if policy.loss_scale.overflowed(measured):
                policy.loss_scale.update(True)
                forget()
                skipped.append(True)
            elif all(map(math.isfinite, measured.values())):
                policy.loss_scale.update(False)
            else:
                batch = list({row["trajectory_id"]: None for row in inputs["rows"]})

                def measure(trajectory: Trajectory) -> dict[str, float]:
                    forget()
                    loss = backward([row for row in inputs["rows"] if row["trajectory_id"] == trajectory.id])
                    return {"loss": loss, "grad_norm": grad_norm()}

                guards.strike(
                    *("non_finite", spec.non_finite, step + len(steps) + 1, measured),
                    [by_id[name] for name in batch],
                    measure,
                    by="grad_norm",
                    advice=policy.loss_scale.advice("Lower the learning rate"),
                )
                forget()  # without a gradient, the optimizer leaves everything as it is
                skipped.append(True)
                total = 0.0
            return torch.tensor(total, device=policy.device)

        def _send_telemetry(self):
            """Nothing leaves this machine."""

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if not logs or "loss" not in logs:
                return
            number = step + len(steps) + 1
            names = ("learning_rate",) if skipped else ("loss", "grad_norm", "learning_rate")
            metrics = {name: float(logs[name]) for name in names}
            metrics |= {"ewc": held[0]} if policy.penalty else {}
            metrics["skipped_steps"] = float(len(skipped))
            metrics |= scaling
            metrics["seconds"] = time.monotonic() - clock[0]
            metrics |= {name: sum(one[name] for one in computed) for name in ("tokens", "computed_tokens")}
            metrics = {"step": float(number), **metrics}
            clock[0] = time.monotonic()
            computed.clear()
            steps.append(metrics)
            on_step(metrics)

    def share(now: int) -> float:
        """Of the learning rate, for the step after `now` ones: the warm-up goes on where the checkpoint stood."""
        done = len(taken) + now
        risen = schedule.warmup_share(spec, step + done + 1)
        return risen * (1 - done / len(batches)) if spec.schedule == "linear" else risen

    class OneProcess(SFTConfig):
        @cached_property
        def _setup_devices(self):
            self.distributed_state, self._n_gpu = _one_process(policy.device), 1
            return self.distributed_state.device

    config = OneProcess(
        output_dir=str(scratch / "trl"),
        per_device_train_batch_size=1,  # a row of the dataset is a batch
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=spec.learning_rate,
        max_grad_norm=spec.max_grad_norm,
        max_length=None,
        seed=seed,
        use_cpu=policy.device == "cpu",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would report the loss before the first one that is not finite
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
        bf16=False,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    with _undisturbed(policy):
        trainer = PackedSFTTrainer(
            model=policy.model,
            args=config,
            data_collator=lambda batches: {"rows": batches[0]["rows"]},
            train_dataset=Dataset.from_list([{"rows": rows} for rows in batches[len(taken) :]]),
            processing_class=tokenizer,
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)),
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)  # it prints every log line to stdout
    clock[0] = time.monotonic()
    random_state.append(checkpoint.random_states())
    trainer.train()
    return step + len(steps), {**over_steps(steps), "examples": float(len(rows))}


def _batches(rows: list[dict[str, Any]], spec: SFTSpec, seed: int) -> Iterator[list[dict[str, Any]]]:
    """The rows of each gradient step: each epoch in an order of its own."""
    for epoch in range(spec.epochs):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for start in range(0, len(order), spec.batch_size):
            yield [rows[index] for index in order[start : start + spec.batch_size]]


def _one_process(device: str) -> PartialState:
    """What accelerate is to know of processes and devices: this process is the only one, whatever else is in the
    machine. It would give each process another part of the batches and average their gradients."""
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
def _undisturbed(policy: Policy) -> Iterator[None]:
    """TRL's trainer, when it is made, seeds every random generator of the process, replaces the forward method of the
    model with one that can also fuse the loss, and rounds adapters on a quantised base to bfloat16. All is put back:
    the random state is the checkpoint's, and a warm policy must be the same after any number of trainings."""
    import numpy

    model = policy.base
    own = "forward" in vars(model)
    tensors = [(parameter, parameter.data) for parameter in policy.parameters.values()]
    forward = model.forward
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        if own:
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
    """`input_ids`, `targets` (indices of the tokens to learn) and `trajectory_id`, one row a history. Histories longer
    than `max_length` tokens are left out whole: a truncated one would teach to stop in the middle. So are failed
    episodes."""
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
    kept = [row for row in rows if len(row["input_ids"]) <= max_length]
    if len(kept) < len(rows):
        log.warning(
            "histories left out of training, for they are longer than model.max_length=%d tokens: %d of %d",
            max_length,
            len(rows) - len(kept),
            len(rows),
        )
    return kept


def reward_weights(trajectories: Sequence[Trajectory], temperature: float | None) -> dict[str, float]:
    """By trajectory: softmax(reward / temperature) over all that are scored, times their number; those that are not
    are left out. Without a temperature, 1 for each."""
    if temperature is None:
        return {one.id: 1.0 for one in trajectories}
    scored = {one.id: one.reward / temperature for one in trajectories if one.reward is not None and not one.failure}
    highest = max(scored.values(), default=0.0)
    powers = {name: math.exp(value - highest) for name, value in scored.items()}
    total = math.fsum(powers.values())
    return {name: len(powers) * power / total for name, power in powers.items()}


def _row(token_ids: list[int], targets: list[int], trajectory: Trajectory) -> dict[str, Any]:
    return {"input_ids": token_ids, "targets": targets, "trajectory_id": trajectory.id}
