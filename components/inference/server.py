"""An OpenAI-compatible HTTP server for any engine; `components.inference.app` describes its routes.

    python -m components.inference.server MODEL_DIR [--port 8000] [--host 127.0.0.1] [--adapters DIR]

By default the server listens on loopback only. On other addresses it requires the API key in the environment variable
ESPALIER_SERVER_KEY (`components.inference.access`). Size and duration of requests are limited (`connection`,
`components.strict_json`, `request_bodies`).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from starlette.types import ASGIApp

from components.data.served.spec import RecordsSpec
from components.errors import ResourceError, SpecError, WaitTimeout
from components.inference.access import AccessMiddleware, check_key, key_from_environment
from components.inference.app import AppOptions, create_app
from components.inference.connection import BoundedConnection
from components.inference.engines.remote import RemoteEngine, RemoteSpec
from components.inference.protocol import Engine, ModelEngine
from components.inference.recording import ServedRecorder
from components.inference.request_bodies import LONGEST_NAME
from components.inference.token_texts import TokenDecoder
from components.specs import validate

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 600.0
"""Time limit of an answer of a model that is served for a check."""


@dataclass(frozen=True)
class ListenOptions:
    """Address of a server, and access to it."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free port."""
    start_timeout: float = 30.0
    """Time limit in seconds until the server is ready."""
    key: str | None = None
    """API key that clients send as `Authorization: Bearer KEY`; required on addresses other than loopback, unless the
    application has an engine for each key."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional values of Host (`components.inference.access`)."""


@dataclass(frozen=True)
class RecordOptions:
    """Recording of conversations and feedback."""

    folder: Path
    version: str
    """Version of the served model, by which results are compared."""
    spec: RecordsSpec


class AppServer:
    """Context manager that serves an application from a thread of this process.

    Raises ResourceError if the port is in use, WaitTimeout if the server is not ready in time.
    """

    def __init__(self, app: ASGIApp, listen: ListenOptions):
        self._listen = listen
        self.host = listen.host
        self.port = listen.port
        self._app = app
        self._thread: threading.Thread | None = None

    @property
    def root_url(self) -> str:
        """Address of the server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def url(self) -> str:
        """Address of the server, as `base_url` of OpenAI's clients."""
        return f"{self.root_url}/v1"

    def __enter__(self) -> Self:
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
            self._app, host=self.host, port=self.port, key=self._listen.key, allowed_hosts=self._listen.allowed_hosts
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
        deadline = time.monotonic() + self._listen.start_timeout
        while not self._uvicorn.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                self.close()
                listener.close()
                raise WaitTimeout(f"the server on {self.url} did not start within {self._listen.start_timeout:g} s")
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


class ModelServer(AppServer):
    """Context manager that serves `engine` from a thread of this process. Raises ResourceError if the key is missing,
    and as `AppServer`."""

    def __init__(
        self, engine: ModelEngine, name: str, app: AppOptions | None = None, listen: ListenOptions | None = None
    ):
        app, listen = app or AppOptions(), listen or ListenOptions()
        if app.engines is None:
            check_key(listen.host, listen.key)
        self.name = name
        super().__init__(create_app(engine, name, app), listen)


@contextmanager
def serve_model(
    model_dir: Path,
    *,
    name: str | None = None,
    max_length: int = 2048,
    dtype: str = "float32",
    device: str = "auto",
    app: AppOptions | None = None,
    listen: ListenOptions | None = None,
    record: RecordOptions | None = None,
) -> Iterator[ModelServer]:
    """Serve the model in a local folder, such as an export, within the block; `name` defaults to the folder's name.

    max_length: maximum conversation length in tokens. record: None records nothing. Raises ResourceError if the folder
    contains no model, or that of the records is not private, and the errors of `ModelServer`.
    """
    model_dir = Path(model_dir)
    if not (model_dir / "config.json").is_file():
        raise ResourceError(f"{model_dir} holds no model: expected config.json, safetensors and a tokenizer there")
    from components.inference.transformers.engine import TransformersEngine

    engine = TransformersEngine(model_dir, max_length=max_length, dtype=dtype, device=device)
    try:
        app = replace(app or AppOptions(), decode=TokenDecoder(engine.tokenizer))
        if record is not None:
            from components.models.digests import vocabulary_digest

            vocabulary = vocabulary_digest(engine.tokenizer)
            recorder = ServedRecorder(
                record.folder, record.version, record.spec, vocabulary=vocabulary, decode=app.decode
            )
            app = replace(app, recorder=recorder)
        with ModelServer(engine, name or model_dir.resolve().name, app, listen) as running:
            yield running
    finally:
        engine.close()


