"""Engines beside the trainer on one GPU: the embedded engine, also with CUDA graphs, and a vLLM server.

First, float32 with an adapter is refused before vLLM starts. Then for each engine: sampled tokens per second, and
log-probabilities of known tokens. A policy whose adapter differs is loaded, the engine samples tokens with their
log-probabilities, and the trainer computes those of the same tokens, with that adapter and with the one before: the
first difference is rounding, the second is what a stale adapter would show. The same after the engine has released its
memory (vLLM: sleep) and taken it again, with another adapter.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import machine
from tests.benchmarks.gpu.exact import policy_logprobs
from tests.benchmarks.gpu.report import Report
from tests.benchmarks.gpu.setup import GPU_MEMORY, GROUP, MAX_LENGTH, RANK, Setup, free
from tests.benchmarks.train_step import Episode

REPEAT = 2
"""Timed batches for each number of rows, after one that warms up."""
NOISE = 0.02
"""Standard deviation of what is added to the adapter for the next version."""
CACHE_BYTES = 32_000_000_000


def run(setup: Setup, report: Report) -> None:
    from components.algorithms.policy.policy import Policy

    report.update(dtype=setup.dtype, sampled_tokens=setup.shape.sampled, refused_float32=refusal(setup), engines={})
    policy = Policy(setup.chat_dir, setup.chat_model, seed=0)
    starts = {"embedded": start_embedded, "embedded_graphed": partial(start_embedded, cuda_graphs=True)}
    for name, start in (starts | {"vllm": start_vllm}).items():
        began = time.monotonic()
        try:
            engine = start(setup)
        except Exception as error:  # noqa: BLE001  an engine that fails must not lose the other
            report.skip(name, error)
            continue
        figures: dict[str, Any] = {"start_seconds": round(time.monotonic() - began, 1), "tokens_per_s": {}}
        report.result["engines"][name] = figures
        report.update()
        try:
            figures["after_swap"] = known_tokens(setup, policy, engine, f"{name}-swap")
            report.update()
            engine.release()
            figures["after_release"] = known_tokens(setup, policy, engine, f"{name}-release")
            for rows in setup.shape.rows:
                figures["tokens_per_s"][str(rows)] = speed(setup, engine, rows)
                report.update()
        except Exception as error:  # noqa: BLE001
            report.skip(name, error)
        finally:
            engine.close()
            free()


def refusal(setup: Setup) -> str | None:
    """Return the message that refuses a float32 model with an adapter on a GPU; None if it is not refused."""
    from components.errors import EspalierError
    from components.inference.engines.vllm import VllmSpec

    spec = VllmSpec(python=setup.vllm_python or sys.executable)
    try:
        spec.check_model(setup.spec(*setup.shape.chat_model, dtype="float32"), setup.chat_dir)
    except EspalierError as error:
        return str(error)
    return None


def start_embedded(setup: Setup, *, cuda_graphs: bool = False) -> Any:
    from components.inference.transformers.engine import TransformersEngine

    options: dict[str, Any] = {"max_length": MAX_LENGTH, "slots": max(setup.shape.rows), "cache_bytes": CACHE_BYTES}
    options["cuda_graphs"] = cuda_graphs
    return TransformersEngine(setup.chat_dir, dtype=setup.dtype, device=setup.device, **options)


def vllm_spec(setup: Setup) -> Any:
    from components.inference.engines.vllm import VllmSpec

    if setup.vllm_python is None:
        raise RuntimeError(machine.NO_VLLM)
    options = {"sleep": 1, "gpu_memory": GPU_MEMORY} if setup.device == "cuda" else {"cpu_cache_gb": 1}
    return VllmSpec(python=setup.vllm_python, max_lora_rank=RANK, **options)  # type: ignore[arg-type]


def start_vllm(setup: Setup) -> Any:
    """Return an engine on the server of all parts, which the first call starts."""
    from components.inference.vllm.engine import VllmEngine
    from components.inference.vllm.server import VllmServer

    spec = vllm_spec(setup)
    if setup.server is None:
        compiled = setup.folder / "compiled"
        server = VllmServer(spec, setup.chat_model, setup.chat_dir, setup.folder / "vllm.log", compiled)
        setup.closing.callback(server.close)
        server.wait()
        setup.server = server
    engine = VllmEngine(
        spec,
        setup.chat_dir,
        max_length=MAX_LENGTH,
        dtype=setup.dtype,
        urls=[setup.server.url],
        ours=True,
        watch=setup.server.check,
    )
    engine.check()
    return engine


def known_tokens(setup: Setup, policy: Any, engine: Any, version: str) -> dict[str, Any]:
    """Load the policy with a changed adapter. Return the mean differences of the engine's log-probabilities of its own
    tokens from the trainer's with this adapter and with the one before, in nats."""
    import torch

    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    generator = torch.Generator().manual_seed(sum(version.encode()))
    with torch.no_grad():
        for value in policy.parameters.values():
            value += NOISE * torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    folder = setup.folder / "adapters" / version
    policy.save(folder)
    began = time.perf_counter()
    engine.load_policy(version, str(Path(folder)))
    seconds = time.perf_counter() - began
    completions = answers(engine, requests(setup, GROUP, version=version))
    episodes = [
        Episode(
            tuple(answer.prompt_token_ids + answer.token_ids),
            (False,) * len(answer.prompt_token_ids) + (True,) * len(answer.token_ids),
            0.0,
        )
        for answer in completions
    ]
    sampled = torch.tensor([value for answer in completions for value in answer.logprobs])
    trained = {name: value.detach().clone() for name, value in policy.parameters.items()}
    gaps = {}
    for name, values in (("stale", before), ("current", trained)):
        with torch.no_grad():
            for key, value in policy.parameters.items():
                value.copy_(values[key])
        gaps[name] = (policy_logprobs(policy, episodes).float().cpu() - sampled).abs()
    return {
        "tokens": len(sampled),
        "load_seconds": round(seconds, 3),
        "mean": float(gaps["current"].mean()),
        "max": float(gaps["current"].max()),
        "stale_mean": float(gaps["stale"].mean()),
    }


def speed(setup: Setup, engine: Any, rows: int) -> int:
    """Return the sampled tokens per second of concurrent requests."""
    rates = []
    for repetition in range(1 + REPEAT):
        asked = requests(setup, rows, repetition, engine.policy)
        began = time.perf_counter()
        completions = answers(engine, asked)
        rates.append(sum(len(answer.token_ids) for answer in completions) / (time.perf_counter() - began))
    return round(statistics.median(rates[1:]))


def requests(setup: Setup, count: int, repetition: int = 0, version: str = "base") -> list[Any]:
    """Return requests in groups of eight with a shared prompt, with different prompts in each repetition, so that no
    engine has them in its cache."""
    from components.inference.protocol import ChatRequest, Sampling

    asked = []
    for index in range(count):
        text = f"{repetition}.{index // GROUP}: Tell a long story about a lamp, a kettle and a chair in a small shop."
        talk = [{"role": "user", "content": text}]
        sampling = Sampling(max_tokens=setup.shape.sampled)
        asked.append(ChatRequest(talk, policy=version, sampling=sampling, seed=1000 * repetition + index))
    return asked


def answers(engine: Any, asked: Sequence[Any]) -> list[Any]:
    from components.inference.protocol import gather_completions

    return asyncio.run(gather_completions(engine.chat, asked))
