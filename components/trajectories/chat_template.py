"""Rendering of a model's chat template, with limits of time, memory and output.

A chat template is a program of whoever published the model: `{{ 'a' * 10**9 }}`, nested loops, or a text doubled forty
times. No rule about its operators would be complete (filters, methods, formats and macros multiply as well), so it runs
in a child process (`components.worker_process`), the same for all templates of this process. A call costs 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from components.errors import PromptRefused
from components.json_process import RequestFailed
from components.trajectories.template_variables import TOKENS
from components.worker_process import CallTooCostly, WorkerProcess

Messages = list[dict[str, Any]]
TODAY = datetime(2025, 1, 1)
"""Date that templates read as the current one."""
SECONDS = 2.0
"""CPU time limit of a rendering, in seconds. A conversation of 100,000 tokens takes some milliseconds."""
MEMORY = 512 << 20
"""Address space limit of the child, in bytes."""
_WORKER = WorkerProcess(f"{Path(__file__).with_name('template_worker.py')}:render", SECONDS, memory=MEMORY)
"""The child of this process, which starts with the first call."""


def render_template(template: str, conversations: Sequence[dict[str, Any]]) -> list[str]:
    """Return conversations, each given as the variables of a template, as text. Raises RequestFailed if the template
    rejects one, CallTooCostly at a limit."""
    texts: list[str] = _WORKER(template=template, today=TODAY.isoformat(), conversations=conversations)
    return texts


def defect(template: str) -> str | None:
    """Return the reason why a template cannot render a question and its answer with any tokenizer; None if it can."""
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "stem"}]
    variables = {**TOKENS, "messages": talk, "tools": None, "documents": None, "add_generation_prompt": False}
    try:
        (text,) = render_template(template, [variables])
    except CallTooCostly as error:
        return f"takes too much for a question and its answer ({error}): repair it"
    except RequestFailed as error:
        return f"refuses a question and its answer ({error}): repair it"
    return None if "stem" in text else "does not render the content of messages as text"


class TemplateTooCostly(PromptRefused):
    """Rendering that exceeded a limit."""


class ChatTemplate:
    """The chat template of a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}

    def render(
        self, conversations: Sequence[tuple[Messages, bool]], tools: list[dict[str, Any]] | None = None
    ) -> list[str]:
        """Return conversations as text; True beside one adds the start of an assistant message. One call costs less
        than several. Raises PromptRefused if the template rejects a conversation, TemplateTooCostly at a limit."""
        fixed = {**self._special_tokens, "tools": tools, "documents": None}
        name = Path(self.tokenizer.name_or_path).name  # without its path, because servers return the message
        try:
            if not all(messages for messages, _ in conversations):
                raise ValueError("the conversation is empty")
            return render_template(
                self.tokenizer.get_chat_template(tools=tools),
                [
                    {**fixed, "messages": messages, "add_generation_prompt": generate}
                    for messages, generate in conversations
                ],
            )
        except CallTooCostly as error:
            raise TemplateTooCostly(f"the chat template of {name} takes too much for a conversation: {error}") from None
        except (RequestFailed, ValueError, TypeError, RecursionError) as error:
            reason = error if isinstance(error, RequestFailed) else f"{type(error).__name__}: {error}"
            raise PromptRefused(f"the chat template of {name} refuses the conversation ({reason})") from error
