"""Code as action (CodeAct, arXiv:2402.01030): the agent writes a block of Python, and reads what it prints.

The block runs in the sandbox. The environment's tools are functions in it: a call leaves the sandbox as JSON, is held
against the tool's schema, carried out by the environment as a step of its own, and returns the answer as text; one that
does not fit, or that the environment answers with `error: ...`, raises ToolError in the agent's code. Variables stay
from turn to turn (`components.sandbox.cells` says how). A turn without a block is what the agent says.

The rewards of the calls of one block add up to that of its turn. Where a call ends the episode, later calls of the
block fail. A block that is not closed, or not the only one, or no Python, is told to the agent and counted as a
`parse_error`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import keyword
import os
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from components.environments.protocol import Messages, Step
from components.errors import AgentError, Problem, ResourceError, SpecError
from components.rollout.action_format import Take, Tools, Unreadable, append_system_text
from components.rollout.observations import clean
from components.rollout.tool_schemas import misfit
from components.sandbox import Limits, Sandbox, cells
from components.sandbox.bubblewrap import check, stoppable
from components.trajectories.tool_calls import literal

_BLOCK = re.compile(r"^```(\w*+)[ \t]*+\n(.*?)(?:^(```)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A block up to the line that closes it, or to the end: so no text is read again from each opening fence."""
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


