"""One session with an MCP server: what an episode has of it.

The SDK's client lives in a task of its own, so that a session may be opened, used and closed by different tasks of one
event loop, and goes down with it. A server over stdio is a process of the session's own; over HTTP the session is the
server's. The handshake comes first (it makes sessions, which keep the state of episodes apart), then what newer servers
speak that know no sessions.

A server that fails (ends, answers too late, breaks the protocol) is EnvironmentFailed, with the end of what it wrote to
stderr; one over HTTP that is only away, or was started anew and knows the session no more, is EnvironmentAway. What a
tool says is its result, also where it says that it failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from components.environments.optional_packages import import_optional
from components.errors import EnvironmentAway, EnvironmentFailed, ResourceError
from components.exceptions import PASSING, passes
from components.redaction import mask_text

EXTRA = "mcp"
MOST_TOOLS = 1000
"""Of one server."""
SHOWN = 500
"""Characters of a server's last words in an error."""
SHORTEST_SECRET = 6
"""Characters. A variable such as DEBUG=1 would blot out every 1."""
NO_SESSION = 404
"""Status of HTTP for a call in a session that the server does not know."""
CLOSE = 5.0
"""Seconds that a server may take to end; then it is killed."""
REFUSED = (-32602, -32601)
"""Codes of JSON-RPC that say that the call was wrong: its arguments, or its name."""
CLOSED = -32000
"""The SDK's code where the connection was closed."""


@dataclass(frozen=True)
class Address:
    """Where a server is: `command` (and arguments) of a process, or `url`."""

    command: tuple[str, ...] = ()
    url: str = ""
    variables: tuple[str, ...] = ()
    """Environment variables that the process is given besides PATH, HOME and the like."""
    headers: Mapping[str, str] | None = None
    """Of requests to the URL: a header and the environment variable that holds its value."""
    folder: str | None = None
    """Working directory of the process."""

    def secrets(self) -> dict[str, str]:
        """Values of the variables by name. Raises ResourceError where one is not set."""
        names = [*self.variables, *(self.headers or {}).values()]
        if missing := [name for name in names if name not in os.environ]:
            raise ResourceError(
                f"environment: the environment variable {missing[0]} is not set; the MCP server is to be given it"
            )
        return {name: os.environ[name] for name in names}

    def __str__(self) -> str:
        return mask_text(self.url) or self.command[0]


@dataclass(frozen=True)
class Result:
    """What a tool said."""

    text: str
    failed: bool
    """Whether it says that it could not do it."""


