"""Speed of decoding with the embedded engine: rows that share a prefix, against the same without sharing, and others.

    python tests/benchmarks/generation.py [--json] [--rows 64] [--prefix 250] [--own 16] [--tokens 24] [--repeat 1]
                                          [--threads 1] [--cache FOLDER] [--vllm-python PYTHON]

Each of `--rows` prompts has `--prefix` tokens in common with the others and `--own` tokens of its own; each run samples
`--tokens` tokens of each. A step samples one token of each row; its time includes the engine's loop and the drawing of
samples, and not the prompts. The steps of the first two take turns within a run, and change their places in a second
one with the same seeds; the other sides run in between. Medians count:

    shared        the engine (`components.inference.transformers`)
    apart         the same, reading the keys and values of each row by itself (`Batch.shared_tokens` infinite)
    transformers  `generate` with the prefix computed once and its cache repeated, scaled dot-product attention
    vllm          vLLM on CPU with prefix caching, in the environment of `--vllm-python`, without compilation
    linear        the matrix products of one step by torch alone: those of the linear layers and the head
    products      these, and the products of attention with the shared prefix once

A second is one of the processor's for one thread, which other programs on the machine disturb least, and else one of
the clock. `tokens_per_s` is that of `shared`; `ratio_vs_X` is its ratio to X, `ratio_vs_before` to `apart`.
`fraction_of_bound` is the share of `products` in a step of `shared`, `fraction_of_linear` that of `linear`.
`ratio_possible` is the ratio to `apart` of a step of nothing but its `products`. `same_tokens` is the share of rows
with the same samples in both runs, in which each step is shared once, and `logprob_gap` the largest difference of
log-probabilities up to a row's first other sample.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
OURS = ("shared", "apart")
PRODUCTS = 6
"""Times that the products of a step are computed after each run."""
VLLM_RUNS = 3
MODELS = {"tiny": ("tiny", "random"), "smollm2": ("smollm2-135m-instruct", "package")}


def clock(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def prompts(tokenizer: Any, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of text: requests to the shop."""
    from components.environments.worlds.shop import SYSTEM, Shop

    requests = [one.input["request"] for one in Shop().scenarios("train")]
    text = SYSTEM + "\n" + "\n".join(requests[-50:]) * (1 + options.prefix // 500)
    shared = tokenizer(text).input_ids[: options.prefix]
    own = [tokenizer(f"{request} {requests[index - 1]}").input_ids for index, request in enumerate(requests)]
    assert len(shared) == options.prefix
    return [[*shared, *own[index % len(own)][: options.own]] for index in range(options.rows)]


class Ours:
    def __init__(self, base_dir: Path, given: list[list[int]], options: argparse.Namespace):
        from components.inference.transformers.engine import TransformersEngine

        longest = options.prefix + options.own + options.tokens
        self.engine = TransformersEngine(base_dir, max_length=longest + 1, device="cpu", slots=options.rows)
        self.engine.batch.stop_ids = frozenset()  # every row samples as many tokens as the others
        self.least = self.engine.batch.shared_tokens
        self.given, self.options = given, options
        self.stamps: list[float] = []
        self.order: tuple[str, ...] = OURS
        original, now = self.engine._pass, clock(options.threads)

        def timed() -> Any:
            batch = self.engine.batch
            batch.shared_tokens = self.least if self.order[len(self.stamps) % len(self.order)] == "shared" else math.inf
            batch._partitioned = []  # compares the prefixes of every step: a millisecond of both sides
            done = original()
            self.stamps.append(now())
            return done

        self.engine._pass = timed

    def run(self, order: tuple[str, ...]) -> tuple[dict[str, list[float]], list[Any]]:
        """Return the seconds of the steps of each side, and the completions."""
        from components.inference.protocol import Sampling, TextRequest

        async def all_at_once() -> list[Any]:
            settings = Sampling(max_tokens=self.options.tokens)
            requests = [TextRequest(ids, sampling=settings, seed=index) for index, ids in enumerate(self.given)]
            return await asyncio.gather(*(self.engine.complete(request) for request in requests))

        self.stamps.clear()
        self.order = order
        completions = asyncio.run(all_at_once())
        steps: dict[str, list[float]] = {side: [] for side in order}
        for index, seconds in enumerate(differences(self.stamps), 1):
            steps[order[index % len(order)]].append(seconds)
        return steps, completions


def differences(stamps: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(stamps)]


def transformers_steps(model: Any, given: list[list[int]], options: argparse.Namespace) -> list[float]:
    import torch
    from transformers import DynamicCache

    now, stamps = clock(options.threads), []

    def stamp(ids: Any, scores: Any, **_: Any) -> Any:
        stamps.append(now())
        return torch.zeros(len(ids), dtype=torch.bool)

    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(input_ids=torch.tensor([given[0][: options.prefix]]), past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(len(given))
            ids = torch.tensor(given)
            count = max(2, options.tokens // 2)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, min_new_tokens=count, max_new_tokens=count, stopping_criteria=[stamp],
            )  # fmt: skip
    finally:
        model.set_attn_implementation(own)
    return differences(stamps)


def products(model: Any, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of the linear layers' matrix products of a step, and of those of attention."""
    import torch

    now, rows, config = clock(options.threads), options.rows, model.config
    layers = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    given = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in layers}}
    heads = config.num_key_value_heads
    groups, dim = config.num_attention_heads // heads, config.hidden_size // config.num_attention_heads
    tokens = options.own + options.tokens // 2
    parts = [(heads, rows * groups, options.prefix), (rows * heads, groups, tokens)]
    attention = [
        (torch.randn(batch, queries, dim), torch.randn(batch, queries, keys), torch.randn(batch, keys, dim))
        for batch, queries, keys in parts
    ]
    with torch.inference_mode():
        start = now()
        for weight in layers:
            torch.nn.functional.linear(given[weight.shape[1]], weight)
        middle = now()
        for _ in range(config.num_hidden_layers):
            for query, share, key in attention:
                torch.bmm(query, key.transpose(1, 2))
                torch.bmm(share, key)
        return middle - start, now() - middle


# --- vLLM, in its own process -----------------------------------------------------------------------------------------


@contextmanager
def vllm(base_dir: Path, given: list[list[int]], options: argparse.Namespace) -> Iterator[Callable[[], float]]:
    """Yield a function that returns vLLM's seconds of a step."""
    told = {"model": str(base_dir), "prompts": given, "tokens": options.tokens, "threads": options.threads}
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [options.vllm_python, str(Path(__file__).resolve()), "--vllm-side"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, **pipes, stderr=errors, cwd="/", env={**os.environ, **variables}) as process,
    ):
        into, out = process.stdin, process.stdout
        assert into is not None
        assert out is not None

        def ask(line: str) -> Any:
            into.write(line + "\n")
            into.flush()
            while said := out.readline():
                if said.startswith("RESULT "):
                    return json.loads(said.removeprefix("RESULT "))
            errors.seek(0)
            raise RuntimeError(f"vLLM failed: {errors.read()[-2000:]}")

        try:
            ask(json.dumps(told))
            yield lambda: ask("run")
        finally:
            into.close()


