"""Exports of a policy, read by the software that their users have: the same tokens as the policy, greedily.

    python -m tests.conformance.exports [--model small|smollm2] [--dtype float32|bfloat16] [--llama-python PYTHON]
        [--vllm-python PYTHON] [--json]

A base model with a LoRA adapter is the policy. It is exported as `merged`, `adapter` and `gguf` (float32 and float16);
plain transformers, PEFT, llama.cpp and vLLM load the folders and answer the same conversations, each in a process that
imports nothing of Espalier. A case passes if prompt and answer have the policy's token ids, including the end of turn.
With `--dtype bfloat16`, base model and policy have 16-bit weights, and the readers compute in the type of the file.

float16 and bfloat16 round: an answer that differs there is `refused`, with the number of equal tokens and the log-
probability of the first other token under the policy. With `--dtype bfloat16` it is `failed` unless that is within the
tolerance of the policy's own choice (`components.deployment.answers.TOLERANCE`), as for a tie that rounding decides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.deployment.answers import TOLERANCE, answers_of
from components.deployment.export import export_adapter, export_gguf, export_merged, gguf_file
from components.inference.protocol import ChatCompletion, ChatRequest, Sampling
from tests.conformance.report import Case, Report, show
from tests.deployment.small import write_llama
from tests.deployment.tiny import write_adapter

COMMAND = "python -m tests.conformance.exports"
PEERS = Path(__file__).parent / "peers"
MAX_TOKENS = 32
MOST_LIKELY = 20
"""Number of the policy's most likely tokens that are known at each token of an answer."""
TOOL = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Finds an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}
ARGUMENTS = {"order": "K482", "from": ["Grüße", 1.5, True, None, {"deep er": {}}], "no word": 'say "\n"'}
CALL = {"id": "call_0_0", "type": "function", "function": {"name": "find_order", "arguments": ARGUMENTS}}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Where is my order?"}], "tools": []},
    {
        "messages": [
            {"role": "system", "content": "You work in a shop."},
            {"role": "user", "content": "Grüße, order 1212 of 3.50 — 東京 🙂"},
        ],
        "tools": [],
    },
    {"messages": [{"role": "user", "content": "Where is order K482?"}], "tools": [TOOL]},
    {
        "messages": [
            {"role": "user", "content": "Where is order K482?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_0_0", "content": "shipped to 'Bern'\n"},
        ],
        "tools": [TOOL],
    },
    {"messages": [{"role": "user", "content": "  two  spaces\tand\n\nlines  "}], "tools": []},
]


@dataclass(frozen=True)
class Policy:
    """The policy, its exports and its greedy answers."""

    merged: Path
    adapter: Path
    base: Path
    gguf: dict[str, Path]
    """Files by precision."""
    answers: list[ChatCompletion]
    dtype: str = "float32"


def base_model(name: str, folder: Path, dtype: str = "float32") -> Path:
    """Return the folder of a base model with weights of a type: `small` has random weights, `smollm2` is
    SmolLM2-135M-Instruct."""
    if name == "small":
        base = write_llama(folder / "base", digits=True)
    else:
        from components.models.spec import ModelSpec
        from components.models.weights import prepare

        base = prepare(ModelSpec(name="smollm2-135m-instruct", source="package", dtype="float32"), folder)
    return base if dtype == "float32" else rounded(base, folder / dtype, dtype)


def rounded(base: Path, out: Path, dtype: str) -> Path:
    """Write a copy of a model folder with weights of another type, and return it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)).save_pretrained(out)
    AutoTokenizer.from_pretrained(base).save_pretrained(out)
    return out


def exported(base: Path, folder: Path, dtype: str = "float32") -> Policy:
    """Export a policy with an adapter on `base` in all formats, and answer with Espalier's engine."""
    from components.inference.transformers.engine import TransformersEngine

    adapter = write_adapter(base, folder / "trained", seed=1)
    export_merged(base, adapter, folder / "merged", "")
    export_adapter(base, adapter, folder / "adapter", "", base=str(base), revision=None)
    files = {}
    for precision in ("f32", "f16"):
        export_gguf(folder / "merged", folder / precision, "", name="policy", precision=precision)
        files[precision] = gguf_file(folder / precision, "policy", precision)
    engine = TransformersEngine(base, max_length=1024, device="cpu", dtype=dtype)
    engine.load_policy("trained", str(adapter))
    sampling = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)
    requests = [
        ChatRequest(talk["messages"], talk["tools"], "trained", sampling, alternatives=MOST_LIKELY)
        for talk in CONVERSATIONS
    ]
    try:
        return Policy(folder / "merged", folder / "adapter", base, files, answers_of(engine, requests), dtype)
    finally:
        engine.close()


