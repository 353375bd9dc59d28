"""Prompts from files or a Hugging Face dataset, answered in one message or with tools.

A row is a scenario. Its columns are the scenario's input, so that rewards can read them (`input.answer`, `input.tests`,
`input.schema`, `input.rubric`). The episode ends with a message without tool calls. With an answer column the
environment reports success; otherwise only the reward scores the episode.
"""

from __future__ import annotations

import functools
import string
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.aio import stoppable
from components.answer_text import NUMBER, boxed, last_line, last_number, same_number
from components.data.spec import Format, SourceSpec
from components.environments.dataset.columns import DatasetColumns, as_text, invalid
from components.environments.dataset.store import Sources, default_cache, stored
from components.environments.protocol import Messages, Step
from components.environments.tools import InvalidAction, ToolEnvironment, tool
from components.environments.worlds.calculator import evaluate, format_number
from components.environments.worlds.python_tool import run_code
from components.errors import SpecError
from components.sandbox import Limits, Sandbox
from components.sandbox.bubblewrap import check
from components.specs.marks import FILES, SERVER
from components.specs.registered import registered
from components.trajectories.schema import Scenario

HELDOUT_SHARE = 0.1
"""Default share of held-out rows, if there is one source."""
CODE_LIMITS = Limits(seconds=10, cpu_seconds=11, memory_mb=256, processes=16, disk_mb=16, output_bytes=2000)
TOLERANCE = 1e-6
"""Largest difference of equal numbers."""
IN_KEY = ("system", "answer_after", "success", "tools")
"""Arguments of stage keys, besides the content of the scenarios."""

Column = Annotated[str, Field(min_length=1)]


