"""Action format with code (CodeAct, arXiv:2402.01030): the agent writes a Python block and reads its output.

The block runs in the sandbox, where the environment's tools are functions. A call leaves the sandbox as JSON, is
validated against the tool's schema, executed by the environment as a separate step, and returns the result as text. An
invalid call, or a result `error: ...`, raises ToolError in the agent's code. Variables persist across turns
(`components.sandbox.cells`). A message without a block is the agent's answer.

The rewards of a block's calls sum to the reward of its turn. After a call that ends the episode or begins a new context
(`Step.new_context`), the block's later calls fail. Variables do not persist across contexts. A message with an unclosed
block, several blocks, or a block in another language is a `parse_error`, which the agent reads.
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

from components.aio import stoppable
from components.environments.protocol import Messages, Step
from components.errors import AgentError, Problem, ResourceError, SpecError
from components.rollout.action_format import Take, Tools, UnparsedAction, append_system_text
from components.rollout.observations import clean
from components.rollout.tool_schemas import misfit
from components.sandbox import Limits, Sandbox, cells
from components.sandbox.bubblewrap import check
from components.trajectories.call_forms.pythonic import literal

_BLOCK = re.compile(r"^```(\w*+)[ \t]*+\n(.*?)(?:^(```)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
"""A block up to its closing line or the end of the text, so that matching takes linear time with unclosed fences."""
_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


class CodeActions:
    """State of the format in one episode: the tools and the executed blocks."""

    mark = "Observation: "

    def __init__(self, limits: Limits):
        self._sandbox = Sandbox(limits)
        self._cells: list[cells.Cell] = []
        self._over = False
        self._number = 0
        self.counts = {"tool_calls": 0, "refused_calls": 0, "failed_blocks": 0}
        """Counts of executed calls, calls that violate a schema, and blocks that ended with an error."""

    def opening(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """Return the initial messages with instructions and function signatures. Raises ResourceError without a
        sandbox, SpecError if two tools have the same function name."""
        check()
        self._cells.clear()
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._functions: dict[str, tuple[str, list[str]]] = {}
        for tool in tools:
            name = tool["function"]["name"]
            function = _identifier(name)
            if function in self._functions:
                both = f"{self._functions[function][0]} and {name}"
                raise SpecError([Problem("agent.format", f"code: the tools {both} would be the same function")])
            self._functions[function] = name, list((tool["function"].get("parameters") or {}).get("properties") or {})
        signatures = "".join(f"\n{_signature(tool['function'])}" for tool in tools)
        instructions = (
            "Act by writing one block of Python a turn. You see what it prints; variables stay. Such as:\n"
            '```python\nfound = tool(argument="value")\nprint(found)\n```\n'
            f"These functions are there; they return text:{signatures}\n"
            if tools
            else "Write one block of Python a turn, from ```python to ```. You see what it prints; variables stay.\n"
        )
        return append_system_text(messages, f"{instructions}A message without a block is your answer."), []

    async def act(self, message: dict[str, Any], take: Take) -> Step:
        text = message.get("content") or ""
        if not text.strip():
            raise UnparsedAction("write a block of code, or your answer")
        if "```" not in text:
            return await take({"role": "assistant", "content": text})
        blocks = [(language, code) for language, code, closed in _BLOCK.findall(text) if closed]
        if len(blocks) != 1:
            problem = (
                "no block of code ends with a line ```" if not blocks else f"there are {len(blocks)} blocks of code"
            )
            raise UnparsedAction(f"{problem}; write one block a turn, from ```python to ```")
        language, code = blocks[0]
        if language not in ("python", "py", ""):
            raise UnparsedAction(f"the block is {language}; only ```python is run")
        return await self._run(code, take)

    def write(self, action: dict[str, Any]) -> dict[str, Any]:
        thought = action.get("content") or ""
        if "```" in thought:
            raise SpecError([Problem("agent.format", f"code: a demonstration says {thought!r:.200}, with ``` in it")])
        calls = [call["function"] for call in action.get("tool_calls") or []]
        if not calls:
            return {"role": "assistant", "content": thought}
        lines = [f"print({_identifier(call['name'])}({_arguments(json.loads(call['arguments']))}))" for call in calls]
        block = "\n".join(["```python", *lines, "```"])
        return {"role": "assistant", "content": f"{thought}\n{block}" if thought else block}

    async def _run(self, code: str, take: Take) -> Step:
        """Run a block in a thread and execute its calls here, in the episode's task. Return the step of the turn."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        calls: asyncio.Queue[tuple[str, dict[str, Any], Future[dict[str, Any]]] | None] = asyncio.Queue()

        def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            answer: Future[dict[str, Any]] = Future()
            loop.call_soon_threadsafe(calls.put_nowait, (name, arguments, answer))
            while not stop.is_set():
                with suppress(TimeoutError):
                    return answer.result(timeout=0.05)
            return {"error": "the episode was stopped"}

        work = functools.partial(cells.play, self._sandbox, self._cells, code, stop, tools=self._functions, call=call)
        running = asyncio.ensure_future(stoppable(work, stop, _pool()))
        running.add_done_callback(lambda _: calls.put_nowait(None))
        turn = Step([])
        try:
            while (pending := await calls.get()) is not None:
                name, arguments, answer = pending
                answer.set_result(await self._answer(name, arguments, take, turn))
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait([running])
        try:
            result = running.result()
        except ResourceError:
            raise
        except OSError as error:
            raise AgentError(f"the sandbox did not run the code: {error}") from error
        if turn.new_context:
            return turn
        text = clean(result.text, len(result.text))[0]
        if result.unreadable:
            raise UnparsedAction(text)
        if result.lost:
            self._cells.clear()
        elif result.kept:
            self._cells.append(cells.Cell(code, result.calls))
        self.counts["failed_blocks"] += not result.well
        turn.observation.insert(0, {"role": "user", "content": f"{self.mark}{text}"})
        return turn

    async def _answer(self, name: str, arguments: dict[str, Any], take: Take, turn: Step) -> dict[str, Any]:
        """Execute one call, return the function's result or error, and add the step to `turn`."""
        if self._over:
            return {"error": "the episode is over"}
        if turn.new_context:
            return {"error": "a new context has begun"}
        tool = self._tools.get(name)
        if problem := misfit(tool, arguments) if tool else f"there is no tool {name!r:.80}":
            self.counts["refused_calls"] += 1
            return {"error": problem}
        self._number += 1
        function = {"name": name, "arguments": json.dumps(arguments)}
        tool_call = {"id": f"call_{self._number}", "type": "function", "function": function}
        step = await take({"role": "assistant", "content": "", "tool_calls": [tool_call]})
        self.counts["tool_calls"] += 1
        turn.reward += step.reward
        turn.done = self._over = step.done
        if step.new_context:
            turn.new_context, turn.observation = True, step.observation
            return {"text": ""}
        text = "\n".join(message["content"] for message in step.observation if message["role"] == "tool")
        turn.observation += [message for message in step.observation if message["role"] != "tool"]
        return {"error": text.removeprefix("error: ")} if text.startswith("error: ") else {"text": text}


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the process's thread pool for sandboxed programs, which limits their number. It is separate from other
    pools because a program waits for environments that run in other threads."""
    return ThreadPoolExecutor(max(8, 4 * (os.cpu_count() or 1)), thread_name_prefix="code")


def _identifier(name: str) -> str:
    """Return the function name of a tool."""
    word = re.sub(r"\W", "_", name)
    return f"{word}_" if keyword.iskeyword(word) else word if word.isidentifier() else f"_{word}"


def _arguments(arguments: dict[str, Any]) -> str:
    """Return the arguments of a call as Python source."""
    named = {key: value for key, value in arguments.items() if key.isidentifier() and not keyword.iskeyword(key)}
    others = {key: value for key, value in arguments.items() if key not in named}
    written = [f"{key}={literal(value)}" for key, value in named.items()]
    return ", ".join([*written, *([f"**{literal(others)}"] if others else [])])


def _signature(function: dict[str, Any]) -> str:
    """Return a function's signature and description, as the agent reads them."""
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or []
    arguments = []
    for name, schema in (parameters.get("properties") or {}).items():
        kind = _TYPES.get(str(schema.get("type")), "Any") if isinstance(schema, dict) else "Any"
        note = f" ({schema['description']})" if isinstance(schema, dict) and schema.get("description") else ""
        arguments.append(f"{name}: {kind}{'' if name in required else ' = ...'}{note}")
    text = f"{_identifier(function['name'])}({', '.join(arguments)})"
    return f"- {text}: {function.get('description') or ''}".rstrip(": ")
