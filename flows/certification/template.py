"""Check of the chat template over several turns, as the engine and the recorder of rollouts use it.

Scripted episodes are played through the prompt cache of the engines (`components.inference.conversations`), the
action format and the recorder (`components.trajectories.recorder`): calls of tools, answers, questions; with and
without reasoning in `<think>`; with an environment that begins a new context (`Step.new_context`). Each prompt has to
extend the tokens so far, or to begin a new history that shows every message.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from components.environments.protocol import Messages
from components.errors import PromptRefused, ResourceError
from components.evaluation.checks import PropertyCheck, check_result
from components.inference.conversations import Conversations, stop_ids
from components.inference.protocol import ChatRequest
from components.rollout.formats import SingleActionFormat
from components.trajectories.call_forms.pythonic import write_pythonic
from components.trajectories.chat import ChatFormat
from components.trajectories.reasoning import ReasoningForm
from components.trajectories.recorder import Recorder
from flows.certification.subject import Subject, call_message, tool

NAME = "template"
LOOK_UP = tool("look_up", "Looks a word up.", word={"type": "string"})
ADD = tool("add", "Adds two numbers.", a={"type": "integer"}, b={"type": "integer"})
ACT = tool("act", "Acts.", action={"type": "string"})
SCRIPT = ("call", "calls", "say", "ask", "call", "say", "ask", "say")
"""Turns of one context: one call, several calls, an answer, and a question of the user."""


@dataclass
class Played:
    """A scripted episode after its last turn."""

    recorder: Recorder
    answers: list[list[int]]
    """Sampled tokens of each response."""
    failures: list[str]
    contexts: int

    @property
    def histories(self) -> int:
        """Number of histories."""
        return len(self.recorder.histories)


def check_template(subject: Subject) -> PropertyCheck:
    """Play the scripted episodes and compare the recorded histories with what was sampled."""
    plain = play(subject)
    thinking = play(subject, thinking=True)
    renewed = play(subject, contexts=2)
    answers = len(plain.answers)
    figures: dict[str, Any] = {"answers": answers, "histories": plain.histories}
    figures |= {"histories_with_reasoning": thinking.histories, "histories_of_2_contexts": renewed.histories}
    failures = [failure for episode in (plain, thinking, renewed) for failure in episode.failures]
    warnings = []
    if plain.histories > 1:
        warnings.append(
            f"the template rewrites earlier messages: an episode of {answers} answers becomes {plain.histories} "
            "histories. Training stays exact, but computes the repeated prompts"
        )
    elif thinking.histories > 1:
        warnings.append(
            f"the template removes reasoning from earlier answers: an episode of {answers} answers with <think> "
            f"becomes {thinking.histories} histories. Training stays exact, but the policy does not read its earlier "
            "reasoning, and repeated prompts are computed. model.keep_reasoning=true keeps it, in one history"
        )
    if refused := _refused(subject.chat):
        figures["demonstrations"] = "refused"
        warnings.append(refused)
    return check_result(NAME, failures, figures, warnings=warnings)


def play(subject: Subject, *, thinking: bool = False, contexts: int = 1) -> Played:
    """Play the script once per context. thinking: each answer begins with reasoning."""
    chat, recorder = subject.chat, Recorder()
    talk = Conversations(chat, subject.model.max_length)
    stops = stop_ids(None, chat)
    played = Played(recorder, [], [], contexts)
    for context in range(contexts):
        shown, style = [f"system-{context}", f"question-{context}-0"], subject.format()
        first = [{"role": "system", "content": shown[0]}, {"role": "user", "content": shown[1]}]
        messages, tools = style.opening(first, [ACT] if subject.agent.format == "chat" else [LOOK_UP, ADD])
        for number, turn in enumerate(SCRIPT):
            mark = f"{context}-{number}"
            if turn == "ask":
                messages.append({"role": "user", "content": f"question-{mark}"})
                shown.append(f"question-{mark}")
                continue
            message = style.write(_action(turn, mark, subject.agent.format, single=chat.single_call))
            request = ChatRequest(list(messages), tools)
            try:
                prompt = talk.prompt(request)
            except PromptRefused as error:
                played.failures.append(str(error))
                return played
            played.failures += _unseen(chat, prompt, shown)
            sampled = chat.encode(written(chat, message, prompt, tools, f"thought-{mark}" if thinking else ""))
            sampled.append(chat.id_of_end(message))
            completion = talk.completion(request, prompt, sampled, [0.0] * len(sampled), stops)
            history = recorder.record(messages, completion)
            played.answers.append(sampled)
            played.failures += _inexact(history.token_ids, prompt + sampled, mark)
            messages.append(completion.message)
            observation = _results(completion.message, mark) if turn != "say" else []
            shown += [f"answer-{mark}"] if turn == "say" else [item["content"] for item in observation]
            if isinstance(style, SingleActionFormat) and subject.agent.format != "chat":
                messages += style.show(observation)
            else:
                messages += _observed(observation)
    recorded = [
        history.token_ids[message.span[0] : message.span[1]]
        for history in recorder.histories
        for message in history.messages
        if message.span is not None
    ]
    if sorted(recorded) != sorted(played.answers):
        played.failures.append("a sampled token is missing from the histories, or is in two of them")
    if recorder.histories and played.histories < contexts:
        played.failures.append(f"{contexts} contexts are recorded as {played.histories} histories")
    return played


def _action(turn: str, mark: str, form: str, *, single: bool) -> dict[str, Any]:
    """Return the action of a turn. single: with one call at most."""
    if turn == "say":
        return {"role": "assistant", "content": f"answer-{mark}"}
    if form == "chat":
        return call_message([("act", json.dumps({"action": f"action-{mark}"}))])
    calls = [("look_up", json.dumps({"word": f"word-{mark}"}))]
    if turn == "calls" and form != "react" and not single:
        calls.append(("add", json.dumps({"a": 1, "b": 2})))
    return call_message(calls)


def _results(message: dict[str, Any], mark: str) -> Messages:
    """Return the results of the message's calls, or of its action in text."""
    ids = [call["id"] for call in message.get("tool_calls") or []] or ["call_0"]
    return [{"role": "tool", "tool_call_id": name, "content": f"result-{mark}-{i}"} for i, name in enumerate(ids)]


