"""Conversion of messages to tokens and back, with the model's chat template.

Sampled tokens are never retokenized. The whole prompt is rendered only for the first turn of a history. Each later
prompt consists of the tokens so far plus the text that the template puts after the last response (`continuation`). If
the template is not prefix-stable (it rewrites earlier turns, as templates that drop old reasoning do), `continuation`
returns None and a new history begins. docs/concepts/trajectories.md lists the model families that do so.

Tools and calls are left to templates that present tools and write calls in a known form
(`components.trajectories.call_forms`). For other templates, the system message lists the tools' signatures, and calls
are written in the pythonic form, `[find_order(order="K482")]` (`components.trajectories.call_forms.pythonic`).

Reasoning is a field of its own of an assistant message (`components.trajectories.reasoning`). A template that drops the
reasoning of earlier turns is not prefix-stable, unless the model's options keep it (`template_options`).

Messages are adapted to the template's restrictions. Without a system role, the system message becomes part of the first
user message. If user and assistant must alternate, consecutive user and tool messages are merged. A template that reads
the current date always gets the same one, so that equal episodes have equal tokens on any day.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from components.errors import EngineError, PromptRefused, ResourceError
from components.trajectories.call_forms.harmony import HARMONY_REASONING, HarmonyForm
from components.trajectories.chat_template import ChatTemplate, Messages, TemplateTooCostly
from components.trajectories.native_calls import NativeCalls
from components.trajectories.plain_messages import merge_user_messages, system_as_user, tools_as_text
from components.trajectories.reasoning import MARKS, ReasoningForm
from components.trajectories.response_reader import ResponseReader
from components.trajectories.special_tokens import SpecialTokens
from components.trajectories.template_options import TemplateOptions


@dataclass(frozen=True)
class TokenStream:
    """The exact tokens of one history."""

    token_ids: list[int]
    """(T,) token ids."""
    spans: list[tuple[int, int]]
    """Range [start, end) of each assistant message, including its end-of-turn token."""


class ChatFormat(ResponseReader):
    """The chat template of one tokenizer. Raises ResourceError without a template or an end-of-turn token.

    A template is a program that is part of the model. If it rejects a conversation, the methods raise PromptRefused.
    """

    def __init__(self, tokenizer):
        if not tokenizer.chat_template:
            raise ResourceError(f"{tokenizer.name_or_path} has no chat template: choose an instruct model")
        self.tokenizer = tokenizer
        self.special_tokens = SpecialTokens(tokenizer)
        self._template = ChatTemplate(tokenizer)
        self.reasoning = None
        self.renders_reasoning = True
        closing, self.final_ids = self._end_of_turn()
        *before, self.end = tokenizer.convert_ids_to_tokens(closing)
        self.end_id = closing[-1]
        self.closing = "".join(before)
        options = TemplateOptions.read(str(tokenizer.get_chat_template()))
        self.keeps_reasoning = options.keep_reasoning
        end = self.closing + self.end
        self.native_calls = NativeCalls(self._template, self.special_tokens, end, options.call_form)
        self.call_form, self.single_call = self.native_calls.form, self.native_calls.single
        self.call_end = self.native_calls.end or self.end
        self.tool_role = "tool" if self.native_tools or self._renders(("user", "assistant", "tool")) else "user"
        self.system_role = self._renders(("system", "user"), which=0)
        self.alternates = not self._renders(("user", "user"))
        self.channel = self._response_channel()
        self.reasoning = self._reasoning_form()
        self.renders_reasoning = self.native_calls.shows_reasoning()
        self.reasoning_end = self._end_of_reasoning(self.reasoning) if self.reasoning else ""

    def _end_of_turn(self) -> tuple[list[int], list[int]]:
        """Return the special tokens after an assistant message, from rendered conversations, and the tokens that only
        the last message of a conversation has after them, such as Phi-3's `<|endoftext|>`. The last of the former is
        the one with which a response ends; it may differ from the tokenizer's end-of-sequence token."""
        name = self.tokenizer.name_or_path
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
        try:
            last, earlier = self._probe(talk), self._probe([*talk, talk[0]])
        except EngineError as error:
            text = f"{error}: a question and its answer; repair the template, or choose another model"
            raise ResourceError(text) from error
        if "stem" not in last:
            raise ResourceError(
                f"the chat template of {name} does not render the content of an assistant message; expected a template "
                "that reads content as text, not as a list of parts. Repair it, or choose another model"
            )
        added = self.tokenizer.added_tokens_decoder  # Gemma's have line breaks among them, which end no message
        special = set(self.tokenizer.all_special_ids) | {i for i, token in added.items() if str(token).strip()}
        tail, common = (self.encode(text.rpartition("stem")[2]) for text in (last, earlier))
        start = next((place for place, token in enumerate(tail) if token in special), None)
        if start is None:  # GLM ends a message with the start of the next one
            tail, common = common, []
            start = next((place for place, token in enumerate(tail) if token in special), None)
            if start is not None:
                return [tail[start]], []
            raise ResourceError(
                f"the chat template of {name} does not mark where an assistant message ends; expected a special token "
                "there: repair the template, or choose another model"
            )
        end = start + 1
        while tail[: end + 1] == common[: end + 1] and end < len(tail) and tail[end] in special:
            end += 1
        eos = [place + 1 for place in range(end, len(tail)) if tail[place] == self.tokenizer.eos_token_id]
        return tail[start:end], tail[end : max(eos, default=end)]

    def _reasoning_form(self) -> ReasoningForm | None:
        """Return the marks of the model's reasoning, from its template; None without any."""
        source = str(self.tokenizer.get_chat_template())
        if isinstance(self.call_form, HarmonyForm):
            return HARMONY_REASONING
        for start, end in MARKS:
            if start in source or end in source:
                head = self._render([([{"role": "user", "content": "a"}], True)], [])[0]
                return ReasoningForm(start, end, opened=False).after(head)
        return None

    def _end_of_reasoning(self, form: ReasoningForm) -> str:
        """Return the end mark with the white space around it, as the template writes it. It is the form's own if the
        template drops reasoning."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem", "reasoning": "root"}]
        try:
            rendered = [text for _, _, text in self.responses(talk, [])]
        except (EngineError, ResourceError):
            rendered = []
        for text in (*rendered, form.write("root", "stem")):
            before, end, after = text.partition("root")[2].partition(form.end)
            if end:
                return before + end + after[: len(after) - len(after.lstrip())]
        return form.end

    def _renders(self, roles: tuple[str, ...], which: int = -1) -> bool:
        """Return True if the template renders a conversation of these roles, including message `which`."""
        talk = [{"role": role, "content": f"probe{number}"} for number, role in enumerate(roles)]
        try:
            return talk[which]["content"] in self._probe(talk)
        except EngineError:
            return False

    def _probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Return a short conversation as text. Raises ResourceError if even that exceeds the template's limits."""
        try:
            return self._template.render([(messages, False)], tools)[0]
        except TemplateTooCostly as error:
            raise ResourceError(f"{error}. Repair the template, or choose another model") from None

    def _response_channel(self) -> str:
        """Return the special tokens that mark a final response and that the model samples itself, such as
        `<|channel|>final<|message|>`; empty for most templates."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stem"}]
        head, whole = self._render([(talk[:1], True), (talk, False)], [])
        between = whole.removeprefix(head).partition("stem")[0] if whole.startswith(head) else ""
        return between if self.special_tokens.first(between) else ""

    @property
    def native_tools(self) -> bool:
        """True if tools and calls are the template's."""
        return self.call_form is not None

    # Rendering

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, generate: bool) -> str:
        """Return the conversation as text; `generate` adds the start of an assistant message. Special tokens in
        messages and tool descriptions, such as `<|im_end|>` on a web page, are escaped as the plain text `<
        |im_end|>`."""
        return self._render([(messages, generate)], tools)[0]

    def _render(self, conversations: Sequence[tuple[Messages, bool]], tools: list[dict[str, Any]]) -> list[str]:
        tools = self.special_tokens.escape(tools)
        shown = [(self._shown(messages, tools), generate) for messages, generate in conversations]
        return self._template.render(shown, (tools or None) if self.native_tools else None)

    def _shown(self, messages: Messages, tools: list[dict[str, Any]]) -> Messages:
        """Return messages as the template reads them."""
        escape = self.special_tokens.escape
        messages = [message if message["role"] == "assistant" else escape(message) for message in messages]
        if self.reasoning is not None and not self.renders_reasoning:
            messages = [_with_reasoning(message, self.reasoning) for message in messages]
        if self.native_tools:
            return self.native_calls.messages(messages)
        shown = tools_as_text(messages, tools, self.tool_role)
        if not self.system_role:
            shown = system_as_user(shown)
        if self.alternates:
            shown = merge_user_messages(shown)
        return self.native_calls.messages(shown)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without added special tokens. Raises PromptRefused for invalid Unicode."""
        try:
            return self.tokenizer(text, add_special_tokens=False).input_ids
        except TypeError as error:
            raise PromptRefused(f"this text is not valid Unicode and cannot be tokenized: {text[:200]!r}") from error

    def prompt_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of a conversation up to the start of the next assistant message."""
        last = max((turn for turn, message in enumerate(messages) if message["role"] == "assistant"), default=None)
        if self.keeps_reasoning and last is not None:
            with suppress(ResourceError):  # reasoning for a prompt that closes it: the template decides
                (*_, stream) = self.streams(messages[: last + 1], tools)
                if (between := self.continuation(messages, tools, last, closed=True)) is not None:
                    return stream.token_ids + self.encode(between)
        return self.encode(self.render(messages, tools, generate=True))

    def continuation(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], turn: int, *, closed: bool
    ) -> str | None:
        """Return the text between the sampled tokens of assistant message `messages[turn]` and the next assistant
        message, or None if the template rewrites earlier messages, so that the tokens so far cannot be extended.

        closed: True if the sampled tokens end with the end-of-turn token.
        """
        if self.keeps_reasoning:
            return self._after_kept(messages, tools, turn, closed=closed)
        head, whole = self._render([(messages[:turn], True), (messages, True)], tools)
        end = self.end_of(messages[turn])
        cut = whole.find(end, len(head))
        if not whole.startswith(head) or cut < 0:
            return None
        if missing_part(whole[len(head) : cut], messages[turn]) is not None:
            return None
        after = whole[cut + len(end) :]
        return after if closed else self.closing + end + after

    def _after_kept(self, messages: Messages, tools: list[dict[str, Any]], turn: int, *, closed: bool) -> str | None:
        """Return the text after an answer that stays as it was sampled, however the template renders it: what follows a
        placeholder in its last call, or else in place of its content."""
        place = sha256(repr(messages).encode("utf-8", "surrogatepass")).hexdigest()  # occurs in no message
        messages = [{key: message[key] for key in message if key != "reasoning"} for message in messages]
        if calls := messages[turn].get("tool_calls"):
            function = {**calls[-1]["function"], "arguments": json.dumps({"place": place})}
            changed: dict[str, Any] = {"tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
        else:
            changed = {"content": place}
        messages[turn] = messages[turn] | changed
        _, shown, text = self.render(messages, tools, generate=True).partition(place)
        end = self.end_of(messages[turn])
        if end not in text:  # gpt-oss: `<|return|>` ends the last answer, `<|end|>` earlier ones
            end = self.special_tokens.first(text) or ""
        if not shown or not end:
            return None
        after = text.partition(end)[2]
        return after if closed else self.closing + end + after

    def streams(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, final: bool = False
    ) -> list[TokenStream]:
        """Return the tokens of a demonstration, identical to those of a rollout with the same messages.

        A template that is not prefix-stable gives several streams, each with the turns that it could extend. final: a
        last assistant message has the tokens that end a conversation (`final_ids`), which no rollout samples.
        """
        streams: list[TokenStream] = []
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        previous: int | None = None
        for turn, prompt, text in self.responses(messages, tools):
            between: str | None = None
            if previous is not None:
                between = self.continuation(messages[:turn], tools, previous, closed=True)
            if between is None:
                if spans:
                    streams.append(TokenStream(ids, spans))
                ids, spans = self.encode(prompt), []
            else:
                ids = ids + self.encode(between)
            answer = self.encode(text)
            if final and turn == len(messages) - 1:
                answer = answer + self.final_ids
            spans.append((len(ids), len(ids) + len(answer)))
            ids = ids + answer
            previous = turn
        if spans:
            streams.append(TokenStream(ids, spans))
        return streams

    def responses(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
        """Return number, prompt and text of each assistant message, the text as the model would write it. Raises
        ResourceError if the template renders a message differently from its generation prompt."""
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        parts = [(messages[:turn], True) for turn in turns] + [(messages[: turn + 1], False) for turn in turns]
        texts = self._render(parts, tools) if turns else []
        responses = []
        for turn, head, whole in zip(turns, texts[: len(turns)], texts[len(turns) :], strict=True):
            body = self._body(head, whole, messages[turn])
            if body is None:  # a template that moves the system message in later turns
                alone = [{"role": "user", "content": "a"}]
                head_alone, whole = self._render([(alone, True), ([*alone, messages[turn]], False)], [])
                body = self._body(head_alone, whole, messages[turn])
            if body is None:
                body = self._opened_body(messages[: turn + 1], tools)
            if body is None:
                raise ResourceError(
                    f"the chat template of {self.tokenizer.name_or_path} renders the assistant message {turn} "
                    "differently from the head that it gives for generation, so its exact tokens are unknown; correct "
                    "the message, or choose another model"
                )
            if self.keeps_reasoning and self.reasoning and missing_part(body, messages[turn]) == "reasoning":
                body = self.reasoning.write(messages[turn]["reasoning"], body)
            responses.append((turn, head, body))
        return responses

    def _body(self, head: str, whole: str, message: dict[str, Any]) -> str | None:
        """Return the text of an assistant message with its end; None if it does not extend the prompt `head`."""
        if not whole.startswith(head):
            return None
        body, end = whole[len(head) :], self.end_of(message)
        cut = body.rfind(end)
        return body[: cut if cut >= 0 else None] + end

    def _opened_body(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
        """Return the last message as the response to a prompt that opens reasoning, if the template renders the message
        without reasoning: as one with reasoning, or else with the marks around it. None if the prompt opens none."""
        form, message = self.reasoning, messages[-1]
        if form is None:
            return None
        reasoning, place = message.get("reasoning") or "", "(reasoning)"
        shown = [*messages[:-1], {**message, "reasoning": place}]
        head, whole, bare = self._render([(messages[:-1], True), (shown, False), (messages, False)], tools)
        if not form.after(head).opened:
            return None
        body = self._body(head, whole, message)
        if body is not None and body.startswith(place):
            return body.replace(place, reasoning, 1)
        before, opened, _ = head.rpartition(form.start.rstrip())
        body = self._body(before, bare, message)
        if body is None or not opened:
            return None
        return form.write(reasoning, body.lstrip("\n")).removeprefix(head[len(before) :])


def _with_reasoning(message: dict[str, Any], form: ReasoningForm) -> dict[str, Any]:
    """Return a message for a template that has no field for reasoning: as part of the content."""
    if message.get("reasoning") is None:
        return message
    shown = {key: value for key, value in message.items() if key != "reasoning"}
    return shown | {"content": form.write(message["reasoning"], message.get("content") or "")}


def missing_part(text: str, message: dict[str, Any]) -> str | None:
    """Return the part of an assistant message, `reasoning`, `content` or `calls`, that a template's rendering of it
    lacks; None for a complete one. Whitespace, which templates trim, is ignored, and of calls only the names count."""
    parts = [("reasoning", message.get("reasoning") or ""), ("content", message.get("content") or "")]
    parts += [("calls", call["function"]["name"]) for call in message.get("tool_calls") or []]
    text, at = "".join(text.split()), 0
    for name, part in parts:
        part = "".join(part.split())
        at = text.find(part, at)
        if at < 0:
            return name
        at += len(part)
    return None
