"""Values of variables of a chat template that have no meaning to it, such as `enable_thinking: "no"`.

Templates compare variables without conversion: `enable_thinking is false` holds for no text and no number, and then
the prompt is that of the default. No value is refused for that alone, because it may state the default. One is refused
if all values of its type give the same prompts, and others do not: true or false, or a text that the template names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import nodes

from components.json_process import RequestFailed
from components.specs.wording import shortened
from components.trajectories.chat_template import render_template
from components.trajectories.native_calls import PROBE_TOOLS
from components.trajectories.template_variables import TOKENS
from components.trajectories.template_worker import environment

Scalar = bool | int | float | str
_OTHER_TEXT = "espalier-other-text"
_FAR = 10**9
"""Number beyond those with which templates compare."""
_SHOWN = 4
"""Maximum number of values in a message."""
_QUESTION: dict[str, Any] = {"role": "user", "content": "question"}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "system"}
_THOUGHT: dict[str, Any] = {"role": "assistant", "content": "answer", "reasoning_content": "thought"}
_TALKS: tuple[list[dict[str, Any]], ...] = ([_QUESTION], [_SYSTEM, _QUESTION], [_QUESTION, _THOUGHT, _QUESTION])


def meaningless(template: str, values: Mapping[str, Scalar]) -> Iterator[tuple[str, str]]:
    """Yield each variable whose value has no meaning to the template, and the values that have. The other variables
    have their values. Raises CallTooCostly for a template that exceeds the limits of a rendering."""

    def prompts(name: str, value: Scalar) -> list[str | None]:
        """Return the prompts with another value; None for a conversation that the template refuses."""
        texts: list[str | None] = []
        for talk in _TALKS:
            for tools in (None, PROBE_TOOLS):
                fixed = {"messages": talk, "tools": tools, "documents": None, "add_generation_prompt": True}
                try:
                    texts += render_template(template, [{**TOKENS, **fixed, **values, name: value}])
                except RequestFailed:
                    texts.append(None)
        return texts

    for name, value in values.items():
        usual = prompts(name, value)
        if any(prompts(name, other) != usual for other in _of_same_type(value)):
            continue

        def differs(other: Scalar, name: str = name, usual: list[str | None] = usual) -> bool:
            return any(text not in (None, before) for text, before in zip(prompts(name, other), usual, strict=True))

        known = _texts(template)
        texts = [text for text in known if differs(text)]
        if (texts and value in known) or (type(value) is int and value in (0, 1) and not differs(bool(value))):
            continue
        if texts:
            shown = " or ".join(map(shortened, texts[:_SHOWN]))
            yield name, shown + (", or others" if len(texts) > _SHOWN else "")
        elif any(differs(other) for other in (True, False)):
            yield name, "true or false"


def _of_same_type(value: Scalar) -> tuple[Scalar, ...]:
    if isinstance(value, bool):
        return (not value, _OTHER_TEXT)
    return (_OTHER_TEXT,) if isinstance(value, str) else (-_FAR, _FAR)


def _texts(template: str) -> list[str]:
    """Return the texts in expressions of a template, without the empty one, which is false."""
    constants = environment().parse(template).find_all(nodes.Const)
    return sorted({constant.value for constant in constants if isinstance(constant.value, str) and constant.value})
