"""Espalier's readers of tool calls against transformers' and vLLM's, on generated, cut and broken texts.

    python -m tests.conformance.tool_calls [--vllm-python PYTHON] [--json]

A case is one reader and one kind of text. `passed`: all texts are read alike. `refused`: they differ, and each
difference has a reason (`tool_call_differences`). `failed`: a difference has none.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.conformance.report import Case, Report, show
from tests.conformance.tool_call_differences import explain, same
from tests.conformance.tool_call_readers import VLLM, Reading, ours, transformers, vllm
from tests.conformance.tool_call_texts import Text, texts

COMMAND = "python -m tests.conformance.tool_calls"


def compared(reader: str, read: Sequence[tuple[Text, Reading]]) -> list[Case]:
    """Return one case for each kind of text, and one for each reason of differences."""
    total, differing = Counter[str](), Counter[str]()
    reasons: dict[str, list[str]] = {}
    cases: list[Case] = []
    for text, other in read:
        total[text.kind] += 1
        mine = ours(text.form, text.text)
        if same(mine, other):
            continue
        reason = explain(reader, text.text, mine, other)
        differing[text.kind] += 1
        if reason is None:
            detail = (
                f"{text.text!r}: Espalier {mine.values}, {mine.content!r}; {reader} {other.values}, {other.content!r}"
            )
            cases.append(Case(f"{reader}: {text.kind}", "failed", detail))
        else:
            reasons.setdefault(reason, []).append(text.text)
    for kind, count in total.items():
        if not differing[kind]:
            cases.append(Case(f"{reader}: {kind} ({count} texts)", "passed"))
        else:
            cases.append(Case(f"{reader}: {kind}", "passed", f"{count - differing[kind]} of {count} texts alike"))
    return cases + [
        Case(f"{reader}: {len(found)} texts", "refused", f"{reason}, such as {min(found, key=len)!r}")
        for reason, found in reasons.items()
    ]


def run(python: Path | None) -> Report:
    """Compare with transformers, and with vLLM if there is a Python that has it."""
    generated = texts()
    tagged = [text for text in generated if text.form == "tagged"]
    cases = compared("transformers", [(text, transformers(text.text)) for text in tagged])
    versions = f"transformers {version('transformers')}"
    if python is None or not python.is_file():
        reason = f"{python or '--vllm-python'} is no Python with vLLM; run `make vllm` or name one"
        cases += [Case(name, "skipped", reason) for name in VLLM]
        return Report("tool calls", versions, COMMAND, cases)
    vllm_version, readings = vllm(python, generated)
    for name, read in readings.items():
        of_form = [text for text in generated if text.form == VLLM[name]]
        cases += compared(name, list(zip(of_form, read, strict=True)))
    return Report("tool calls", f"{versions}, vllm {vllm_version}", COMMAND, cases)


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Compares readers of tool calls.")
    default = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))
    parser.add_argument("--vllm-python", type=Path, default=default, help="Python with vLLM (default: VLLM_PYTHON)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    return show(run(options.vllm_python.absolute()), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
