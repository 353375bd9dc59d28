"""lm-evaluation-harness evaluates a served policy, and agrees with `flows.evaluate` and with transformers.

    python -m tests.conformance.lm_eval --python PYTHON [--model tiny] [--items 4] [--root FOLDER] [--json]

PYTHON is the interpreter of an environment with `lm-eval[api]` and `transformers`; it is not Espalier's.
`local-chat-completions` generates answers to the scenarios that `flows.evaluate` played greedily: text and score must
be equal. `local-completions` asks for the log-likelihood of four answers to each problem: each must equal what
transformers computes from the same model folder in one forward pass, up to TOLERANCE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conformance import policy
from tests.conformance.inspect_ai import add_options, version_of
from tests.conformance.report import Case, Report, Unavailable, show

SUITE = "lm-eval"
COMMAND = "python -m tests.conformance.lm_eval --python PYTHON"
TOLERANCE = 1e-3
"""Largest difference of a log-likelihood, in nats: float32, in another order of operations."""
TIMEOUT = 1800.0
GENERATION = """\
task: espalier_generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|im_end|>"], max_gen_toks: {max_tokens}, temperature: 0, do_sample: false}}
filter_list:
  - name: final
    filter:
      - {{function: regex, regex_pattern: '####\\s*(-?\\d+)\\b', group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
CHOICE = """\
task: espalier_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


def rows(items: Sequence[policy.Item]) -> list[dict[str, Any]]:
    """Return the items as rows of the tasks; the first choice is the right one."""
    return [
        {
            "id": item.id,
            "question": item.prompt[-1]["content"],
            "answer": item.answer,
            "choices": [str(int(item.answer) + offset) for offset in (0, 1, -1, 10)],
        }
        for item in items
    ]


def run_harness(python: Path, task: str, table: list[dict[str, Any]], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the logged samples of a task, in the order of the rows. Raises Unavailable."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.json").write_text("\n".join(json.dumps(row) for row in table))
        text = task.format(file=folder / "rows.json", max_tokens=policy.MAX_TOKENS)
        task_name = text.splitlines()[0].removeprefix("task: ")
        (folder / "task.yaml").write_text(text)
        command = [
            *(python, "-m", "lm_eval", "run", "--tasks", task_name, "--include_path", folder, "--log_samples"),
            *("--output_path", folder / "results", "--batch_size", "1", *arguments),
        ]
        environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HOME": name, "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(
            command, env=environment, cwd=name, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        logs = list((folder / "results").rglob("samples_*.jsonl"))
        if ended.returncode or not logs:
            raise Unavailable(f"lm_eval ended with exit code {ended.returncode}: {ended.stderr[-800:].strip()}")
        samples = [json.loads(line) for line in logs[0].read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def generation_cases(python: Path, evaluation: policy.Evaluation, url: str) -> list[Case]:
    """Return a case for each generated answer."""
    system = evaluation.items[0].prompt[0]["content"]
    model = f"model={policy.NAME},base_url={url}/chat/completions,num_concurrent=1,max_retries=1"
    arguments = ("--model", "local-chat-completions", "--model_args", model, "--apply_chat_template")
    samples = run_harness(python, GENERATION, rows(evaluation.items), [*arguments, "--system_instruction", system])
    results = []
    for item, sample in zip(evaluation.items, samples, strict=True):
        ours, theirs = item.messages[0]["content"], sample["resps"][0][0]
        difference = "" if ours == theirs else f"evaluate {ours!r}, lm-eval {theirs!r}"
        if bool(sample["exact_match"]) != item.success:
            difference = difference or f"evaluate success = {item.success}, lm-eval {sample['exact_match']}"
        results.append(Case(f"generate {item.id}", "failed" if difference else "passed", difference))
    return results


def likelihood_cases(python: Path, evaluation: policy.Evaluation, url: str) -> list[Case]:
    """Return a case for the four log-likelihoods of each problem."""
    model = f"model={policy.NAME},base_url={url}/completions,tokenizer_backend=huggingface,tokenizer={evaluation.model}"
    arguments = ("--model", "local-completions", "--model_args", f"{model},num_concurrent=1,max_retries=1")
    table = rows(evaluation.items)
    samples = run_harness(python, CHOICE, table, arguments)
    reference = likelihoods(evaluation.model, table)
    results = []
    for row, sample, expected in zip(table, samples, reference, strict=True):
        measured = [float(response[0][0]) for response in sample["resps"]]
        largest = max(abs(a - b) for a, b in zip(measured, expected, strict=True))
        difference = (
            "" if largest <= TOLERANCE else f"differs by {largest:.2g} nats: {measured}, transformers {expected}"
        )
        results.append(Case(f"loglikelihood {row['id']}", "failed" if difference else "passed", difference))
    return results


def likelihoods(model: Path, table: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Return the log-likelihoods of the choices of each row, computed by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    results = []
    for row in table:
        context = f"{row['question']}\nAnswer:"
        start = len(tokenizer(context, add_special_tokens=False)["input_ids"])
        values = []
        for choice in row["choices"]:
            tokens = torch.tensor([tokenizer(f"{context} {choice}", add_special_tokens=False)["input_ids"]])
            with torch.no_grad():
                logprobs = network(tokens).logits[0].log_softmax(-1)
            values.append(sum(float(logprobs[i - 1, tokens[0, i]]) for i in range(start, tokens.shape[1])))
        results.append(values)
    return results


def report(python: Path, root: Path | None = None, model: str = "smollm2", items: int = 4) -> Report:
    """Return the comparison of all scenarios."""
    try:
        version = version_of(python, "lm_eval")
        version_of(python, "transformers")
        with tempfile.TemporaryDirectory() as folder:
            evaluation = policy.evaluate(root or Path(folder), model, "arithmetic", items)
            with policy.served(evaluation.model) as url:
                results = generation_cases(python, evaluation, url) + likelihood_cases(python, evaluation, url)
    except Unavailable as error:
        return Report(SUITE, "", COMMAND, reason=str(error))
    return Report(SUITE, version, COMMAND, results)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.lm_eval", description=__doc__)
    add_options(parser)
    options = parser.parse_args(arguments)
    root = options.root.absolute() if options.root else None
    return show(report(options.python, root, options.model, options.items), options.json)


if __name__ == "__main__":
    sys.exit(main())
