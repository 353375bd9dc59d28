"""Records what an agent and an engine say to each other as exact histories.

Each completion brings the tokens of its prompt. Where they extend the tokens recorded so far, the history goes on;
where they do not (a template that rewrites the past, a compacted context), a new one begins with the whole prompt.
Either way the sampled tokens are recorded as sampled, and nothing else is.
"""

from __future__ import annotations

from typing import Any

from components.inference.protocol import ChatCompletion
from components.trajectories.convert import to_message
from components.trajectories.schema import History, Message

NOT_SAMPLED = float("nan")


class Recorder:
    """The histories of one episode. Several conversations may go on at once: each answer belongs to the history of the
    same agent of which its prompt repeats most."""

    def __init__(self, agent: str = "main"):
        self.agent = agent
        """Who speaks, where nobody says otherwise."""
        self.histories: list[History] = []

    def record(self, messages: list[dict[str, Any]], completion: ChatCompletion, agent: str | None = None) -> History:
        """Adds one answer to the conversation `messages` that it answers; returns the history in which it is."""
        prompt, agent = completion.prompt_token_ids, agent or self.agent
        own = [one for one in self.histories if one.agent == agent]
        if prompt:
            going_on = [one for one in own if prompt[: len(one.token_ids)] == one.token_ids]
        else:  # a server that does not say its tokens: what was said must be repeated
            said = [to_message(message) for message in messages]
            going_on = [one for one in own if _same(one.messages, said)]
        history = max(going_on, key=lambda one: (len(one.token_ids), len(one.messages)), default=None)
        if history is None:
            history = History([], agent=agent)
            self.histories.append(history)
        history.messages.extend(to_message(message) for message in messages[len(history.messages) :])
        history.logprobs.extend([NOT_SAMPLED] * (len(prompt) - len(history.token_ids)))
        history.token_ids.extend(prompt[len(history.token_ids) :])
        start = len(history.token_ids)
        history.token_ids.extend(completion.token_ids)
        history.logprobs.extend(completion.logprobs)
        answer = to_message(completion.message)
        answer.span = (start, len(history.token_ids)) if completion.token_ids else None
        answer.finish_reason = completion.finish_reason
        history.messages.append(answer)
        return history

    def close(self, messages: list[dict[str, Any]]) -> None:
        """Adds what was said after the last answer, so that the episode reads to its end."""
        if not self.histories:
            self.histories.append(History([], agent=self.agent))
        history = self.histories[-1]
        history.messages.extend(to_message(message) for message in messages[len(history.messages) :])


def _same(before: list[Message], said: list[Message]) -> bool:
    """Whether a conversation begins with what was said before."""
    shown = [(one.role, one.content, one.tool_calls) for one in said[: len(before)]]
    return [(one.role, one.content, one.tool_calls) for one in before] == shown
