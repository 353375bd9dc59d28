"""Advice: the first rule that applies, with its command, composed and checked before it is shown."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from components.errors import Problem, SpecError
from flows.advice.rules import ADDITIONS, FEW, RULES, Rule
from flows.advice.situation import Situation


@dataclass(frozen=True)
class Advice:
    """Method for a situation."""

    method: str
    reason: str
    command: str
    """Command that trains with the method; it is valid as it stands."""
    notes: Sequence[str] = ()
    overrides: Sequence[str] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the advice as JSON data."""
        return {
            "method": self.method,
            "reason": self.reason,
            "command": self.command,
            "notes": list(self.notes),
            "overrides": list(self.overrides),
        }


def advise(situation: Situation, overrides: Sequence[str] = (), config_dir: str | None = None) -> Advice:
    """Return the advice for a situation. overrides: further ones of the user, which the command gets as well. Raises
    SpecError for contradictions, for a situation in which nothing can be learned, and if the command would not be
    valid."""
    if problems := situation.problems():
        raise SpecError(problems)
    rule = next((rule for rule in RULES if rule.applies(situation)), None)
    if rule is None:
        raise SpecError([_nothing_to_learn_from(situation)])
    additions = [addition for addition in ADDITIONS if addition.applies(situation, rule)]
    lines = [*_named(rule, situation, config_dir), *(line for addition in additions for line in addition.overrides)]
    lines += overrides
    _check(lines, config_dir)
    reason = " ".join([rule.reason, *(addition.reason for addition in additions)])
    words = ["python", "-m", "flows.run", *lines, *(["--config-dir", config_dir] if config_dir else [])]
    return Advice(rule.method, reason, shlex.join(words), _notes(situation, rule, lines), lines)


def _named(rule: Rule, situation: Situation, config_dir: str | None) -> list[str]:
    """Return the overrides of a rule with the name of the experiment, the environment and the warmup."""
    lines = list(rule.overrides(situation))
    if situation.environment is not None:
        lines = [f"environment={situation.environment}", *lines]
        if rule.warms_up and not _has_solver(situation.environment, config_dir):
            lines.append("warmup=none")
    if not any(line.startswith("+experiment=") for line in lines):
        name = "-".join(filter(str.isalnum, rule.method.lower().replace("+", " ").replace("-", " ").split()))
        lines = [f"name={name}", *lines]
    return lines


def _has_solver(environment: str, config_dir: str | None) -> bool:
    """Return True if the class of an option of `conf/environment` solves its own scenarios."""
    from components.specs import Target
    from flows.experiment.composer import Composer

    composer = Composer(config_dir)
    data, _ = composer.point(composer.parse([f"environment={environment}"])[0])
    target = ((data or {}).get("environment") or {}).get("_target_")
    if target is None:
        return True  # the check of the command names the environment as unknown
    return "solve" in dir(Target.model_validate({"_target_": target}).factory())


def _check(lines: Sequence[str], config_dir: str | None) -> None:
    """Raise SpecError if the command is not valid, with the remedy for a value that only the user knows."""
    from flows.experiment.compose import check

    try:
        check(lines, config_dir=config_dir, named=True)
    except SpecError as error:
        hint = "add it to flows.advise as key=value"
        problems = [Problem(item.path, f"{item.message}; {hint}", item.nearest) for item in error.problems]
        raise SpecError(problems) from None


def _nothing_to_learn_from(situation: Situation) -> Problem:
    """Return the reason why no rule applies."""
    if situation.environment is not None:
        return Problem(
            "--environment",
            f"{situation.environment} reports no success, and there is no judge; expected --judge yes, --success yes, "
            "or demonstrations or preferences",
        )
    if situation.teacher is not None or situation.judge is not None:
        return Problem(
            "--environment", "none: a teacher or a judge needs episodes; expected --environment NAME, or --labels N"
        )
    return Problem(
        "--labels",
        "0: there is nothing to learn from; expected demonstrations (--labels N), preferences (--preferences N), or an "
        "environment (--environment NAME)",
    )


def _notes(situation: Situation, rule: Rule, lines: Sequence[str]) -> list[str]:
    """Return what the user still has to do or to know."""
    notes = []
    if not rule.rounds and situation.data is None:
        notes.append("give your file as --data FILE to have its content checked")
    amounts = {"demonstrations": situation.labels, "preferences": situation.preferences}
    for name, amount in amounts.items():
        if 0 < amount < FEW and not rule.rounds:
            notes.append(f"{amount} {name} are few; expect overfitting below {FEW}")
    if any(line.startswith("store=s3://BUCKET") for line in lines):
        notes.append("replace s3://BUCKET/PREFIX by a store that all machines reach")
    if situation.judge is not None and any(line.startswith("judge_model@") for line in lines):
        notes.append("measure the judge before you train on it: python -m flows.calibrate with the same overrides")
    if rule.warms_up and "warmup=none" in lines:
        notes.append("the environment has no solver, so there is no warmup; use warmup=teacher with a larger model")
    return notes
