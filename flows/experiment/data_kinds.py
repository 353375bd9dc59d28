"""Check of data of one's own against the training that reads it: preferences in place of demonstrations, the reverse,
or rows without what an algorithm learns from. The first rows decide before the first stage; the import counts all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from components.algorithms.spec import AlgorithmSpec
from components.data.examples import DataExample
from components.data.spec import DataSpec
from components.errors import Problem, SpecError
from components.filters.everything import Everything
from flows.experiment.data import resolve
from flows.experiment.sections import RewardModelPartSpec
from flows.experiment.spec import ExperimentSpec

NEEDED = {
    "choices": "preference pairs or ranked answers (two answers to one prompt, of which one is better)",
    "scores": "answers with a score, a thumb, or an accepted completion",
    "corrections": "accepted completions",
}
"""Data that an algorithm learns from, by `AlgorithmSpec.feedback_kinds`."""
OVERALL = "overall"
"""Head that learns the reward."""
PREFERENCES = "reward_model.data"
"""Key of the data that the reward model learns from."""


def check(spec: ExperimentSpec) -> None:
    """Raise SpecError for data that cannot be read, and for data of another kind than its training learns from, as far
    as the first rows show."""
    problems: list[Problem] = []
    if spec.data.is_set and (spec.flow.offline or spec.fork is None):
        problems += _offline(spec) if spec.flow.offline else _warmup(spec)
    if spec.reward_model is not None and spec.reward_model.data.is_set:
        problems += _preferences(spec.reward_model)
    if problems:
        raise SpecError(problems)


def learns_nothing(algorithm: AlgorithmSpec) -> Problem:
    """Return the problem of data without anything that the algorithm learns from."""
    needed = " or ".join(NEEDED[kind] for kind in algorithm.feedback_kinds)
    return Problem("data", f"algorithm={algorithm.name} learns nothing from this data; it needs {needed}")


def imitates_rejected(algorithm: AlgorithmSpec, rejected: float) -> Problem:
    """Return the problem of a filter that keeps rejected answers for an algorithm that imitates all of them."""
    return Problem(
        "filter",
        f"keeps {rejected:.0f} rejected answers, which algorithm={algorithm.name} would imitate; "
        "expected filter=successful, or an algorithm that learns from both, such as dpo or kto",
    )


def compares_nothing() -> Problem:
    """Return the problem of data in which the reward model finds no pair."""
    return Problem(
        PREFERENCES,
        "no prompt has answers of different scores, and the reward model learns which of two answers is better; "
        "expected preference pairs, ranked answers, or scored answers that share an id. Demonstrations belong in "
        "data.path",
    )


def _offline(spec: ExperimentSpec) -> Iterator[Problem]:
    _, examples = _first(spec.data, "data")
    if spec.algorithm.feedback_kinds == ("choices",) and not _comparable(examples):
        yield learns_nothing(spec.algorithm)
    rejected = sum((candidate.reward or 0.0) <= 0.5 for example in examples for candidate in example.candidates)
    if spec.algorithm.imitates and rejected and spec.filter.factory() is Everything:
        yield imitates_rejected(spec.algorithm, rejected)


def _warmup(spec: ExperimentSpec) -> Iterator[Problem]:
    form, examples = _first(spec.data, "data")
    separate = spec.reward_model is not None and spec.reward_model.data.is_set and spec.data.form == "auto"
    if separate and any(len(example.candidates) > 1 for example in examples):
        yield Problem(
            "data",
            f"form {form}: the warmup imitates demonstrations, and these rows compare answers; expected prompts with "
            f"completions, or conversations. Preferences belong in {PREFERENCES}.path; to imitate their best answers, "
            f"set data.form={form}",
        )


def _preferences(part: RewardModelPartSpec) -> Iterator[Problem]:
    form, examples = _first(part.data, PREFERENCES)
    if not part.algorithm.learns_turn_labels:
        if not _comparable(examples):
            yield compares_nothing()
        heads = set(part.algorithm.heads) - {OVERALL}
        named = {name for example in examples for candidate in example.candidates for name in candidate.components}
        if heads and not heads & named:
            yield Problem(
                "reward_model.algorithm.heads",
                f"{', '.join(sorted(heads))}: the first rows of {PREFERENCES} name no such head (column head: "
                f"{', '.join(sorted(named)) or 'none'}); expected one of these, or overall",
            )
    elif examples and not any(
        answer.step_labels or answer.step_rewards for row in examples for answer in row.candidates
    ):
        yield Problem(
            PREFERENCES,
            f"form {form}: a process reward model learns labels of steps, and these rows have none; expected rows of "
            "the form step_labels, or reward_model=bradley_terry",
        )


def _first(data: DataSpec, section: str) -> tuple[str, list[DataExample]]:
    """Return the form of the data and the examples of its first rows."""
    from components.data.form_resolution import first_examples

    resolved = resolve(data, section).spec
    return resolved.form, first_examples(resolved)


def _comparable(examples: Sequence[DataExample]) -> bool:
    """Return False if the rows hold one answer to a prompt each, and none names a scenario that others may share."""
    several = (len({candidate.reward for candidate in example.candidates}) > 1 for example in examples)
    return not examples or any(several) or any(example.shared_scenario() for example in examples)
