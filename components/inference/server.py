"""An OpenAI-compatible HTTP server for any engine.

    python -m components.inference.server MODEL_DIR [--port 8000] [--host 127.0.0.1] [--adapters DIR]

Routes: `/v1/chat/completions`, `/v1/responses`, `/v1/models`, `/health`. The model name in a request is `name`, or
`name@version` to require that policy version (else HTTP 409). With a folder of adapters, `/v1/load_lora_adapter` and
`/v1/unload_lora_adapter` change the policy, as in vLLM: the adapter `name@version` becomes the policy `version`.
Adapters outside that folder are rejected. Unsupported requests get HTTP 400 and OpenAI's error object
(`components.inference.wire`, `components.inference.responses`). Responses are computed completely before they are sent,
with `stream: true` as server-sent events, so that errors have their status code.

By default the server listens on loopback only. On other addresses it requires the API key in the environment variable
ESPALIER_SERVER_KEY (`components.inference.access`). Size and duration of requests are limited (`connection`,
`strict_json`, `wire`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from starlette.exceptions import HTTPException

from components.errors import (
    ArtifactError,
    CallsUsedUp,
    ContextOverflow,
    EngineBusy,
    EngineError,
    EspalierError,
    Problem,
    PromptRefused,
    ResourceError,
    SpecError,
    StalePolicy,
    WaitTimeout,
)
from components.inference import responses, wire
from components.inference.access import AccessMiddleware, check_key, key_from_environment
from components.inference.connection import BoundedConnection, PendingBytes, read_json_object
from components.inference.protocol import BASE_POLICY, MAIN, ChatCompletion, ChatRequest, Engine, gather_completions
from components.inference.refusals import refusal
from components.specs import Spec, validate

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 8
"""Maximum number of problems of a request in the error message."""


class AdapterName(Spec):
    """Body of a request to unload an adapter."""

    lora_name: str = Field(max_length=wire.LONGEST_NAME)


class LoadedAdapter(AdapterName):
    """Body of a request to load an adapter."""

    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = True
    """No effect: one adapter is loaded at a time."""


def create_app(
    engine: Engine,
    name: str,
    *,
    decode: wire.Decode | None = None,
    default_max_tokens: int = 512,
    timeout: float = 600.0,
    adapters: Path | None = None,
    engines: Mapping[str, Engine] | None = None,
) -> FastAPI:
    """Return the application that serves `engine` under the model name `name`.

    decode: conversion of token ids to text, for log-probabilities; without it their tokens are `token_id:17`.
    default_max_tokens: maximum number of tokens of a response if the request does not specify it. timeout: time limit
    of a request in seconds. adapters: folder of adapters that may be loaded; None allows none. engines: engine of each
    API key (`Authorization: Bearer KEY`); requests with another key, or none, are rejected. None: `engine` serves all
    requests. With `engines`, responses are stored (`previous_response_id`) for the lifetime of each engine, and the
    model name may be `name:agent`, to distinguish several agents of one episode.
    """
    app = FastAPI(title="Espalier", docs_url=None, redoc_url=None, openapi_url=None)
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
        return adapter.removeprefix(f"{name}@")

    def listing(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "espalier"}

    def engine_of(request: Request) -> Engine:
        if engines is None:
            return engine
        keyed = engines.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if keyed is None:
            raise HTTPException(401, "this key belongs to no running episode")
        return keyed

    def spoken_by(engine: Engine) -> Collection[str]:
        """Return the call arguments that an engine's model wrote, if the engine records them."""
        return getattr(engine, "spoken", ())

    async def answers(request: Request, requests: Sequence[ChatRequest], engine: Engine) -> list[ChatCompletion]:
        """Return the engine's responses. Raises WaitTimeout after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                return await _unless_disconnected(request, _answer_all(engine, requests))
        except TimeoutError:
            raise WaitTimeout(f"the engine did not answer within {timeout:g} s") from None

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        request_engine = engine_of(request)
        body, agent = split_agent(await read_json_object(request, pending))
        parsed = wire.read_request(
            body,
            requested_version,
            default_max_tokens,
            strict_tools=engines is not None,
            spoken=spoken_by(request_engine),
        )
        completions = await answers(request, [replace(chat, agent=agent) for chat in parsed.requests], request_engine)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served_name(completions[0].policy),
        }
        if not parsed.stream:
            return JSONResponse(wire.completion_body(completions, parsed, head, decode))
        chunks = wire.completion_chunks(completions, parsed, head, decode)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        request_engine = engine_of(request)
        body, agent = split_agent(await read_json_object(request, pending))
        stored = {} if engines is None else remembered.setdefault(request_engine, {})

        def earlier(response_id: str) -> responses.Messages:
            if response_id not in stored:
                text = f"{response_id!r} is no stored response of this episode"
                raise SpecError([Problem("previous_response_id", text)])
            return stored[response_id]

        parsed = responses.read_request(
            body,
            requested_version,
            default_max_tokens,
            earlier if engines is not None else None,
            strict_tools=engines is not None,
            spoken=spoken_by(request_engine),
        )
        (answer,) = await answers(request, [replace(parsed.request, agent=agent)], request_engine)
        response_id = f"resp_{uuid.uuid4().hex}"
        head = {
            "id": response_id,
            "created_at": int(time.time()),
            "model": served_name(answer.policy),
        }
        if engines is not None and parsed.body.store is not False:
            stored[response_id] = [*parsed.conversation, answer.message]
        if not parsed.stream:
            return JSONResponse(responses.response_body(answer, parsed, head, decode))
        events = responses.response_events(answer, parsed, head, decode)
        return StreamingResponse(_named_events(events), media_type="text/event-stream")

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        if adapters is None:
            raise HTTPException(403, "this server loads no adapters; start it with --adapters DIR")
        adapter = validate(LoadedAdapter, await read_json_object(request, pending), configuration=False)
        folder = _folder_below(adapters, adapter.lora_path)
        await asyncio.to_thread(engine.load_policy, adapter_version(adapter.lora_name), str(folder))
        return Response()

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        adapter = validate(AdapterName, await read_json_object(request, pending), configuration=False)
        if adapters is None or adapter_version(adapter.lora_name) != engine.policy:
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
    async def health() -> dict[str, str | None]:
        return {"status": "ok", "model": name, "policy": None if engine.policy == BASE_POLICY else engine.policy}

    for kind in (EspalierError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


def _folder_below(adapters: Path, path: str) -> Path:
    """Return the adapter's folder with resolved links. Raises HTTPException if it is not below `adapters`."""
    try:
        folder = Path(path).resolve()
        if folder.is_relative_to(adapters.resolve()) and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):  # name too long, null byte, link cycle
        pass
    raise HTTPException(404, f"there is no adapter {path!r:.300} below {adapters}, the folder of --adapters")


