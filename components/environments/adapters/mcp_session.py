"""A session with an MCP server, which one episode uses.

The SDK's client runs in its own task, so different tasks of one event loop may open, use and close a session; it ends
with the loop. A stdio server is a subprocess of the session; over HTTP the server manages the session. The client first
tries the handshake, which creates sessions and so isolates the state of episodes, then the sessionless protocol of
newer servers.

A server that exits, times out or violates the protocol raises EnvironmentFailed with the end of its stderr. A server
over HTTP that is unreachable, or restarted and lost the session, raises EnvironmentUnavailable. The response of a tool
is its result, even if it reports an error.
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

from components.bounded_reply import IDENTITY, ReplyLimits, bound_response
from components.environments.optional_packages import import_optional
from components.errors import EnvironmentFailed, EnvironmentUnavailable, ResourceError
from components.exceptions import PASSING, passes
from components.redaction import mask_text

EXTRA = "mcp"
MOST_TOOLS, MOST_PAGES = 1000, 100
"""Maximum number of tools of a server, and of pages that list them."""
MOST_LISTED = 4 << 20
"""Maximum size of all tools of a server as JSON, in characters."""
REPLY = ReplyLimits(size=1 << 20)
"""Limits of a message over HTTP. The SDK keeps some 50 times its size while it validates one."""
MAX_QUOTED = 500
"""Maximum length of the server's stderr in an error message, in characters."""
SHORTEST_SECRET = 6
"""Minimum length of a masked value in characters: masking the value of DEBUG=1 would mask every 1."""
NO_SESSION = 404
"""HTTP status for a call in a session that the server does not have."""
BAD_REQUEST = 400
"""Lowest HTTP status of an error."""
UNAUTHORIZED = (401, 403)
"""HTTP statuses for missing or insufficient credentials."""
CLOSE = 5.0
"""Timeout for the exit of a server, in seconds; it is then killed."""
REFUSED = (-32602, -32601)
"""JSON-RPC error codes for invalid arguments and for an unknown method."""
CLOSED = -32000
"""Error code of the SDK for a closed connection."""


@dataclass(frozen=True)
class Address:
    """The address of a server: `command` (with arguments) of a subprocess, or `url`."""

    command: tuple[str, ...] = ()
    url: str = ""
    variables: tuple[str, ...] = ()
    """Environment variables passed to the subprocess, besides PATH, HOME and the like."""
    headers: Mapping[str, str] | None = None
    """Headers of requests to the URL; each value is the name of an environment variable."""
    folder: str | None = None
    """Working directory of the subprocess."""

    def secrets(self) -> dict[str, str]:
        """Return the values of the environment variables by name. Raises ResourceError if one is not set."""
        names = [*self.variables, *(self.headers or {}).values()]
        if missing := [name for name in names if name not in os.environ]:
            raise ResourceError(
                f"environment: the environment variable {missing[0]} is not set; the MCP server requires it"
            )
        return {name: os.environ[name] for name in names}

    def __str__(self) -> str:
        return mask_text(self.url) or self.command[0]


@dataclass(frozen=True)
class ToolResult:
    """The result of a tool call."""

    text: str
    failed: bool
    """True if the tool reports an error."""