def vllm_side() -> None:
    """In the process of vLLM: answer each line with the seconds of a step."""
    from vllm import LLM, SamplingParams

    told = json.loads(sys.stdin.readline())
    given = [{"prompt_token_ids": ids} for ids in told["prompts"]]
    now, tokens = clock(told["threads"]), told["tokens"]
    longest = len(told["prompts"][0]) + tokens + 1
    sizes = {"max_model_len": longest, "max_num_seqs": len(given)}
    llm = LLM(told["model"], dtype="float32", enforce_eager=True, enable_prefix_caching=True, **sizes)

    def seconds(count: int) -> float:
        settings = SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, logprobs=0)
        start = now()
        llm.generate(given, settings, use_tqdm=False)
        return now() - start

    seconds(2)
    print("RESULT null", flush=True)
    for _ in sys.stdin:
        first = seconds(1)
        print("RESULT", (seconds(tokens) - first) / (tokens - 1), flush=True)


# --- results ----------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    import torch

    from components.models import weights
    from components.models.spec import ModelSpec

    torch.set_num_threads(options.threads)
    name, source = MODELS[options.model]
    base_dir = weights.prepare(ModelSpec(name=name, source=source, device="cpu"), cache)
    given = prompts(weights.load_tokenizer(base_dir), options)
    ours = Ours(base_dir, given, options)
    steps: dict[str, list[float]] = {side: [] for side in (*OURS, "transformers", "linear", "products")}
    samples: list[list[Any]] = [[], []]
    for order in (OURS, OURS[::-1]) * options.repeat:
        seconds, completions = ours.run(order)
        samples[order == OURS] = completions
        for side in OURS:
            steps[side] += seconds[side]
        steps["transformers"] += transformers_steps(ours.engine.model, given, options)
        for _ in range(PRODUCTS):
            linear, attention = products(ours.engine.model, options)
            steps["linear"].append(linear)
            steps["products"].append(linear + attention)
    result = summary(steps, options.rows) | equality(*samples)
    print(json.dumps(result), file=sys.stderr, flush=True)  # the rest takes minutes on a busy machine
    return result | against_vllm(base_dir, given, ours, options)


