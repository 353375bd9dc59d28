"""The engine protocol: OpenAI chat completions that also return token ids and log-probabilities.

Messages and tools are OpenAI's JSON. Each response contains the prompt tokens and the sampled tokens, so a recorder can
store the exact token stream. The trained model is addressed by version: a request for a version that the engine has not
loaded raises `StalePolicy`; another version never responds to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from components.errors import Problem, SpecError

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")

BASE_POLICY = "base"
"""Policy version before any training: the model as loaded."""
TokenLogprobs = list[tuple[int, float]]
"""Token ids with their log-probabilities, the most likely first."""
MAIN = "main"
"""Name of the default agent."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters."""

    temperature: float = 1.0
    """Divisor of the logits; 0 means greedy decoding."""
    top_p: float = 1.0
    """Probability mass of the smallest token set to sample from; 1 means all tokens."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 means no limit."""
    max_tokens: int = 128
    """Maximum number of tokens per response."""
    min_p: float = 0.0
    """Minimum probability of a sampled token, as a share of the most likely token's probability."""
    max_thinking_tokens: int | None = None
    """Number of tokens after which unfinished reasoning is ended: the engine adds the tokens of its end, which are not
    sampled. None never ends it. Only engines with `ends_reasoning` accept it."""

    def refuse_thinking_limit(self, engine: str) -> None:
        """Raise SpecError if reasoning is to be ended. engine: name of an engine that cannot end it."""
        if self.max_thinking_tokens is not None:
            text = f"{self.max_thinking_tokens}: inference.name={engine} cannot end the reasoning of a response"
            raise SpecError(
                [Problem("agent.max_thinking_tokens", f"{text}; expected null, or inference.name=embedded")]
            )

    def settings(self) -> dict[str, Any]:
        """Return the parameters by name, without a `max_thinking_tokens` of None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def cuts(self) -> dict[str, float]:
        """Truncation parameters in effect (of top_p, top_k and min_p), by request parameter name."""
        cuts = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return {name: getattr(self, name) for name, cut in cuts.items() if cut}


ANY_OBJECT = '{"type": "object"}'
"""Schema of `json_object`."""


@dataclass(slots=True, frozen=True)
class ResponseForm:
    """The form of a response."""

    json_schema: str | None = None
    """JSON text of the schema that the content of a response without calls validates against; None allows any text."""
    schema_name: str = "response"
    """Label of the schema; it has no effect."""
    calls: tuple[str, ...] | None = None
    """Names of the tools of which the response calls exactly one; empty if it calls none, so that its text is content
    whatever it looks like. None leaves calls to the model."""
    strict: bool = False
    """True to hold the arguments of calls that the model makes to the schemas of their tools, if `calls` is None."""
    single: bool = False
    """True to hold a response to one call at most, if `strict`."""

    @property
    def constrained(self) -> bool:
        """True if tokens are excluded, so that the response is not a sample of the policy's own distribution."""
        return self.json_schema is not None or bool(self.calls) or self.strict

    @property
    def without_calls(self) -> bool:
        """True if the text of the response is its content, even if it looks like a call."""
        return self.calls == ()

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the content."""
        return json.loads(self.json_schema or "{}")


@dataclass(slots=True, frozen=True)
class LogitChange:
    """Changes of the logits that a request demands, before the temperature."""

    bias: tuple[tuple[int, float], ...] = ()
    """Additions to the logits of tokens, by token id."""
    presence: float = 0.0
    """Subtraction from the logit of each token that was sampled before in the response."""
    frequency: float = 0.0
    """Subtraction from the logit of a token for each time that it was sampled before in the response."""


NO_CHANGE = LogitChange()
"""The model's own logits."""
FREE = ResponseForm()
"""Any response."""
NO_CALLS = ResponseForm(calls=())
"""Text."""


def parameter_of(form: ResponseForm) -> str:
    """Return the name of the request's parameter that demands a form."""
    return "response_format" if form.json_schema is not None else "tools" if form.strict else "tool_choice"


@dataclass(slots=True, frozen=True)
class CallDelta:
    """Part of a call of a response that is sampled (`components.inference.growing_text`)."""

    id: str
    name: str
    arguments: str
    """Next part of the arguments."""
    index: int = 0
    """Place among the calls of the response."""


