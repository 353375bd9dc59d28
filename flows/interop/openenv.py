"""Server of OpenEnv's protocol (openenv 0.10) for an environment.

A WebSocket connection at `/ws` is a session with an instance of its own. Over HTTP, a reset opens a session and
returns its `episode_id`, a secret of the server's choice, which further requests send and DELETE `/episodes/ID` ends:
no client can guess, read or step the episode of another. `/mcp` lists
and calls tools by JSON-RPC, in a session of `openenv/session/create` that `/ws?session_id=` can join, as OpenEnv's MCP
clients do.

Requests that an episode cannot accept get OpenEnv's error codes over a WebSocket, and HTTP 409 or 422.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp

from components.errors import EspalierError
from components.redaction import mask_text
from components.strict_json import parse
from flows.interop import openenv_messages as messages
from flows.interop.actions import InvalidRequest
from flows.interop.listening import BoundedRequests
from flows.interop.openenv_messages import AnyAction, ResetData, StateData, StepBody, TextAction
from flows.interop.openenv_rpc import JsonRpc
from flows.interop.sessions import CapacityReached, Session, SessionLimits, Sessions
from flows.interop.source import EpisodeSource

VERSION = "1.0.0"
"""Version of the HTTP interface of OpenEnv's servers."""


def create_app(source: EpisodeSource, limits: SessionLimits | None = None) -> ASGIApp:
    """Return the application."""
    sessions = Sessions(source, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with sessions.running():
            yield

    app = FastAPI(title="OpenEnv Environment HTTP API", version=VERSION, lifespan=lifespan)
    server = OpenEnvServer(sessions)
    app.post("/reset")(server.reset)
    app.post("/step")(server.step)
    app.get("/state")(server.state)
    app.delete("/episodes/{episode_id}")(server.close)
    app.get("/health")(server.health)
    app.get("/metadata")(server.metadata)
    app.get("/schema")(server.schema)
    app.post("/mcp")(server.mcp)
    app.websocket("/ws")(server.websocket)
    return BoundedRequests(app, lambda status, detail: JSONResponse({"detail": detail}, status), invalid_json=422)


class OpenEnvServer:
    """Request handlers."""

    def __init__(self, sessions: Sessions):
        self.sessions, self.source = sessions, sessions.source
        self._rpc = JsonRpc(sessions)

    async def health(self) -> dict[str, str]:
        """Return the status of the server."""
        return {"status": "healthy"}

    async def metadata(self) -> dict[str, Any]:
        """Return the name and description of the environment."""
        return {
            "name": self.source.name,
            "description": self.source.description,
            "split": self.source.split,
            "scenarios": len(self.source.scenarios),
            "max_turns": self.source.max_turns,
        }

    async def schema(self) -> dict[str, Any]:
        """Return the JSON schemas of actions, observations and states."""
        action: type[BaseModel] = TextAction if self.source.takes_text else AnyAction
        return {
            "action": action.model_json_schema(),
            "observation": messages.Observation.model_json_schema(),
            "state": StateData.model_json_schema(),
        }

    async def reset(self, request: Request) -> JSONResponse:
        """Start an episode."""

        async def start(body: Any) -> dict[str, Any]:
            data = ResetData.model_validate(body)
            session = self._session(data.episode_id) if data.episode_id else await self.sessions.open()
            return await _reset(session, data, session.id)

        return await _respond(request, start)

    async def step(self, request: Request) -> JSONResponse:
        """Execute an action."""

        async def execute(body: Any) -> dict[str, Any]:
            data = StepBody.model_validate(body)
            action = AnyAction.model_validate(data.action)
            session = self._session(data.episode_id)
            async with asyncio.timeout(data.timeout_s):
                return await _step(session, action)

        return await _respond(request, execute)

    async def state(self, episode_id: str = "") -> dict[str, Any]:
        """Return the state of an episode; that of none without an id or for an unknown one."""
        return messages.state(self.sessions.get(episode_id))

    async def close(self, episode_id: str) -> JSONResponse:
        """Close the session of an HTTP episode."""
        session = self.sessions.get(episode_id)
        closed = session is not None and not session.attached and await self.sessions.close(episode_id)
        return JSONResponse({"closed": closed}, 200 if closed else 404)

    async def mcp(self, request: Request) -> JSONResponse:
        """Answer a JSON-RPC request."""
        return JSONResponse(await self._rpc.answer_text(await request.body()))

    def _session(self, episode_id: str) -> Session:
        """Return the session of an HTTP episode. Raises InvalidRequest."""
        session = self.sessions.get(episode_id)
        if session is None or session.attached:
            raise InvalidRequest(
                f"episode_id = {episode_id!r:.100}: no such episode is open; reset without an episode_id, and use the "
                "one in the response's metadata"
            )
        return session

    # WebSocket

    async def websocket(self, socket: WebSocket) -> None:
        """Serve a session until the client closes it or is idle for too long."""
        await socket.accept()
        joined = socket.query_params.get("session_id")
        session: Session | None = None
        try:
            session = self._join(joined) if joined else await self.sessions.open(attached=True)
            await self._serve(socket, session)
        except WebSocketDisconnect:
            pass
        except CapacityReached as error:
            limit = {"active_sessions": len(self.sessions), "max_sessions": self.sessions.most}
            await _send_error(socket, str(error), "CAPACITY_REACHED", **limit)
        except InvalidRequest as error:
            await _send_error(socket, str(error), "SESSION_ERROR")
        except TimeoutError:
            text = f"the session was closed: no message for {self.sessions.limits.idle:g} s (--idle-timeout)"
            await _send_error(socket, text, "SESSION_ERROR")
        except EspalierError as error:
            await _send_error(socket, _text(error), "FACTORY_ERROR")
        finally:
            if session is not None:
                session.attached = False
                if not joined:
                    await self.sessions.close(session.id)
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):
                await socket.close()

    def _join(self, id: str) -> Session:
        """Attach to a session of /mcp. Raises InvalidRequest."""
        session = self.sessions.get(id)
        if session is None:
            raise InvalidRequest(f"session_id = {id!r:.100}: there is no such session; create it at /mcp")
        if session.attached:
            raise InvalidRequest(f"session_id = {id!r:.100}: another connection uses the session")
        session.attached = True
        return session

    async def _serve(self, socket: WebSocket, session: Session) -> None:
        while True:
            async with asyncio.timeout(self.sessions.limits.idle):
                frame = await socket.receive()
            if frame["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(frame.get("code") or 1000, frame.get("reason"))
            text = frame.get("text")
            if text is None:
                response: dict[str, Any] | None = _error("expected a text frame with JSON", "INVALID_JSON")
            else:
                response = await self._answer(text, session)
            if response is None:
                return
            await socket.send_text(json.dumps(response))

    async def _answer(self, text: str, session: Session) -> dict[str, Any] | None:
        """Return the response to a message; None if it closes the session."""
        try:
            message = parse(text.encode())
        except ValueError as error:
            return _error(f"Invalid JSON: {error}", "INVALID_JSON")
        if not isinstance(message, dict):
            return _error("expected an object with type and data", "INVALID_JSON")
        data = message.get("data") or {}
        try:
            match message.get("type"):
                case "reset":
                    reset = ResetData.model_validate(data)
                    return {"type": "observation", "data": await _reset(session, reset, reset.episode_id or "")}
                case "step":
                    return {"type": "observation", "data": await _step(session, AnyAction.model_validate(data))}
                case "state":
                    return {"type": "state", "data": messages.state(session)}
                case "mcp":
                    return {"type": "mcp", "data": await self._rpc.answer(data, session)}
                case "close":
                    return None
                case other:
                    return _error(f"Unknown message type: {other!r:.100}", "UNKNOWN_TYPE")
        except ValidationError as error:
            return _error("Invalid message", "VALIDATION_ERROR", errors=messages.validation_errors(error))
        except (InvalidRequest, EspalierError) as error:
            return _error(_text(error), "EXECUTION_ERROR")


async def _reset(session: Session, data: ResetData, episode_id: str) -> dict[str, Any]:
    start = await session.reset(seed=data.seed, scenario=data.scenario, episode_id=episode_id)
    return messages.started(start, session.episode_id)


async def _step(session: Session, action: AnyAction) -> dict[str, Any]:
    if action.type == "list_tools":
        tools = session.start.tools if session.start else list(session.episode.source.tools)
        return messages.listed(tools, session.episode.done)
    parsed = action.action()
    return messages.stepped(action, await session.call(lambda episode: episode.step(parsed)))


async def _respond(request: Request, work: Callable[[Any], Awaitable[dict[str, Any]]]) -> JSONResponse:
    """Return the HTTP response of a request with a JSON body."""
    try:
        body = await request.body()
        return JSONResponse(await work(parse(body) if body else {}))
    except ValidationError as error:
        return JSONResponse({"detail": messages.validation_errors(error)}, 422)
    except InvalidRequest as error:
        return JSONResponse({"detail": str(error)}, 409)
    except CapacityReached as error:
        return JSONResponse({"detail": str(error)}, 503)
    except EspalierError as error:
        return JSONResponse({"detail": _text(error)}, 500)
    except TimeoutError:
        return JSONResponse({"detail": "the step took longer than its timeout_s"}, 504)


async def _send_error(socket: WebSocket, message: str, code: str, **details: Any) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_text(json.dumps(_error(message, code, **details)))


def _error(message: str, code: str, **details: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **details}}


def _text(error: BaseException) -> str:
    return mask_text(str(error))[:2000]
