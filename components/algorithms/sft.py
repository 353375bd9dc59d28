"""Supervised fine-tuning on assistant tokens, with TRL's SFTTrainer over prefix-trie packs.

Demonstrations are laid out as a rollout would lay them out (`ChatFormat.streams`), sampled trajectories keep the
tokens that were sampled. Only tokens that the policy would write are learned, never those of system, user or tools.

TRL keeps the loop, the schedule and the logs. The loss is TRL's own (mean negative log-likelihood over the batch's
learned tokens, arXiv:2203.02155), but computed on a pack instead of padded rows: prompts that demonstrations share are
computed once, and logits are made for learned tokens only, which is where the padded form spends its memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from components.algorithms.packing import Sequence_, pack
from components.algorithms.policy import Policy
from components.algorithms.spec import SFTSpec
from components.errors import TrainingDiverged
from components.models.weights import load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.schema import Trajectory


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
) -> tuple[int, dict[str, float]]:
    """`spec.epochs` passes over the trajectories. Returns the new step count and the mean metrics.

    Raises TrainingDiverged where the loss or the gradient is no longer finite.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer = load_tokenizer(base_dir)
    rows = examples(ChatFormat(tokenizer), trajectories, policy.spec.max_length)
    if not rows:
        return step, {"skipped": 1.0}
    logs: list[dict[str, float]] = []
    clock = [time.monotonic()]
    computed = [0, 0]

    class PackedSFTTrainer(SFTTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            sequences = [Sequence_(row["input_ids"], row["targets"]) for row in inputs["rows"]]
            learned = sum(len(sequence.targets) for sequence in sequences)
            total = torch.zeros((), device=policy.device)
            for part in pack(sequences, spec.pack_tokens):
                logprob_S, _ = policy.logprobs(part, temperature=1.0)
                loss = -logprob_S.sum() / learned
                self.accelerator.backward(loss)
                total += loss.detach()
                computed[0] += sum(part.lengths)
                computed[1] += len(part.token_ids_N)
            return total

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if not logs or "loss" not in logs:
                return
            number = step + state.global_step
            metrics = {name: float(logs[name]) for name in ("loss", "grad_norm", "learning_rate")}
            if not all(math.isfinite(value) for value in metrics.values()):
                raise TrainingDiverged(
                    f"gradient step {number}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}. No checkpoint "
                    "was written. Lower the learning rate"
                )
            metrics["seconds"] = time.monotonic() - clock[0]
            clock[0] = time.monotonic()
            record(number, metrics)

    def record(number: int, metrics: dict[str, float]) -> None:
        logs.append(metrics)
        on_step({"step": number, **metrics})

    trainer = PackedSFTTrainer(
        model=policy.model,
        args=SFTConfig(
            output_dir=str(scratch / "trl"),
            per_device_train_batch_size=spec.batch_size,
            num_train_epochs=spec.epochs,
            learning_rate=spec.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=max(0, spec.warmup_steps - step),
            max_grad_norm=spec.max_grad_norm,
            max_length=None,
            seed=seed,
            use_cpu=policy.device == "cpu",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            bf16=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            dataloader_pin_memory=False,
        ),
        data_collator=lambda batch: {"rows": batch},
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        optimizers=(optimizer, None),
        callbacks=[Report()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints every log line to stdout
    trainer.train()
    seconds = sum(log["seconds"] for log in logs)
    means = {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}
    means |= {
        "seconds": seconds,
        "tokens": float(computed[0]),
        "computed_tokens": float(computed[1]),
        "tokens_per_s": computed[0] / seconds,
        "examples": float(len(rows)),
    }
    return step + trainer.state.global_step, means


def examples(chat: ChatFormat, trajectories: Sequence[Trajectory], max_length: int) -> list[dict[str, Any]]:
    """`input_ids` and `targets` (indices of the tokens to learn), one row a history. Histories longer than
    `max_length` tokens are left out whole: a truncated one would teach to stop in the middle."""
    rows = []
    for trajectory in trajectories:
        for history in trajectory.histories:
            if history.token_ids:
                targets = [index for index, sampled in enumerate(history.sampled_mask()) if sampled]
                rows.append({"input_ids": list(history.token_ids), "targets": targets})
                continue
            for stream in chat.streams([to_openai(message) for message in history.messages], trajectory.tools):
                targets = [index for start, end in stream.spans for index in range(start, end)]
                rows.append({"input_ids": stream.token_ids, "targets": targets})
    return [row for row in rows if row["targets"] and len(row["input_ids"]) <= max_length]