@registered("environment.dataset")
class Dataset(ToolEnvironment):
    """Prompts from files or a Hugging Face dataset.

    Scenario types and difficulties: columns of the dataset. The input of a scenario holds `prompt`, `answer` and
    `demonstration` if these columns are set, and the other columns under their own names.

    Args:
        path: File, folder, glob pattern or URI of the rows (JSONL, JSON, CSV, Parquet, Arrow, text), or a list of them.
        heldout_path: Files of the held-out rows; null takes them from `path`.
        dataset: Name of a dataset of the Hugging Face hub, in place of `path`.
        config: Configuration of `dataset`.
        revision: Commit, tag or branch of `dataset`.
        split: Split of `dataset`, or of the files of `path`, for training.
        heldout_split: Split for the held-out rows; null takes `heldout_path` or `heldout_share`.
        format: Format of the files; `auto` takes it from their names.
        heldout_share: Share of the rows that is held out, by a hash of the prompt; null takes 0.1 if neither
            `heldout_path` nor `heldout_split` is set.
        prompt: Column of the prompt: a text, or messages that end with the user's. null takes `prompt`, unless
            `template` is set.
        template: Prompt with `{column}` in it, in place of the column `prompt`; `{{` is a brace.
        system: System prompt, for prompts without a system message; empty for none.
        answer: Column of the right answer, or of a list of right answers.
        answer_after: Text after which the answer begins, in its column and in messages of the agent: "####".
        success: Comparison with the answer: `number`, the last number counts; `text`, the boxed text or the last line
            counts, regardless of case; `auto`, number if the answer is one, else text; null reports no success.
        demonstration: Column of a solution for `warmup=sft`: a text, or messages.
        fields: Other columns for the input; null takes all.
        type: Column of the scenario type.
        difficulty: Column of the difficulty: a whole number, or text that contains one.
        tools: Tools of the agent: `calculate` (exact arithmetic), `python` (code in the sandbox).
        duplicates: `refuse` equal prompts, or `drop` all but the first; a held-out prompt is dropped from training.
        cache: Folder of the stored scenarios; null takes a folder in the user's cache.
    """

    def __init__(
        self,
        path: Annotated[str | list[str] | None, FILES] = None,
        heldout_path: Annotated[str | list[str] | None, FILES] = None,
        dataset: Annotated[str | None, SERVER] = None,
        config: str | None = None,
        revision: str | None = None,
        split: str | None = None,
        heldout_split: str | None = None,
        format: Format = "auto",
        heldout_share: Annotated[float, Field(gt=0, lt=1)] | None = None,
        prompt: Column | None = None,
        template: Annotated[str, Field(min_length=1)] | None = None,
        system: str = "",
        answer: Column | None = None,
        answer_after: Annotated[str, Field(min_length=1)] | None = None,
        success: Literal["auto", "number", "text"] | None = "auto",
        demonstration: Column | None = None,
        fields: Sequence[Column] | None = None,
        type: Column | None = None,
        difficulty: Column | None = None,
        tools: Sequence[Literal["calculate", "python"]] = (),
        duplicates: Literal["refuse", "drop"] = "refuse",
        cache: Annotated[str | None, FILES] = None,
    ):
        source = {"path": path, "dataset": dataset, "config": config, "revision": revision, "split": split}
        sources = _sources({**source, "format": format}, heldout_path, heldout_split, heldout_share, duplicates)
        if prompt is None and template is None:
            prompt = "prompt"
        others = None if fields is None else tuple(fields)
        columns = DatasetColumns(
            prompt, template, answer, answer_after, demonstration, type, difficulty, others, success == "number"
        )
        columns.check()
        folder = Path(cache).expanduser() if cache else default_cache()
        self._stored = stored(sources, columns, folder)
        self.system, self.answer_after = system, answer_after
        self.success = success if answer is not None else None
        self.offered = tuple(tools)
        self.has_demonstrations = demonstration is not None
        self._sandbox = Sandbox(CODE_LIMITS)
        self._stop = threading.Event()

    @staticmethod
    def key_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that determine results: the scenarios by their content, without paths."""
        relevant = {name: value for name, value in arguments.items() if name in IN_KEY}
        return relevant | {"scenarios": Dataset(**arguments)._stored.digest}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return self._stored.splits.get(split, ())

    def tools(self) -> list[dict[str, Any]]:
        return [schema for schema in super().tools() if schema["function"]["name"] in self.offered]

    def reset(self, scenario: Scenario) -> Messages:
        super().reset(scenario)
        return self.prompt(scenario)

    def prompt(self, scenario: Scenario) -> Messages:
        """Return the messages with which an episode begins."""
        prompt = scenario.input["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        own_system = any(message["role"] == "system" for message in messages)
        return [*([{"role": "system", "content": self.system}] if self.system and not own_system else []), *messages]

    def begin(self, scenario: Scenario) -> str:
        if "python" in self.offered:
            check()
        self.cells: list[str] = []
        return ""  # `prompt` has the messages

    def step(self, action: dict[str, Any]) -> Step:
        """Execute one action; with Python in a thread, so that code does not block other episodes."""
        if "python" not in self.offered:
            return super().step(action)
        self._stop = threading.Event()
        return stoppable(functools.partial(super().step, action), self._stop)  # type: ignore[return-value]  # awaited

    @tool
    def calculate(
        self, expression: Annotated[str, "numbers, + - * / // % **, brackets, round, floor, ceil, abs, min, max"]
    ) -> str:
        """calculates exactly"""
        return format_number(evaluate(expression))

    @tool
    def python(self, code: Annotated[str, "a program; the value of its last line is shown, too"]) -> str:
        """runs Python code; variables stay from one call to the next"""
        result = run_code(self._sandbox, self.cells, code, self._stop)
        if result.kept:
            self.cells.append(code)
        return result.text

    def outcome(self, answer: str) -> dict[str, Any]:
        if self.success is None:
            return {}
        expected = self.scenario.input["answer"]
        alternatives = expected if isinstance(expected, list) else [expected]
        return {"success": any(self._right(answer, alternative) for alternative in alternatives)}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the demonstration of the row. Raises SpecError if it has none."""
        self.check_solutions([scenario])
        solution = scenario.input["demonstration"]
        return [{"role": "assistant", "content": solution}] if isinstance(solution, str) else solution

    def check_solutions(self, scenarios: Sequence[Scenario]) -> None:
        """Raise SpecError if a scenario has no demonstration."""
        missing = [scenario for scenario in scenarios if "demonstration" not in scenario.input]
        if not self.has_demonstrations:
            message = "null: there are no demonstrations for the warmup; expected a column, or warmup=none"
            raise SpecError.at("environment.demonstration", message)
        if missing:
            message = (
                f"{len(missing)} of {len(scenarios)} scenarios of the warmup have no demonstration, the first has the "
                f"prompt {str(missing[0].input['prompt'])[:60]!r}; remove these rows, or set warmup=none"
            )
            raise SpecError.at("environment.demonstration", message)

    def _run_tool(self, name: str, arguments: Any) -> str:
        if name not in self.offered:
            raise InvalidAction(f"no tool {str(name)[:80]}; there are {', '.join(self.offered) or 'none'}")
        return super()._run_tool(name, arguments)

    def _right(self, text: str, expected: Any) -> bool:
        """Return True if the final answer of a text is the expected one."""
        marked = self.answer_after is not None and self.answer_after in text
        final = text.rpartition(self.answer_after)[2] if self.answer_after is not None and marked else text
        if self.success == "number" or (self.success == "auto" and _is_number(expected)):
            number, right = last_number(final), last_number(as_text(expected))
            return number is not None and right is not None and same_number(number, right, TOLERANCE)
        return _plain(boxed(final) or (final if marked else last_line(final))) == _plain(as_text(expected))


def _sources(
    source: Mapping[str, Any],
    heldout_path: str | list[str] | None,
    heldout_split: str | None,
    share: float | None,
    duplicates: str,
) -> Sources:
    """Return the sources of both splits. Raises SpecError if they contradict each other."""
    if (source["path"] is None) == (source["dataset"] is None):
        raise invalid("path", "set path (files) or dataset (of the Hugging Face hub), exactly one of the two")
    for problem in SourceSpec.cross_problems(source):
        raise invalid(problem.path, problem.message)
    ways = {"heldout_path": heldout_path, "heldout_split": heldout_split, "heldout_share": share}
    chosen = [name for name, value in ways.items() if value is not None]
    if len(chosen) > 1:
        raise invalid(chosen[1], f"is set together with {chosen[0]}; set only one of the two")
    heldout = None
    if heldout_path is not None:
        heldout = SourceSpec(path=heldout_path, format=source["format"])
    elif heldout_split is not None:
        heldout = SourceSpec(**{**source, "split": heldout_split})
    key = chosen[0] if heldout is not None else "heldout_share"
    return Sources(SourceSpec(**source), heldout, key, share or HELDOUT_SHARE, duplicates == "drop")


def _is_number(value: Any) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool)
    return isinstance(value, str) and NUMBER.fullmatch(value.strip().strip("$%").strip()) is not None


def _plain(text: str) -> str:
    marks = string.whitespace + "*_`\"'$"
    return " ".join(text.lstrip(marks).rstrip(f"{marks}.").split()).casefold()
