"""A gradient step of TRL's AsyncGRPOTrainer, whose rows are prefix trees, without its vLLM server.

The trainer accepts a rollout worker and a weight transfer of one's own: here a queue that holds the episodes of the
workload, and a transfer that does nothing. Packing, forward pass, loss and optimizer are TRL's. It packs in its data
loader, before the step that is timed; ours packs within its step.

Its attention is a FlashAttention 3 kernel of the package `kernels`, for Hopper GPUs, from the Hugging Face cache. Where
that is not available, the same segments go to torch's `varlen_attn`, or to one call of scaled dot-product attention per
segment; the result names the kernel.
"""

from __future__ import annotations

import contextlib
import inspect
import queue
import sys
import time
from typing import Any

from tests.benchmarks.gpu.setup import ALPHA, RANK, Setup
from tests.benchmarks.train_step import Episode, synchronize

BATCHES = 3
"""Number of batches in the queue per step."""


class TrlTree:
    """Trainer with a step of one group per call."""

    def __init__(self, setup: Setup, episodes: list[Episode]):
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import TrainerCallback
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer

        from components.models.weights import load_tokenizer

        self.kernel = use_kernel(setup)
        self.worker = Worker(episodes)
        self.times: list[float] = []
        times, device = self.times, setup.device
        if device == "cpu":
            async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for the name of the GPU

        class Clock(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                synchronize(device)
                times.append(time.perf_counter())

            def on_step_end(self, *_: Any, **__: Any) -> None:
                synchronize(device)
                times.append(time.perf_counter())

        config = AsyncGRPOConfig(
            output_dir=str(setup.folder / "trl_tree"),
            dtype=setup.dtype,
            per_device_train_batch_size=len(episodes),
            gradient_accumulation_steps=1,
            num_generations=len(episodes),
            token_budget=-1,  # all samples of the micro-batch in one row
            max_steps=1,
            learning_rate=1e-9,
            max_grad_norm=1e9,
            bf16=setup.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=device == "cpu",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        lora = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        )
        with contextlib.redirect_stdout(sys.stderr):
            self.trainer = AsyncGRPOTrainer(
                model=str(setup.base_dir),
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=config,
                train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}]] * len(episodes)}),
                processing_class=load_tokenizer(setup.base_dir),
                callbacks=[Clock()],
                peft_config=lora,
                rollout_worker=self.worker,
                weight_transfer=NoTransfer(),
            )

    def step(self) -> float:
        """Take a step and return its seconds."""
        self.times.clear()
        self.worker.fill(self.trainer.model_version)
        with contextlib.redirect_stdout(sys.stderr):
            self.trainer.train()
        return self.times[1] - self.times[0]


class Worker:
    """Rollout worker whose queue holds the episodes of a workload."""

    def __init__(self, episodes: list[Episode]):
        self.episodes = episodes
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def fill(self, version: int) -> None:
        """Fill the queue with the group, with advantages by its standard deviation: once for the step, and for the
        batches that the data loader fetches ahead."""
        import numpy as np
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        while not self.rollout_buffer.empty():
            self.rollout_buffer.get_nowait()
        rewards = np.array([episode.reward for episode in self.episodes])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for episode, advantage in [*zip(self.episodes, advantages, strict=True)] * BATCHES:
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array(episode.token_ids),
                    completion_mask=np.array(episode.sampled, dtype=np.int64),
                    old_log_probs=np.zeros(len(episode.token_ids), dtype=np.float32),
                    advantage=float(advantage),
                    model_version=version,
                    group_id=0,
                    metrics={},
                )
            )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the trainer asks for more samples than a step has")


class NoTransfer:
    """Weight transfer to nowhere."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Any) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


# Kernels


def use_kernel(setup: Setup) -> str:
    """Make TRL's tree attention use the first kernel that computes here. Return its name."""
    from trl.experimental.async_grpo import packing

    if setup.device == "cuda":
        try:
            module = packing._flash_attn()
            if _equal(module.flash_attn_varlen_func):
                return "flash-attn3"
        except Exception:  # noqa: BLE001  not installed, not cached, or not for this GPU
            pass
        try:
            if _equal(_torch_varlen):
                packing._flash_attn = lambda: _Kernel(_torch_varlen)
                return "torch varlen_attn"
        except Exception:  # noqa: BLE001
            pass
    packing._flash_attn = lambda: _Kernel(_by_segment)
    return "sdpa per segment"


class _Kernel:
    def __init__(self, function: Any):
        self.flash_attn_varlen_func = function


def _torch_varlen(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, softmax_scale: Any, **_: Any
) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    options = {"scale": softmax_scale, "window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    else:  # before torch 2.12
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, **options)


def _by_segment(
    query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *, softmax_scale: Any, **_: Any
) -> Any:
    """Compute one segment after the other. A segment's queries are the last positions of its keys."""
    import torch

    parts, starts = [], zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:], strict=False)
    for first, last, start, stop in starts:
        q, k, v = (one.transpose(0, 1)[None] for one in (query[first:last], key[start:stop], value[start:stop]))
        rows, columns = last - first, stop - start
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _equal(function: Any) -> bool:
    """Return True if a kernel computes what `_by_segment` does, up to the rounding of bfloat16."""
    import torch

    torch.manual_seed(0)
    query, key, value = (
        torch.randn(count, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count, heads in ((96, 4), (160, 2), (160, 2))
    )
    cu_q, cu_k = (torch.tensor(ends, device="cuda", dtype=torch.int32) for ends in ([0, 64, 96], [0, 64, 160]))
    results = []
    for one in (function, _by_segment):
        out = one(query, key, value, cu_q, cu_k, 64, 96, softmax_scale=0.1, causal=True)
        out = out[0] if isinstance(out, tuple) else out
        gradients = torch.autograd.grad(out.float().square().sum(), (query, key, value))
        results.append([out.detach(), *gradients])
    return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in zip(*results, strict=True))
