"""A test server with the protocol of AgentGym servers, over a real socket; one kind per server.

Paths, bodies, responses and errors match the real servers: an int or a mapping from /create, `env_idx` or `id`, errors
with status 200 or 500, missing /close, instances that are returned twice when the server is full, cumulative scores.
The task is the same for every kind: given words in a given order, each in the action format of the environment.
Instances live until the server ends; `log` contains every request.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

WORDS = ("apple", "bread", "chair", "house", "lemon", "river", "table", "water")
MOVES = ("up", "down", "left", "right")
TOOLS = ("weather", "movie", "academia", "sheet", "todo")
BY_INDEX = ("webshop", "sqlgym", "webarena", *TOOLS, "searchqa")
"""Kinds whose instances are called env_idx."""
CLOSING = ("webarena", "searchqa")
LATE = 1000
"""babyai: from this item on, success gives little and does not end the episode."""


def words(kind: str, item: int) -> list[str]:
    """Return the words of the solution."""
    if kind == "maze":
        return [MOVES[(item + step) % 4] for step in range(2 + item % 2)]
    count = 1 if kind in ("sqlgym", "wordle") else 2 + item % 2
    return [WORDS[(3 * item + step) % len(WORDS)] for step in range(count)]


def solution(kind: str, item: int) -> list[str]:
    """Return the actions of a correct solution, as an agent writes them."""
    *others, last = words(kind, item)
    first, final = {
        "webshop": ("search[{}]", "click[{}]"),
        "sqlgym": ("", "```sql\nSELECT '{}'\n```"),
        "webarena": ("click [{}]", "stop [{}]"),
        "alfworld": ("go to {}", "go to {}"),
        "sciworld": ("focus on {}", "focus on {}"),
        "babyai": ("go to {} 1", "go to {} 1"),
        "textcraft": ("get 1 {}", "get 1 {}"),
        "maze": ("move {}", "{}"),
        "wordle": ("", "{}"),
        "searchqa": ("<search>{}</search>", "<answer>{}</answer>"),
    }.get(kind, ('look with Action Input: {{"node": "{}"}}', 'finish with Action Input:\n{{"answer": "{}"}}'))
    return [first.format(word) for word in others] + [final.format(last)]


def trajectories(kind: str, items: Any, prefix: str = "") -> list[dict[str, Any]]:
    """Return solutions in AgentTraj's format."""
    records = []
    for item in items:
        talk = [
            {"from": "human", "loss": None, "value": "These are the rules."},
            {"from": "gpt", "loss": False, "value": "OK."},
            {"from": "human", "loss": None, "value": "Say the words."},
        ]
        for number, action in enumerate(solution(kind, item)):
            talk.append({"from": "gpt", "loss": True, "value": f"Thought:\nWord {number}.\n\nAction:\n{action}"})
            talk.append({"from": "human", "loss": None, "value": "Go on."})
        records.append({"conversations": talk[:-1], "item_id": f"{prefix or kind}_{item}"})
    return records


@dataclass
class Fault:
    """A fault that is injected into one request."""

    status: int = 200
    body: bytes | None = None
    """Body returned in place of the correct response; the request is not executed."""
    edit: Callable[[Any], Any] | None = None
    """Function that changes the correct response."""
    wait: float = 0.0
    """Delay before the request is handled, in seconds."""
    cut: bool = False
    """Execute the request, then close the connection without a response."""


@dataclass
class _Instance:
    item: int | None = None
    right: int = 0
    steps: int = 0
    reward: float = 0.0
    score: float = 0.0
    done: bool = False
    said: list[str] = field(default_factory=list)


class _Unknown(Exception):
    pass


