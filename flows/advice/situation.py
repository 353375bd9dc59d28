"""Situation of a user: data, environment, judge and machines to train with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from components.errors import Problem, SpecError

Form = Literal["pairs", "thumbs", "ranked"]
"""Form of preferences: a better and a worse answer, one answer marked good or bad, or several answers in order."""
Goal = Literal["simple", "regularized", "reasoning", "self-improvement"]
"""Property of a method that matters most: fewest models and settings, bounded distance from the reference policy,
rewards of single steps, or learning from the policy's own selected attempts."""
PREFERENCES: dict[str, Form] = {"preference": "pairs", "thumbs": "thumbs", "ranking": "ranked"}
"""Forms of preferences, by the form of the data."""
DEMONSTRATIONS = ("messages", "sharegpt", "agenttraj", "prompt_completion", "steps", "trajectories")
"""Forms of data that hold demonstrations."""
JUDGE = "openai/gpt-5-mini"
"""Judge model of an advice that names none."""


@dataclass(frozen=True)
class Situation:
    """Data, environment, judge and machines that a user has."""

    labels: int = 0
    """Number of demonstrations: conversations or answers to imitate."""
    preferences: int = 0
    """Number of preferences."""
    form: Form | None = None
    """Form of the preferences; None without preferences."""
    environment: str | None = None
    """Option of `conf/environment`, or `mcp` for the tools of an MCP server; None without an environment."""
    success: bool = True
    """True if the environment reports whether an episode succeeded."""
    judge: str | None = None
    """`PROVIDER/MODEL` that can judge episodes; None without a judge."""
    teacher: str | None = None
    """Larger model of the hub, or its folder, to learn from; None without one."""
    sparse: bool = False
    """True if episodes are long and success is rare."""
    slow: bool = False
    """True if collecting episodes takes about as long as training on them."""
    tight: bool = False
    """True if the model hardly fits the GPU memory."""
    goal: Goal | None = None
    compute: Literal["cpu", "gpu", "cluster"] = "cpu"
    data: str | None = None
    """File with the demonstrations, the preferences, or prompts and their answers."""
    columns: tuple[str, str] | None = None
    """Columns of prompt and answer in `data`, if it has the tasks of `environment=dataset`."""
    solves: bool = True
    """True if the environment has solutions of its scenarios; `advise` looks it up."""
    restores: bool = True
    """True if the environment can continue from any point of an episode; `advise` looks it up."""

    tasks: bool = False
    """True if the user has tasks for the tools of an MCP server (`environment.scenarios`); `advise` looks it up."""

    @property
    def preferred(self) -> bool:
        """True if there are preferences."""
        return self.preferences > 0

    @property
    def compared(self) -> bool:
        """True if preferences compare answers with each other."""
        return self.form in ("pairs", "ranked")

    def problems(self) -> list[Problem]:
        """Return the contradictions."""
        problems = []
        for name in ("labels", "preferences"):
            if getattr(self, name) < 0:
                problems.append(Problem(f"--{name}", f"is {getattr(self, name)}; expected 0 or more"))
        if self.preferred and self.form is None:
            problems.append(Problem("--preferences", "have no form; expected --pairs, --thumbs or --ranked"))
        if self.form is not None and not self.preferred:
            problems.append(Problem(f"--{self.form}", "needs the number of preferences; expected --preferences N"))
        if self.sparse and self.environment is None:
            problems.append(Problem("--sparse", "is about an environment; expected --environment NAME"))
        if self.goal is not None and self.goal not in get_args(Goal):
            problems.append(Problem("--goal", f"is {self.goal!r}; expected one of {', '.join(get_args(Goal))}"))
        if self.goal == "regularized" and not self.compared:
            problems.append(
                Problem(
                    "--goal", "regularized: IPO learns from comparisons; expected --preferences N --pairs or --ranked"
                )
            )
        if self.goal == "reasoning" and (self.environment is None or not self.success):
            text = "reasoning: R3 labels a step by the success of continuations from it"
            problems.append(Problem("--goal", f"{text}; expected --environment NAME --success yes"))
        if self.goal == "self-improvement" and self.environment is None:
            text = "self-improvement: the policy attempts the tasks of an environment; expected --environment NAME"
            problems.append(Problem("--goal", text))
        return problems


def with_data(answers: dict[str, Any], path: str | None) -> dict[str, Any]:
    """Return the answers, completed by the content of a file: its form, and the number of its rows. Answers stay as
    they are. Raises SpecError or ResourceError for data that cannot be read, that has no known form, or a form that no
    method here learns from."""
    if path is None:
        return answers
    from components.data.form_resolution import resolve_form
    from components.data.sources import rows
    from components.data.spec import DataSpec

    spec = DataSpec(path=path)
    try:
        name = resolve_form(spec)
    except SpecError as error:
        raise SpecError([Problem("--data", problem.message, problem.nearest) for problem in error.problems]) from None
    count = sum(1 for _ in rows(spec, lambda broken: None))
    if name in PREFERENCES:
        return {"preferences": count, "form": PREFERENCES[name], **answers, "data": path}
    if name in DEMONSTRATIONS:
        return {"labels": count, **answers, "data": path}
    if name == "ground_truth":
        columns = _columns(name, next(rows(spec, lambda broken: None)).values)
        return {"environment": "dataset", **answers, "data": path, "columns": columns}
    expected = ", ".join([*DEMONSTRATIONS, *PREFERENCES, "ground_truth"])
    raise SpecError([Problem("--data", f"{path} has the form {name}; expected one of {expected}")])


def _columns(form: str, values: dict[str, Any]) -> tuple[str, str]:
    """Return the names of the columns of prompt and answer in a row."""
    from components.data.forms import FORMS

    prompt, answer = (next(name for name in names if name in values) for names in FORMS[form].columns.values())
    return prompt, answer