@dataclass(slots=True, frozen=True)
class Increment:
    """Tokens that an engine has sampled since the last increment of a response."""

    text: str
    """Text that is now certain to be the next part of the message's content; empty while later tokens can change it
    (`components.inference.growing_text`)."""
    token_ids: list[int]
    logprobs: list[float]
    prompt_token_ids: list[int]
    policy: str
    likeliest: list[TokenLogprobs] = field(default_factory=list)
    """As in `ChatCompletion`."""
    calls: Sequence[CallDelta] = ()
    """Next parts of the response's calls, which it has unless one of them turns out to be invalid."""
    reasoning: str = ""
    """Next part of the message's reasoning, before any text."""


@dataclass(slots=True, frozen=True)
class ResponseStart:
    """First tokens of a response whose sampling was interrupted, with their log-probabilities."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True, frozen=True)
class ChatRequest:
    """A chat completion request to an engine."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    policy: str = BASE_POLICY
    sampling: Sampling = Sampling()
    seed: int = 0
    """Sampling seed: equal requests with equal seeds get equal responses."""
    agent: str = MAIN
    """Name of the requesting agent, if several agents play one episode. It affects the response of a policy with an
    adapter for each role only (`engines.embedded`)."""
    episode: str = ""
    """Episode id for requests whose messages are copies of earlier responses (a client behind HTTP). Among earlier
    responses with equal text, the engine continues the one of the same episode."""
    stop: tuple[str, ...] = ()
    """Strings that end the response; the message ends before the first one (`components.inference.growing_text`)."""
    listener: Callable[[Increment], None] | None = field(default=None, compare=False, repr=False)
    """Callback for the tokens of the response as they are sampled, in the event loop of the request. It does not affect
    the response. Engines that do not stream never call it."""
    form: ResponseForm = FREE
    """Form that the response is held to."""
    change: LogitChange = NO_CHANGE
    alternatives: int | None = None
    """Number of most likely tokens to return for each token; None returns none. It does not affect the response."""
    start: ResponseStart | None = None
    """First tokens of the response, which the engine completes; its response has them and those that follow. None
    samples all tokens. Only engines with `completes_responses` accept it, in requests without a form."""

    @property
    def altered(self) -> bool:
        """True if the response is no sample of the policy's distribution: its form excludes tokens, or logits are
        changed."""
        return self.form.constrained or self.change != NO_CHANGE


@dataclass(slots=True, frozen=True)
class ReportedTokens:
    """Token counts of a response as its server reports them, and its cost."""

    prompt_tokens: int
    sampled_tokens: int
    cost: float | None = None
    """Cost in the currency of the prices; None if the price is unknown."""


@dataclass(slots=True, frozen=True)
class ChatCompletion:
    """A response of an engine, with its token ids and log-probabilities."""

    message: dict[str, Any]
    """OpenAI assistant message: role, content, tool_calls."""
    finish_reason: str
    """Finish reason: `stop`, `tool_calls` or `length`."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Sampled tokens, including the end-of-turn token."""
    logprobs: list[float]
    """Log-probability of each sampled token under the distribution that it was drawn from; NaN for a token that was
    added (`Sampling.max_thinking_tokens`). Greedy responses have the log-probability at temperature 1, not 0."""
    policy: str
    """Version of the policy that generated the response."""
    usage: ReportedTokens | None = None
    """Counts of a server that returns no token ids; None if the token ids are the counts, or if nothing is known."""
    altered: bool = False
    """True if the request altered the policy's distribution (`ChatRequest.altered`): the tokens are not trained on."""
    likeliest: list[TokenLogprobs] = field(default_factory=list)
    """Most likely tokens at each sampled token, under the distribution that it was drawn from, if the request has
    `alternatives`. Empty from engines that do not return them."""
    reasoning_tokens: int = 0
    """Number of sampled tokens of the reasoning, with the marks around it; 0 without token ids."""
    stop_string: str | None = None
    """String of the request's `stop` that ended the response; None without one, or if a server does not name it."""
    invalid_call: bool | None = None
    """True if the content is meant as a call of an offered tool that cannot be read; None if the form of the model's
    calls is unknown, as that of servers."""

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens; 0 if unknown."""
        return self.usage.sampled_tokens if self.usage is not None else len(self.token_ids)


@dataclass(slots=True, frozen=True)
class TextIncrement(Increment):
    """Tokens that an engine has sampled since the last increment of a completion, and its prompt."""

    prompt_logprobs: list[float] = field(default_factory=list)
    """This and the following fields: as in `TextCompletion`."""
    prompt_likeliest: list[TokenLogprobs] = field(default_factory=list)
    added_tokens: int = 0


@dataclass(slots=True, frozen=True)
class TextRequest:
    """A text completion request to an engine."""

    prompt: str | list[int]
    """Text, which the engine tokenizes with the tokenizer's special tokens (such as the beginning of a sequence), or
    token ids, which it uses as they are."""
    policy: str = BASE_POLICY
    sampling: Sampling = Sampling()
    """`max_tokens` may be 0 if the prompt is scored."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end the completion; its text ends before the first one."""
    change: LogitChange = NO_CHANGE
    alternatives: int | None = None
    """Number of most likely tokens to return for each token; None returns none."""
    scores_prompt: bool = False
    """True to return the log-probabilities of the prompt tokens."""
    listener: Callable[[TextIncrement], None] | None = field(default=None, compare=False, repr=False)
    """Callback for the tokens of the completion as they are sampled, as in `ChatRequest`."""
    stop_ids: frozenset[int] | None = None
    """Tokens that end the completion; None: those of the model. The embedded engine only."""


