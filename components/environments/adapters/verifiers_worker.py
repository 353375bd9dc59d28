"""Worker that runs verifiers episodes for `verifiers.py`, with the interpreter that has the package, as the target of
`components.json_worker`.

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
    module.EpisodeChat = EpisodeChat  # type: ignore[attr-defined]
    return module


class EpisodeWorker:
    """The environment and the episodes of this process.

    A call with `action` "open" loads the environment and returns its tasks; "play" starts an episode; "answer" sends it
    the model's reply; "stop" cancels it. "play" and "answer" return the next model call of the episode,
    {"ask": {"messages", "tools"}}, or its end, {"ended": {...}}.
    """

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.events: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.playing: dict[str, asyncio.Task[None]] = {}
        self.server: asyncio.Task[None] | None = None
        self.port = 0

    async def __call__(self, action: str, **arguments: Any) -> Any:
        return await getattr(self, action)(**arguments)

    async def open(self, config: dict[str, Any], most: int, play: bool) -> list[dict[str, Any]]:
        """Load the environment; return the descriptions of at most `most` tasks. play: episodes follow."""
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
        if play:
            ready = asyncio.get_running_loop().create_future()
            self.server = asyncio.create_task(self.serve(ready))
            await asyncio.wait([ready, self.server], return_when=asyncio.FIRST_COMPLETED)
            if self.server.done():
                await self.server  # raises its exception
        return [describe(task) for task in self.tasks]

    async def play(self, episode: str, task: int) -> dict[str, Any]:
        """Start an episode of a task; return its first event."""
        self.events[episode] = asyncio.Queue()
        self.playing[episode] = asyncio.create_task(self.run(episode, task))
        return await self.next_event(episode)

    async def answer(self, episode: str, message: dict[str, Any]) -> dict[str, Any]:
        """Send the model's reply to an episode; return its next event."""
        waiting = self.answers.pop(episode, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        return await self.next_event(episode)

    async def next_event(self, episode: str) -> dict[str, Any]:
        event = await self.events[episode].get()  # `stop` drops the queue while this waits
        if "ended" in event:
            self.events.pop(episode, None)
        return event

    async def stop(self, episode: str) -> None:
        """Cancel an episode."""
        if episode in self.playing:
            self.playing.pop(episode).cancel()
        self.put_event(episode, {"ended": {"ok": False, "errors": ["the episode was stopped"]}})
        self.events.pop(episode, None)

    def put_event(self, episode: str, event: dict[str, Any]) -> None:
        """Report an event, unless the episode was stopped."""
        if episode in self.events:
            self.events[episode].put_nowait(event)

    async def close(self) -> None:
        tasks = [*self.playing.values(), *([self.server] if self.server else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def serve(self, ready: asyncio.Future[None]) -> None:
        """Run the HTTP endpoint to which the package sends model calls, until cancelled."""
        web = importlib.import_module("aiohttp.web")

        async def completions(request: Any) -> Any:
            episode = request.match_info["episode"]
            body = await request.json()
            if episode in self.answers or episode not in self.playing:
                return web.json_response({"error": {"message": "several model calls at once"}}, status=400)
            self.answers[episode] = asyncio.get_running_loop().create_future()
            ask = {"messages": body["messages"], "tools": body.get("tools") or []}
            self.put_event(episode, {"ask": ask})
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
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = runner.addresses[0][1]
            async with self.env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    async def run(self, episode: str, index: int) -> None:
        """Run an episode of a task; its end is its last event."""
        vf = self.vf
        try:
            client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{self.port}/{episode}/v1", api_key_var="NO_KEY")
            context = vf.ModelContext(model="policy", client=client)
            ended = summarize(await self.env.run_episode(self.tasks[index], context))
        except Exception as error:  # noqa: BLE001  every error is reported to the parent
            ended = {"ok": False, "errors": [f"{type(error).__name__}: {error}"[:1000]]}
        finally:
            self.playing.pop(episode, None)
            if (unanswered := self.answers.pop(episode, None)) is not None:
                unanswered.cancel()
        self.put_event(episode, {"ended": ended})


def summarize(result: Any) -> dict[str, Any]:
    """Return the end of an episode, as it is sent to the parent."""
    errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
    traces = [trace for trace in result.traces if trace.agent is None or getattr(trace.agent, "trainable", True)]
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    for trace in traces:
        rewards |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        metrics |= {name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)}
    return {
        "ok": bool(result.ok),
        "reward": sum(trace.reward for trace in traces) / max(1, len(traces)),
        "rewards": rewards,
        "metrics": metrics,
        "stop": next((trace.stop_condition for trace in traces if trace.stop_condition), ""),
        "errors": [f"{error.type}: {error.message}"[:1000] for error in errors],
    }


def describe(task: Any) -> dict[str, Any]:
    """Return the description of a task that is sent to the parent."""
    kind, difficulty = getattr(task.data, "type", None), getattr(task.data, "difficulty", None)
    return {
        "key": task.key,
        "name": task.data.name or task.data.id or "",
        "type": kind if isinstance(kind, str) else "",
        "difficulty": difficulty if isinstance(difficulty, int) and 1 <= difficulty <= 5 else 0,
    }