def _observed(observation: Messages) -> Messages:
    """Return an observation as a message of the user."""
    text = "\n".join(message["content"] for message in observation)
    return [{"role": "user", "content": f"Observation: {text}"}] if observation else []


def written(chat: ChatFormat, message: dict[str, Any], prompt: list[int], tools: Messages, thought: str = "") -> str:
    """Return a message as the text that a model samples after the prompt. tools: the offered ones."""
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    parts = [message["content"]] if message["content"] else []
    if calls:
        native = chat.native_tools
        parts.append(chat.native_calls.written(message["tool_calls"], tools) if native else write_pythonic(calls))
    text = "\n".join(parts)
    if not (calls and chat.harmony):
        text = chat.channel + text
    marks = chat.after(prompt).reasoning or ReasoningForm("<think>", "</think>", opened=False)
    if thought or marks.opened:
        text = marks.write(thought, text).removeprefix(marks.start if marks.opened else "")
    return text


def _unseen(chat: ChatFormat, prompt: list[int], shown: Sequence[str]) -> list[str]:
    """Return a failure if the prompt lacks an earlier message."""
    text = chat.tokenizer.decode(prompt, skip_special_tokens=False)
    missing = [part for part in shown if part not in text]
    return [f"the template drops earlier messages: a later prompt lacks {missing[0]!r}"] if missing else []


def _inexact(recorded: list[int], exact: list[int], mark: str) -> list[str]:
    return [] if recorded == exact else [f"turn {mark}: the recorded tokens are not those of prompt and response"]


def _refused(chat: ChatFormat) -> str:
    """Return the reason if a demonstration has no exact tokens; else an empty text."""
    talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    try:
        chat.streams(talk, [])
    except ResourceError as error:
        return f"no training on demonstrations (warmup): {error}"
    return ""
