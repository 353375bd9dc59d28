"""Recorded episodes that are played again: their responses come from the record, with the tokens and log-probabilities
that were sampled, and the environment executes their actions again. What the agent reads must be what was recorded;
otherwise a SpecError names the environment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from components.environments.protocol import Messages
from components.errors import Problem, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest, Engine, ResponseStart
from components.trajectories.convert import to_message, to_openai
from components.trajectories.schema import Message, Trajectory
from components.trajectories.versions import PAUSED

Recall = Callable[[ChatRequest, dict[str, Any], list[int]], None]
"""Function that makes an engine continue a conversation from exact tokens: the request, its response, and the tokens of
the conversation up to the end of the response."""


class RecordedEngine:
    """Engine that first repeats the recorded responses of an episode, then samples. environment: name for messages.
    expected: remedy in the message on an environment that does not repeat itself."""

    def __init__(
        self,
        engine: Engine,
        episode: str,
        recorded: Sequence[RecordedResponse],
        environment: str,
        recall: Recall | None,
        expected: str = "equal observations for equal actions",
    ):
        self._engine = engine
        self._episode = episode
        self._environment = environment
        self._recall = recall
        self._recorded = deque(recorded)
        self._expected = expected

    @property
    def policy(self) -> str:
        return self._engine.policy

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the next recorded response, or sample one or the rest of one. Raises SpecError if the conversation is
        not the recorded one."""
        if not self._recorded:
            return await self._engine.chat(request)
        conversation, completion = self._recorded.popleft()
        self.require_equal(request.messages, conversation)
        if completion.finish_reason == PAUSED:
            start = ResponseStart(completion.prompt_token_ids, completion.token_ids, completion.logprobs)
            return await self._engine.chat(replace(request, start=start))
        if self._recall is not None and completion.token_ids:
            self._recall(request, completion.message, completion.prompt_token_ids + completion.token_ids)
        return completion

    def require_equal(self, messages: Messages, conversation: Sequence[Any]) -> None:
        """Raise SpecError if messages are not those of the recorded conversation."""
        if [_content(to_message(message)) for message in messages] != list(conversation):
            text = (
                f"{self._environment} gave other observations when the actions of the episode {self._episode} were "
                f"played again, so the episode cannot be continued; expected {self._expected}"
            )
            raise SpecError([Problem("environment", text)])


RecordedResponse = tuple[list[Any], ChatCompletion]
"""Content of the conversation before a response, and the response."""


def recorded_responses(episode: Trajectory) -> Iterator[RecordedResponse]:
    """Yield each sampled response in order, with the content of the conversation before it."""
    for history in episode.histories:
        for place, message in enumerate(history.messages):
            if message.finish_reason is None:  # not sampled in this history
                continue
            start, end = message.span or (0, 0)
            yield (
                [_content(earlier) for earlier in history.messages[:place]],
                ChatCompletion(
                    message=to_openai(message),
                    finish_reason=message.finish_reason,
                    prompt_token_ids=history.token_ids[:start],
                    token_ids=history.token_ids[start:end],
                    logprobs=history.logprobs[start:end],
                    policy=episode.policy,
                    altered=not message.trained,
                ),
            )


def _content(message: Message) -> tuple[Any, ...]:
    return message.role, message.content, message.tool_calls, message.tool_call_id
