"""Readers of tool calls, each from text to content and calls: Espalier's, transformers' and vLLM's."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.deployment.vllm_parsers import PYTHONIC, TOOL_CALLS
from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.pythonic import read_pythonic
from tests.conformance.tool_call_forms import TOOLS
from tests.conformance.tool_call_texts import Text

PROGRAM = Path(__file__).parent / "peers" / "vllm_tool_calls.py"
VLLM = {parser: form for form, parser in TOOL_CALLS.items() if form != "harmony"} | {PYTHONIC: "pythonic"}
"""Form of each parser of vLLM. Its parser of harmony reads tokens of a vocabulary that it downloads."""
SPECIAL = (
    "<tool_call>",
    "</tool_call>",
    "<tool_calls>",
    "</tool_calls>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<|tool_call|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|python_tag|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    "<think>",
    "</think>",
    "<|channel>",
    "<channel|>",
    "<|turn>",
    "<turn|>",
    "<|message|>",
    "<|tool_response>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|start|>",
    "<|eot|>",
)
"""Special tokens that the parsers look for in a tokenizer."""


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


def ours(form: str, text: str) -> Reading:
    """Read as `ChatFormat.parse_text`."""
    try:
        content, calls = read_pythonic(text) if form == "pythonic" else FORMS[form].read(text, TOOLS)
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


def vllm(python: Path, texts: Sequence[Text]) -> tuple[str, dict[str, list[Reading]]]:
    """Return vLLM's version and the readings of each of its parsers, for the texts of its form, in order."""
    asked = {
        "tools": TOOLS,
        "special": SPECIAL,
        "texts": {parser: [text.text for text in texts if text.form == form] for parser, form in VLLM.items()},
    }
    process = subprocess.run([python, PROGRAM], input=json.dumps(asked), capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{python} {PROGRAM.name}: {process.stderr.strip()[-500:]}")
    answer = json.loads(process.stdout)
    return answer["version"], {
        name: [Reading(reading["content"], tuple(map(tuple, reading["calls"] or ())) or None) for reading in readings]
        for name, readings in answer["read"].items()
    }