def against_vllm(base_dir: Path, given: list[list[int]], ours: Ours, options: argparse.Namespace) -> dict[str, Any]:
    if not options.vllm_python:
        return {"ratio_vs_vllm": None, "ratio_vs_vllm_reason": "--vllm-python names no environment with vLLM"}
    steps: dict[str, list[float]] = {"shared": [], "vllm": []}
    try:
        with vllm(base_dir, given, options) as step:
            for _ in range(VLLM_RUNS * options.repeat):
                steps["vllm"].append(step())
                steps["shared"] += ours.run(("shared",))[0]["shared"]
    except (OSError, RuntimeError) as error:
        return {"ratio_vs_vllm": None, "ratio_vs_vllm_reason": str(error)}
    medians = {side: statistics.median(values) for side, values in steps.items()}
    seconds = {f"{side}_beside_vllm" if side == "shared" else side: value for side, value in medians.items()}
    return {
        "ratio_vs_vllm": round(medians["vllm"] / medians["shared"], 3),
        "ratio_vs_vllm_reason": None,
        **{f"{side}_ms": round(1000 * value, 1) for side, value in seconds.items()},
    }


def summary(steps: dict[str, list[float]], rows: int) -> dict[str, Any]:
    medians = {side: statistics.median(values) for side, values in steps.items() if values}
    ratios = {side: round(medians[side] / medians["shared"], 3) for side in medians}
    return {
        "tokens_per_s": round(rows / medians["shared"], 1),
        "ratio_vs_before": ratios["apart"],
        "ratio_vs_transformers": ratios["transformers"],
        "fraction_of_bound": ratios["products"],
        "fraction_of_linear": ratios["linear"],
        "ratio_possible": round(medians["apart"] / medians["products"], 3),
        **{f"{side}_ms": round(1000 * value, 1) for side, value in medians.items()},
    }


def equality(ours: list[Any], theirs: list[Any]) -> dict[str, float]:
    gap = 0.0
    for a, b in zip(ours, theirs, strict=True):
        for first, second, x, y in zip(a.token_ids, b.token_ids, a.logprobs, b.logprobs, strict=True):
            if first != second:
                break
            gap = max(gap, abs(x - y))
    same = [a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)]
    return {"same_tokens": round(sum(same) / len(same), 4), "logprob_gap": gap}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    for name, value, text in (
        ("rows", 64, "concurrent sequences"),
        ("prefix", 250, "tokens that all prompts share"),
        ("own", 16, "further tokens of each prompt"),
        ("tokens", 24, "tokens that a run samples of each row"),
        ("repeat", 1, "pairs of runs"),
        ("threads", 1, "threads; more than one is timed by the clock"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default {value})")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--cache", type=Path, help="folder of converted weights; without it they are converted anew")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter of an environment that has vLLM")
    parser.add_argument("--vllm-side", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.vllm_side:
        vllm_side()
        return
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    sys.path.insert(0, str(CODE))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="espalier-generation-") as folder:
        result = measure(options, options.cache or Path(folder))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:30} {value}")


if __name__ == "__main__":
    main()
