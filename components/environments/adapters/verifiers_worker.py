"""Worker that runs verifiers episodes for `verifiers.py`, with the interpreter that has the package.

    python -P verifiers_worker.py

The protocol is JSON lines. Input: {"do": "open", "config": {...}, "most": maximum number of tasks, "play": true if
episodes follow}, then {"do": "play", "episode": id, "task": index}, {"do": "answer", "episode": id, "message": {...}}
and {"do": "stop", "episode": id}. Output: {"tasks": [...]} or {"failed": text}; then, per episode,
{"episode": id, "ask": {"messages", "tools"}} for each model call, and {"episode": id, "ended": {...}} at its end.

The package runs the episode with its task, tools and rewards. Model calls go to an HTTP endpoint in this process, which
forwards them to the parent. The agent program is the chat loop below, unless the configuration names another one. This
module imports nothing from Espalier.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import signal
import sys
import time
import types
from typing import Any

HARNESS = "espalier_chat"
"""Name of the chat loop in the package."""
MAX_LINE = 2**26
"""Maximum size of a message, in bytes."""


def chat_harness(vf: Any) -> types.ModuleType:
    """Return a module with a harness that calls the model and the tools of the task, in this process."""
    tools = importlib.import_module("verifiers.v1.harnesses.utils.mcp")
    to_wire = importlib.import_module("verifiers.v1.dialects.chat").message_to_wire
    httpx = importlib.import_module("httpx")

    class ChatConfig(vf.HarnessConfig):
        id: str = HARNESS

    class EpisodeChat(vf.Harness[ChatConfig]):
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [to_wire(message) for message in prompt or []]
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with contextlib.AsyncExitStack() as stack:
                schemas, dispatch, connected = await tools.connect_mcp({"mcpServers": servers}, stack)
                client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
                while True:
                    body = {"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})}
                    answer = await client.post(
                        f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
                    )
                    if answer.status_code != 200:  # the rollout was stopped and has recorded the reason
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text[-2000:])
                    message = answer.json()["choices"][0]["message"]
                    messages.append(message)
                    calls = message.get("tool_calls") or []
                    if not calls:
                        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                    for call in calls:
                        content = await self.call(tools, connected, dispatch, call["function"])
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

        async def call(self, tools: Any, connected: Any, dispatch: Any, function: dict[str, Any]) -> Any:
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                arguments = None
            if not isinstance(arguments, dict):
                return f"error: the arguments of {function['name']} are no JSON object"
            if function["name"] not in dispatch:
                return f"error: no tool {function['name']}; there are {', '.join(dispatch) or 'none'}"
            return await tools.call_mcp(connected, dispatch, function["name"], arguments)

    module = types.ModuleType(HARNESS)
    module.__all__ = ["EpisodeChat"]  # type: ignore[attr-defined]
    module.Chat = EpisodeChat  # type: ignore[attr-defined]
    return module


class EpisodeWorker:
    """The protocol loop and the episodes of this process."""

    def __init__(self, out: Any):
        self.out = out
        self.answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.playing: dict[str, asyncio.Task[None]] = {}
        self.port = 0

    def send(self, **message: Any) -> None:
        self.out.write(json.dumps(message) + "\n")
        self.out.flush()

    async def run(self, lines: asyncio.StreamReader) -> None:
        async with contextlib.AsyncExitStack() as stack:
            while line := await lines.readline():
                request = json.loads(line)
                match request["do"]:
                    case "open":
                        try:
                            await self.open(request["config"], request["most"])
                            if request["play"]:
                                await self.serve(stack)
                                await stack.enter_async_context(self.env.serving())
                            self.send(tasks=[describe(task) for task in self.tasks])
                        except Exception as error:  # noqa: BLE001  every error is reported to the parent
                            self.send(failed=f"{type(error).__name__}: {error}"[:2000])
                    case "play":
                        task = asyncio.create_task(self.play(request["episode"], request["task"]))
                        self.playing[request["episode"]] = task
                    case "answer":
                        waiting = self.answers.pop(request["episode"], None)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(request["message"])
                    case "stop":
                        if request["episode"] in self.playing:
                            self.playing.pop(request["episode"]).cancel()
            for task in self.playing.values():
                task.cancel()
            await asyncio.gather(*self.playing.values(), return_exceptions=True)

    async def open(self, config: dict[str, Any], most: int) -> None:
        """Load the environment and read at most `most` tasks."""
        self.vf = vf = importlib.import_module("verifiers.v1")
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        fields = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields
        sys.modules[HARNESS] = chat_harness(vf)
        config_type = loaders.env_config_type(config["taskset"]["id"], config.get("id") or "")
        seats = [name for name, field in config_type.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        for seat in seats:
            agent = config.setdefault(seat, {})
            agent.setdefault("harness", {"id": HARNESS})
            agent.setdefault("runtime", {"type": "subprocess"})
        env_config = loaders.resolve_env_config(config)
        self.env = loaders.load_environment(env_config)
        for name, spec in fields(env_config).items():
            harness = self.env._harnesses[name]
            if harness.EXECUTES_CODE and isinstance(spec.runtime, vf.SubprocessConfig):
                text = f"the harness {harness.config.id!r} runs model-written code on this machine"
                raise ValueError(f"{text}; set {name}.runtime, such as {{type: docker}}")
        self.tasks = list(itertools.islice(self.env.taskset, most))

    async def serve(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the HTTP endpoint to which the package sends model calls."""
        web = importlib.import_module("aiohttp.web")

        async def completions(request: Any) -> Any:
            episode = request.match_info["episode"]
            body = await request.json()
            if episode in self.answers or episode not in self.playing:
                return web.json_response({"error": {"message": "several model calls at once"}}, status=400)
            self.answers[episode] = asyncio.get_running_loop().create_future()
            self.send(episode=episode, ask={"messages": body["messages"], "tools": body.get("tools") or []})
            message = await self.answers[episode]
            calls = message.get("tool_calls") or None
            choice = {
                "index": 0,
                "message": {"role": "assistant", "content": message.get("content") or "", "tool_calls": calls},
                "finish_reason": "tool_calls" if calls else "stop",
            }
            usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            answer = {"id": f"chat-{time.time_ns()}", "object": "chat.completion", "created": int(time.time())}
            return web.json_response({**answer, "model": body["model"], "choices": [choice], "usage": usage})

        app = web.Application(client_max_size=MAX_LINE)
        app.router.add_post("/{episode}/v1/chat/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]

    async def play(self, episode: str, index: int) -> None:
        """Run an episode of a task and report its end."""
        vf = self.vf
        try:
            client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{self.port}/{episode}/v1", api_key_var="NO_KEY")
            context = vf.ModelContext(model="policy", client=client)
            result = await self.env.run_episode(self.tasks[index], context)
            errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
            traces = [
                trace for trace in result.traces if trace.agent is None or getattr(trace.agent, "trainable", True)
            ]
            rewards: dict[str, float] = {}
            metrics: dict[str, float] = {}
            for trace in traces:
                rewards |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
                metrics |= {
                    name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)
                }
            self.send(
                episode=episode,
                ended={
                    "ok": bool(result.ok),
                    "reward": sum(trace.reward for trace in traces) / max(1, len(traces)),
                    "rewards": rewards,
                    "metrics": metrics,
                    "stop": next((trace.stop_condition for trace in traces if trace.stop_condition), ""),
                    "errors": [f"{error.type}: {error.message}"[:1000] for error in errors],
                },
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  every error is reported to the parent
            self.send(episode=episode, ended={"ok": False, "errors": [f"{type(error).__name__}: {error}"[:1000]]})
        finally:
            self.playing.pop(episode, None)
            self.answers.pop(episode, None)


def describe(task: Any) -> dict[str, Any]:
    """Return the description of a task that is sent to the parent."""
    kind, difficulty = getattr(task.data, "type", None), getattr(task.data, "difficulty", None)
    return {
        "key": task.key,
        "name": task.data.name or task.data.id or "",
        "type": kind if isinstance(kind, str) else "",
        "difficulty": difficulty if isinstance(difficulty, int) and 1 <= difficulty <= 5 else 0,
    }


async def main() -> None:
    out = os.fdopen(os.dup(1), "w")  # output that packages print must not mix with the protocol
    os.dup2(2, 1)
    lines = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await EpisodeWorker(out).run(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    asyncio.run(main())
