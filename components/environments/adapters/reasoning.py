"""Reasoning tasks of the package reasoning-gym: over a hundred families (arithmetic, algebra, logic, games, code),
each with its own generator and scorer.

The agent answers a question. With `attempts` above 1, it sees the score of a wrong answer and may answer again. Scores
come from the package and range from 0 to 1; success is a score of 1.

Questions are unique across both splits. Some scorers evaluate answers as Python or with sympy, and some loop as often
as the answer says. Answers are therefore validated first (`_is_safe`): anything but a number, a list or a short formula
scores 0, unless it equals the reference answer.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import math
import random
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from components.environments.optional_packages import import_optional
from components.environments.protocol import Messages
from components.environments.restorable import RestorableState
from components.environments.seeded import Count
from components.errors import Problem, SpecError
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = {
    "tags": "Solve the task. Think first if you need to, then write your final answer as <answer>...</answer>.",
    "plain": "Solve the task. Say nothing but the final answer.",
}
ANSWER = re.compile(r"<answer>(.*?)(?:(</answer>)|\Z)", re.DOTALL | re.IGNORECASE)
"""Answer up to its closing tag or to the end of the text; so no text is scanned repeatedly for each opening tag."""
LONGEST = 10_000
"""Maximum length of an answer in characters; the longest correct ones have about 2,000."""
MIXTURE = "composite"
"""Family of the package that only mixes other families."""
WITHOUT_ANSWERS = ("boxnet", "rush_hour")
"""Families for which the package has a scorer but no reference answers."""
ANSWER_KEYS = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Metadata key of the reference answer, for families that store it in their metadata."""
LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Families whose scorers evaluate an answer as Python."""
FORMULAS = {
    "countdown": (),
    "puzzle24": (),
    "polynomial_multiplication": None,
    "simple_integration": None,
    "intermediate_integration": None,
}
"""Families whose scorers evaluate an answer with sympy, which evaluates Python, and the names that may occur in it;
None allows single letters and FUNCTIONS."""
FUNCTIONS = ("sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "Abs", "pi", "E")
PLAIN_FORMULAS = ("countdown", "puzzle24", "polynomial_multiplication")
"""Families of FORMULAS whose scorers do not simplify the answer; simplification is slow for large formulas."""
EXACT = ("game_of_life_halting",)
"""Families whose scorers accept any answer; it is compared with the reference answer instead."""
COUNTED = ("rubiks_cube", "rush_hour")
"""Families whose scorers repeat a move as often as the number after it says."""

Weight = Annotated[float, Field(gt=0)]


@registered("environment.reasoning")
class ReasoningGym(RestorableState):
    """A mix of reasoning-gym task families.

    Scenario types: the families. Difficulty: 1 to 5 by the level; 0 if the family has no curriculum or difficulties is
    null.

    Args:
        tasks: Names of families, in equal proportions, or a weight for each.
        difficulties: Difficulties from 1 (first level of the family's curriculum) to 5 (last level), in equal
            proportions; null takes the default of the family.
        config: Arguments of families by name; they override those of the level.
        attempts: Maximum number of answers.
        answer: Format of an answer: `tags`, text between <answer> and </answer>; `plain`, the whole message.
        seed: Seed of the generators.
        train, heldout: Number of scenarios of the split.
    """

    saved = ("answers", "score", "best")

    def __init__(
        self,
        tasks: Mapping[str, Weight] | Sequence[str] = ("chain_sum", "letter_counting", "calendar_arithmetic"),
        difficulties: Sequence[Annotated[int, Field(ge=1, le=5)]] | None = (1, 2, 3),
        config: Mapping[str, dict[str, Any]] | None = None,
        attempts: Annotated[int, Field(ge=1)] = 1,
        answer: Literal["tags", "plain"] = "tags",
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
    ):
        weights = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks, 1.0)
        config = dict(config or {})
        _check(weights, config)
        self.system = SYSTEM[answer]
        self.attempts, self.answer = attempts, answer
        self._entries = _generate(
            json.dumps([weights, difficulties or [], config], sort_keys=True), seed, train, train + heldout
        )

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return [scenario for scenario, _, _ in self._entries.values() if scenario.split == split]

    def begin(self, scenario: Scenario) -> str:
        self.answers, self.score, self.best = 0, 0.0, 0.0
        return str(scenario.input["question"])

    def on_message(self, text: str) -> Messages:
        self.answers += 1
        answers = (answer for answer, closed in ANSWER.findall(text) if closed)
        candidates = list(answers) if self.answer == "tags" else [text]
        if candidates:
            self.score = self._score(candidates[-1].strip())
            self.best = max(self.best, self.score)
            feedback = f"Not right: score {self.score:.2f} of 1."
        else:
            self.invalid_actions += 1
            feedback = "error: no <answer>...</answer> in your message."
        remaining = self.attempts - self.answers
        self.done = self.score == 1.0 or remaining == 0
        return [] if self.done else [{"role": "user", "content": f"{feedback} Answers left: {remaining}."}]

    def outcome(self, answer: str) -> dict[str, Any]:
        return {"success": self.score == 1.0, "progress": self.best, "answers": self.answers}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the reference answer. Raises SpecError for the families in WITHOUT_ANSWERS."""
        _, dataset, entry = self._entries[scenario.id]
        reference = entry["answer"]
        if scenario.type in ANSWER_KEYS:
            reference = entry["metadata"][ANSWER_KEYS[scenario.type]]
        if reference is None or _score(dataset, entry, scenario.type, _text(reference)) != 1.0:
            message = f"{scenario.type} has no reference answers; remove it, or set warmup=none"
            raise SpecError.at("environment.tasks", message)
        text = f"<answer>{_text(reference)}</answer>" if self.answer == "tags" else _text(reference)
        return [{"role": "assistant", "content": text}]

    def _score(self, answer: str) -> float:
        _, dataset, entry = self._entries[self.scenario.id]
        return _score(dataset, entry, self.scenario.type, answer)


def families() -> list[str]:
    """Return the names of all supported task families."""
    import_optional("reasoning_gym", "reasoning")
    return sorted(set(import_optional("reasoning_gym.factory", "reasoning").DATASETS) - {MIXTURE})


def _check(weights: Mapping[str, float], config: Mapping[str, dict[str, Any]]) -> None:
    names, problems = families(), []
    if not weights:
        problems.append(Problem("environment.tasks", "is empty; expected at least one task family"))
    for name in weights:
        if name == MIXTURE:
            message = "composite is a mixture of other families; list these instead, optionally with weights"
            problems.append(Problem("environment.tasks", message))
        elif name not in names:
            page = "docs/reference/environments/packages.md"
            message = f"reasoning-gym has no family {name!r}; it has {len(names)} ({page})"
            problems.append(Problem("environment.tasks", message, nearest(name, names)))
    for name in sorted(set(config) - set(weights)):
        message = "is not among the tasks; remove it (environment.config=null removes all), or add it to the tasks"
        problems.append(Problem(f"environment.config.{name}", message, nearest(name, list(weights))))
    for name, arguments in config.items():
        for key in sorted({"seed", "size"} & set(arguments)):
            message = "is set by seed, train and heldout of the environment; remove it"
            problems.append(Problem(f"environment.config.{name}.{key}", message))
    if problems:
        raise SpecError(problems)


_random_state = threading.Lock()


@functools.lru_cache(maxsize=4)  # a collector creates many environments with the same scenarios
def _generate(settings: str, seed: int, train: int, total: int) -> dict[str, tuple[Scenario, Any, dict[str, Any]]]:
    """Return (scenario, dataset of its family with the scorer, entry of the dataset) by scenario id."""
    weights, difficulties, config = json.loads(settings)
    datasets: dict[tuple[str, int], tuple[Any, int]] = {}
    drawn: Counter[tuple[str, int]] = Counter()
    counts = dict.fromkeys(weights, 0)
    total_weight = sum(weights.values())
    questions: set[str] = set()
    entries: dict[str, tuple[Scenario, Any, dict[str, Any]]] = {}
    # Held-out scenarios come first, so they do not depend on the size of the train split.
    for number in range(total):
        split, position = ("heldout", number) if number < total - train else ("train", number - (total - train))
        if position == 0:
            counts = dict.fromkeys(weights, 0)
        task = max(weights, key=lambda name: weights[name] / total_weight * (position + 1) - counts[name])
        requested = difficulties[counts[task] % len(difficulties)] if difficulties else 0
        counts[task] += 1
        kind = (task, requested)
        if kind not in datasets:
            datasets[kind] = _dataset(task, requested, config.get(task, {}), seed, size=20 * total + 100)
        dataset, difficulty = datasets[kind]
        for _ in range(20 + total):
            index = drawn[kind]
            drawn[kind] += 1
            try:
                entry = _entry(dataset, index)
            except ValueError:  # the generator found no task for this draw
                continue
            if entry["question"] not in questions:
                break
        else:
            message = f"{task} has only {counts[task] - 1} distinct questions of this difficulty for {split}"
            raise SpecError.at("environment.tasks", f"{message}; lower {split}, or add tasks or difficulties")
        questions.add(entry["question"])
        name = f"{task}-{requested}-{seed}-{index}"
        scenario = Scenario(name, {"task": task, "question": entry["question"]}, split, task, difficulty)
        entries[name] = (scenario, dataset, entry)
    return entries


def _dataset(task: str, requested: int, config: dict[str, Any], seed: int, size: int) -> tuple[Any, int]:
    """Return the dataset of a family at a difficulty, and its actual difficulty.

    They may differ because a curriculum may have fewer than five levels.
    """
    factory = import_optional("reasoning_gym.factory", "reasoning")
    number = int.from_bytes(hashlib.sha256(f"{seed} {task} {requested}".encode()).digest()[:4], "big") >> 1
    arguments: dict[str, Any] = {"seed": number, "size": size}
    difficulty = 0
    try:
        if requested and task in factory.CURRICULA:
            base = import_optional("reasoning_gym.coaching.base_curriculum", "reasoning")
            curriculum = factory.create_curriculum(task)
            last = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
            level = round((requested - 1) / 4 * last)
            difficulty = 1 + round(4 * level / last) if last else 1
            curriculum.set_global_level(level)
            context = base.DefaultCurriculumContext(base.RangeAttributeMode.UPPER_BOUND)
            arguments = vars(curriculum.generate_configuration(arguments, context))
        return factory.create_dataset(task, **{**arguments, **config}), difficulty
    except (AssertionError, TypeError, ValueError) as error:
        message = (
            f"{task} does not accept {config}: {error}" if config else f"{task} at difficulty {requested}: {error}"
        )
        raise SpecError.at(f"environment.config.{task}", message) from error


def _entry(dataset: Any, index: int) -> dict[str, Any]:
    """Return an entry. One family uses the global random generator, so it is seeded here and restored."""
    with _random_state:
        state = random.getstate()
        random.seed(dataset.seed + index)
        try:
            return dict(dataset[index])
        finally:
            random.setstate(state)


def _score(dataset: Any, entry: dict[str, Any], task: str, answer: str) -> float:
    if task in EXACT:
        return float(answer.strip().lower() == str(entry["answer"]).lower())
    if answer != entry["answer"] and not _is_safe(task, answer):
        return 0.0
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  scorers fail on answers of an unexpected form
        return 0.0
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


def _is_safe(task: str, answer: str) -> bool:
    """Return True if the answer is safe to pass to the scorer of the family."""
    if len(answer) > LONGEST:
        return False
    if task in COUNTED:
        return re.search(r"\d{3}", answer) is None
    if task not in LITERALS and task not in FORMULAS:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return task in LITERALS  # not an expression, so nothing is evaluated
    if task in LITERALS:
        return _is_literal(tree)
    return len(answer) <= 4_000 and _degree(tree, FORMULAS[task]) <= (400 if task in PLAIN_FORMULAS else 30)


def _is_literal(tree: ast.expr) -> bool:
    if isinstance(tree, ast.List | ast.Tuple):
        return all(_is_literal(element) for element in tree.elts)
    return isinstance(tree, ast.Constant)


def _degree(tree: ast.AST, names: tuple[str, ...] | None) -> float:
    """Return a bound on the size of the expanded formula; infinity if it is not a plain formula."""
    match tree:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return 1 if abs(value) < 1e120 else math.inf
        case ast.Name(id=name) if names is None and (name in FUNCTIONS or len(name) == 1):
            return 1
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _degree(operand, names)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_degree(left, names), _degree(right, names))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _degree(left, names) + _degree(right, names)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _degree(left, names) * max(1.0, _exponent(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if names is None and name in FUNCTIONS:
            return 4 * _degree(argument, names)
    return math.inf


def _exponent(tree: ast.AST) -> float:
    """Return the size of an exponent that is a small number or fraction; infinity for anything else."""
    match tree:
        case ast.Constant(value=int() | float() as value) if abs(value) <= 128:
            return abs(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as value)) if value:
            return _exponent(left)
    return math.inf