class FakeAgentGym:
    """A fake server.

    room: maximum number of instances; beyond it, /create returns an existing one. closes: True if /close exists.
    """

    def __init__(self, kind: str, room: int = 1000, closes: bool | None = None):
        self.kind = kind
        self.room = room
        self.closes = kind in CLOSING if closes is None else closes
        self.key = "env_idx" if kind in BY_INDEX else "id"
        self.prefix = f"/{kind}" if kind in ("maze", "wordle") else ""
        self.port = 0
        self.log: list[tuple[str, str, Any]] = []
        self.faults: dict[str, list[Fault]] = {}
        self.instances: dict[int, _Instance] = {}
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> FakeAgentGym:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start without instances, on the previous port if there was one."""
        fake = self
        self.instances, self._rotation = {}, 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # an answer is sent whole

            def do_GET(self) -> None:
                fake._serve(self, "GET")

            def do_POST(self) -> None:
                fake._serve(self, "POST")

            def log_message(self, *_: object) -> None:
                pass

        ThreadingHTTPServer.request_queue_size = 128
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def paths(self, *kept: str) -> list[str]:
        """Return the paths of the requests so far."""
        found = [path.removeprefix(self.prefix) for _, path, _ in self.log]
        return [path for path in found if not kept or path in kept]

    def _serve(self, handler: BaseHTTPRequestHandler, method: str) -> None:
        size = int(handler.headers.get("Content-Length") or 0)
        parts = urlsplit(handler.path)
        raw = handler.rfile.read(size)
        if method == "GET":
            body: Any = {name: int(value[0]) for name, value in parse_qs(parts.query).items()}
        else:
            body = json.loads(raw) if raw else None
        with self._lock:
            self.log.append((method, parts.path, body))
            queue = self.faults.get(parts.path.removeprefix(self.prefix), [])
            fault = queue.pop(0) if queue else Fault()
        time.sleep(fault.wait)
        if fault.body is not None:
            return self._answer(handler, fault.status, fault.body)
        try:
            with self._lock:
                answer = self._route(method, parts.path.removeprefix(self.prefix), body)
            status = 200
        except _Unknown:
            status, answer = 500, b"Internal Server Error"
        except KeyError:
            status, answer = 404, {"detail": "Not Found"}
        except TypeError:
            status, answer = 422, {"detail": [{"type": "missing"}]}
        if fault.cut:
            handler.close_connection = True
            handler.connection.close()
            return None
        if fault.edit is not None:
            answer = fault.edit(answer)
        return self._answer(handler, status, answer if isinstance(answer, bytes) else json.dumps(answer).encode())

    def _answer(self, handler: BaseHTTPRequestHandler, status: int, content: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    def _route(self, method: str, path: str, body: Any) -> Any:
        if (method, path) == ("GET", "/"):
            return "ok"
        if (method, path) == ("GET", "/list_envs") and self.key == "env_idx" and self.kind != "searchqa":
            return list(self.instances)
        action = {
            ("POST", "/create"): self._create,
            ("POST", "/reset"): self._reset,
            ("POST", "/step"): self._step,
            ("GET", "/observation"): self._observation,
            ("POST", "/close"): self._close,
        }[method, path]
        if (path == "/close" and not self.closes) or (path == "/observation" and self.kind == "babyai"):
            raise KeyError(path)
        if path == "/create":
            return self._create(body)
        if not isinstance(body, dict) or not isinstance(body.get(self.key), int):
            raise TypeError
        if self.key == "env_idx":
            if body[self.key] not in self.instances:
                raise _Unknown
            return action(body)
        if body[self.key] not in self.instances:
            return {"error": f"The id {body[self.key]} is not valid."}
        return action(body)

    def _create(self, body: Any) -> Any:
        if self.kind in (*TOOLS, "searchqa") and not isinstance((body or {}).get("id"), int):
            raise TypeError
        if self.kind == "textcraft" and not isinstance(body, dict):
            raise TypeError
        if len(self.instances) >= self.room:
            number = list(self.instances)[self._rotation % len(self.instances)]
            self._rotation += 1
        else:
            number = 7 * len(self.instances) + 3 if self.kind in ("webshop", "sqlgym") else len(self.instances)
            self.instances[number] = _Instance()
        if self.kind == "webarena":
            return {"env_idx": number}
        if self.key == "env_idx":
            return number
        more = {"observation": "Say it.", "done": False, "reward": 0} if self.kind == "textcraft" else {}
        return {"id": number, **more}

    def _reset(self, body: dict[str, Any]) -> Any:
        name = {"webshop": "session_id", "sqlgym": "item_id", "webarena": "idx", "alfworld": "game", "maze": "game"}
        name |= {"wordle": "seed", "searchqa": "id", **dict.fromkeys(TOOLS, "id")}
        item = body.get(name.get(self.kind, "data_idx"))
        if not isinstance(item, int) or (self.kind == "webarena" and body.get("seed") != 0):
            raise TypeError
        if self.kind == "alfworld" and body.get("world_type") != "Text":
            return {"error": 'world_type must be one of "Text", "Embody" and "Hybrid"'}
        if self.kind == "maze" and item >= 26:
            return {"error": f"The game {item} is not valid."}
        self.instances[body[self.key]] = state = _Instance(item)
        text = self._text(state)
        if self.kind in ("webshop", "sqlgym"):
            return [text, None]
        if self.kind == "webarena":
            return {"observation": "the page, without the objective"}
        if self.kind in (*TOOLS, "searchqa"):
            return text
        answer = {"id": body["id"], "observation": text, "done": False, "reward": 0}
        if self.kind == "alfworld":
            answer |= {"available_actions": self._actions(state), "task_type": "pick_and_place/trial_1"}
        if self.kind == "sciworld":
            task = f"Your task is item {item}."
            answer |= {"task_name": "boil", "task_description": task, "observation": "A kitchen.", "score": 0}
        if self.kind == "babyai":
            answer |= {"score": 0.0}
        return answer

    def _text(self, state: _Instance) -> str:
        return f"Item {state.item}, step {state.steps}: {state.right} right."

    def _actions(self, state: _Instance) -> list[str]:
        return [f"go to {word}" for word in WORDS]

    def _observation(self, body: dict[str, Any]) -> Any:
        state = self.instances[body[self.key]]
        if state.item is None:
            raise _Unknown
        return self._text(state)

    def _close(self, body: dict[str, Any]) -> Any:
        del self.instances[body[self.key]]
        return b"closed" if self.kind == "webarena" else {"closed": True}

    def _step(self, body: dict[str, Any]) -> Any:
        state, action = self.instances[body[self.key]], body.get("action")
        if not isinstance(action, str):
            raise TypeError
        if state.item is None:
            if self.key == "env_idx":
                raise _Unknown
            return {"error": "0"}
        if state.done and self.kind in ("alfworld", "sciworld", "babyai", "maze", "wordle"):
            return {"error": f"The task with environment {body['id']} has finished."}
        if action == "get 1 crash":
            return {"error": "'NoneType' object has no attribute 'split'"}
        state.steps += 1
        state.said.append(action)
        goal = words(self.kind, state.item)
        word, ends, refusal = self._read(action)
        hit = state.right < len(goal) and word == goal[state.right]
        state.right += hit
        whole = state.right == len(goal)
        text = self._text(state) if refusal is None else refusal
        share = state.right / len(goal)
        if self.kind in ("webshop", "sqlgym"):
            done = whole or self.kind == "sqlgym"
            return {"state": text, "reward": float(whole), "done": done, "info": None}
        if self.kind == "webarena":
            return {"observation": text, "reward": whole and ends, "terminated": ends, "truncated": False, "info": {}}
        if self.kind in TOOLS:
            text = text if refusal else f"Observation: {text}\nGive me one action."
            return {"observation": text, "reward": share, "done": ends}
        if self.kind == "sciworld":
            state.done = whole
            return {"observation": text, "reward": 100 * hit / len(goal), "score": int(100 * share), "done": whole}
        if self.kind == "babyai":
            late = state.item >= LATE
            if hit and whole:
                state.reward = 0.3 if late else 0.8
            state.score += state.reward
            state.done = whole and not late
            text += "\nAvailable actions: [...]"
            return {"observation": text, "reward": state.reward, "score": state.score, "done": state.done}
        state.done = whole
        answer = {"observation": text, "reward": float(whole), "done": whole}
        if self.kind == "alfworld":
            answer["available_actions"] = self._actions(state)
        return answer

    def _read(self, action: str) -> tuple[str | None, bool, str | None]:
        """The word of an action, whether it ends the episode, and what is said of one that is none: as the real servers
        read actions."""
        if self.kind in TOOLS:
            found = re.search(r"\s*(.*?)\s*with\s*Action Input:\s*(.*?)$", action)
            if found is None:
                return None, False, "Format error, please response in the format"
            whole = f"{found[1]} with Action Input: {found[2]}"
            call = re.match(r".*?Action:\s*(.*?)\s*with\s*Action Input:\s*(.*?)$", whole, re.MULTILINE | re.DOTALL)
            try:
                values = list(json.loads(call[2]).values()) if call else []
            except (ValueError, AttributeError):
                values = []
            if call is None or not values:
                return None, False, "Observation: ERROR | TypeError(not valid)\nGive me one action."
            return str(values[0]), "finish" in call[1], None
        pattern, refusal = {
            "webshop": (r"(?:search|click)\[(.*)\]", None),
            "sqlgym": (r"SELECT '(\w+)'", "syntax error"),
            "webarena": (r"(?s).*?```(?:click|stop) \[(\w+)\]```.*", "Cannot parse action from response"),
            "alfworld": (r"go to (\w+)", "Nothing happens."),
            "sciworld": (r"focus on (\w+)", "No known action matches that input."),
            "babyai": (r"go to (\w+) 1", "The action is not recognized. Please check valid actions."),
            "textcraft": (r"get 1 (\w+)", f"Could not execute {action}"),
            "maze": (r"move (up|down|left|right)", None),
            "wordle": (r"((?:[a-z] ){4}[a-z])", "invalid word"),
            "searchqa": (r"(?s).*?<(?:search|answer)>(.*?)</.*", "Your previous action is invalid."),
        }[self.kind]
        found = re.fullmatch(pattern, action)
        if found is None:
            return None, False, refusal
        return found[1].replace(" ", ""), "stop [" in action, None