@dataclass(slots=True, frozen=True)
class TextCompletion:
    """A completion, with its token ids and log-probabilities."""

    text: str
    finish_reason: str
    """Finish reason: `stop` or `length`."""
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Sampled tokens, including an end-of-sequence token, which is not part of the text."""
    logprobs: list[float]
    """Log-probability of each sampled token under the distribution that it was drawn from, as in `ChatCompletion`."""
    policy: str
    likeliest: list[TokenLogprobs] = field(default_factory=list)
    """Most likely tokens at each sampled token, under the same distribution."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probability of each prompt token but the first under the model's distribution: temperature 1, all tokens."""
    prompt_likeliest: list[TokenLogprobs] = field(default_factory=list)
    """Most likely tokens at each prompt token but the first, under the model's distribution."""
    added_tokens: int = 0
    """Number of leading prompt tokens that the tokenizer added to the text."""


class Engine(Protocol):
    """An engine that generates with one policy at a time."""

    @property
    def policy(self) -> str:
        """Loaded policy version."""
        ...

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        """Return the response to a request. Concurrent calls are batched. Raises EngineError and its subclasses."""
        ...


class ModelEngine(Engine, Protocol):
    """An engine with a model, as `EngineSpec.build` returns it."""

    def load_policy(self, version: str, folder: str | None) -> None:
        """Load `version`: the trained weights in `folder` (`components.models.trained_weights`), or the base model if
        `folder` is None."""
        ...

    def close(self) -> None:
        """Release the engine's resources."""
        ...

    def release(self) -> None:
        """Free the memory that only generation needs; it is allocated again on use."""
        ...


@runtime_checkable
class MonitoredEngine(Protocol):
    """An engine that reports whether it makes progress."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last progress; 0 if no request is in flight."""
        ...


class ServerEngine(ModelEngine, Protocol):
    """An engine whose model is on a server."""

    def check(self) -> None:
        """Raise ResourceError if the server is unreachable or unsuitable."""
        ...


def ensure_usable(engine: ServerEngine) -> ModelEngine:
    """Return the engine after its check; close it if the check fails."""
    try:
        engine.check()
    except BaseException:
        engine.close()
        raise
    return engine


class WarmCache(Protocol):
    """Cache of objects that stay loaded between the stages of a run."""

    def get(self, kind: str, recipe: Any, build: Callable[[], Any]) -> Any:
        """Return the cached object of this kind if its recipe is equal, else the result of `build`."""
        ...


class EngineHost(Protocol):
    """Resources of the process that builds an engine."""

    @property
    def cache(self) -> Path:
        """Folder of converted model weights."""
        ...

    @property
    def warm(self) -> WarmCache: ...

    @property
    def on_wait(self) -> Callable[[str], None]:
        """Callback for messages about long waits."""
        ...


async def gather_completions(chat: Callable[[Asked], Awaitable[Answered]], requests: Sequence[Asked]) -> list[Answered]:
    """Return the responses to concurrent requests. If one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(chat(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