@contextmanager
def engine_over_http(
    model_dir: Path, *, max_length: int, dtype: str = "float32", device: str = "auto"
) -> Iterator[Engine]:
    """Serve the model in a local folder within the block, and return an engine that asks it over HTTP."""
    with serve_model(model_dir, max_length=max_length, dtype=dtype, device=device) as server:
        spec = RemoteSpec(url=server.url, model=server.name, timeout=ANSWER_SECONDS, retry_for=0)
        with closing(RemoteEngine(spec)) as engine:
            yield engine


def _number(least: int, most: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers within bounds."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,12}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least} to {most}")
        return int(text)

    return read


def _text(text: str) -> str:
    """Return a text that is not empty. An argparse type."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a text that is not empty")
    return text


def _name(text: str) -> str:
    """Return a model name that requests can state. An argparse type."""
    if len(_text(text)) > LONGEST_NAME:
        raise argparse.ArgumentTypeError(f"{len(text)} characters: expected at most {LONGEST_NAME}")
    return text


def _folder(text: str) -> Path:
    """Return an existing folder. An argparse type."""
    if not Path(_text(text)).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: expected an existing folder; create it first")
    return Path(text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m components.inference.server",
        description="Serves a model folder to OpenAI's clients. On any address but loopback they need the key in the "
        "environment variable ESPALIER_SERVER_KEY.",
    )
    parser.add_argument("model_dir", type=Path, help="folder with config.json, safetensors and tokenizer")
    parser.add_argument(
        "--host", type=_text, default="127.0.0.1", help="address to listen on (default: %(default)s, this machine)"
    )
    parser.add_argument(
        "--allowed-host",
        type=_text,
        action="append",
        default=[],
        dest="allowed_hosts",
        metavar="NAME[:PORT]",
        help="accept this Host header too, for clients behind a proxy or a tunnel; may be given again",
    )
    parser.add_argument(
        "--port", type=_number(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--adapters", type=_folder, metavar="DIR", help="load adapters below DIR when a client asks")
    parser.add_argument("--name", type=_name, help="model name to serve under (default: the folder's)")
    parser.add_argument(
        "--max-length", type=_number(2, 10**7), default=2048, help="longest conversation, tokens (%(default)s)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group = parser.add_argument_group("recording of conversations and feedback (docs/guides/production.md)")
    group.add_argument("--record", type=Path, metavar="DIR", help="private folder to record in (default: none)")
    group.add_argument("--version", type=_name, help="version of the model in the records; required by --record")
    group.add_argument("--retention-days", type=float, default=30.0, metavar="N", help="delete after (%(default)g)")
    group.add_argument(
        "--retention-megabytes", type=float, default=1024.0, metavar="N", help="keep at most (%(default)g)"
    )
    group.add_argument(
        "--redact", action="append", default=[], metavar="REGEX", help="replace matching text; may be given again"
    )
    options = parser.parse_args(arguments)
    record = None
    if options.record is not None:
        if options.version is None:
            parser.error("--record requires --version NAME: results are compared by version")
        limits = {"days": options.retention_days, "megabytes": options.retention_megabytes, "redact": options.redact}
        try:
            record = RecordOptions(options.record, options.version, validate(RecordsSpec, limits, path="--record"))
        except SpecError as error:
            parser.error(str(error))
    os.environ.setdefault("TQDM_DISABLE", "1")  # no progress bar of model loading in the log
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # shut down cleanly on SIGTERM too
    try:
        key = key_from_environment()
        check_key(options.host, key)  # before the model is loaded
        with serve_model(
            model_dir=options.model_dir,
            name=options.name,
            max_length=options.max_length,
            dtype=options.dtype,
            device=options.device,
            app=AppOptions(adapters=options.adapters),
            listen=ListenOptions(options.host, options.port, key=key, allowed_hosts=tuple(options.allowed_hosts)),
            record=record,
        ) as server:
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
