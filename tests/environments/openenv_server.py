"""An OpenEnv test server: a number-guessing game with three kinds of actions, and one with large observations.

    python openenv_server.py PORT [words|numbers|tools|screens] [real]

With `real`, the package itself serves the game and must be importable. Without it, a minimal server sends the same
messages as the package (version 0.10).
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

ROOMS = 3
"""Maximum number of concurrent environments."""


class Guess:
    """A game with numbers up to 20; reward 1 for the correct one."""

    def __init__(self) -> None:
        self.number, self.steps = 0, 0

    def begin(self, seed: int | None) -> dict[str, Any]:
        self.number, self.steps = random.Random(seed).randrange(1, 21), 0
        return {"message": "Guess a number from 1 to 20.", "done": False, "reward": 0.0}

    def guess(self, number: int) -> dict[str, Any]:
        self.steps += 1
        if number == 13:
            raise RuntimeError("13 is unlucky")
        if number == 14:
            os._exit(1)
        right = number == self.number
        hint = "right" if right else "higher" if self.number > number else "lower"
        return {"message": hint, "done": right, "reward": float(right)}


def fields(kind: str) -> dict[str, Any]:
    return {"message": {"type": "string"}} if kind == "words" else {"number": {"type": "integer", "minimum": 1}}


def number_of(action: dict[str, Any]) -> int:
    return int(action["message"]) if "message" in action else int(action["number"])


def ours(kind: str) -> Any:
    app = FastAPI()
    open_ones: set[int] = set()
    names = list(fields(kind))

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        metadata = {"metadata": {"type": "object"}}
        properties = {} if kind == "tools" else fields(kind)
        action = {"title": "Act", "type": "object", "properties": {**metadata, **properties}, "required": names}
        return {"action": action, "observation": {}, "state": {}}

    def answer(game: Guess, message: dict[str, Any]) -> dict[str, Any]:
        data = message.get("data") or {}
        match message["type"]:
            case "state":
                return {"type": "state", "data": {"step_count": game.steps}}
            case "reset":
                result = game.begin(data.get("seed"))
                if kind == "screens":
                    result["screen"] = "x" * (5 << 20)
            case "mcp":
                tool = {"name": "guess", "description": "guesses", "inputSchema": {"type": "object"}}
                return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": [tool]}}}
            case "step" if kind == "tools":
                result = game.guess(number_of(data["arguments"]))
                result["result"] = {"data": result.pop("message")}
            case "step" if set(data) - {"metadata"} != set(names) or not str(data[names[0]]).lstrip("-").isdigit():
                errors = [{"loc": [names[0]], "msg": "Field required"}]
                wrong = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
                return {"type": "error", "data": wrong}
            case "step":
                result = game.guess(number_of(data))
        reward, done = result.pop("reward"), result.pop("done")
        return {"type": "observation", "data": {"observation": result, "reward": reward, "done": done}}

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        if len(open_ones) >= ROOMS:
            full = {"message": "no room", "code": "CAPACITY_REACHED"}
            await socket.send_text(json.dumps({"type": "error", "data": full}))
            await socket.close()
            return
        open_ones.add(id(socket))
        game = Guess()
        try:
            while True:
                message = json.loads(await socket.receive_text())
                try:
                    response = answer(game, message)
                except Exception as error:  # noqa: BLE001  as the package has it
                    response = {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}
                await socket.send_text(json.dumps(response))
        except WebSocketDisconnect:
            pass
        finally:
            open_ones.discard(id(socket))

    return app


def real(kind: str) -> Any:
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    from pydantic import Field

    if kind == "words":

        class Act(Action):
            """says a number"""

            message: str
    else:

        class Act(Action):  # type: ignore[no-redef]
            """guesses"""

            number: int = Field(ge=1)

    class Seen(Observation):
        message: str = ""

    class Game(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.game = Guess()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
            return Seen(**self.game.begin(seed))

        def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Seen:
            return Seen(**self.game.guess(number_of(action.model_dump(exclude={"metadata"}))))

        @property
        def state(self) -> State:
            return State(step_count=self.game.steps)

    return create_fastapi_app(Game, Act, Seen, max_concurrent_envs=ROOMS)


def real_tools() -> Any:
    from fastmcp import FastMCP
    from openenv.core.env_server import CallToolAction, CallToolObservation, State, create_fastapi_app
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    class Game(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            self.game = Guess()
            server = FastMCP("guess")

            @server.tool
            def guess(number: int) -> str:
                """guesses"""
                self.last = self.game.guess(number)
                return str(self.last["message"])

            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
            from openenv.core.env_server import Observation

            self.game.begin(seed)
            return Observation(done=False, reward=0.0)

        def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
            raise ValueError("only tools")

        async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Any:
            self.last = {"done": False, "reward": 0.0}
            result = await super().step_async(action, timeout_s=timeout_s, **options)
            result.done, result.reward = self.last["done"], self.last["reward"]
            return result

        @property
        def state(self) -> State:
            return State(step_count=self.game.steps)

    return create_fastapi_app(Game, CallToolAction, CallToolObservation, max_concurrent_envs=ROOMS)


if __name__ == "__main__":
    port, kind = int(sys.argv[1]), sys.argv[2]
    app = ours(kind) if "real" not in sys.argv else real_tools() if kind == "tools" else real(kind)
    uvicorn.run(app, port=port, log_level="error")
