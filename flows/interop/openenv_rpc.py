"""JSON-RPC requests of OpenEnv's `/mcp`: sessions, tools/list and tools/call."""

from __future__ import annotations

from typing import Any

from components.errors import EspalierError
from components.redaction import mask_text
from components.strict_json import parse
from flows.interop import actions
from flows.interop.actions import InvalidRequest
from flows.interop.openenv_messages import mcp_tools
from flows.interop.sessions import CapacityReached, Session, Sessions

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, SERVER_ERROR = -32603, -32000
Response = dict[str, Any]


class RpcError(Exception):
    """Error response."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class JsonRpc:
    """Answers requests. A request names its session by `params.session_id`, unless its connection has one."""

    def __init__(self, sessions: Sessions):
        self.sessions = sessions

    async def answer_text(self, body: bytes) -> Response:
        """Return the response to a request as text."""
        try:
            request = parse(body)
        except ValueError:
            return _failure(None, PARSE_ERROR, "Parse error")
        return await self.answer(request)

    async def answer(self, request: Any, session: Session | None = None) -> Response:
        """Return the response to a request. session: that of the connection."""
        id = request.get("id") if isinstance(request, dict) else None
        id = id if isinstance(id, str | int) else None
        try:
            if not isinstance(request, dict) or request.get("jsonrpc") != "2.0":
                raise RpcError(
                    INVALID_REQUEST, 'Invalid request: expected {"jsonrpc": "2.0", "method": ..., "id": ...}'
                )
            params = request.get("params") or {}
            if not isinstance(params, dict):
                raise RpcError(INVALID_PARAMS, "Params must be an object")
            return {"jsonrpc": "2.0", "id": id, "result": await self._result(request.get("method"), params, session)}
        except RpcError as error:
            return _failure(id, error.code, str(error))
        except InvalidRequest as error:
            return _failure(id, INVALID_REQUEST, str(error))
        except CapacityReached as error:
            return _failure(id, SERVER_ERROR, str(error))
        except EspalierError as error:
            return _failure(id, INTERNAL_ERROR, mask_text(str(error))[:2000])

    async def _result(self, method: Any, params: dict[str, Any], session: Session | None) -> Any:
        named = str(params.get("session_id") or "")
        match method:
            case "openenv/session/create":
                return {"session_id": (session or await self.sessions.open()).id}
            case "openenv/session/close":
                return await self._close(named)
            case "tools/list":
                session = self._session(named, session)
                tools = session.start.tools if session and session.start else list(self.sessions.source.tools)
                return {"tools": mcp_tools(tools)}
            case "tools/call":
                return await self._call(params, self._session(named, session))
            case _:
                raise RpcError(METHOD_NOT_FOUND, f"Method not found: {method!r:.100}")

    async def _close(self, id: str) -> dict[str, Any]:
        open_session = self._session(id, None)
        if open_session is None:
            raise RpcError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
        if open_session.attached:
            raise RpcError(INVALID_REQUEST, "a WebSocket uses the session; close the connection first")
        await self.sessions.close(id)
        return {"session_id": id, "closed": True}

    async def _call(self, params: dict[str, Any], session: Session | None) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "expected name (text) and arguments (an object)")
        if session is None:
            raise RpcError(
                INVALID_PARAMS, "session_id is required: create a session, reset it over /ws, then call tools"
            )
        action = actions.tool_calls([(name, arguments)])
        transition = await session.call(lambda episode: episode.step(action))
        return {
            "content": [{"type": "text", "text": transition.text}],
            "data": transition.text,
            "isError": False,
            "reward": transition.reward,
            "done": transition.done,
        }

    def _session(self, id: str, session: Session | None) -> Session | None:
        """Return the session that a request names, or that of its connection. Raises RpcError for an unknown one."""
        if session is not None or not id:
            return session
        session = self.sessions.get(id)
        if session is None:
            raise RpcError(INVALID_PARAMS, f"Unknown session_id: {id!r:.100}")
        return session


def _failure(id: Any, code: int, message: str) -> Response:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message, "data": None}}