async def _answer_all(engine: Engine, requests: Sequence[ChatRequest]) -> list[ChatCompletion]:
    """Return all responses, or raise the first error. Uses the engine's `chat_all` if it has one."""
    if hasattr(engine, "chat_all"):
        return await engine.chat_all(requests)
    return await gather_completions(engine.chat, requests)


async def _unless_disconnected(
    request: Request, answers: Coroutine[Any, Any, list[ChatCompletion]]
) -> list[ChatCompletion]:
    """Return the responses. If the client disconnects, cancel them and raise HTTPException."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, disconnect = asyncio.create_task(answers), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({answering, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise HTTPException(499, "the client hung up")
        return answering.result()
    finally:
        disconnect.cancel()
        if answering.cancel():
            await asyncio.gather(answering, return_exceptions=True)


async def _events(chunks: Iterator[dict[str, Any]]) -> AsyncIterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


async def _named_events(events: Iterator[dict[str, Any]]) -> AsyncIterator[str]:
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    """Return OpenAI's error object, with the status that its clients expect."""
    status, kind, code, param, message, headers = 500, "server_error", None, None, str(error), None
    match error:
        case SpecError():
            status, kind, param = 400, "invalid_request_error", error.problems[0].path
            shown = [str(problem) for problem in error.problems[:SHOWN_PROBLEMS]]
            message = "; ".join([*shown, "and more problems"] if len(error.problems) > len(shown) else shown)
        case ArtifactError():
            status, kind, code = 400, "invalid_request_error", "adapter_not_usable"
        case ContextOverflow():
            status, kind, code = 400, "invalid_request_error", "context_length_exceeded"
        case PromptRefused():
            status, kind, code = 400, "invalid_request_error", "prompt_refused"
        case StalePolicy():
            status, kind, code = 409, "invalid_request_error", "stale_policy"
        case EngineBusy():
            status, kind, code = 409, "invalid_request_error", "engine_busy"
        case WaitTimeout():
            status, code = 504, "timeout"
        case CallsUsedUp():
            status, kind, code = 403, "invalid_request_error", "calls_used_up"
        case HTTPException():
            status, kind, message = error.status_code, "invalid_request_error", str(error.detail)
            headers = error.headers
            code = "model_not_found" if status == 404 and message.startswith("the model ") else None
        case EngineError():
            code = "engine_error"
        case _:
            message = f"internal error ({type(error).__name__}); the server's log has the rest"
    return refusal(status, message, kind=kind, code=code, param=param, headers=headers)


