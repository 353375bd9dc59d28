"""Generation and adapter swaps: the embedded engine, a batch of transformers and a vLLM server on one GPU, in turn.

All get the same chat requests at once: groups of eight requests share a prompt. The engines get them through Espalier's
engine protocol; transformers generates in one batch. The weights are random, so a response ends at its maximum length.
A swap loads another adapter; its first response is measured as well, because a server may load weights only then.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.setup import MAX_LENGTH, RANK, Report, Setup, free, reason, with_peak

GROUP = 8
SWAPS = 3
GPU_MEMORY = 0.35
"""Share of the GPU memory that vLLM reserves."""
START = 0.8
"""Share of the part's time that vLLM's start may take."""
CACHE_BYTES = 32_000_000_000
"""Cache of the embedded engine: one slot of 2,048 tokens for each request."""

Generator = Callable[[list[Any]], list[int]]
"""Function that answers chat requests, and returns the number of sampled tokens of each."""


def run(setup: Setup, report: Report) -> None:
    """Measure the embedded engine, then start vLLM, whose start may fail or take long, and measure both in turn."""
    shape = setup.shape
    report.update(requests=shape.requests, sampled_tokens=shape.sampled, skipped_sides={}, sides={}, dtype=setup.dtype)
    skipped: dict[str, str] = report.result["skipped_sides"]
    engines: dict[str, Any] = {}
    generators: dict[str, Generator] = {}
    close: list[Callable[[], None]] = []
    try:
        for name, start in (("embedded", start_embedded), ("transformers", start_batch), ("vllm", start_vllm)):
            began = time.monotonic()
            try:
                started = start(setup, close)
            except Exception as error:  # noqa: BLE001  a side that fails here must not lose the others
                skipped[name] = reason(name, error)
                report.update()
                continue
            if name == "transformers":
                generators[name] = started
            else:
                engines[name] = started
                generators[name] = lambda asked, engine=started: [len(one.token_ids) for one in answers(engine, asked)]
            report.result["sides"][name] = {"start_seconds": round(time.monotonic() - began, 1)}
            if name == "transformers" and setup.vllm_python is not None:
                generate(setup, report, generators, 1)  # before vLLM, whose start can fail in ways that end the part
        generate(setup, report, generators, setup.repeat)
        compare(setup, report, engines)
        swap(setup, report, engines)
    finally:
        for stop in reversed(close):
            stop()


def start_embedded(setup: Setup, close: list[Callable[[], None]]) -> Any:
    from components.inference.transformers.engine import TransformersEngine

    free()
    options: dict[str, Any] = {"max_length": MAX_LENGTH, "slots": setup.shape.requests, "cache_bytes": CACHE_BYTES}
    engine = TransformersEngine(setup.base_dir, dtype=setup.dtype, device=setup.device, **options)
    close.append(engine.close)
    return engine


def start_vllm(setup: Setup, close: list[Callable[[], None]]) -> Any:
    from components.inference.engines.vllm import VllmSpec
    from components.inference.vllm.engine import VllmEngine
    from components.inference.vllm.server import VllmServer

    if setup.vllm_python is None:
        raise RuntimeError("vLLM is not installed here; name the interpreter of its environment by --vllm-python")
    timeout = max(START * (setup.deadline - time.monotonic()), 20.0)
    spec = VllmSpec(
        python=setup.vllm_python, max_lora_rank=RANK, gpu_memory=GPU_MEMORY, cpu_cache_gb=1, start_timeout=timeout
    )
    server = VllmServer(spec, setup.model(), setup.base_dir, setup.folder / "vllm.log")
    close.append(server.close)
    engine = VllmEngine(spec, setup.base_dir, max_length=MAX_LENGTH, urls=[server.url], ours=True, watch=server.check)
    close.append(engine.close)
    engine.check()
    return engine


def start_batch(setup: Setup, close: list[Callable[[], None]]) -> Generator:
    """Return a generator by `model.generate` of transformers, without an adapter: rows padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    from components.models.weights import load_tokenizer

    tokenizer = load_tokenizer(setup.base_dir)
    model = AutoModelForCausalLM.from_pretrained(setup.base_dir, dtype=getattr(torch, setup.dtype)).to(setup.device)

    def generator(asked: list[Any]) -> list[int]:
        prompts = [
            tokenizer.apply_chat_template(request.messages, add_generation_prompt=True, return_dict=False)
            for request in asked
        ]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=setup.device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        count = asked[0].sampling.max_tokens
        bounds = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": True, "top_k": 0}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask.to(setup.device), pad_token_id=0, **bounds)
        return [out.shape[1] - longest] * len(asked)

    return generator


