"""Forms in which families of models write tool calls, by name.

A model's form is the first that reads back the call in a conversation which its chat template renders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from components.trajectories.call_forms.bracketed import MarkedPythonic, MistralForm
from components.trajectories.call_forms.elements import FUNCTION_ELEMENTS, KEY_VALUE_ELEMENTS, invoke_elements
from components.trajectories.call_forms.gemma import GemmaForm
from components.trajectories.call_forms.harmony import HarmonyForm
from components.trajectories.call_forms.marked import CallForm, JSONForm, MarkedForm, SectionForm, Tools
from components.trajectories.call_forms.pythonic import attempts_pythonic
from components.trajectories.call_forms.text_json import TAG, JSONText

_DEEPSEEK = ("<｜tool▁calls▁begin｜>",), "<｜tool▁calls▁end｜>"

FORMS: Mapping[str, CallForm] = {
    # Qwen 2.5 and 3, Hermes, Granite 4, Ernie 4.5
    "tagged_json": JSONForm(("<tool_call>",), "</tool_call>"),
    # Qwen 3.5 and 3.6, Qwen3-Coder, Nemotron 3
    "function_elements": FUNCTION_ELEMENTS,
    # GLM 4.5 to 5
    "key_value_elements": KEY_VALUE_ELEMENTS,
    # MiniMax M2
    "minimax": invoke_elements("", "minimax:tool_call"),
    # DeepSeek V3.2
    "dsml": invoke_elements("｜DSML｜", "｜DSML｜function_calls"),
    # Muse
    "atem": invoke_elements("atem:", "atem:function_calls"),
    # Gemma 4
    "gemma": GemmaForm(),
    # LFM 2 and 2.5
    "marked_pythonic": MarkedPythonic(),
    # Mistral
    "mistral": MistralForm(),
    # DeepSeek V3 and R1
    "deepseek": SectionForm(
        *_DEEPSEEK,
        head=re.compile(r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"),
        tail=re.compile(r"\s*```<｜tool▁call▁end｜>"),
    ),
    # DeepSeek V3.1
    "deepseek_3_1": SectionForm(
        *_DEEPSEEK,
        head=re.compile(r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>"),
        tail=re.compile(r"\s*<｜tool▁call▁end｜>"),
    ),
    # Kimi K2
    "kimi": SectionForm(
        ("<|tool_calls_section_begin|>",),
        "<|tool_calls_section_end|>",
        head=re.compile(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s<]+?):\d+\s*<\|tool_call_argument_begin\|>"
        ),
        tail=re.compile(r"\s*<\|tool_call_end\|>"),
    ),
    # Granite 3
    "granite": JSONForm(("<|tool_call|>", "<tool_call>"), "", listed=True),
    # Hunyuan, Jamba
    "tagged_list": JSONForm(("<tool_calls>",), "</tool_calls>", listed=True),
    # Command R7B and A
    "cohere": JSONForm(("<|START_ACTION|>",), "<|END_ACTION|>", listed=True, name="tool_name", arguments="parameters"),
    # gpt-oss
    "harmony": HarmonyForm(),
    # Llama 3.1 to 3.3
    "json_text": JSONText(),
}


def attempts_call(text: str, tools: Tools) -> bool:
    """Return True for an answer that is meant as a call of one of these tools, in any form, as that of a server whose
    model is not known."""
    return bool(tools) and (attempts_pythonic(text, tools) or any(form.attempts_call(text) for form in FORMS.values()))


MARKS = sorted({TAG, *(mark for form in FORMS.values() if isinstance(form, MarkedForm) for mark in form.marks)})
"""Markers with which calls begin, of all forms."""