class Session:
    """A session that is open. timeout: seconds for one answer of the server."""

    def __init__(self, address: Address, timeout: float):
        self._address, self._timeout = address, timeout
        self._secrets = address.secrets()
        self._client: Any = None
        self._ended = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._errors: IO[bytes] | None = None
        self._status = 0
        """Of HTTP, of the last answer to what was sent: the SDK says another error in its place."""

    async def open(self, timeout: float) -> None:
        """timeout: seconds that the server may take to start. Raises EnvironmentFailed, EnvironmentAway,
        ResourceError."""
        import_optional("mcp", EXTRA)
        self._task = asyncio.create_task(self._live())
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._opened)
        except TimeoutError:
            await self.close()
            raise self._failed(f"did not answer within {timeout:g} s (environment.start_timeout)") from None
        except BaseException:
            await self.close()
            raise

    async def tools(self) -> list[Any]:
        """As the server lists them. Raises EnvironmentFailed, EnvironmentAway."""
        found: list[Any] = []
        cursor = None
        while True:
            page = await self._ask("tools/list", functools.partial(self._page, cursor))
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return found
            if len(found) > MOST_TOOLS:
                raise self._failed(f"lists more than {MOST_TOOLS} tools")

    async def _page(self, cursor: str | None) -> Any:
        return await self._client.list_tools(cursor=cursor)

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        """Raises EnvironmentFailed where the server gives no answer, EnvironmentAway where it is only away."""
        try:
            answer = await self._ask(name, lambda: self._client.call_tool(name, arguments))
        except _Refused as error:
            return Result(str(error), failed=True)
        return Result(self._printable(_text(answer)), failed=bool(answer.is_error))

    async def close(self) -> None:
        """Ends it; a process that does not end is killed."""
        self._ended.set()
        if self._task is None:
            return
        done, _ = await asyncio.wait([self._task], timeout=CLOSE)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE)
        if not self._opened.done():
            self._opened.cancel()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    async def _live(self) -> None:
        """The whole life of the client: the SDK wants it opened and closed by one task."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._client = await self._connect(stack)
                if not self._opened.done():
                    self._opened.set_result(None)
                await self._ended.wait()
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  groups too: whatever it is, whoever opens or calls is told
            if not self._opened.done():
                self._opened.set_exception(self._reason(error))
        finally:
            self._client = None

    async def _connect(self, stack: contextlib.AsyncExitStack) -> Any:
        mcp = import_optional("mcp", EXTRA)
        for mode in ("legacy", "auto"):
            try:
                client = mcp.Client(await self._transport(), mode=mode, cache=None)
                return await stack.enter_async_context(client)
            except mcp.MCPError:
                if mode == "auto" or self._status in PASSING:  # a session may be had a moment later
                    raise
        raise AssertionError("unreachable")

    async def _transport(self) -> Any:
        if self._address.url:
            http = import_optional("mcp.client.streamable_http", EXTRA)
            headers = {name: self._secrets[variable] for name, variable in (self._address.headers or {}).items()}
            return _http(http.streamable_http_client, self._address.url, headers, self._timeout, self._answered)
        stdio = import_optional("mcp.client.stdio", EXTRA)
        command, *arguments = self._address.command
        given = {name: self._secrets[name] for name in self._address.variables}
        parameters = stdio.StdioServerParameters(command=command, args=arguments, env=given, cwd=self._address.folder)
        if self._errors is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the session
        return stdio.stdio_client(parameters, errlog=self._errors)

    async def _answered(self, response: Any) -> None:
        if response.request.method == "POST":
            self._status = response.status_code

    async def _ask(self, what: str, send: Callable[[], Any]) -> Any:
        mcp = import_optional("mcp", EXTRA)
        if self._client is None:
            raise self._lost("has ended")
        self._status = 0
        asked = asyncio.ensure_future(send())
        assert self._task is not None
        try:
            await asyncio.wait([asked, self._task], timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done() and not asked.done():
                raise self._lost(f"ended during {what}")
            if not asked.done():
                raise self._failed(f"took longer than {self._timeout:g} s for {what} (environment.timeout)")
            return asked.result()
        except mcp.MCPError as error:
            if self._status == NO_SESSION:
                raise self._lost(f"knows the session no more, at {what}: {error}") from None
            if self._status in PASSING or error.code == CLOSED:
                status = f" (HTTP {self._status})" if self._status in PASSING else ""
                raise self._lost(f"failed at {what}: {error}{status}") from None
            if error.code in REFUSED:
                raise _Refused(self._printable(str(error))) from None
            raise self._failed(f"failed at {what}: {error}") from None
        except (RuntimeError, ValueError) as error:  # an answer that does not keep the protocol or the tool's schema
            if isinstance(error, EnvironmentFailed):
                raise
            raise self._failed(f"gave no valid answer to {what}: {error}") from None
        finally:
            asked.cancel()

    def _reason(self, error: BaseException) -> Exception:
        """Why it could not be opened, as an error of ours."""
        away = passes(error) or self._status in PASSING
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ResourceError | EnvironmentFailed):
            return error
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            return ResourceError(f"environment.command: {self._address}: {error.strerror}; it cannot be started")
        return (self._lost if away else self._failed)(f"cannot be used: {type(error).__name__}: {error}")

    def _lost(self, what: str) -> EnvironmentFailed:
        """A program that ends has failed; a server at an address may come back."""
        failed = self._failed(what)
        return EnvironmentAway(str(failed)) if self._address.url else failed

    def _failed(self, what: str) -> EnvironmentFailed:
        said = self._last_words()
        return EnvironmentFailed(
            self._printable(f"the MCP server {self._address} {what}" + (f"; it said: {said}" if said else ""))
        )

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4 * SHOWN))
        return self._errors.read().decode(errors="replace")[-SHOWN:].strip()

    def _printable(self, text: str) -> str:
        """Without the values of the variables that the server was given, but for those too short to be a secret."""
        for value in self._secrets.values():
            text = text.replace(value, "***") if len(value) >= SHORTEST_SECRET else text
        return text


class _Refused(Exception):
    """The server says that the call was wrong."""


@contextlib.asynccontextmanager
async def _http(
    connect: Callable[..., Any],
    url: str,
    headers: Mapping[str, str],
    timeout: float,
    answered: Callable[[Any], Awaitable[None]],
) -> AsyncIterator[Any]:
    """answered: is told of each response."""
    httpx2 = import_optional("httpx2", EXTRA)
    limits = httpx2.Timeout(timeout, read=timeout + 5.0)  # the session's own limit comes first, and says what was asked
    async with (
        httpx2.AsyncClient(headers=dict(headers), timeout=limits, event_hooks={"response": [answered]}) as client,
        connect(url, http_client=client) as streams,
    ):
        yield streams


def _text(answer: Any) -> str:
    """A result as text: its texts, and a word for what is none."""
    parts = [_part(one) for one in answer.content]
    if not parts and answer.structured_content is not None:
        return json.dumps(answer.structured_content)
    return "\n".join(parts)


def _part(one: Any) -> str:
    if one.type == "text":
        return str(one.text)
    if one.type == "resource":
        inside = one.resource
        return str(inside.text) if hasattr(inside, "text") else f"[resource {inside.uri}]"
    if one.type == "resource_link":
        return f"[resource {one.uri}]"
    return f"[{one.type}: {one.mime_type}]"