class McpSession:
    """A session with a server. timeout: timeout of a response, in seconds."""

    def __init__(self, address: Address, timeout: float):
        self._address, self._timeout = address, timeout
        self._secrets = address.secrets()
        self._client: Any = None
        self._ended = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._errors: IO[bytes] | None = None
        self._status = 0
        """HTTP status of the last response to a POST; the SDK replaces it by another error."""

    async def open(self, timeout: float) -> None:
        """Open the session. timeout: timeout for the start of the server, in seconds.

        Raises EnvironmentFailed, EnvironmentUnavailable, ResourceError.
        """
        import_optional("mcp", EXTRA)
        self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(self._opened)
        except TimeoutError:
            await self.close()
            raise self._failed(f"did not start within {timeout:g} s (environment.start_timeout)") from None
        except BaseException:
            await self.close()
            raise

    async def tools(self) -> list[Any]:
        """Return the tools that the server lists, within one timeout. Raises EnvironmentFailed,
        EnvironmentUnavailable."""
        tools: list[Any] = []
        cursor, size = None, 0
        try:
            async with asyncio.timeout(self._timeout):
                for _ in range(MOST_PAGES):
                    page = await self._ask("tools/list", functools.partial(self._page, cursor))
                    tools += page.tools
                    cursor = page.next_cursor
                    if len(tools) > MOST_TOOLS:
                        raise self._failed(f"lists more than {MOST_TOOLS} tools")
                    size += sum(len(tool.model_dump_json()) for tool in page.tools)
                    if size > MOST_LISTED:
                        raise self._failed(f"lists tools of more than {MOST_LISTED} characters")
                    if cursor is None:
                        return tools
        except TimeoutError:
            raise self._failed(f"did not list its tools within {self._timeout:g} s (environment.timeout)") from None
        raise self._failed(f"lists its tools on more than {MOST_PAGES} pages")

    async def _page(self, cursor: str | None) -> Any:
        return await self._client.list_tools(cursor=cursor)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call a tool. Raises EnvironmentFailed if the server fails, EnvironmentUnavailable if that is transient."""
        try:
            answer = await self._ask(name, lambda: self._client.call_tool(name, arguments))
        except _Refused as error:
            return ToolResult(str(error), failed=True)
        return ToolResult(self._printable(_text(answer)), failed=bool(answer.is_error))

    async def close(self) -> None:
        """Close the session; kill a subprocess that does not exit. A session that is still opening ends at once."""
        self._ended.set()
        if self._task is None:
            return
        done, _ = await asyncio.wait([self._task], timeout=CLOSE if self._opened.done() else 0)
        if not done:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=CLOSE)
        if not self._opened.done():
            self._opened.cancel()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    async def _run(self) -> None:
        """Open the client, wait for the end of the session, close it: the SDK requires one task for both."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._client = await self._connect(stack)
                if not self._opened.done():
                    self._opened.set_result(None)
                await self._ended.wait()
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001  exception groups too; `open` and the calls raise it
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
                if mode == "auto" or self._status in PASSING:  # transient: retrying may open a session
                    raise
        raise AssertionError("unreachable")

    async def _transport(self) -> Any:
        if self._address.url:
            http = import_optional("mcp.client.streamable_http", EXTRA)
            headers = {name: self._secrets[variable] for name, variable in (self._address.headers or {}).items()}
            return _http(http.streamable_http_client, self._address.url, headers, self._timeout, self._on_response)
        stdio = import_optional("mcp.client.stdio", EXTRA)
        command, *arguments = self._address.command
        variables = {name: self._secrets[name] for name in self._address.variables}
        folder = self._address.folder
        parameters = stdio.StdioServerParameters(command=command, args=arguments, env=variables, cwd=folder)
        if self._errors is None:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the session
        return stdio.stdio_client(parameters, errlog=self._errors)

    async def _on_response(self, response: Any) -> None:
        bound_response(import_optional("httpx2", EXTRA), response, REPLY)
        if response.request.method == "POST":
            self._status = response.status_code

    async def _ask(self, action: str, send: Callable[[], Any]) -> Any:
        mcp = import_optional("mcp", EXTRA)
        if self._client is None:
            raise self._lost("has exited")
        self._status = 0
        response = asyncio.ensure_future(send())
        assert self._task is not None
        try:
            await asyncio.wait([response, self._task], timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done() and not response.done():
                raise self._lost(f"exited during {action}")
            if not response.done():
                raise self._failed(f"timed out at {action} after {self._timeout:g} s (environment.timeout)")
            return response.result()
        except mcp.MCPError as error:
            if self._status == NO_SESSION:
                raise self._lost(f"lost the session at {action}: {error}") from None
            if self._status in PASSING or error.code == CLOSED:
                raise self._lost(f"failed at {action}: {error}{self._status_text()}") from None
            if error.code in REFUSED:
                raise _Refused(self._printable(str(error))) from None
            raise self._failed(f"failed at {action}: {error}{self._status_text()}") from None
        except (RuntimeError, ValueError) as error:  # a response that violates the protocol or the schema of the tool
            if isinstance(error, EnvironmentFailed):
                raise
            raise self._failed(f"returned an invalid response to {action}: {error}") from None
        finally:
            response.cancel()

    def _reason(self, error: BaseException) -> Exception:
        """Convert an exception of the SDK to the error that `open` raises."""
        unavailable = passes(error) or self._status in PASSING
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ResourceError | EnvironmentFailed):
            return error
        if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
            return ResourceError(f"environment.command: {self._address}: {error.strerror}; cannot start the program")
        return (self._lost if unavailable else self._failed)(
            f"failed to open a session: {type(error).__name__}: {error}{self._status_text()}"
        )

    def _status_text(self) -> str:
        """Return the HTTP status of an error, with what to do where the server requires credentials."""
        if self._status < BAD_REQUEST:
            return ""
        credentials = (
            "; expected credentials: set environment.headers={Authorization: VARIABLE}; OAuth is not supported"
        )
        return f" (HTTP {self._status}{credentials if self._status in UNAUTHORIZED else ''})"

    def _lost(self, action: str) -> EnvironmentFailed:
        """Return EnvironmentUnavailable for a server over HTTP, which may return; EnvironmentFailed for a
        subprocess."""
        failed = self._failed(action)
        return EnvironmentUnavailable(str(failed)) if self._address.url else failed

    def _failed(self, action: str) -> EnvironmentFailed:
        stderr = self._stderr_tail()
        return EnvironmentFailed(
            self._printable(f"the MCP server {self._address} {action}" + (f"; stderr: {stderr}" if stderr else ""))
        )

    def _stderr_tail(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4 * MAX_QUOTED))
        return self._errors.read().decode(errors="replace")[-MAX_QUOTED:].strip()

    def _printable(self, text: str) -> str:
        """Mask the values of the server's environment variables, except those too short to be secrets."""
        for value in self._secrets.values():
            text = text.replace(value, "***") if len(value) >= SHORTEST_SECRET else text
        return text


