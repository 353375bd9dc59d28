"""RL on the tools of an MCP server without tasks and without a reward of one's own.

    tools of the server ─▶ tasks by a language model ─▶ rounds: episodes ─▶ RULER ─▶ GRPO

The model `author` writes the tasks once (stage `generate`), and all later stages play these. The reward, the algorithm
and the other sections are those of the experiment; `conf/flow/mcp_rl.yaml` chooses RULER.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.environments.adapters.mcp import Mcp
from components.environments.tool_tasks import batches, heldout_places
from components.errors import Problem, SpecError
from components.rewards.llm.spec import JudgeModel
from flows.experiment.flow import recipe
from flows.experiment.spec import ExperimentSpec
from flows.recipes.run import Run
from flows.recipes.stage_calls import PolicyVersion

Difficulty = Annotated[int, Field(ge=1, le=5)]


@recipe("rounds", "early_stopping", "warmup", "replay", "fork", generates=True)
def mcp_rl(
    run: Run,
    spec: ExperimentSpec,
    *,
    author: JudgeModel,
    count: Annotated[int, Field(ge=2)] = 64,
    about: str = "",
    difficulties: Annotated[list[Difficulty], Field(min_length=1)] = [1, 2, 3, 4, 5],  # noqa: B006  never changed
) -> PolicyVersion:
    """Let a model write tasks for the tools of the environment's MCP server, then train on them in rounds.

    author: model that writes the tasks. count: number of tasks, which cycle through the difficulties; a fifth is held
    out. about: description of the world behind the tools, for the author. difficulties: from 1, one call of one tool,
    to 5, planning ahead."""
    _check(spec, author, count, difficulties)
    run.generate_tasks(author, count=count, about=about, difficulties=difficulties)
    policy, _ = run.warm_up(run.begin())
    for round in run.rounds(policy):
        round.train(round.gather())
    return run.policy


def _check(spec: ExperimentSpec, author: JudgeModel, count: int, difficulties: list[int]) -> None:
    """Raise SpecError for settings that exclude generated tasks, and for numbers of scenarios beyond those tasks."""
    problems = []
    if not issubclass(spec.required_environment.factory(), Mcp):  # type: ignore[arg-type]
        text = f"{spec.required_environment.target} is no MCP server; expected environment=mcp"
        problems.append(Problem("environment._target_", text))
    if author.asks_policy:
        text = "policy: it is the policy in training; expected another judge_model@flow.author, such as served"
        problems.append(Problem("flow.author.name", text))
    if spec.warmup is not None and spec.warmup.teacher is None:
        text = "generated tasks have no solutions to demonstrate; expected warmup=none or warmup=teacher"
        problems.append(Problem("warmup", text))
    heldout = sum(len(heldout_places(target)) for target in batches(count, difficulties))
    needed = {
        "collect.scenarios": (spec.collect.scenarios * (1 + spec.collect.refills), count - heldout, "train"),
        "evaluate.scenarios": (spec.evaluate.scenarios or 0, heldout, "held out"),
    }
    for key, (number, available, split) in needed.items():
        if number > available:
            text = f"{number} scenarios: of flow.count={count} tasks, {available} are {split}; raise flow.count"
            problems.append(Problem(key, text))
    if problems:
        raise SpecError(problems)