class ModelServer:
    """Context manager that serves `engine` from a thread of this process.

    port: 0 picks a free port. key: API key that clients send as `Authorization: Bearer KEY`; required on addresses
    other than loopback, unless `engines` has a key for each episode. allowed_hosts: additional values of Host
    (`components.inference.access`). Further arguments are those of `create_app`. Raises ResourceError if the key is
    missing or the port is in use, WaitTimeout if the server is not ready within `start_timeout` seconds.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        start_timeout: float = 30.0,
        key: str | None = None,
        allowed_hosts: Collection[str] = (),
        **app: Any,
    ):
        if app.get("engines") is None:
            check_key(host, key)
        self._key = key
        self._allowed_hosts = allowed_hosts
        self.name = name
        self.host = host
        self.port = port
        self._start_timeout = start_timeout
        self._app = create_app(engine, name, **app)
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """Address of the server, as `base_url` of OpenAI's clients."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def __enter__(self) -> ModelServer:
        import uvicorn

        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise ResourceError(
                f"cannot listen on {self.host} port {self.port} ({error.strerror or error}): "
                "choose another port, or 0 for any free one"
            ) from None
        self.port = listener.getsockname()[1]
        access = AccessMiddleware(
            self._app, host=self.host, port=self.port, key=self._key, allowed_hosts=self._allowed_hosts
        )
        # The application configures logging; hanging clients do not delay shutdown.
        config = uvicorn.Config(
            access,
            http=BoundedConnection,
            log_config=None,
            log_level="warning",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=3,
        )
        self._uvicorn = uvicorn.Server(config)
        # Not `Server.run`, which replaces the event loop policy of the whole process.
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._uvicorn.serve([listener])), name=f"server-{self.port}", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + self._start_timeout
        while not self._uvicorn.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self.close()
                listener.close()
                raise WaitTimeout(f"the server on {self.url} did not start within {self._start_timeout:g} s")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Wait until the server has ended."""
        assert self._thread is not None, "the server was not started"
        while self._thread.is_alive():
            self._thread.join(1.0)  # a join without a timeout would delay signals

    def close(self) -> None:
        """Stop the server; requests in flight get three seconds. Raises WaitTimeout if it does not stop."""
        if self._thread is None:
            return
        self._uvicorn.should_exit = True
        self._thread.join(10.0)
        if self._thread.is_alive():
            raise WaitTimeout(f"the server on {self.url} did not stop within 10 s")
        self._thread = None


@contextmanager
def serve_model(
    model_dir: Path,
    *,
    name: str | None = None,
    max_length: int = 2048,
    dtype: str = "float32",
    device: str = "auto",
    **server: Any,
) -> Iterator[ModelServer]:
    """Serve the model in a local folder, such as an export, within the block; `name` defaults to the folder's name.

    max_length: maximum conversation length in tokens. Further arguments are those of `ModelServer`.
    Raises ResourceError if the folder contains no model.
    """
    model_dir = Path(model_dir)
    if not (model_dir / "config.json").is_file():
        raise ResourceError(f"{model_dir} holds no model: expected config.json, safetensors and a tokenizer there")
    from components.inference.transformers.engine import TransformersEngine

    engine = TransformersEngine(model_dir, max_length=max_length, dtype=dtype, device=device)
    try:
        with ModelServer(engine, name or model_dir.resolve().name, decode=engine.tokenizer.decode, **server) as running:
            yield running
    finally:
        engine.close()


def _number(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers within bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {most}")
        return int(text)

    return read


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m components.inference.server",
        description="Serves a model folder to OpenAI's clients. On any address but loopback they need the key in the "
        "environment variable ESPALIER_SERVER_KEY.",
    )
    parser.add_argument("model_dir", type=Path, help="folder with config.json, safetensors and tokenizer")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        dest="allowed_hosts",
        metavar="NAME[:PORT]",
        help="accept this Host header too, for clients behind a proxy or a tunnel; may be given again",
    )
    parser.add_argument(
        "--port", type=_number(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--adapters", type=Path, metavar="DIR", help="load adapters below DIR when a client asks")
    parser.add_argument("--name", help="model name to serve under (default: the folder's)")
    parser.add_argument(
        "--max-length", type=_number(2, 10**7), default=2048, help="longest conversation, tokens (%(default)s)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = vars(parser.parse_args(arguments))
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bar of model loading in the log
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # shut down cleanly on SIGTERM too
    try:
        key = key_from_environment()
        check_key(options["host"], key)  # before the model is loaded
        with serve_model(**options, key=key) as server:
            logger.info("serving %s on %s (Ctrl-C stops)", server.name, server.url)
            server.wait()
    except ResourceError as error:
        logger.error("%s", error)
        return 2
    except KeyboardInterrupt:
        logger.info("stopped")
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
