"""An OpenAI-compatible HTTP server in front of any engine.

    python -m components.inference.server MODEL_DIR [--port 8000] [--host 127.0.0.1] [--adapters DIR]

Routes: `/v1/chat/completions`, `/v1/responses`, `/v1/models`, `/health`. A model is asked for as `name`, or as
`name@version` to be answered by that policy or not at all (HTTP 409). With a folder of adapters,
`/v1/load_lora_adapter` and `/v1/unload_lora_adapter` change the policy, as vLLM has them; the adapter `name@version`
becomes the policy `version`, and one outside that folder is refused. What the engine cannot do is refused with HTTP 400
and OpenAI's error object (`components.inference.wire`, `components.inference.responses`). Answers are computed whole;
with `stream: true` they are sent as server-sent events once they are there, so that an error still has its status code.

The server listens on this machine only, unless told otherwise, and then it asks for the key in the environment variable
ESPALIER_SERVER_KEY (`components.inference.access`). What a request may hold, and how long a client may take for it, is
bounded (`connection`, `strict_json`, `wire`).
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
from components.inference.access import Access, check_key, key_from_environment
from components.inference.connection import BoundedConnection, PendingBytes, read_json_object
from components.inference.protocol import BASE_POLICY, MAIN, ChatCompletion, ChatRequest, Engine, all_answers
from components.inference.refusals import refusal
from components.specs import Spec, validate

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 8
"""Most problems of a request that are reported."""


class AdapterName(Spec):
    lora_name: str = Field(max_length=wire.LONGEST_NAME)


class Adapter(AdapterName):
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = True
    """Without effect: one adapter is held at a time."""


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
    """The application that serves `engine` under the model name `name`.

    decode: token ids to text, for log-probs; without it their tokens read `token_id:17`.
    default_max_tokens: most tokens of an answer where the request does not say. timeout: seconds for one request.
    adapters: folder below which adapters may be loaded; None loads none. engines: by key of a request
    (`Authorization: Bearer KEY`), who answers it; a request with another key, or none, is refused. None lets `engine`
    answer everybody. With them, answers are remembered (`previous_response_id`) for each engine while it lives, and the
    model may be asked for as `name:agent` by several agents of one episode.
    """
    app = FastAPI(title="Espalier", docs_url=None, redoc_url=None, openapi_url=None)
    remembered: WeakKeyDictionary[Engine, dict[str, responses.Messages]] = WeakKeyDictionary()
    """Conversations up to and with an answer, by its id."""
    pending = PendingBytes()

    def agent_asked(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The request with the model's own name, and who asks for it (`name:agent`), where there are episodes."""
        model, mark, agent = str(body.get("model")).partition(":")
        if engines is None or not mark:
            return body, MAIN
        if not re.fullmatch(r"[\w.-]{1,64}", agent):
            raise HTTPException(
                404, f"the model '{model}:{agent}' is not here; an agent's name is letters, digits, '.', '_' and '-'"
            )
        return {**body, "model": model}, agent

    def version_asked(model: str) -> str:
        if model == name:
            return engine.policy
        if model.startswith(f"{name}@"):
            return model.removeprefix(f"{name}@")
        raise HTTPException(404, f"the model '{model}' is not here; this server has '{name}'")

    def called(version: str) -> str:
        """The name of a policy. A model without an adapter is what it is, an export as well as a base model."""
        return name if version == BASE_POLICY else f"{name}@{version}"

    def version_named(adapter: str) -> str:
        if not adapter.startswith(f"{name}@") or adapter == f"{name}@":
            raise SpecError([Problem("lora_name", f"{adapter!r} is no adapter of '{name}'; expected '{name}@VERSION'")])
        return adapter.removeprefix(f"{name}@")

    def listing(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": 0, "owned_by": "espalier"}

    def answering(request: Request) -> Engine:
        if engines is None:
            return engine
        found = engines.get(request.headers.get("authorization", "").removeprefix("Bearer "))
        if found is None:
            raise HTTPException(401, "this key belongs to no episode that is under way")
        return found

    def spoken_by(by: Engine) -> Collection[str]:
        """Arguments of the calls that it wrote, where it remembers them."""
        return getattr(by, "spoken", ())

    async def answers(request: Request, asked: Sequence[ChatRequest], by: Engine) -> list[ChatCompletion]:
        try:
            async with asyncio.timeout(timeout):
                return await _while_there(request, _answer_all(by, asked))
        except TimeoutError:
            raise WaitTimeout(f"the engine did not answer within {timeout:g} s") from None

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        by = answering(request)
        body, agent = agent_asked(await read_json_object(request, pending))
        asked = wire.read_request(
            body, version_asked, default_max_tokens, strict_tools=engines is not None, spoken=spoken_by(by)
        )
        found = await answers(request, [replace(one, agent=agent) for one in asked.requests], by)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": called(found[0].policy),
        }
        if not asked.stream:
            return JSONResponse(wire.completion_body(found, asked, head, decode))
        chunks = wire.completion_chunks(found, asked, head, decode)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")

    @app.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        by = answering(request)
        body, agent = agent_asked(await read_json_object(request, pending))
        kept = {} if engines is None else remembered.setdefault(by, {})

        def earlier(before: str) -> responses.Messages:
            if before not in kept:
                text = f"{before!r} is no answer of this episode that was stored"
                raise SpecError([Problem("previous_response_id", text)])
            return kept[before]

        asked = responses.read_request(
            body,
            version_asked,
            default_max_tokens,
            earlier if engines is not None else None,
            strict_tools=engines is not None,
            spoken=spoken_by(by),
        )
        (answer,) = await answers(request, [replace(asked.request, agent=agent)], by)
        named = f"resp_{uuid.uuid4().hex}"
        head = {
            "id": named,
            "created_at": int(time.time()),
            "model": called(answer.policy),
        }
        if engines is not None and asked.body.store is not False:
            kept[named] = [*asked.said, answer.message]
        if not asked.stream:
            return JSONResponse(responses.response_body(answer, asked, head, decode))
        events = responses.response_events(answer, asked, head, decode)
        return StreamingResponse(_named_events(events), media_type="text/event-stream")

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        if adapters is None:
            raise HTTPException(403, "this server loads no adapters; start it with --adapters DIR")
        asked = validate(Adapter, await read_json_object(request, pending), configuration=False)
        folder = _folder_below(adapters, asked.lora_path)
        await asyncio.to_thread(engine.load_policy, version_named(asked.lora_name), str(folder))
        return Response()

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        asked = validate(AdapterName, await read_json_object(request, pending), configuration=False)
        if adapters is None or version_named(asked.lora_name) != engine.policy:
            raise HTTPException(404, f"no adapter '{asked.lora_name}' is loaded; this server has '{engine.policy}'")
        await asyncio.to_thread(engine.load_policy, BASE_POLICY, None)
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [listing(one) for one in dict.fromkeys((name, called(engine.policy)))]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if version_asked(model) != engine.policy:
            raise HTTPException(404, f"the model '{model}' is not here; this server has '{called(engine.policy)}'")
        return listing(model)

    @app.get("/health")
    async def health() -> dict[str, str | None]:
        return {"status": "ok", "model": name, "policy": None if engine.policy == BASE_POLICY else engine.policy}

    for kind in (EspalierError, HTTPException, Exception):
        app.add_exception_handler(kind, _refuse)
    return app


