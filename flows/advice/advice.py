"""Advice: the first rule that applies, with its command, composed and checked before it is shown."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.errors import Problem, SpecError
from flows.advice.rules import ADDITIONS, FEW, FILE, RULES, MethodRule
from flows.advice.situation import JUDGE, Situation


@dataclass(frozen=True)
class Advice:
    """Method for a situation."""

    method: str
    reason: str
    command: str
    """Command that trains with the method; it is valid as it stands."""
    needs: Mapping[str, str | None]
    """Needs besides the policy, by name; None for what the method does not need."""
    costs: Mapping[str, int]
    """Costs, by name (`flows.advice.needs.requirements`)."""
    notes: Sequence[str] = ()
    overrides: Sequence[str] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the advice as JSON data."""
        return {
            "method": self.method,
            "reason": self.reason,
            "command": self.command,
            "needs": dict(self.needs),
            "costs": dict(self.costs),
            "notes": list(self.notes),
            "overrides": list(self.overrides),
        }


def advise(situation: Situation, overrides: Sequence[str] = (), config_dir: str | None = None) -> Advice:
    """Return the advice for a situation. overrides: further ones of the user, which the command gets as well. Raises
    SpecError for contradictions, for a situation in which nothing can be learned, and if the command would not be
    valid."""
    if problems := situation.problems():
        raise SpecError(problems)
    tasks = any(line.startswith("environment.scenarios=") for line in overrides)
    situation = replace(_looked_up(situation, overrides, config_dir), tasks=tasks)
    rule = next((rule for rule in RULES if rule.applies(situation)), None)
    if rule is None:
        raise SpecError([_nothing_to_learn_from(situation)])
    additions = [addition for addition in ADDITIONS if addition.applies(situation, rule)]
    lines = [*_named(rule, situation), *(line for addition in additions for line in addition.overrides), *overrides]
    preparation = None
    if MCP_RL in lines:
        lines = lines if servers(overrides) else [*lines, SERVER]
    elif situation.environment == "mcp" and not tasks:
        preparation, lines = with_generated_tasks(lines)
    needs, costs = _checked(lines, config_dir)
    warm = "warmup=none" not in lines
    sentences = [rule.reason, *([rule.warmup_reason] if warm and rule.warmup_reason else [])]
    reason = " ".join([*sentences, *(addition.reason for addition in additions)])
    words = ["python", "-m", "flows.run", *lines, *(["--config-dir", config_dir] if config_dir else [])]
    command = shlex.join(words) if preparation is None else f"{shlex.join(preparation)} && {shlex.join(words)}"
    method = rule.method if warm else rule.without_warmup
    return Advice(method, reason, command, needs, costs, _notes(situation, rule, lines), lines)


def _looked_up(situation: Situation, overrides: Sequence[str], config_dir: str | None) -> Situation:
    """Return the situation with what the class of its environment can do, composed with the user's overrides, such as
    `allow`."""
    if situation.environment is None:
        return situation
    from components.specs.component_path import locate
    from flows.experiment.composer import Composer

    composer = Composer(config_dir)
    data, _ = composer.point(composer.parse([f"environment={situation.environment}", *overrides])[0])
    data = data or {}
    factory = locate((data.get("environment") or {}).get("_target_"), data.get("allow") or ())[1]
    methods = dir(factory)
    return replace(situation, solves="solve" in methods, restores={"save", "restore"} <= set(methods))


def _named(rule: MethodRule, situation: Situation) -> list[str]:
    """Return the overrides of a rule with the name of the experiment, the environment and the warmup."""
    lines = list(rule.overrides(situation))
    if situation.environment is not None and MCP_RL not in lines:
        lines = [f"environment={situation.environment}", *lines]
        lines += _tasks(situation)
        if rule.warms_up and situation.labels:
            lines.append(f"data.path={situation.data or FILE}")
        elif not rule.warms_up or not situation.solves or situation.environment in ("mcp", "dataset"):
            lines.append("warmup=none")
    if any(line.startswith("+experiment=") for line in lines):
        return lines
    method = rule.without_warmup if "warmup=none" in lines else rule.method
    return [f"name={'-'.join(re.findall('[a-z0-9]+', method.lower()))}", *lines]


def _tasks(situation: Situation) -> list[str]:
    """Return the overrides of `environment=dataset`: its file and its columns."""
    if situation.columns is None:
        return []
    prompt, answer = situation.columns
    path = f"environment.path={situation.data}"
    return [path, f"environment.prompt={prompt}", f"environment.answer={answer}"]


