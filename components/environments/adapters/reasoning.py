"""Reasoning tasks of the package reasoning-gym: over a hundred families (arithmetic, algebra, logic, games, code),
each with a generator and a scorer of its own.

The agent is asked a question and answers it; with `attempts` above 1 a wrong answer is met with its score, and it may
answer again. Scores are the package's, from 0 to 1; success is a score of 1.

Questions are unique over both splits. Some scorers evaluate what they are given as Python or by sympy, and some count
as far as the answer says: answers are checked before they get there (`_harmless`), and what is not plainly a number, a
list or a short formula scores 0 unless it is the known answer itself.
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
from components.environments.scenario_counts import Count
from components.environments.tools import ToolEnvironment
from components.errors import Problem, SpecError
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = {
    "tags": "Solve the task. Think first if you need to, then write your final answer as <answer>...</answer>.",
    "plain": "Solve the task. Say nothing but the final answer.",
}
ANSWER = re.compile(r"<answer>(.*?)(?:(</answer>)|\Z)", re.DOTALL | re.IGNORECASE)
"""An answer up to the tag that closes it, or to the end: so no text is read again from each opening tag."""
LONGEST = 10_000
"""Characters of an answer; the longest right ones have some 2,000."""
MIXTURE = "composite"
"""The package's family that only mixes others."""
UNKNOWN = ("boxnet", "rush_hour")
"""Families whose right answers the package does not know, only how to judge one."""
ELSEWHERE = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}
"""Families that keep a right answer in their metadata, and under which name."""
LITERALS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
"""Their scorers evaluate an answer as Python."""
FORMULAS = {
    "countdown": (),
    "puzzle24": (),
    "polynomial_multiplication": None,
    "simple_integration": None,
    "intermediate_integration": None,
}
"""Their scorers evaluate an answer by sympy, which evaluates Python. The names that may occur; None: single letters
and FUNCTIONS."""
FUNCTIONS = ("sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "Abs", "pi", "E")
PLAIN_FORMULAS = ("countdown", "puzzle24", "polynomial_multiplication")
"""Of those, the ones whose scorers do not simplify what they are given, which takes long for large formulas."""
EXACT = ("game_of_life_halting",)
"""Their scorers take any answer for right; it is compared with the known one instead."""
COUNTED = ("rubiks_cube", "rush_hour")
"""Their scorers carry a move out as often as the number after it says."""

Weight = Annotated[float, Field(gt=0)]


@registered("environment.reasoning")
class ReasoningGym(ToolEnvironment):
    """tasks: families by name, mixed evenly, or with a weight each. difficulties: from 1 (the first level of the
    family's curriculum) to 5 (its last), mixed evenly; null: what the family does by default. config: arguments for
    families by name, over those of the level. attempts: answers that the agent may give. answer: `tags`, between
    <answer> and </answer> with anything before it; `plain`, the whole message. seed: of the generators.
    train, heldout: scenarios of the two splits.

    Scenario types: the families. Difficulty: 1 to 5 by the level, 0 where the family has no curriculum or
    difficulties is null.
    """

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

    def said(self, text: str) -> Messages:
        self.answers += 1
        answers = (answer for answer, closed in ANSWER.findall(text) if closed)
        found = list(answers) if self.answer == "tags" else [text]
        if found:
            self.score = self._scored(found[-1].strip())
            self.best = max(self.best, self.score)
            told = f"Not right: score {self.score:.2f} of 1."
        else:
            self.invalid_actions += 1
            told = "error: no <answer>...</answer> in your message."
        left = self.attempts - self.answers
        self.done = self.score == 1.0 or left == 0
        return [] if self.done else [{"role": "user", "content": f"{told} Answers left: {left}."}]

    def outcome(self, answer: str) -> dict[str, Any]:
        return {"success": self.score == 1.0, "progress": self.best, "answers": self.answers}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Raises SpecError for the families in UNKNOWN."""
        _, dataset, entry = self._entries[scenario.id]
        right = entry["answer"]
        if scenario.type in ELSEWHERE:
            right = entry["metadata"][ELSEWHERE[scenario.type]]
        if right is None or _score(dataset, entry, scenario.type, _text(right)) != 1.0:
            message = f"{scenario.type} does not know its answers; leave it out, or write warmup=none"
            raise SpecError([Problem("environment.tasks", message)])
        text = f"<answer>{_text(right)}</answer>" if self.answer == "tags" else _text(right)
        return [{"role": "assistant", "content": text}]

    def save(self) -> Any:
        return [self.answers, self.score, self.best, self.invalid_actions]

    def restore(self, scenario: Scenario, state: Any) -> None:
        self.reset(scenario)
        self.answers, self.score, self.best, self.invalid_actions = state

    def _scored(self, answer: str) -> float:
        _, dataset, entry = self._entries[self.scenario.id]
        return _score(dataset, entry, self.scenario.type, answer)


def families() -> list[str]:
    """All task families that can be played."""
    import_optional("reasoning_gym", "reasoning")
    return sorted(set(import_optional("reasoning_gym.factory", "reasoning").DATASETS) - {MIXTURE})


def _check(weights: Mapping[str, float], config: Mapping[str, dict[str, Any]]) -> None:
    known, problems = families(), []
    if not weights:
        problems.append(Problem("environment.tasks", "names no task family; expected at least one"))
    for name in weights:
        if name == MIXTURE:
            message = "composite is a mixture of other families; name those, with weights where you like"
            problems.append(Problem("environment.tasks", message))
        elif name not in known:
            message = f"reasoning-gym has no family {name!r}; it has {len(known)} (docs/environments/packages.md)"
            problems.append(Problem("environment.tasks", message, nearest(name, known)))
    for name in sorted(set(config) - set(weights)):
        problems.append(Problem(f"environment.config.{name}", "is not among the tasks", nearest(name, list(weights))))
    for name, arguments in config.items():
        for key in sorted({"seed", "size"} & set(arguments)):
            message = "follows from seed, train and heldout of the environment; leave it out"
            problems.append(Problem(f"environment.config.{name}.{key}", message))
    if problems:
        raise SpecError(problems)


_random_state = threading.Lock()


@functools.lru_cache(maxsize=4)  # a collector makes many environments of the same scenarios
def _generate(settings: str, seed: int, train: int, total: int) -> dict[str, tuple[Scenario, Any, dict[str, Any]]]:
    """By the scenario's id: the scenario, its family's dataset (the scorer), and the entry that it scores."""
    weights, difficulties, config = json.loads(settings)
    datasets: dict[tuple[str, int], tuple[Any, int]] = {}
    drawn: Counter[tuple[str, int]] = Counter()
    counts = dict.fromkeys(weights, 0)
    all_weights = sum(weights.values())
    questions: set[str] = set()
    found: dict[str, tuple[Scenario, Any, dict[str, Any]]] = {}
    # Heldout first: a larger train split then leaves it as it is.
    for number in range(total):
        split, at = ("heldout", number) if number < total - train else ("train", number - (total - train))
        if at == 0:
            counts = dict.fromkeys(weights, 0)
        task = max(weights, key=lambda name: weights[name] / all_weights * (at + 1) - counts[name])
        wished = difficulties[counts[task] % len(difficulties)] if difficulties else 0
        counts[task] += 1
        kind = (task, wished)
        if kind not in datasets:
            datasets[kind] = _dataset(task, wished, config.get(task, {}), seed, size=20 * total + 100)
        dataset, difficulty = datasets[kind]
        for _ in range(20 + total):
            index = drawn[kind]
            drawn[kind] += 1
            try:
                entry = _entry(dataset, index)
            except ValueError:  # a generator that found no task with what it drew
                continue
            if entry["question"] not in questions:
                break
        else:
            message = f"{task} has no more than {counts[task] - 1} different questions of this kind for {split}"
            raise SpecError([Problem("environment.tasks", f"{message}; ask for fewer, or add tasks or difficulties")])
        questions.add(entry["question"])
        name = f"{task}-{wished}-{seed}-{index}"
        scenario = Scenario(name, {"task": task, "question": entry["question"]}, split, task, difficulty)
        found[name] = (scenario, dataset, entry)
    return found


def _dataset(task: str, wished: int, config: dict[str, Any], seed: int, size: int) -> tuple[Any, int]:
    """A family at a difficulty, and the difficulty that this is: a curriculum may have fewer than five levels."""
    factory = import_optional("reasoning_gym.factory", "reasoning")
    number = int.from_bytes(hashlib.sha256(f"{seed} {task} {wished}".encode()).digest()[:4], "big") >> 1
    given: dict[str, Any] = {"seed": number, "size": size}
    difficulty = 0
    try:
        if wished and task in factory.CURRICULA:
            base = import_optional("reasoning_gym.coaching.base_curriculum", "reasoning")
            curriculum = factory.create_curriculum(task)
            last = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
            level = round((wished - 1) / 4 * last)
            difficulty = 1 + round(4 * level / last) if last else 1
            curriculum.set_global_level(level)
            context = base.DefaultCurriculumContext(base.RangeAttributeMode.UPPER_BOUND)
            given = vars(curriculum.generate_configuration(given, context))
        return factory.create_dataset(task, **{**given, **config}), difficulty
    except (AssertionError, TypeError, ValueError) as error:
        what = f"{task} does not take {config}: {error}" if config else f"{task} at difficulty {wished}: {error}"
        raise SpecError([Problem(f"environment.config.{task}", what)]) from error


def _entry(dataset: Any, index: int) -> dict[str, Any]:
    """One family draws from the global generator: it is seeded, and left as it was."""
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
    if answer != entry["answer"] and not _harmless(task, answer):
        return 0.0
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001  scorers stumble over answers of a form that they did not expect
        return 0.0
    return min(1.0, max(0.0, score)) if math.isfinite(score) else 0.0


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


def _harmless(task: str, answer: str) -> bool:
    """Whether the family's scorer may see it."""
    if len(answer) > LONGEST:
        return False
    if task in COUNTED:
        return re.search(r"\d{3}", answer) is None
    if task not in LITERALS and task not in FORMULAS:
        return True
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return task in LITERALS  # no expression, so nothing that could be evaluated
    if task in LITERALS:
        return _literal(tree)
    return len(answer) <= 4_000 and _degree(tree, FORMULAS[task]) <= (400 if task in PLAIN_FORMULAS else 30)


def _literal(tree: ast.expr) -> bool:
    if isinstance(tree, ast.List | ast.Tuple):
        return all(_literal(one) for one in tree.elts)
    return isinstance(tree, ast.Constant)


def _degree(tree: ast.AST, names: tuple[str, ...] | None) -> float:
    """How large the formula can grow when it is multiplied out; infinite for what is no plain formula."""
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
    """Its size: a small number or fraction; infinite for anything else."""
    match tree:
        case ast.Constant(value=int() | float() as value) if abs(value) <= 128:
            return abs(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _exponent(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as value)) if value:
            return _exponent(left)
    return math.inf