def generate(setup: Setup, report: Report, generators: dict[str, Generator], repeat: int) -> None:
    """Measure sampled tokens per second. The first round of each side is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    for repetition in range(repeat + 1):
        if repetition > 1 and time.monotonic() > setup.deadline:
            break
        for name, generator in generators.items():
            asked = requests(setup, repetition)
            device = "cpu" if name == "vllm" else setup.device
            began = time.perf_counter()
            counts, peak = with_peak(device, lambda generator=generator, asked=asked: generator(asked))
            taken = time.perf_counter() - began
            if not repetition:
                continue
            seconds[name].append(taken)
            median = statistics.median(seconds[name])
            figures = {"seconds": round(median, 3), "repetitions": len(seconds[name])}
            figures |= {"tokens_per_s": round(sum(counts) / median), "sampled": sum(counts)}
            if name != "vllm":
                figures["peak_mb"] = peak
            report.result["sides"][name] |= figures
            report.update()
    measured = report.result["sides"]
    for name in ("transformers", "vllm"):
        if all("tokens_per_s" in measured.get(side, {}) for side in (name, "embedded")):
            speed = measured[name]["tokens_per_s"] / measured["embedded"]["tokens_per_s"]
            report.update(**{f"{name}_speed": round(speed, 2)})


def requests(setup: Setup, repetition: int, policy: str = "base", count: int | None = None) -> list[Any]:
    """Return requests in groups of eight with a shared prompt. Prompts differ between repetitions, so that no engine
    has them in its cache."""
    from components.inference.protocol import ChatRequest, Sampling

    found = []
    for index in range(count or setup.shape.requests):
        group = index // GROUP
        text = f"Group {group} of repetition {repetition}: " + "look it up, then answer. " * 200
        talk = [{"role": "user", "content": text[: setup.shape.prompt]}]
        sampling = Sampling(max_tokens=setup.shape.sampled if count is None else 1)
        found.append(ChatRequest(talk, policy=policy, sampling=sampling, seed=1000 * repetition + index))
    return found


def answers(engine: Any, asked: list[Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*(engine.chat(request) for request in asked))

    return asyncio.run(gather())


def compare(setup: Setup, report: Report, engines: dict[str, Any]) -> None:
    """Compare vLLM's log-probabilities of its own tokens with those that the embedded engine computes for them."""
    from components.inference.protocol import Sampling, TextRequest

    if len(engines) < 2:
        return

    async def score(completions: list[Any]) -> list[Any]:
        asked = [
            TextRequest([*one.prompt_token_ids, *one.token_ids], sampling=Sampling(max_tokens=0), scores_prompt=True)
            for one in completions
        ]
        return await asyncio.gather(*(engines["embedded"].complete(request) for request in asked))

    completions = answers(engines["vllm"], requests(setup, 90)[:GROUP])
    differences = []
    for theirs, ours in zip(completions, asyncio.run(score(completions)), strict=True):
        scored = ours.prompt_logprobs[-len(theirs.token_ids) :]
        differences += [abs(one - other) for one, other in zip(theirs.logprobs, scored, strict=True)]
    mean, most = statistics.fmean(differences), max(differences)
    report.update(logprob_difference={"mean": mean, "max": most, "tokens": len(differences)})


def swap(setup: Setup, report: Report, engines: dict[str, Any]) -> None:
    """Measure the time until another adapter is loaded, and until it has answered one request with one token."""
    from tests.deployment.tiny import write_adapter

    folders = [write_adapter(setup.base_dir, setup.folder / f"adapter-{index}", index, RANK) for index in range(SWAPS)]
    loaded: dict[str, list[float]] = {name: [] for name in engines}
    answered: dict[str, list[float]] = {name: [] for name in engines}
    for index, folder in enumerate(folders):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.load_policy(f"v{index}", str(Path(folder)))
            loaded[name].append(time.perf_counter() - began)
            answers(engine, requests(setup, 100 + index, f"v{index}", count=1))
            answered[name].append(time.perf_counter() - began)
            report.result["sides"][name] |= {
                "swap_seconds": round(statistics.median(loaded[name]), 3),
                "swap_and_answer_seconds": round(statistics.median(answered[name]), 3),
                "swaps": len(loaded[name]),
            }
            report.update()
