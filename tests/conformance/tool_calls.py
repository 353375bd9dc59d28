"""Espalier's readers of tool calls against transformers' and vLLM's, on generated, cut and broken texts.

    python -m tests.conformance.tool_calls [--vllm-python PYTHON] [--json]

A case is one reader and one kind of text. `passed`: all texts are read alike. `refused`: some differ, and each
difference has a reason (`tool_call_differences`). `failed`: a difference has none.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from tests.conformance.report import Case, Report, show
from tests.conformance.tool_call_differences import explain, same
from tests.conformance.tool_call_forms import WRITERS, form_texts
from tests.conformance.tool_call_readers import VLLM, Reading, ours, transformers, vllm
from tests.conformance.tool_call_texts import Text, texts

COMMAND = "python -m tests.conformance.tool_calls"


def compared(reader: str, read: Sequence[tuple[Text, Reading]]) -> list[Case]:
    """Return one case for each kind of text."""
    total = Counter(text.kind for text, _ in read)
    reasons: dict[str, dict[str, list[str]]] = {kind: {} for kind in total}
    failed: dict[str, str] = {}
    for text, other in read:
        mine = ours(text.form, text.text)
        if same(mine, other):
            continue
        reason = explain(reader, text.text, mine, other)
        if reason is None:
            values = f"Espalier {mine.values}, {mine.content!r}; {reader} {other.values}, {other.content!r}"
            failed.setdefault(text.kind, f"{text.text!r}: {values}")
        else:
            reasons[text.kind].setdefault(reason, []).append(text.text)
    cases = []
    for kind, count in total.items():
        name = f"{reader}: {kind}"
        explained = "; ".join(f"{len(found)} {reason}" for reason, found in reasons[kind].items())
        differing = sum(map(len, reasons[kind].values()))
        if kind in failed:
            cases.append(Case(name, "failed", failed[kind]))
        elif differing:
            cases.append(Case(name, "refused", f"{differing} of {count} texts differ: {explained}"))
        else:
            cases.append(Case(name, "passed", f"{count} texts"))
    return cases


def run(python: Path | None) -> Report:
    """Compare with transformers, and with vLLM if there is a Python that has it."""
    generated = [*texts(), *chain.from_iterable(map(form_texts, WRITERS))]
    tagged = [text for text in generated if text.form == "tagged_json"]
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
