"""Recording of the conversation between an agent and an engine as exact token histories.

Each completion includes the tokens of its prompt. If they extend the recorded tokens, the history continues; otherwise
(a template that rewrites earlier messages, a compacted context) a new history begins with the whole prompt. Only the
engine's sampled tokens are recorded as sampled. Raises EngineError for sampled tokens without a prompt.
"""

from __future__ import annotations

from typing import Any

from components.errors import EngineError
from components.inference.protocol import ChatCompletion
from components.trajectories.convert import to_message
from components.trajectories.schema import History, Message

NOT_SAMPLED = float("nan")
"""Log-probability of a token that was not sampled."""


class Recorder:
    """The histories of one episode. Conversations may be interleaved: each response continues the history of the same
    agent that shares the longest prefix with its prompt."""

    def __init__(self, agent: str = "main"):
        self.agent = agent
        """Default agent name."""
        self.histories: list[History] = []

    def record(self, messages: list[dict[str, Any]], completion: ChatCompletion, agent: str | None = None) -> History:
        """Append a response to the conversation `messages` and return its history."""
        prompt, agent = completion.prompt_token_ids, agent or self.agent
        own = [history for history in self.histories if history.agent == agent]
        if prompt:
            candidates = [history for history in own if prompt[: len(history.token_ids)] == history.token_ids]
        else:  # a server without token ids: the messages must match
            conversation = [to_message(message) for message in messages]
            candidates = [history for history in own if _is_prefix(history.messages, conversation)]
        history = max(candidates, key=lambda history: (len(history.token_ids), len(history.messages)), default=None)
        if history is None:
            history = History([], agent=agent)
            self.histories.append(history)
        history.messages.extend(to_message(message) for message in messages[len(history.messages) :])
        if completion.token_ids and not prompt and not history.token_ids:
            raise EngineError(
                "the engine returned sampled tokens without those of their prompt (prompt_token_ids), so they cannot "
                "be trained on"
            )
        history.logprobs.extend([NOT_SAMPLED] * (len(prompt) - len(history.token_ids)))
        history.token_ids.extend(prompt[len(history.token_ids) :])
        start = len(history.token_ids)
        history.token_ids.extend(completion.token_ids)
        history.logprobs.extend(completion.logprobs)
        answer = to_message(completion.message)
        answer.span = (start, len(history.token_ids)) if completion.token_ids else None
        answer.finish_reason = completion.finish_reason
        answer.trained = not (completion.altered and completion.token_ids)
        history.messages.append(answer)
        return history

    def close(self, messages: list[dict[str, Any]]) -> None:
        """Append the messages after the last response, so that the history is complete. A conversation without a
        response is left out, unless it is the only one."""
        if not self.histories:
            self.histories.append(History([], agent=self.agent))
        history, conversation = self.histories[-1], [to_message(message) for message in messages]
        if _is_prefix(history.messages, conversation):
            history.messages.extend(conversation[len(history.messages) :])


def _is_prefix(prefix: list[Message], messages: list[Message]) -> bool:
    """Return True if the messages begin with `prefix`, by role, content and tool calls."""
    start = [(message.role, message.content, message.tool_calls) for message in messages[: len(prefix)]]
    return [(message.role, message.content, message.tool_calls) for message in prefix] == start
