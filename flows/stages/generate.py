"""Generate stage: a language model writes tasks for the tools of an MCP server.

Valid answers of the model are cached (`components.rewards.llm.cache`), so an interrupted generation resumes without
paying for a task twice.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from components.artifacts import Draft
from components.environments.protocol import Messages
from components.environments.tool_tasks import AT_ONCE, DIFFICULTIES, batches, parse_tasks, write_tasks
from components.errors import BudgetExceeded, EnvironmentFailed, JudgeError, ResourceError
from components.models.spec import ModelSpec
from components.rewards.llm.spec import JudgeModel
from components.rewards.spec import JudgeSpec
from components.specs import Target
from flows.stages.base import Context, Inputs, Stage, StageSpec

if TYPE_CHECKING:
    from components.rewards.llm.client import JudgeClient

TASKS = "tasks"
"""Kind of the artifact, and name of the input of the stages that play the tasks."""
FILE = "tasks.json"
SERVER = ("command", "url", "tools")
"""Arguments of the environment that determine the tools."""
PROMPT_TOKENS, TASK_TOKENS = 3000, 100
"""Assumed tokens of a request, with the tools and the tasks that exist, and of a written task, for estimated costs."""

S = TypeVar("S", bound=StageSpec)


class GenerateStage(StageSpec):
    environment: Target
    """MCP server; only what determines its tools is part of the key."""
    author: JudgeModel
    """Model that writes the tasks."""
    count: int = Field(ge=2)
    """Number of tasks, which cycle through the difficulties."""
    about: str = ""
    """Description of the world behind the tools."""
    difficulties: list[Annotated[int, Field(ge=1, le=len(DIFFICULTIES))]] = Field(min_length=1)
    model: ModelSpec
    """Policy model, whose device a local author uses; not part of the key."""
    judge: JudgeSpec = JudgeSpec()
    """Budget; not part of the key."""

    def key_part(self) -> dict[str, Any]:
        server = self.environment.resolved()
        return {
            "server": {name: server.get(name) for name in SERVER},
            "author": self.author.key_part() | {"price": None},
            **self.model_dump(mode="json", include={"count", "about", "difficulties"}),
        }

    def generation_cost(self) -> float | None:
        requests = sum(-(-target // AT_ONCE) for target in batches(self.count, self.difficulties))
        return self.author.estimated_cost(requests * PROMPT_TOKENS, self.count * TASK_TOKENS)


class _ClientAuthor:
    """Author that asks a judge model. Only answers with tasks are cached."""

    def __init__(self, client: JudgeClient):
        self._client = client
        self.model = client.name

    async def ask(self, messages: Messages, *, seed: int, max_tokens: int, temperature: float = 0.0) -> str:
        answer = await self._client.ask(messages, repeat=seed)
        if parse_tasks(answer.text):
            self._client.keep(answer)
        return answer.text


def generate(spec: GenerateStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `tasks.json`. Raises ResourceError for a server that does not start, and for an author that is unreachable
    or writes no usable tasks; SpecError for a server without tools; BudgetExceeded."""
    from components.rewards.llm.budget import Meter
    from components.rewards.llm.client import JudgeClient
    from flows.stages.judge import model_resources

    meter = Meter(spec.judge.budget)
    tools = asyncio.run(_tools(spec.environment))
    context.progress(0, spec.count)
    try:
        client = JudgeClient(spec.author, model_resources(meter, context, spec.model, None, None))
        try:
            tasks = asyncio.run(_write(spec, client, tools))
        finally:
            client.close()
    except BudgetExceeded:
        raise
    except (EnvironmentFailed, JudgeError, ResourceError) as error:
        raise ResourceError(author_message(str(error))) from None
    context.progress(len(tasks), spec.count)
    (draft.path / FILE).write_text(json.dumps(tasks, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    splits = Counter(task["split"] for task in tasks)
    counts = {"tasks": float(len(tasks)), "train": float(splits["train"]), "heldout": float(splits["heldout"])}
    unpriced = {"unpriced_calls": float(meter.unpriced)} if meter.unpriced else {}
    figures = {"spent": meter.spent, "calls": float(meter.calls), "kept_answers": float(meter.cached)}
    return {**counts, "tools": float(len(tools)), **figures, **unpriced}


def author_message(text: str) -> str:
    """Return the message of an error of the author's model, with its configuration key."""
    text = text.replace("reward.model", "flow.author")
    return text if text.startswith("flow.author") else f"flow.author: {text}"


async def _tools(environment: Target) -> list[dict[str, Any]]:
    """Return the tools of the server. Raises ResourceError if it does not start or fails."""
    instance = environment.build()
    try:
        return list(await instance.tools())
    except EnvironmentFailed as error:
        key = "url" if environment.arguments.get("url") else "command"
        raise ResourceError(f"environment.{key}: {error}; expected an MCP server that lists its tools") from None
    finally:
        await instance.close()


async def _write(spec: GenerateStage, client: JudgeClient, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    author = _ClientAuthor(client)
    return await write_tasks(author, tools, count=spec.count, about=spec.about, difficulties=spec.difficulties)


def with_tasks(spec: S, inputs: Inputs) -> S:
    """Return the spec of a stage that plays episodes, whose environment reads the generated tasks, if there are any."""
    if TASKS not in inputs:
        return spec
    environment = spec.environment.with_arguments(scenarios=str(inputs[TASKS].path / FILE))  # type: ignore[attr-defined]
    return spec.model_copy(update={"environment": environment})


STAGE = Stage(
    "generate",
    1,
    GenerateStage,
    TASKS,
    1,
    generate,
    files={FILE: "tasks with difficulty, criteria and split"},
    order=6,
    unit="tasks",
    lineage="input",
    summary=lambda metrics: "  ".join(
        f"{name} {metrics[name]:g}" for name in ("tools", "train", "heldout", "spent") if name in metrics
    ),
)
