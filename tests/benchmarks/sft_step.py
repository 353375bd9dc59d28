"""Gradient steps of supervised fine-tuning on the quickstart's demonstrations: ours and TRL's SFTTrainer.

    python tests/benchmarks/sft_step.py [--repeat 3] [--model smollm2|tiny] [--demonstrations 28] [--batch-size 4]
        [--pack-tokens 768]

The demonstrations of `+experiment=quickstart`: the shop's solutions of 28 scenarios, which share the system prompt with
its tools. LoRA of rank 8 on all linear layers, float32 on a CPU, 4 demonstrations in a step, packs of 768 tokens, no
gradient checkpointing. Both see the same batches; the learning rate is so small that every step starts from the same
policy, so that the losses can be compared.

The two take turns in one process, one epoch each time. Seconds are those of single steps; memory is the most that is
resident during an epoch beyond what was before it. Ratios are TRL over ours for time, of the medians, and ours over TRL
for memory, of the peaks. Tokens are those of the demonstrations; `computed` is the share that ours computes.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.algorithms.builders import make_context
from tests.benchmarks.train_step import MODELS, Plain, adamw, model_spec, summary, with_peak

LEARNING_RATE = 1e-9


def demonstrations(count: int) -> list[Any]:
    from components.environments.worlds.shop import Shop
    from components.rollout.collector import choose_scenarios, demonstrate
    from components.rollout.formats import Presentation

    return demonstrate(Shop, choose_scenarios(Shop().scenarios("train"), count, 0, 0), Presentation())


class Ours:
    def __init__(self, base_dir: Path, trajectories: list[Any], options: argparse.Namespace, scratch: Path):
        from components.algorithms.policy.policy import Policy
        from components.algorithms.sft.spec import SFTSpec

        self.base_dir, self.trajectories, self.scratch = base_dir, trajectories, scratch
        self.policy = Policy(base_dir, model_spec(options.model), seed=0)
        self.optimizer = adamw(list(self.policy.parameters.values()))
        self.spec = SFTSpec(
            learning_rate=LEARNING_RATE,
            batch_size=options.batch_size,
            pack_tokens=options.pack_tokens,
            schedule="constant",
        )
        self.metrics: dict[str, float] = {}

    def epoch(self) -> tuple[list[float], list[float]]:
        """Return the seconds and the losses of the steps of one epoch."""
        from components.algorithms.sft.trainer import train_sft

        logs: list[dict[str, float]] = []
        options = {"base_dir": self.base_dir, "scratch": self.scratch, "on_step": logs.append}
        context = make_context(self.policy, self.optimizer, self.trajectories, **options)
        _, self.metrics = train_sft(self.spec, context)
        return [log["seconds"] for log in logs], [log["loss"] for log in logs]


class Trl(Plain):
    def __init__(self, base_dir: Path, trajectories: list[Any], options: argparse.Namespace, scratch: Path):
        from datasets import Dataset
        from transformers import TrainerCallback
        from transformers.trainer_callback import PrinterCallback
        from trl import SFTConfig, SFTTrainer

        from components.algorithms.sft.trainer import examples
        from components.models.weights import load_tokenizer
        from components.trajectories.chat import ChatFormat

        super().__init__(base_dir, model_spec(options.model))
        tokenizer = load_tokenizer(base_dir)
        rows = [
            {
                "input_ids": row["input_ids"],
                "labels": [token if index in row["targets"] else -100 for index, token in enumerate(row["input_ids"])],
            }
            for row in examples(ChatFormat(tokenizer), trajectories, model_spec(options.model).max_length)
        ]
        self.times: list[float] = []
        times = self.times

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                times.append(time.perf_counter())

        self.trainer = SFTTrainer(
            model=self.model,
            args=SFTConfig(
                output_dir=str(scratch),
                per_device_train_batch_size=options.batch_size,
                num_train_epochs=1,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                max_length=None,
                seed=0,
                use_cpu=True,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        self.trainer.remove_callback(PrinterCallback)

    def epoch(self) -> tuple[list[float], list[float]]:
        self.times.clear()
        self.trainer.train()
        losses = [log["loss"] for log in self.trainer.state.log_history if "loss" in log]
        return [end - begin for begin, end in zip(self.times[::2], self.times[1::2], strict=True)], losses


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from components.models import weights

    base_dir = weights.prepare(model_spec(options.model), options.cache or folder)
    trajectories = demonstrations(options.demonstrations)
    forms: dict[str, Any] = {
        "ours": Ours(base_dir, trajectories, options, folder),
        "trl": Trl(base_dir, trajectories, options, folder / "trl"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    losses: dict[str, list[float]] = {}
    peaks = dict.fromkeys(forms, 0.0)
    for turn in range(options.repeat + 1):
        for name, form in forms.items():
            (step_seconds, losses[name]), peak = with_peak(form.epoch)
            if turn == 0:
                continue  # warm-up
            seconds[name] += step_seconds
            peaks[name] = max(peaks[name], peak)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    metrics = forms["ours"].metrics
    return {
        "model": options.model,
        "steps": len(losses["ours"]),
        "tokens": int(metrics["tokens"]),
        "computed": round(metrics["computed_tokens"] / metrics["tokens"], 3),
        **{f"{name}_seconds": summary(values) for name, values in seconds.items()},
        **{f"{name}_peak_mb": peak for name, peak in peaks.items()},
        "time_ratio": round(medians["trl"] / medians["ours"], 3),
        "memory_ratio": round(peaks["ours"] / peaks["trl"], 3),
        "loss_difference": max(abs(ours - trl) for ours, trl in zip(losses["ours"], losses["trl"], strict=True)),
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="epochs of each that are timed, after one that is not")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--demonstrations", type=int, default=28)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--pack-tokens", type=int, default=768)
    parser.add_argument("--cache", type=Path, help="folder of converted weights; without it they are converted anew")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="espalier-sft-step-") as temporary:
        print(json.dumps(measure(options, Path(temporary)), indent=1))


if __name__ == "__main__":
    main()