class _Refused(Exception):
    """The server rejected the call as invalid."""


@contextlib.asynccontextmanager
async def _http(
    connect: Callable[..., Any],
    url: str,
    headers: Mapping[str, str],
    timeout: float,
    on_response: Callable[[Any], Awaitable[None]],
) -> AsyncIterator[Any]:
    """Yield the streams of an HTTP connection. on_response: called with each response."""
    httpx2 = import_optional("httpx2", EXTRA)
    limits = httpx2.Timeout(timeout, read=timeout + 5.0)  # the session's own timeout fires first and names the request
    async with (
        httpx2.AsyncClient(
            headers={**headers, **IDENTITY}, timeout=limits, event_hooks={"response": [on_response]}
        ) as client,
        connect(url, http_client=client, max_sse_event_size=REPLY.size) as streams,
    ):
        yield streams


def _text(answer: Any) -> str:
    """Return a result as text: its parts, those that are not text by their type, then the structured content unless the
    parts repeat it."""
    parts = [_part_text(part) for part in answer.content]
    structured = answer.structured_content
    if structured is not None and not _repeats(parts, structured):
        parts.append(json.dumps(structured))
    return "\n".join(parts)


def _repeats(parts: list[str], structured: Any) -> bool:
    """Return True if the parts hold the structured content: as JSON, or, as the SDK writes a result that is no object,
    with its items as parts and `{"result": ...}` as structured content."""
    values = [_from_json(part) for part in parts]
    if structured in values:
        return True
    bare = structured.get("result") if isinstance(structured, dict) and set(structured) == {"result"} else None
    return bool(parts) and bare is not None and bare in (*values, *parts, values, parts)


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        resource = part.resource
        return str(resource.text) if hasattr(resource, "text") else f"[resource {resource.uri}]"
    if part.type == "resource_link":
        return f"[resource {part.uri}]"
    return f"[{part.type}: {part.mime_type}]"
