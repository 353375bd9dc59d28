"""Taskset of the package verifiers (0.4) for an environment that `flows.environment serve --as openenv` serves.

    PYTHONPATH=flows/interop/verifiers_plugin vf-eval espalier_environment --env.taskset.url http://127.0.0.1:8000

Each scenario is a task. The harness plays it: the policy gets the environment's messages and tools in OpenAI's format,
its answer is the action. The reward `episode_score` is the sum of the rewards of the steps, which is Espalier's score.
This module needs only what verifiers installs, so it runs in an interpreter without Espalier.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import verifiers.v1 as vf

__all__ = ["EspalierEnv", "EspalierHarness", "EspalierTaskset"]

ID = "espalier_environment"
TIMEOUT = 120.0
"""Seconds to wait for a response of the environment's server."""
MAX_MESSAGE = 2**26
"""Maximum size of a message of the server, in bytes."""


class EspalierData(vf.TaskData):
    """A scenario on a server."""

    url: str
    scenario: str
    type: str = ""
    difficulty: int = 0


class EspalierTask(vf.Task[EspalierData, vf.State, vf.TaskConfig]):
    """A scenario with the environment's reward."""

    @vf.reward
    async def episode_score(self, trace: Any) -> float:
        """Return the sum of the rewards of the episode."""
        return float(trace.info.get("espalier", {}).get("reward", 0.0))

    @vf.metric
    async def success(self, trace: Any) -> float:
        """Return 1 if the environment reported success."""
        return float(bool(trace.info.get("espalier", {}).get("success", False)))


class EspalierConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    id: str = ID
    url: str = ""
    """Address of the server, such as http://127.0.0.1:8000."""
    tasks: int | None = None
    """Maximum number of tasks; None: every scenario of the server."""


class EspalierTaskset(vf.Taskset[EspalierTask, EspalierConfig]):
    """Scenarios of a server, read one after the other."""

    def load(self) -> Iterator[EspalierTask]:
        url = self.config.url.rstrip("/")
        if not url:
            raise ValueError("taskset.url is not set; expected the address of `python -m flows.environment serve`")
        reading: dict[str, str] = {}  # the episode in which the prompts of the tasks are read
        with httpx.Client(base_url=url, timeout=TIMEOUT) as client:
            try:
                count = _json(client.get("/metadata"))["scenarios"]
                for seed in range(count if self.config.tasks is None else min(count, self.config.tasks)):
                    start = _json(client.post("/reset", json={"seed": seed, **reading}))["metadata"]
                    reading = {"episode_id": start["episode_id"]}
                    yield EspalierTask(_data(url, start), self.config.task)
            except httpx.TransportError as error:
                raise RuntimeError(f"taskset.url = {url}: cannot be reached: {error}; start the server first") from None
            finally:
                with contextlib.suppress(httpx.TransportError):
                    for id in reading.values():
                        client.delete(f"/episodes/{id}")


class EspalierHarnessConfig(vf.HarnessConfig):
    """Settings of the harness."""

    id: str = ID


class EspalierHarness(vf.Harness[EspalierHarnessConfig]):
    """Loop of model calls and steps, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> Any:
        """Play an episode of `data`. The trace records the model calls, `trace.info` the rewards."""
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.ws_connect(f"{data.url}/ws", max_msg_size=MAX_MESSAGE) as socket,
        ):
            start = (await _exchange(socket, "reset", {"scenario": data.scenario}))["metadata"]
            messages, tools = start["messages"], start["tools"]
            result: dict[str, Any] = {"reward": 0.0, "success": False, "truncated": False}
            trace.info["espalier"] = result
            done = False
            while not done:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                async with session.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                    if response.status != 200:  # the rollout was stopped and has recorded the reason
                        text = await response.text()
                        return vf.ProgramResult(exit_code=1, stdout="", stderr=text[-2000:])
                    answer = (await response.json())["choices"][0]["message"]
                calls = answer.get("tool_calls") or None
                called = {"tool_calls": calls} if calls else {}
                action = {"message": answer.get("content") or "", **called}
                step = await _exchange(socket, "step", action)
                info = step["metadata"]
                result["reward"] += step["reward"]
                result["success"] = bool(info["info"].get("success", False))
                result["truncated"], done = info["truncated"], step["done"]
                message = {
                    "role": "assistant",
                    "content": action["message"],
                    **({"tool_calls": calls} if calls else {}),
                }
                messages = [*([] if info["new_context"] else [*messages, message]), *info["messages"]]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class EspalierEnvConfig(vf.EnvConfig):
    """Settings of the environment. The harness executes no code of the model, so it needs no container."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class EspalierEnv(vf.Env[EspalierEnvConfig]):
    """A single agent that plays a scenario."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play an episode."""
        await agents.agent.run(task)


def load_environment(url: str, tasks: int | None = None, **env: Any) -> Any:
    """Return the environment of verifiers for a served one. env: other settings of `EspalierEnvConfig`."""
    from verifiers.v1.utils import loaders

    taskset = {"id": ID, "url": url, "tasks": tasks}
    config = loaders.resolve_env_config({**env, "taskset": taskset})
    return loaders.load_environment(config)


def _data(url: str, start: dict[str, Any]) -> EspalierData:
    """Return the task of a reset."""
    messages = start["messages"]
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    prompt = "\n\n".join(message["content"] for message in messages if message["role"] != "system")
    return EspalierData(
        id=start["scenario"],
        name=start["scenario"],
        prompt=prompt or "(begin)",
        system_prompt=system or None,
        url=url,
        scenario=start["scenario"],
        type=start["type"],
        difficulty=start["difficulty"],
    )


def _json(response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise RuntimeError(f"{response.url}: HTTP {response.status_code}: {response.text[:500]}")
    return response.json()


async def _exchange(socket: Any, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    """Send a message and return the data of the response. Raises RuntimeError for an error of the server."""
    await socket.send_str(json.dumps({"type": kind, "data": data}))
    message = await socket.receive(timeout=TIMEOUT)
    if message.type != aiohttp.WSMsgType.TEXT:
        raise RuntimeError(f"the environment's server closed the connection at {kind}")
    response = json.loads(message.data)
    if response["type"] == "error":
        raise RuntimeError(f"the environment's server: {response['data']['message']} ({response['data']['code']})")
    return dict(response["data"])
