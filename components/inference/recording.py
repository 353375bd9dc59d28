"""Recording of a served policy: its answers with their tokens, and the feedback of its users.

A call that continues a recorded answer belongs to its conversation; a second continuation of the same answer, and any
other call, begins a new one, unless the client names the conversation in the header `X-Conversation-Id`. Responses have
the conversation in this header.

Secrets of known form, and text that matches a pattern of `redact`, are replaced in messages, tools and feedback. Tokens
would still contain them, so answers to redacted conversations are recorded without tokens and log-probabilities.

A failure to record is logged and shown by `/health`; the answer is sent nevertheless.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from starlette.exceptions import HTTPException

from components.data.served.log import Line, ServedLog
from components.data.served.spec import RecordsSpec
from components.errors import Problem, SpecError, WaitTimeout
from components.inference.conversations import REMEMBERED_ANSWERS, conversation_keys, key_of
from components.inference.protocol import BASE_POLICY, ChatCompletion, ChatRequest
from components.inference.request_bodies import RequestBody, read_body
from components.inference.token_texts import Decode
from components.redaction import mask, mask_text
from components.redaction.forms import ASSIGNED, spans
from components.trajectories.feedback import CorrectedCall

log = logging.getLogger(__name__)
HEADER = "x-conversation-id"
REDACTED = "[redacted]"
_STRUCTURE = {"role", "type", "id", "tool_call_id"}
"""Keys whose texts are no text of a conversation."""
Answer = Callable[[Sequence[ChatRequest]], Coroutine[Any, Any, list[ChatCompletion]]]
Id = Annotated[str, StringConstraints(pattern=r"^[\w./-]{1,128}$")]


class CorrectedAnswer(RequestBody):
    """The answer that the policy should have given."""

    text: str = Field("", max_length=200_000)
    calls: list[CorrectedCall] = Field([], max_length=128)


class Feedback(RequestBody):
    """Body of `POST /v1/feedback`."""

    answer: Id | None = None
    """Id of an answer; answers of a request with `n` are `ID`, `ID/1`, `ID/2`."""
    conversation: Id | None = None
    score: Annotated[float, Field(ge=0, le=1)] | None = None
    """From 0 (bad) to 1 (good)."""
    better_than: Id | None = None
    """Id of a worse answer to the same prompt."""
    correction: CorrectedAnswer | None = None
    text: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None

    def check(self) -> None:
        """Raise SpecError for missing fields, and for those that exclude each other."""
        fields = self.model_dump(exclude_none=True)
        problems = []
        if (self.answer is None) == (self.conversation is None):
            problems.append(Problem("answer", "expected the id of an answer, or that of a conversation in its place"))
        if not fields.keys() - {"answer", "conversation"}:
            problems.append(Problem("score", "missing; expected score, better_than, correction or text"))
        problems += [
            Problem(name, "is about an answer; expected the id of one in answer, and no conversation")
            for name in ("better_than", "correction")
            if name in fields and self.answer is None
        ]
        if self.correction is not None and not self.correction.text.strip() and not self.correction.calls:
            problems.append(Problem("correction", "is empty; expected text or calls"))
        if problems:
            raise SpecError(problems)


@dataclass
class _Known:
    """Recorded answer that a call may continue."""

    id: str
    conversation: str
    file: str
    messages: int
    """Number of messages up to and including it."""
    tokens: int
    """Number of tokens up to its end."""
    digest: str
    """Digest of these tokens; empty if it was recorded without."""
    continued: bool = False


class ServedRecorder:
    """Recorder of one server. version: that of the served model; an adapter has its own. vocabulary: digest of the
    tokenizer (`components.models.digests.vocabulary_digest`). decode: to also search the text of tokens."""

    def __init__(
        self,
        folder: Path,
        version: str,
        spec: RecordsSpec | None = None,
        *,
        vocabulary: str = "",
        decode: Decode | None = None,
    ):
        self._log = ServedLog(folder, spec)
        self._log.expire()
        self._version = version
        self._vocabulary = vocabulary
        self._redact = [re.compile(text) for text in self._log.spec.redact]
        self._decode = decode
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        """Answers by named conversation, or an empty text, and by content."""
        self.error = ""
        """Reason why the last answer was not recorded; empty if it was."""

    def begin(self, request: ChatRequest, identity: str, named: str | None) -> RecordedCall:
        """Return the recorder of a call. identity: id of its answer. Raises SpecError for an invalid name of its
        conversation."""
        if named is not None and not re.fullmatch(r"[\w.-]{1,64}", named):
            raise SpecError([Problem(HEADER, f"{named!r:.80}: expected up to 64 letters, digits, '.', '_' and '-'")])
        keys = list(conversation_keys(request.messages, request.tools))
        answered = [key for key, message in zip(keys, request.messages, strict=True) if message["role"] == "assistant"]
        parent = next((known for key in reversed(answered) if (known := self._known.get((named or "", key)))), None)
        if named is None and parent is not None:
            parent = None if parent.continued else parent
        return RecordedCall(self, identity, parent, named)

    async def write(
        self, call: RecordedCall, requests: Sequence[ChatRequest], answers: Sequence[ChatCompletion]
    ) -> None:
        """Record the answers to a call."""
        lines: list[Line] = []

        def lines_for(file: str) -> list[Line]:
            pairs = zip(requests, answers, strict=True)
            lines.extend(self._line(call, file, place, *pair) for place, pair in enumerate(pairs))
            return lines

        try:
            file = await asyncio.to_thread(self._log.append, lines_for)
        except (OSError, WaitTimeout) as error:
            log.error("an answer is not recorded: %s", error)
            self.error = str(error)
            return
        self.error = ""
        for line, request, answer in zip(lines, requests, answers, strict=True):
            messages, tokens = [*request.messages, answer.message], [*answer.prompt_token_ids, *answer.token_ids]
            digest = _digest(tokens) if line["token_ids"] else ""
            known = _Known(line["id"], call.conversation, file, len(messages), len(tokens), digest)
            self._known[call.named or "", key_of(messages, request.tools)] = known
        while len(self._known) > REMEMBERED_ANSWERS:
            self._known.popitem(last=False)

    def _line(self, call: RecordedCall, file: str, place: int, request: ChatRequest, answer: ChatCompletion) -> Line:
        parent = call.parent if call.parent is not None and call.parent.file == file else None
        messages, message = self._redacted(request.messages), self._redacted(answer.message)
        tools = self._redacted(request.tools)
        tokens = [*answer.prompt_token_ids, *answer.token_ids]
        exact = (messages, message, tools) == (request.messages, answer.message, request.tools)
        if exact and self._decode is not None:
            text = self._decode(tokens)  # has reasoning that the client left out, and calls as the model wrote them
            secrets = [span for span in spans(text) if not span.kind.startswith(ASSIGNED)]
            exact = not secrets and not any(pattern.search(text) for pattern in self._redact)
        shared = parent.tokens if exact and parent is not None and parent.digest else 0
        if shared and parent is not None and _digest(tokens[:shared]) != parent.digest:
            shared = 0
        return {
            "id": call.identity if place == 0 else f"{call.identity}/{place}",
            "conversation": call.conversation,
            "seconds": round(call.seconds, 4),
            "version": self._version if answer.policy == BASE_POLICY else answer.policy,
            "tokenizer": self._vocabulary,
            "parent": parent and parent.id,
            **({} if parent else {"tools": tools}),
            "messages": messages[parent.messages if parent else 0 :],
            "prompt": hashlib.sha256(json.dumps([messages, tools]).encode()).hexdigest()[:32],
            "message": message,
            "finish_reason": answer.finish_reason,
            "altered": answer.altered,
            "sampling": request.sampling.settings(),
            "shared": shared,
            "prompt_token_ids": answer.prompt_token_ids[shared:] if exact else [],
            "token_ids": answer.token_ids if exact else [],
            "logprobs": [None if math.isnan(value) else value for value in answer.logprobs] if exact else [],
        }

    def _redacted(self, value: Any, structure: Collection[str] = _STRUCTURE) -> Any:
        """Return JSON data with secrets, and text that matches a pattern, replaced. structure: keys whose texts
        stay."""
        if isinstance(value, str):
            text = self._masked(value)
            for pattern in self._redact:
                text = pattern.sub(REDACTED, text)
            return text
        if isinstance(value, Mapping):
            return {
                key: item if key in structure and isinstance(item, str) else self._redacted(item, structure)
                for key, item in value.items()
            }
        return [self._redacted(item, structure) for item in value] if isinstance(value, list) else value

    def _masked(self, text: str) -> str:
        """Return a text without secrets; one that is JSON, such as arguments, with its values redacted, because its
        escapes hide them from a pattern."""
        if not text.lstrip().startswith(("{", "[")):
            return mask_text(text)
        try:
            data = json.loads(text)
            redacted = self._redacted(mask(data), ())
        except RecursionError:
            return REDACTED
        except ValueError:
            return mask_text(text)
        return text if redacted == data else json.dumps(redacted, ensure_ascii=False)

    async def feedback(self, body: dict[str, Any]) -> dict[str, Any]:
        """Record feedback and return its ids. Raises SpecError for an invalid body, and HTTPException for an answer or
        a conversation that is unknown, or was deleted."""
        feedback = read_body(Feedback, body)
        feedback.check()
        return await asyncio.to_thread(self._feedback, feedback)

    def _feedback(self, feedback: Feedback) -> dict[str, Any]:
        answer = self._log.find(answer=feedback.answer, conversation=feedback.conversation)
        worse = answer if feedback.better_than is None else self._log.find(answer=feedback.better_than)
        days = f"it was not recorded here, or is older than the {self._log.spec.days:g} days that are kept"
        if answer is None:
            name = "answer" if feedback.answer is not None else "conversation"
            raise HTTPException(404, f"no {name} {feedback.answer or feedback.conversation}: {days}")
        if worse is None:
            raise HTTPException(404, f"no answer {feedback.better_than}: {days}")
        if feedback.better_than is not None and (worse.prompt != answer.prompt or worse.id == answer.id):
            text = f"{worse.id} is not another answer to the prompt of {answer.id}; only such answers can be compared"
            raise SpecError([Problem("better_than", text)])
        content = feedback.model_dump(mode="json", exclude_none=True, exclude={"answer", "conversation", "better_than"})
        line = {"feedback": f"fb-{uuid.uuid4().hex}", "answer": feedback.answer, "conversation": answer.conversation}
        compared = {"better_than": worse.id} if feedback.better_than is not None else {}
        if not self._log.append_feedback({**line, **compared, **self._redacted(content)}, answer):
            raise HTTPException(404, f"no answer {answer.id}: {days}")
        return {
            "id": line["feedback"],
            "object": "feedback",
            **{name: line[name] for name in ("answer", "conversation")},
        }

    def health(self) -> dict[str, Any]:
        """Return the state for `/health`."""
        return {"recording": True, **({"recording_error": self.error} if self.error else {})}


class RecordedCall:
    """One call and its place in a conversation."""

    def __init__(self, recorder: ServedRecorder, identity: str, parent: _Known | None, named: str | None):
        self._recorder = recorder
        self.identity = identity
        self.parent = parent
        self.named = named
        self.conversation = named or (parent.conversation if parent else f"conv-{uuid.uuid4().hex}")
        self.seconds = 0.0
        """Latency of the answers."""
        if parent is not None:
            parent.continued = True

    def recorded(self, complete: Answer) -> Answer:
        """Return `complete` so that it records its answers."""

        async def answer(requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
            began, answers = time.monotonic(), []
            try:
                answers = await complete(requests)
            finally:
                if self.parent is not None and not answers:
                    self.parent.continued = False  # the client may repeat it
            self.seconds = time.monotonic() - began
            await self._recorder.write(self, requests, answers)
            return answers

        return answer


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
