"""The application of a server for clients of OpenAI and Anthropic: its routes.

Routes: `/v1/chat/completions`, `/v1/responses`, `/v1/completions`, Anthropic's `/v1/messages` and
`/v1/messages/count_tokens`, `/v1/models`, `/v1/feedback`, `/health`. The model name in a request
is `name`, or `name@version` to require that policy version (else HTTP 409). With a folder of adapters,
`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` change the policy, as in vLLM: the adapter `name@version` becomes
the policy `version`. Adapters outside that folder are rejected. Unsupported requests get HTTP 400 and OpenAI's error
object (`components.inference.refusals`). With `stream: true`, responses are server-sent
events (`components.inference.streaming`). If a client disconnects, its responses are cancelled. `/health` answers 503
if an embedded engine makes no progress for STALLED_SECONDS.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.exceptions import HTTPException

from components.errors import ArtifactError, EspalierError, Problem, SpecError, WaitTimeout
from components.inference import anthropic_messages, chat_completions, responses, streaming, text_completions
from components.inference.anthropic_events import MessageAnswers
from components.inference.connection import PendingBytes, read_json_object
from components.inference.protocol import (
    BASE_POLICY,
    MAIN,
    ChatCompletion,
    ChatRequest,
    Engine,
    ModelEngine,
    MonitoredEngine,
    gather_completions,
)
from components.inference.recording import HEADER, Answer, ServedRecorder
from components.inference.refusals import refuse
from components.inference.request_bodies import LONGEST_NAME, RequestBody, RequestContext, read_body
from components.inference.response_events import ResponseAnswers
from components.inference.streaming import Asked, Complete, Feed, unless_disconnected
from components.inference.token_texts import Decode

_VERSION = re.compile(r"[\w.-]{1,128}")
"""Version of an adapter, as model names and addresses contain it."""
STALLED_SECONDS = 120.0
"""Time without a forward pass, while requests are in flight, after which `/health` answers 503."""


class AdapterName(RequestBody):
    """Body of a request to unload an adapter."""

    lora_name: str = Field(max_length=LONGEST_NAME)


class LoadedAdapter(AdapterName):
    """Body of a request to load an adapter."""

    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = True
    """No effect: one adapter is loaded at a time."""


@dataclass(frozen=True)
class AppOptions:
    """Options of the application."""

    decode: Decode | None = None
    """Conversion of token ids to text, for log-probabilities; without it their tokens are `token_id:17`."""
    default_max_tokens: int = 512
    """Maximum number of tokens of a response if the request does not specify it."""
    timeout: float = 600.0
    """Time limit of a request in seconds."""
    adapters: Path | None = None
    """Folder of adapters that may be loaded; None allows none."""
    engines: Mapping[str, Engine] | None = None
    """Engine of each API key (`Authorization: Bearer KEY`, or `X-Api-Key`); requests with another key, or none, are
    rejected. None: one engine serves all requests. With `engines`, responses are stored (`previous_response_id`) for
    the lifetime of each engine, and the model name may be `name:agent`, to distinguish several agents of one episode.
    """
    samples: bool = False
    """True to add the tokens to the choices of Chat Completions, except streams (`components.inference.samples`)."""
    recorder: ServedRecorder | None = None
    """Recorder of conversations and feedback; None records nothing."""


def create_app(engine: ModelEngine, name: str, options: AppOptions) -> FastAPI:
    """Return the application that serves `engine` under the model name `name`."""
    decode, engines = options.decode, options.engines
    app = FastAPI(title="Espalier", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    remembered: WeakKeyDictionary[Engine, dict[str, responses.Messages]] = WeakKeyDictionary()
    """Conversations including a response, by the response's id."""
    pending = PendingBytes()

    def split_agent(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the request with the plain model name, and the agent of `name:agent` if `engines` is set."""
        model, mark, agent = str(body.get("model")).partition(":")
        if engines is None or not mark:
            return body, MAIN
        if not re.fullmatch(r"[\w.-]{1,64}", agent):
            raise HTTPException(
                404, f"the model '{model}:{agent}' is not here; an agent's name is letters, digits, '.', '_' and '-'"
            )
        return {**body, "model": model}, agent

    def requested_version(model: str) -> str:
        if model == name:
            return engine.policy
        if model.startswith(f"{name}@"):
            return model.removeprefix(f"{name}@")
        raise HTTPException(404, f"the model '{model}' is not here; this server has '{name}'")

    def served_name(version: str) -> str:
        """Return the model name of a policy version. The base model, or an export, has the plain name."""
        return name if version == BASE_POLICY else f"{name}@{version}"

    def adapter_version(adapter: str) -> str:
        if not adapter.startswith(f"{name}@") or adapter == f"{name}@":
            raise SpecError([Problem("lora_name", f"{adapter!r} is no adapter of '{name}'; expected '{name}@VERSION'")])
        version = adapter.removeprefix(f"{name}@")
        if version == BASE_POLICY or not _VERSION.fullmatch(version):
            text = f"{version!r}: expected a version of letters, digits, '.', '_' and '-', other than {BASE_POLICY!r}"
            raise SpecError([Problem("lora_name", text)])
        return version

    def listing(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "espalier"}

    def engine_of(request: Request) -> Engine:
        if engines is None:
            return engine
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        keyed = engines.get(bearer or request.headers.get("x-api-key", ""))
        if keyed is None:
            raise HTTPException(401, "this key belongs to no running episode")
        return keyed

    def context_of(engine: Engine, agent: str) -> RequestContext:
        """Return the context of requests to an engine, which may record the arguments that its model wrote."""
        written = getattr(engine, "sampled_arguments", ())
        return RequestContext(requested_version, options.default_max_tokens, engines is not None, written, agent)

    def new_head(prefix: str, created: str = "created") -> streaming.Head:
        identity = {"id": f"{prefix}{uuid.uuid4().hex}", created: int(time.time())}
        return lambda policy: {**identity, "model": served_name(policy)}

    async def respond(
        request: Request,
        requests: Sequence[Asked],
        complete: Callable[[Sequence[Asked]], Coroutine[Any, Any, list[Complete]]],
        answers: streaming.Answers[Any, Complete],
        *,
        streamed: bool | None,
        live: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return the answers to a request: an object, or a stream of events. Raises WaitTimeout after `options.timeout`
        seconds."""

        async def within_time(requests: Sequence[Asked]) -> list[Complete]:
            try:
                async with asyncio.timeout(options.timeout):
                    return await complete(requests)
            except TimeoutError:
                raise WaitTimeout(f"the engine did not answer within {options.timeout:g} s") from None

        if streamed:
            stream = await streaming.stream(request, Feed(requests, within_time, live=live), answers, refuse)
            stream.headers.update(headers or {})
            return stream
        whole = answers.whole(await unless_disconnected(request, within_time(requests)))
        return JSONResponse(whole, headers=headers)

    async def converse(
        request: Request,
        engine: Engine,
        requests: Sequence[ChatRequest],
        answers: streaming.Answers[Any, ChatCompletion],
        head: streaming.Head,
        *,
        streamed: bool | None,
        store: bool | None = None,
    ) -> Response:
        """Return the answers of an engine to a conversation, which are recorded if the server does so. store: false if
        the client refuses that."""
        complete: Answer = partial(_answer_all, engine)
        headers = {}
        if options.recorder is not None and store is not False:
            call = options.recorder.begin(requests[0], head(BASE_POLICY)["id"], request.headers.get(HEADER))
            complete, headers = call.recorded(complete), {HEADER: call.conversation}
        return await respond(
            *(request, requests, complete, answers), streamed=streamed, live=engines is None, headers=headers
        )

    @app.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        head, engine = new_head("chatcmpl-"), engine_of(request)
        body, agent = split_agent(await read_json_object(request, pending))
        parsed = chat_completions.read_request(body, context_of(engine, agent))
        answers = chat_completions.ChatAnswers(parsed, head, decode, samples=options.samples)
        streamed, store = parsed.body.stream, body.get("store")
        return await converse(request, engine, parsed.requests, answers, head, streamed=streamed, store=store)

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        head, engine = new_head("resp_", "created_at"), engine_of(request)
        body, agent = split_agent(await read_json_object(request, pending))
        stored = {} if engines is None else remembered.setdefault(engine, {})

        def earlier(response_id: str) -> responses.Messages:
            if response_id not in stored:
                text = f"{response_id!r} is no stored response of this episode"
                raise SpecError([Problem("previous_response_id", text)])
            return stored[response_id]

        parsed = responses.read_request(body, context_of(engine, agent), earlier if engines is not None else None)

        def completed(answer: ChatCompletion) -> None:
            if parsed.stored:
                stored[head(answer.policy)["id"]] = [*parsed.conversation, answer.message]

        answers = ResponseAnswers(parsed, head, decode, completed)
        streamed, store = parsed.body.stream, body.get("store")
        return await converse(request, engine, [parsed.request], answers, head, streamed=streamed, store=store)

    @app.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        engine = engine_of(request)
        body, agent = split_agent(await read_json_object(request, pending))
        asked, parsed = anthropic_messages.read_request(body, context_of(engine, agent))
        head = new_head("msg_")
        return await converse(request, engine, [asked], MessageAnswers(head), head, streamed=parsed.stream)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> dict[str, int]:
        engine = engine_of(request)
        body, agent = split_agent(await read_json_object(request, pending))
        asked = anthropic_messages.read_count(body, context_of(engine, agent))
        count = getattr(engine, "count_tokens", None)
        if count is None:
            raise HTTPException(404, "the engine of this server cannot count tokens; use inference=embedded or vllm")
        return {"input_tokens": await asyncio.to_thread(count, asked)}

    @app.post("/v1/feedback")
    async def create_feedback(request: Request) -> dict[str, Any]:
        if options.recorder is None:
            text = "this server records no answers, so there is nothing to give feedback on; start it with --record DIR"
            raise HTTPException(404, text)
        return await options.recorder.feedback(await read_json_object(request, pending))

    @app.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        complete_text = getattr(engine_of(request), "complete", None)
        if complete_text is None:
            raise HTTPException(404, "this server answers conversations only: use /v1/chat/completions")
        head, body = new_head("cmpl-"), await read_json_object(request, pending)
        parsed = text_completions.read_request(body, RequestContext(requested_version))
        answers = text_completions.CompletionAnswers(parsed, head, decode)
        complete = partial(gather_completions, complete_text)
        return await respond(request, parsed.requests, complete, answers, streamed=parsed.body.stream)

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        if options.adapters is None:
            raise HTTPException(403, "this server loads no adapters; start it with --adapters DIR")
        adapter = read_body(LoadedAdapter, await read_json_object(request, pending))
        folder = _folder_below(options.adapters, adapter.lora_path)
        version = adapter_version(adapter.lora_name)
        try:
            await asyncio.to_thread(engine.load_policy, version, str(folder))
        except ArtifactError as error:  # names the folder as the client did, not where it is on this machine
            raise ArtifactError(str(error).replace(str(folder), adapter.lora_path)) from error
        return Response()

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        adapter = read_body(AdapterName, await read_json_object(request, pending))
        if options.adapters is None or adapter_version(adapter.lora_name) != engine.policy:
            raise HTTPException(404, f"no adapter '{adapter.lora_name}' is loaded; this server has '{engine.policy}'")
        await asyncio.to_thread(engine.load_policy, BASE_POLICY, None)
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [listing(model) for model in dict.fromkeys((name, served_name(engine.policy)))],
        }

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if requested_version(model) != engine.policy:
            raise HTTPException(404, f"the model '{model}' is not here; this server has '{served_name(engine.policy)}'")
        return listing(model)

    @app.get("/health")
    async def health() -> JSONResponse:
        state: dict[str, Any] = {
            "status": "ok",
            "model": name,
            "policy": None if engine.policy == BASE_POLICY else engine.policy,
        }
        state |= {"recording": False} if options.recorder is None else options.recorder.health()
        stalled = engine.stalled_seconds if isinstance(engine, MonitoredEngine) else 0.0
        if stalled < STALLED_SECONDS:
            return JSONResponse(state)
        return JSONResponse({**state, "status": "stalled", "stalled_seconds": round(stalled)}, status_code=503)

    for kind in (EspalierError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    return app


def _folder_below(adapters: Path, path: str) -> Path:
    """Return the adapter's folder with resolved links. Raises HTTPException if it is not below `adapters`."""
    try:
        folder = Path(path).resolve()
        if folder.is_relative_to(adapters.resolve()) and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):  # name too long, null byte, link cycle
        pass
    raise HTTPException(404, f"there is no adapter {path!r:.300} below the folder of --adapters")


async def _answer_all(engine: Engine, requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
    """Return all responses, or raise the first error. Uses the engine's `chat_all` if it has one."""
    if hasattr(engine, "chat_all"):
        answers = await engine.chat_all(requests)
    else:
        answers = await gather_completions(engine.chat, requests)
    if requests[0].alternatives and any(answer.token_ids and not answer.likeliest for answer in answers):
        text = "the engine of this server returns the sampled tokens only; leave it out, or use inference=embedded"
        raise SpecError([Problem("top_logprobs", text)])
    return answers