class Code:
    """One for each episode: it remembers the tools, and the blocks that ran."""

    mark = "Observation: "

    def __init__(self, limits: Limits):
        self._sandbox = Sandbox(limits)
        self._cells: list[cells.Cell] = []
        self._over = False
        self._number = 0
        self.counts = {"tool_calls": 0, "refused_calls": 0, "failed_blocks": 0}
        """Calls that the environment carried out, those that fitted no schema, blocks that ended with an error."""

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """Raises ResourceError, saying what to do, where there is no sandbox."""
        check()
        self._tools = {one["function"]["name"]: one["function"] for one in tools}
        self._functions: dict[str, tuple[str, list[str]]] = {}
        for one in tools:
            name = one["function"]["name"]
            function = _identifier(name)
            if function in self._functions:
                both = f"{self._functions[function][0]} and {name}"
                raise SpecError([Problem("agent.format", f"code: the tools {both} would be the same function")])
            self._functions[function] = name, list((one["function"].get("parameters") or {}).get("properties") or {})
        listed = "".join(f"\n{_described(one['function'])}" for one in tools)
        said = (
            "Act by writing one block of Python a turn. You see what it prints; variables stay. Such as:\n"
            '```python\nfound = tool(argument="value")\nprint(found)\n```\n'
            f"These functions are there; they return text:{listed}\n"
            if tools
            else "Write one block of Python a turn, from ```python to ```. You see what it prints; variables stay.\n"
        )
        return append_system_text(messages, f"{said}A message without a block is your answer."), []

    async def act(self, message: dict[str, Any], take: Take) -> Step:
        text = message.get("content") or ""
        if not text.strip():
            raise Unreadable("write a block of code, or your answer")
        if "```" not in text:
            return await take({"role": "assistant", "content": text})
        blocks = [(language, code) for language, code, closed in _BLOCK.findall(text) if closed]
        if len(blocks) != 1:
            what = "no block of code ends with a line ```" if not blocks else f"there are {len(blocks)} blocks of code"
            raise Unreadable(f"{what}; write one block a turn, from ```python to ```")
        language, code = blocks[0]
        if language not in ("python", "py", ""):
            raise Unreadable(f"the block is {language}; only ```python is run")
        return await self._run(code, take)

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        thought = action.get("content") or ""
        if "```" in thought:
            raise SpecError([Problem("agent.format", f"code: a demonstration says {thought!r:.200}, with ``` in it")])
        calls = [call["function"] for call in action.get("tool_calls") or []]
        if not calls:
            return {"role": "assistant", "content": thought}
        lines = [f"print({_identifier(one['name'])}({_arguments(json.loads(one['arguments']))}))" for one in calls]
        block = "\n".join(["```python", *lines, "```"])
        return {"role": "assistant", "content": f"{thought}\n{block}" if thought else block}

    async def _run(self, code: str, take: Take) -> Step:
        """Runs a block in a thread; its calls are carried out here, in the episode's own task."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        asked: asyncio.Queue[tuple[str, dict[str, Any], Future[dict[str, Any]]] | None] = asyncio.Queue()

        def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            answer: Future[dict[str, Any]] = Future()
            loop.call_soon_threadsafe(asked.put_nowait, (name, arguments, answer))
            while not stop.is_set():
                with suppress(TimeoutError):
                    return answer.result(timeout=0.05)
            return {"error": "the episode was stopped"}

        work = functools.partial(cells.play, self._sandbox, self._cells, code, stop, tools=self._functions, call=call)
        running = asyncio.ensure_future(stoppable(work, stop, _pool()))
        running.add_done_callback(lambda _: asked.put_nowait(None))
        whole = Step([])
        try:
            while (one := await asked.get()) is not None:
                name, arguments, answer = one
                answer.set_result(await self._answer(name, arguments, take, whole))
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])
        try:
            shown = running.result()
        except ResourceError:
            raise
        except OSError as error:
            raise AgentError(f"the sandbox did not run the code: {error}") from error
        text = clean(shown.text, len(shown.text))[0]
        if shown.unreadable:
            raise Unreadable(text)
        if shown.lost:
            self._cells.clear()
        elif shown.kept:
            self._cells.append(cells.Cell(code, shown.calls))
        self.counts["failed_blocks"] += not shown.well
        whole.observation.insert(0, {"role": "user", "content": f"{self.mark}{text}"})
        return whole

    async def _answer(self, name: str, arguments: dict[str, Any], take: Take, whole: Step) -> dict[str, Any]:
        """Carries out one call: what the function returns or raises. What the step came to is added to `whole`."""
        if self._over:
            return {"error": "the episode is over"}
        tool = self._tools.get(name)
        if wrong := misfit(tool, arguments) if tool else f"there is no tool {name!r:.80}":
            self.counts["refused_calls"] += 1
            return {"error": wrong}
        self._number += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        made = {"id": f"call_{self._number}", "type": "function", "function": function}
        step = await take({"role": "assistant", "content": "", "tool_calls": [made]})
        self.counts["tool_calls"] += 1
        whole.reward += step.reward
        whole.done = self._over = step.done
        told = "\n".join(one["content"] for one in step.observation if one["role"] == "tool")
        whole.observation += [one for one in step.observation if one["role"] != "tool"]
        return {"error": told.removeprefix("error: ")} if told.startswith("error: ") else {"text": told}


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Of the threads that watch programs: so many run at once in this process. Of its own, as a program waits for what
    environments do in other threads."""
    return ThreadPoolExecutor(max(8, 4 * (os.cpu_count() or 1)), thread_name_prefix="code")


def _identifier(name: str) -> str:
    """A tool's name as that of a function."""
    word = re.sub(r"\W", "_", name)
    return f"{word}_" if keyword.iskeyword(word) else word if word.isidentifier() else f"_{word}"


def _arguments(arguments: dict[str, Any]) -> str:
    named = {key: value for key, value in arguments.items() if key.isidentifier() and not keyword.iskeyword(key)}
    others = {key: value for key, value in arguments.items() if key not in named}
    written = [f"{key}={literal(value)}" for key, value in named.items()]
    return ", ".join([*written, *([f"**{literal(others)}"] if others else [])])


def _described(function: dict[str, Any]) -> str:
    """As the head of a function, with what it does."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    arguments = []
    for name, schema in (parameters.get("properties") or {}).items():
        kind = _TYPES.get(str(schema.get("type")), "Any") if isinstance(schema, dict) else "Any"
        note = f" ({schema['description']})" if isinstance(schema, dict) and schema.get("description") else ""
        arguments.append(f"{name}: {kind}{'' if name in required else ' = ...'}{note}")
    text = f"{_identifier(function['name'])}({', '.join(arguments)})"
    return f"- {text}: {function.get('description') or ''}".rstrip(": ")
