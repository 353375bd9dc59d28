"""What prefix-trie packs save: forward and backward of a GRPO batch, packed and padded.

    python tests/benchmarks/packing.py [--json] [--model tiny|smollm2] [--groups 1] [--completions 8] [--prompt 400]
        [--completion 100] [--pack-tokens 1024] [--repeat 3]

The same episodes, the same LoRA model, the same loss (mean log-probability of the completions), each form in a fresh
process. `padded` is the common form: one row a completion, scaled dot-product attention of transformers, logits for
the completions only. Seconds are the best of the repeats; `peak_mb` is what a process held at most beyond the loaded
model. `speedup` and `memory_ratio` are padded over packed.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CODE = Path(__file__).resolve().parents[2]
MODELS = {"tiny": ("tiny", "random"), "smollm2": ("smollm2-135m-instruct", "package")}
FORMS = ("packed", "padded")


def main() -> None:
    options = arguments()
    if options.form:
        print(json.dumps(measure(options)))
        return
    with tempfile.TemporaryDirectory(prefix="espalier-packing-") as folder:
        cache = options.cache or Path(folder)
        prepare(options, cache)
        packed, padded = (in_own_process(form, cache) for form in FORMS)
    result = {
        "model": options.model,
        "tokens": padded["tokens"],
        "computed_tokens": packed["tokens"],
        **{f"{form}_{name}": run[name] for form, run in zip(FORMS, (packed, padded), strict=True) for name in MEASURED},
        "speedup": round(padded["seconds"] / packed["seconds"], 2),
        "memory_ratio": round(padded["peak_mb"] / packed["peak_mb"], 2),
        "loss_difference": abs(packed["loss"] - padded["loss"]),
    }
    if not options.json:
        print(
            f"{options.model}, {padded['tokens']} tokens padded: {padded['seconds']:.3f} s, {padded['peak_mb']:.0f} MB"
            f"; {packed['tokens']} packed: {packed['seconds']:.3f} s, {packed['peak_mb']:.0f} MB; "
            f"{result['speedup']:.1f} times as fast, losses differ by {result['loss_difference']:.1e}"
        )
    print(json.dumps(result))


MEASURED = ("seconds", "peak_mb")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--groups", type=int, default=1, help="prompts")
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=400, help="tokens")
    parser.add_argument("--completion", type=int, default=100, help="tokens at most; the shortest has half as many")
    parser.add_argument("--pack-tokens", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cache", type=Path, help="folder of converted weights; without it they are converted anew")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def model_spec(name: str):
    from components.models.spec import ModelSpec

    package, source = MODELS[name]
    return ModelSpec(name=package, source=source)


def prepare(options: argparse.Namespace, cache: Path) -> Path:
    from components.models import weights

    return weights.prepare(model_spec(options.model), cache)


def in_own_process(form: str, cache: Path) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--form", form, "--cache", str(cache)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{form} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def episodes(options: argparse.Namespace, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of each."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    made = []
    for _ in range(options.groups):
        prompt = tokens(options.prompt)
        for index in range(options.completions):
            shorter = index * options.completion // (2 * max(options.completions - 1, 1))
            made.append((prompt, tokens(options.completion - shorter)))
    return made


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Time and memory of one form, in this process."""
    import torch

    from components.algorithms.policy import Policy

    policy = Policy(prepare(options, options.cache), model_spec(options.model), seed=0)
    rows = episodes(options, policy.model.config.vocab_size)
    form = {"packed": packed, "padded": padded}[options.form]
    cuda = policy.device == "cuda"
    loaded = restart_peak(cuda)
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        loss, tokens = form(policy, rows, options.pack_tokens)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        policy.model.zero_grad()
    peak = peak_mb(cuda) - loaded
    return {"seconds": round(min(seconds), 4), "peak_mb": round(peak, 1), "loss": loss, "tokens": tokens}


def restart_peak(cuda: bool) -> float:
    """Forgets the peak so far, which is that of loading; returns what is held now, in MB."""
    import torch

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from VmRSS
    return peak_mb(cuda)


def peak_mb(cuda: bool) -> float:
    import torch

    if cuda:
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def packed(policy, rows, pack_tokens: int) -> tuple[float, int]:
    from components.algorithms.packing import Sequence_, pack
    from components.models.distribution import Cut

    learned = sum(len(completion) for _, completion in rows)
    sequences = [
        Sequence_([*prompt, *completion], range(len(prompt), len(prompt) + len(completion)))
        for prompt, completion in rows
    ]
    total, tokens = 0.0, 0
    for one in pack(sequences, pack_tokens):
        logprob_S, _ = policy.logprobs(one, Cut())
        loss = -logprob_S.sum() / learned
        loss.backward()
        total += loss.item()
        tokens += len(one.token_ids_N)
    return total, tokens


def padded(policy, rows, pack_tokens: int) -> tuple[float, int]:
    import torch

    model = policy.model
    model.get_base_model().set_attn_implementation("sdpa")
    learned = sum(len(completion) for _, completion in rows)
    longest = max(len(completion) for _, completion in rows)
    ids_BT = torch.tensor([[*prompt, *completion, *[0] * (longest - len(completion))] for prompt, completion in rows])
    real_BT = torch.tensor([[1] * len(c) + [0] * (longest - len(c)) for _, c in rows])
    mask_BT = torch.cat([torch.ones(len(rows), ids_BT.shape[1] - longest, dtype=torch.long), real_BT], 1)
    ids_BT, real_BT, mask_BT = (tensor.to(policy.device) for tensor in (ids_BT, real_BT, mask_BT))
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, logits_to_keep=longest + 1).logits
    logps_BTV = logits_BTV[:, :-1].float().log_softmax(-1)
    logprob_BT = logps_BTV.gather(-1, ids_BT[:, -longest:, None])[..., 0]
    loss = -(logprob_BT * real_BT).sum() / learned
    loss.backward()
    return loss.item(), int(ids_BT.numel())


if __name__ == "__main__":
    sys.path.insert(0, str(CODE))
    main()
