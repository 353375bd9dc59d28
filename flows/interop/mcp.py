"""Server of the Model Context Protocol for an environment, over streamable HTTP and on standard input and output.

The tools are those of the environment, and three of the episode:

    episode_reset     starts an episode: a scenario by id or by seed; returns the task
    episode_message   says something without a tool call, such as the final answer; many episodes end with it
    episode_score     the score of the episode as if it ended now

Each result has the environment's text, and `reward`, `done` and `truncated` as structured content. The prompt `task` is
the task of the current episode, the resource `episode://scenarios` the list of scenarios, `episode://state` the state.

Over HTTP each session has an instance of its own, so the server asks for the handshake that creates sessions: clients
of the sessionless protocol (2026-07-28) fall back to it. On standard input and output there is one instance.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse

from components.environments.optional_packages import import_optional
from components.errors import EspalierError
from components.redaction import mask_text
from flows.interop import actions
from flows.interop.actions import InvalidRequest
from flows.interop.episode import Transition
from flows.interop.listening import BoundedRequests
from flows.interop.openenv_rpc import PARSE_ERROR
from flows.interop.sessions import CapacityReached, Session, SessionLimits, Sessions
from flows.interop.source import EpisodeSource

PATH = "/mcp"
"""Path of the HTTP endpoint."""
RESET, MESSAGE, SCORE = "episode_reset", "episode_message", "episode_score"
SCENARIOS, STATE = "episode://scenarios", "episode://state"
TASK = "task"
SESSION_HEADER = "mcp-session-id"
STDIO = "stdio"
"""Id of the only session on standard input and output."""
PACKAGE, NEEDED_BY = "mcp", "--as mcp"
EPISODE_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    RESET: (
        "Start an episode and return its task. Call it before any other tool.",
        {
            "seed": {"type": "integer", "minimum": 0, "description": "index of the scenario, modulo their number"},
            "scenario": {"type": "string", "description": "id of the scenario, in place of a seed"},
        },
    ),
    MESSAGE: (
        "Say something without calling a tool, such as the final answer.",
        {"text": {"type": "string", "description": "what you say"}},
    ),
    SCORE: ("Return the score of the episode as if it ended now.", {}),
}
"""Description and arguments of the tools of the episode."""


def create_mcp_app(source: EpisodeSource, limits: SessionLimits | None = None) -> Any:
    """Return the ASGI application for streamable HTTP at `PATH`."""
    sessions = Sessions(source, limits)
    server = McpServer(sessions).server(http=True)
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        session_idle_timeout=sessions.limits.idle,
        max_sessions=sessions.limits.sessions,
    )
    return BoundedRequests(_closing(app, sessions), _invalid, invalid_json=400)


def serve_stdio(source: EpisodeSource) -> None:
    """Serve on standard input and output until standard input ends."""
    from components.aio import run

    stdio = import_optional("mcp.server.stdio", PACKAGE, NEEDED_BY)
    server = McpServer(Sessions(source, SessionLimits(sessions=1, idle=float(2**31)))).server(http=False)

    async def serve() -> None:
        async with stdio.stdio_server() as (reads, writes):
            await server.run(reads, writes, server.create_initialization_options())

    run(serve())


class McpServer:
    """Request handlers."""

    def __init__(self, sessions: Sessions):
        self.sessions, self.source = sessions, sessions.source
        self.types = import_optional("mcp_types", PACKAGE, NEEDED_BY)
        self._error = import_optional("mcp.shared.exceptions", PACKAGE, NEEDED_BY).MCPError

    def server(self, *, http: bool) -> Any:
        """Return the server of the SDK. http: each session has an instance; otherwise there is one."""
        lowlevel = import_optional("mcp.server.lowlevel", PACKAGE, NEEDED_BY)
        lifespan = self._lifespan
        server = lowlevel.Server(
            f"espalier-{self.source.name}",
            instructions=f"{self.source.description} Call {RESET} first; it returns the task.",
            lifespan=lambda _: lifespan(),
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_prompts=self._list_prompts,
            on_get_prompt=self._get_prompt,
            on_list_resources=self._list_resources,
            on_read_resource=self._read_resource,
        )
        if http:
            server.add_request_handler("server/discover", self.types.RequestParams, self._discover)
        return server

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[dict[str, Any]]:
        async with self.sessions.running():
            yield {}

    async def _discover(self, context: Any, params: Any) -> Any:
        """Advertise only versions whose handshake creates a session."""
        versions = import_optional("mcp_types.version", PACKAGE, NEEDED_BY).HANDSHAKE_PROTOCOL_VERSIONS
        return self.types.DiscoverResult(
            supported_versions=list(versions), capabilities=self.types.ServerCapabilities(), instructions=None
        )

    # Sessions

    def _id(self, context: Any) -> str:
        """Return the session of a request. Raises MCPError for a request without one over HTTP."""
        if context.request is None:
            return STDIO
        id = context.request.headers.get(SESSION_HEADER)
        if not id:
            raise self._error(
                self.types.INVALID_REQUEST,
                "an episode needs a session, which the handshake (initialize) creates; this request belongs to none. "
                "Connect with a protocol version up to 2025-11-25",
            )
        return str(id)

    def _current(self, context: Any) -> Session | None:
        """Return the session of a request, or None before its first reset."""
        return self.sessions.get(self._id(context))

    async def _opened(self, context: Any) -> Session:
        """Return the session of a request, with an instance of the environment."""
        return await self.sessions.ensure(self._id(context))

    # Tools

    async def _list_tools(self, context: Any, params: Any) -> Any:
        return self.types.ListToolsResult(tools=[self._tool(*tool) for tool in self._tools(context).values()])

    def _tools(self, context: Any) -> dict[str, tuple[str, str, dict[str, Any]]]:
        """Return name, description and schema of each tool."""
        session = self._current(context)
        offered = session.start.tools if session and session.start else list(self.source.tools)
        tools = {
            name: (name, text, {"type": "object", "properties": properties, "additionalProperties": False})
            for name, (text, properties) in EPISODE_TOOLS.items()
        }
        tools[MESSAGE][2]["required"] = ["text"]
        for tool in offered:
            function = tool["function"]
            schema = function.get("parameters") or {"type": "object"}
            tools[function["name"]] = (function["name"], function.get("description", ""), schema)
        return tools

    def _tool(self, name: str, description: str, schema: dict[str, Any]) -> Any:
        return self.types.Tool(name=name, description=description, input_schema=schema)

    async def _call_tool(self, context: Any, params: Any) -> Any:
        arguments = dict(params.arguments or {})
        if params.name not in self._tools(context):
            names = ", ".join(self._tools(context))
            raise self._error(self.types.INVALID_PARAMS, f"Unknown tool: {params.name!r:.80}; there are {names}")
        try:
            match params.name:
                case name if name == RESET:
                    return await self._reset(context, arguments)
                case name if name == SCORE:
                    _expect(name, arguments)
                    session = await self._opened(context)
                    score = await session.call(lambda episode: episode.score())
                    return self._result(f"{score:g}", {"score": score, "done": session.episode.done})
                case name if name == MESSAGE:
                    _expect(name, arguments, text=str)
                    if "text" not in arguments:
                        raise InvalidRequest(f"{name}: the argument text is missing")
                    return await self._step(context, actions.message(arguments["text"]))
                case name:
                    return await self._step(context, actions.tool_calls([(name, arguments)]))
        except (InvalidRequest, CapacityReached, EspalierError) as error:
            return self._result(f"error: {mask_text(str(error))[:2000]}", None, is_error=True)

    async def _reset(self, context: Any, arguments: dict[str, Any]) -> Any:
        _expect(RESET, arguments, seed=int, scenario=str)
        if arguments.get("seed", 0) < 0:
            raise InvalidRequest(f"{RESET}: seed = {arguments['seed']}: expected 0 or more")
        session = await self._opened(context)
        start = await session.reset(seed=arguments.get("seed"), scenario=arguments.get("scenario"))
        scenario = start.scenario
        data = {"scenario": scenario.id, "type": scenario.type, "difficulty": scenario.difficulty,
                "messages": start.messages, "tools": [tool["function"]["name"] for tool in start.tools]}  # fmt: skip
        return self._result(start.text, data)

    async def _step(self, context: Any, action: actions.Action) -> Any:
        session = await self._opened(context)
        transition = await session.call(lambda episode: episode.step(action))
        data = {"reward": transition.reward, "done": transition.done, "truncated": transition.truncated,
                "success": bool(transition.info.get("success", False))}  # fmt: skip
        return self._result(_shown(transition), data)

    def _result(self, text: str, data: dict[str, Any] | None, is_error: bool = False) -> Any:
        content = [self.types.TextContent(type="text", text=text)]
        return self.types.CallToolResult(content=content, structured_content=data, is_error=is_error)

    # Prompts and resources

    async def _list_prompts(self, context: Any, params: Any) -> Any:
        return self.types.ListPromptsResult(
            prompts=[self.types.Prompt(name=TASK, description=f"Task of the current episode, after {RESET}.")]
        )

    async def _get_prompt(self, context: Any, params: Any) -> Any:
        if params.name != TASK:
            raise self._error(self.types.INVALID_PARAMS, f"Unknown prompt: {params.name!r:.80}; there is {TASK}")
        session = self._current(context)
        if session is None or session.start is None:
            raise self._error(self.types.INVALID_REQUEST, f"no episode: call {RESET} first")
        shown = [
            self.types.PromptMessage(
                role="assistant" if message["role"] == "assistant" else "user",
                content=self.types.TextContent(type="text", text=str(message["content"])),
            )
            for message in session.start.messages
        ]
        return self.types.GetPromptResult(messages=shown)

    async def _list_resources(self, context: Any, params: Any) -> Any:
        resources = [
            self.types.Resource(uri=SCENARIOS, name="scenarios", mime_type="application/json"),
            self.types.Resource(uri=STATE, name="state of the episode", mime_type="application/json"),
        ]
        return self.types.ListResourcesResult(resources=resources)

    async def _read_resource(self, context: Any, params: Any) -> Any:
        readers: dict[str, Callable[[Any], Awaitable[Any]]] = {SCENARIOS: self._scenarios, STATE: self._state}
        if params.uri not in readers:
            text = f"Unknown resource: {params.uri!r:.80}; there are {', '.join(readers)}"
            raise self._error(self.types.INVALID_PARAMS, text)
        contents = self.types.TextResourceContents(
            uri=params.uri, mime_type="application/json", text=json.dumps(await readers[params.uri](context))
        )
        return self.types.ReadResourceResult(contents=[contents])

    async def _scenarios(self, context: Any) -> list[dict[str, Any]]:
        return [
            {"seed": seed, "id": scenario.id, "type": scenario.type, "difficulty": scenario.difficulty}
            for seed, scenario in enumerate(self.source.scenarios)
        ]

    async def _state(self, context: Any) -> dict[str, Any]:
        session = self._current(context)
        if session is None or session.start is None:
            return {"scenario": None}
        episode = session.episode
        return {
            "scenario": session.start.scenario.id,
            "steps": episode.steps,
            "done": episode.done,
            "reward": episode.total,
        }


def _expect(tool: str, arguments: dict[str, Any], **types: type) -> None:
    """Raise InvalidRequest unless the arguments have known names and types."""
    for name, value in arguments.items():
        if name not in types:
            raise InvalidRequest(f"{tool}: no argument {name!r:.80}; expected {', '.join(types) or 'none'}")
        if not isinstance(value, types[name]) or isinstance(value, bool):
            kind = "text" if types[name] is str else "a whole number"
            raise InvalidRequest(f"{tool}: {name} = {value!r:.80}: expected {kind}")


def _shown(transition: Transition) -> str:
    """Return the text of a step; the last one says that the episode is over."""
    parts = [transition.text, "(the episode is over)" if transition.done else ""]
    return "\n\n".join(part for part in parts if part)


def _invalid(status: int, message: str) -> JSONResponse:
    """Return the JSON-RPC error for a body that is not read."""
    error = {"code": PARSE_ERROR, "message": message}
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status)


def _closing(app: Any, sessions: Sessions) -> Any:
    """Return the application with an instance's end at the end of its session (DELETE)."""

    async def closing(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "DELETE":
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            await sessions.close(headers.get(SESSION_HEADER, ""))

    return closing