def _folder_below(adapters: Path, path: str) -> Path:
    """Return the adapter's folder, links resolved. Raises HTTPException where it is not below `adapters`."""
    try:
        folder = Path(path).resolve()
        if folder.is_relative_to(adapters.resolve()) and folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError):  # too long a name, a null byte, links in a circle
        pass
    raise HTTPException(404, f"there is no adapter {path!r:.300} below {adapters}, the folder of --adapters")


async def _answer_all(engine: Engine, asked: Sequence[ChatRequest]) -> list[ChatCompletion]:
    """All answers, or none. An engine that has to know which belong together has `chat_all`."""
    if hasattr(engine, "chat_all"):
        return await engine.chat_all(asked)
    return await all_answers(engine.chat, asked)


async def _while_there(request: Request, answers: Coroutine[Any, Any, list[ChatCompletion]]) -> list[ChatCompletion]:
    """The answers; they are given up where the client hangs up, as nobody would hear them."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, leaving = asyncio.create_task(answers), asyncio.create_task(gone())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise HTTPException(499, "the client hung up")
        return answering.result()
    finally:
        leaving.cancel()
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
    """OpenAI's error object, with the status that its clients expect."""
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


class Server:
    """Serves `engine` from a thread of this process while the `with` block runs.

    port: 0 takes a free one. key: sent by clients as `Authorization: Bearer KEY`; needed on any address but loopback,
    unless `engines` has a key for each episode. allowed_hosts: further values of Host (`components.inference.access`).
    Further arguments are those of `create_app`.
    Raises ResourceError where the key is missing or the port cannot be had, WaitTimeout where the server is not up
    within `start_timeout` seconds.
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
        """What OpenAI's clients take as `base_url`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def __enter__(self) -> Server:
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
        access = Access(self._app, host=self.host, port=self.port, key=self._key, allowed_hosts=self._allowed_hosts)
        # Logging is the application's; a client that hangs is not waited for.
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
        # Not `Server.run`: it would replace the event loop policy of the whole process.
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
        """Returns when the server has ended."""
        assert self._thread is not None, "the server was not started"
        while self._thread.is_alive():
            self._thread.join(1.0)  # a bare join would hold signals back

    def close(self) -> None:
        """Stops the server: answers under way get three seconds. Raises WaitTimeout where it does not end."""
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
) -> Iterator[Server]:
    """A server on the model in a local folder, such as an export; `name` is by default the folder's.

    max_length: longest conversation in tokens. Further arguments are those of `Server`.
    Raises ResourceError where the folder holds no model.
    """
    model_dir = Path(model_dir)
    if not (model_dir / "config.json").is_file():
        raise ResourceError(f"{model_dir} holds no model: expected config.json, safetensors and a tokenizer there")
    from components.inference.transformers_engine import TransformersEngine

    engine = TransformersEngine(model_dir, max_length=max_length, dtype=dtype, device=device)
    try:
        with Server(engine, name or model_dir.resolve().name, decode=engine.tokenizer.decode, **server) as running:
            yield running
    finally:
        engine.close()


def _number(least: int, most: int) -> Callable[[str], int]:
    """Return the reader of an option that is a whole number within bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {most}")
        return int(text)

    return read


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 2 for a mistake of the user's."""
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
    os.environ.setdefault("TQDM_DISABLE", "1")  # no bar of the loading among the lines of the log
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the server ends in order on SIGTERM too
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