def _checked(lines: Sequence[str], config_dir: str | None) -> tuple[dict[str, str | None], dict[str, int]]:
    """Return needs and costs of the command. Raises SpecError if it is not valid, with the remedy for a value that only
    the user knows. Files that do not exist yet are represented by examples."""
    from flows.advice.needs import requirements
    from flows.experiment.compose import check

    try:
        with tempfile.TemporaryDirectory() as folder:
            tasks, rows = Path(folder) / TASKS, Path(folder) / "rows.jsonl"
            tasks.write_text(json.dumps([{"task": f"Task {n}", "criteria": "done"} for n in range(GENERATED)]))
            rows.write_text("".join(f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(GENERATED)))
            examples = {TASKS: str(tasks), FILE: str(rows)}
            split = [line.partition("=") for line in lines]
            composed = [f"{key}{equals}{examples.get(value, value)}" for key, equals, value in split]
            return requirements(check(composed, config_dir=config_dir, named=True)[0])
    except SpecError as error:
        raise SpecError([_with_remedy(problem) for problem in error.problems]) from None


def _with_remedy(problem: Problem) -> Problem:
    if "needs a value" not in problem.message:
        return problem
    message = f"{problem.message}; add it to the command, as in flows.advise --environment NAME {problem.path}=VALUE"
    return Problem(problem.path, message, problem.nearest)


def _nothing_to_learn_from(situation: Situation) -> Problem:
    """Return the reason why no rule applies."""
    if situation.environment is not None:
        return Problem(
            "--environment",
            f"{situation.environment} reports no success, and there is no judge; expected --judge yes, --success yes, "
            "or demonstrations or preferences",
        )
    return Problem(
        "--environment", "none: a teacher or a judge needs episodes; expected --environment NAME, or --labels N"
    )


def _notes(situation: Situation, rule: MethodRule, lines: Sequence[str]) -> list[str]:
    """Return what the user still has to do or to know."""
    notes = []
    if f"data.path={FILE}" in lines:
        notes.append(f"replace {FILE} by your data, or give it as --data FILE to have its content recognized")
    if f"environment.path={FILE}" in lines:
        notes.append(f"replace {FILE} by some questions with the columns prompt and answer")
        notes.append("environment.system=TEXT holds the instructions and the solved examples")
        notes.append("inference=litellm inference.model=PROVIDER/MODEL prompts a larger model of a provider")
    elif not rule.rounds and situation.environment is None:
        notes.append("environment=NAME adds held-out success in an environment that tests what you train for")
    amounts = {"demonstrations": situation.labels, "preferences": situation.preferences}
    if situation.labels and not rule.rounds and situation.preferred:
        notes.append("imitate your demonstrations first (+experiment=sft), and start from that run: fork=sft")
    if rule.method == "SFT + R3" and not situation.restores:
        notes.append(
            "the environment cannot save its state, so continuations replay actions: it must repeat its results"
        )
    for name, amount in amounts.items():
        if 0 < amount < FEW and not rule.rounds:
            notes.append(f"{amount} {name} are few; expect overfitting below {FEW}")
    if any(line.startswith("store=s3://BUCKET") for line in lines):
        notes.append("replace s3://BUCKET/PREFIX by a store that all machines reach")
    if situation.judge is not None and any(line.startswith("judge_model@") for line in lines):
        notes.append(
            "measure the judge before you train on it: python -m flows.explain calibrate with the same overrides"
        )
    if rule.warms_up and ("warmup=none" in lines or MCP_RL in lines):
        notes.append("the environment has no solver for a warmup; warmup=teacher imitates a larger model's episodes")
    if SERVER in lines:
        notes.append("replace my_server.py by your MCP server, or set environment.url=URL in place of the command")
    if MCP_RL in lines:
        notes.append(
            "read the tasks that the model wrote (artifact of the stage generate), and shape them with flow.about"
        )
        notes.append("python -m flows.plan with the same overrides estimates the cost of the model")
    if any(line.endswith(TASKS) for line in lines):
        notes.append(f"read and correct {TASKS} before the training")
    return notes


TASKS = "tasks.json"
"""File of the tasks."""
GENERATED = 64
"""Number of tasks."""
SERVER = "environment.command=[python,my_server.py]"
"""Override that names the server, if the user does not."""


MCP_RL = "+experiment=mcp_rl"
"""Override of the experiment that writes the tasks itself."""


def servers(lines: Sequence[str]) -> list[str]:
    """Return the overrides that name the server."""
    return [line for line in lines if line.startswith(("environment.command=", "environment.url="))]


def with_generated_tasks(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the command that writes the tasks, and the overrides of the run that reads them."""
    named = servers(lines)
    server = named[-1] if named else SERVER
    key, _, value = server.partition("=")
    author = ["--author", JUDGE.partition("/")[2], "--author-url", "https://api.openai.com/v1"]
    author += ["--key-variable", "OPENAI_API_KEY"]
    words = [word.strip() for word in value.strip("[]").split(",")]
    address = ["--url", value] if key.endswith("url") else ["--", *words]
    writer = ["python", "-m", "flows.environment", "scenarios", "--out", TASKS, "--count", str(GENERATED)]
    return [*writer, *author, *address], [*lines, *([] if named else [server]), f"environment.scenarios={TASKS}"]
