"""Rounds of TRL's `GRPOTrainer`, with vLLM in the same process: `python trl_rounds.py REQUEST`.

Imports TRL and vLLM, waits for a line on standard input, then trains. The last line of the output is a JSON object. Its
packages may be those of vLLM's environment, so it imports nothing of Espalier.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from typing import Any


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return rewards as of `rounds.TokenReward`."""
    texts = (",".join(map(str, tokens)) for tokens in completion_ids)
    return [int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 for text in texts]


def train(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    if request["vllm"]:
        import vllm  # type: ignore[import-not-found]  # noqa: F401
    sys.stdin.readline()
    began = time.monotonic()
    ended: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            ended.append(time.monotonic())

    options: dict[str, Any] = {"use_vllm": False}
    if request["vllm"]:
        options = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": request["gpu_memory"],
            "vllm_max_model_length": 512,
        }
    config = GRPOConfig(
        output_dir=request["out"],
        model_init_kwargs={"dtype": request["dtype"]},
        per_device_train_batch_size=request["group"] * len(request["prompts"]),
        num_generations=request["group"],
        max_steps=request["rounds"],
        max_completion_length=request["sampled"],
        learning_rate=request["learning_rate"],
        beta=0.0,
        gradient_checkpointing=False,
        bf16=request["dtype"] == "bfloat16",
        use_cpu=request["device"] == "cpu",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )
    lora = {"r": request["rank"], "lora_alpha": request["alpha"], "lora_dropout": 0.0}
    rows = [[{"role": "user", "content": prompt}] for prompt in request["prompts"]]
    trainer = GRPOTrainer(
        model=request["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows}),
        peft_config=LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **lora),
        callbacks=[Clock()],
    )
    trainer.train()
    generator = "vLLM colocated" if request["vllm"] else "transformers"
    return {
        "label": f"TRL `GRPOTrainer`, {generator}",
        "first_seconds": round(ended[0] - began, 1),
        "rounds_per_hour": round(3600 * (len(ended) - 1) / (ended[-1] - ended[0])),
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        result = train(json.loads(sys.argv[1]))
    print(json.dumps(result))