def ask(python: Path, program: str, **asked: Any) -> dict[str, Any]:
    """Run a program of `peers` and return its answers. Raises RuntimeError with the end of its errors."""
    request = json.dumps(asked | {"conversations": CONVERSATIONS, "max_tokens": MAX_TOKENS})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.run(
        [python, PEERS / program], input=request, capture_output=True, text=True, env=environment, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{program}: {process.stderr.strip()[-800:]}")
    written = [line for line in process.stdout.splitlines() if line.startswith('{"version"')]  # engines log around it
    if not written:
        raise RuntimeError(f"{program} wrote no answers: {process.stderr.strip()[-800:]}")
    answer: dict[str, Any] = json.JSONDecoder().raw_decode(written[-1])[0]  # vLLM may log on the same line
    return answer


def compared(
    reader: str, read: Sequence[dict[str, Any]], expected: Sequence[ChatCompletion], *, tolerance: float = 0.0
) -> list[Case]:
    """Return one case for each conversation. tolerance: maximum difference of log-probabilities, under the policy, of
    its token and another one that rounding may prefer, in nats; 0 without rounding, infinity for any difference."""
    return [
        compared_answer(f"{reader}: conversation {index}", *pair, tolerance)
        for index, pair in enumerate(zip(read, expected, strict=True))
    ]


def compared_answer(name: str, read: dict[str, Any], answer: ChatCompletion, tolerance: float) -> Case:
    """Return the case of one conversation."""
    prompt, wanted, tokens = answer.prompt_token_ids, answer.token_ids, read["answer"]
    if read["prompt"] != prompt:
        return Case(name, "failed", f"prompt {difference(read['prompt'], prompt)}")
    if tokens == wanted:
        return Case(name, "passed", f"{len(prompt)} + {len(wanted)} tokens")
    detail, at = f"answer {difference(tokens, wanted)}", first_difference(tokens, wanted)
    if not tolerance or at >= min(len(tokens), len(wanted)):
        return Case(name, "failed", detail)
    likely = dict(answer.likeliest[at])
    gap = likely[wanted[at]] - likely[tokens[at]] if likely.keys() >= {wanted[at], tokens[at]} else math.inf
    shown = f"{gap:.3f} nats less likely to the policy" if gap < math.inf else "not among the policy's likeliest"
    detail = f"{at} of {len(wanted)} tokens equal, then {detail}, {shown}"
    return Case(name, "refused" if gap <= tolerance else "failed", detail)


def difference(tokens: list[int], wanted: list[int]) -> str:
    at = first_difference(tokens, wanted)
    return f"differs at token {at}: {tokens[at : at + 3]}, the policy {wanted[at : at + 3]}"


def first_difference(tokens: list[int], wanted: list[int]) -> int:
    """Return the place of the first token that differs; the length of the shorter list if it begins the other."""
    pairs = enumerate(zip(tokens, wanted, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(wanted)))


def run(model: str, llama: Path | None, vllm: Path | None, dtype: str = "float32") -> Report:
    """Export and compare with every reader that is here. dtype: type of the base model's weights."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        policy = exported(base_model(model, folder, dtype), folder, dtype)
        here = Path(sys.executable)
        readers: list[tuple[str, Path | None, str, dict[str, Any]]] = [
            ("merged, transformers", here, "transformers_export.py", {"folder": str(policy.merged), "adapter": None}),
            (
                "adapter, PEFT",
                here,
                "transformers_export.py",
                {"folder": str(policy.base), "adapter": str(policy.adapter)},
            ),
            *((f"gguf {p}, llama.cpp", llama, "llama_cpp_export.py", {"file": str(f)}) for p, f in policy.gguf.items()),
            ("merged, vLLM", vllm, "vllm_export.py", {"folder": str(policy.merged), "adapter": None, "dtype": dtype}),
            (
                "adapter, vLLM",
                vllm,
                "vllm_export.py",
                {"folder": str(policy.base), "adapter": str(policy.adapter), "dtype": dtype},
            ),
        ]
        cases: list[Case] = []
        versions: list[str] = []
        for name, python, program, asked in readers:
            if python is None or not python.is_file():
                cases.append(Case(name, "skipped", f"no Python with it: {python or 'name one by an option'}"))
                continue
            try:
                answer = ask(python, program, **asked)
            except RuntimeError as error:
                unsupported = re.search(r"Unsupported CPU attention configuration: head_dim=\d+", str(error))
                reason = f"{unsupported[0]} (vLLM); choose --model smollm2" if unsupported else str(error)
                cases.append(Case(name, "skipped" if unsupported else "failed", reason))
                continue
            versions += [answer["version"]] if answer["version"] not in versions else []
            tolerance = math.inf if "f16" in name else 0.0
            tolerance = tolerance if dtype == "float32" else TOLERANCE[dtype]
            cases += compared(name, answer["answers"], policy.answers, tolerance=tolerance)
    return Report(
        f"exports of {model}{'' if dtype == 'float32' else f' in {dtype}'}", ", ".join(versions), COMMAND, cases
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Reads exports with other software.")
    parser.add_argument("--model", choices=("small", "smollm2"), default="small", help="base model (default: small)")
    types = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=types, default=types[0], help="type of the base model's weights")
    parser.add_argument("--llama-python", type=Path, help="Python with xllamacpp (default: LLAMA_PYTHON)")
    parser.add_argument("--vllm-python", type=Path, help="Python with vLLM (default: VLLM_PYTHON)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    pythons = [
        option or (Path(os.environ[variable]) if variable in os.environ else None)
        for option, variable in ((options.llama_python, "LLAMA_PYTHON"), (options.vllm_python, "VLLM_PYTHON"))
    ]
    return show(run(options.model, *pythons, options.dtype), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
