"""Names of vLLM's parsers for tool calls and reasoning, for servers that read answers themselves."""

from __future__ import annotations

from components.trajectories.call_forms import FORMS
from components.trajectories.call_forms.harmony import ANALYSIS
from components.trajectories.chat import ChatFormat

TOOL_CALLS = {
    "tagged_json": "hermes",
    "function_elements": "qwen3_coder",
    "key_value_elements": "glm45",
    "minimax": "minimax_m2",
    "dsml": "deepseek_v32",
    "atem": "muse_glimmer",
    "gemma": "gemma4",
    "marked_pythonic": "lfm2",
    "mistral": "mistral",
    "deepseek": "deepseek_v3",
    "deepseek_3_1": "deepseek_v31",
    "kimi": "kimi_k2",
    "granite": "granite",
    "tagged_list": "hunyuan_a13b",
    "cohere": "cohere_command3",
    "harmony": "openai",
    "json_text": "llama3_json",
}
"""Parser of each form of calls (`components.trajectories.call_forms`)."""
PYTHONIC = "pythonic"
"""Parser of the calls of models whose template has none."""
REASONING = {
    "<think>": "qwen3",
    "<|channel>thought\n": "gemma4",
    "[THINK]": "mistral",
    "<seed:think>": "seed_oss",
    "<|START_THINKING|>": "cohere_command3",
    ANALYSIS: "openai_gptoss",
}
"""Parser of reasoning by its start."""


def parser_flags(chat: ChatFormat) -> dict[str, str]:
    """Return the arguments of vLLM's server that name the parsers of a model. Reasoning stays in the content for a
    template that reads it there."""
    form = next((name for name, form in FORMS.items() if form is chat.call_form), None)
    flags = {"tool-call-parser": TOOL_CALLS[form] if form else PYTHONIC}
    if chat.reasoning is not None and chat.renders_reasoning:
        opened = chat.reasoning.opened and chat.reasoning.start == "<think>"
        flags["reasoning-parser"] = "deepseek_r1" if opened else REASONING[chat.reasoning.start]
    return flags
