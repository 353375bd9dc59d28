"""Readers of tool calls, each from text to content and calls: Espalier's, transformers' and vLLM's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.trajectories.tool_calls import read_pythonic, read_tagged
from tests.conformance.tool_call_texts import Form, Text

PROGRAM = Path(__file__).parent / "peers" / "vllm_tool_calls.py"
VLLM: dict[str, Form] = {"hermes": "tagged", "pythonic": "pythonic", "lfm2": "pythonic"}
"""Parsers of vLLM. Espalier deploys with `hermes` and `pythonic`; `lfm2` is a second reader of the pythonic form."""
LFM2 = "<|tool_call_start|>{}<|tool_call_end|>"


@dataclass(frozen=True)
class Reading:
    """Content and calls as a reader returns them. calls: name and arguments as JSON text; None if it reads none."""

    content: str
    calls: tuple[tuple[str, str], ...] | None

    @property
    def values(self) -> list[tuple[str, Any]] | None:
        """Calls with parsed arguments; text that is no JSON is kept as text."""
        return None if self.calls is None else [(name, _parsed(text)) for name, text in self.calls]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def ours(form: Form, text: str) -> Reading:
    """Read as `ChatFormat.parse_text`."""
    try:
        content, calls = read_tagged(text) if form == "tagged" else read_pythonic(text)
    except (ValueError, RecursionError):
        return Reading(text, None)
    return Reading(content, tuple(calls) or None)


def transformers(text: str) -> Reading:
    """Read by transformers' response template for Qwen, which has the tagged form. Text that it refuses has no
    calls."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
    from transformers.utils.chat_parsing import parse_response

    (template,) = [value for types, value in _RESPONSE_TEMPLATE_FALLBACKS.items() if "qwen3" in types]
    try:
        message = parse_response(text, template, prefix="<|im_start|>assistant\n")
    except ValueError:
        return Reading(text, None)
    calls = []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return Reading(message.get("content", ""), None)
        calls.append((function["name"], json.dumps(function.get("arguments"), ensure_ascii=False)))
    return Reading(message.get("content", ""), tuple(calls) or None)


def _marked(text: Text) -> str:
    """Return a text with the marks of LFM2 around its list of calls."""
    words, line, calls = text.text.partition("\n[")
    if text.kind == "text before" or (text.kind.startswith("written by") and text.text[:1] != "["):
        return f"{words}\n{LFM2.format('[' + calls)}" if line else text.text
    return LFM2.format(text.text)


def vllm(python: Path, texts: Sequence[Text]) -> tuple[str, dict[str, list[Reading]]]:
    """Return vLLM's version and the readings of each of its parsers, for the texts of its form, in order."""
    asked = {
        name: [_marked(one) if name == "lfm2" else one.text for one in texts if one.form == form]
        for name, form in VLLM.items()
    }
    process = subprocess.run([python, PROGRAM], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{python} {PROGRAM.name}: {process.stderr.strip()[-500:]}")
    answer = json.loads(process.stdout)
    return answer["version"], {
        name: [Reading(one["content"], one["calls"] and tuple(map(tuple, one["calls"]))) for one in readings]
        for name, readings in answer["read"].items()
    }
