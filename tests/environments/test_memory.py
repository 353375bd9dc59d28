"""Memory: every session begins a new context, only the memory leads to the answer, and not everything fits into it."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from components.environments.tools import call
from components.environments.worlds.memory import LEVELS, MOST_CHARACTERS, NAMES, Memory
from tests.environments import checks

DONE = {"role": "assistant", "content": "done"}


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


def of(memory: Memory, difficulty: int, kind: str = ""):
    return next(
        scenario
        for scenario in memory.scenarios("train")
        if scenario.difficulty == difficulty and kind in ("", scenario.type)
    )


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def result(step) -> str:
    (message,) = step.observation
    return message["content"]


def contexts(memory: Memory, scenario, actions) -> list[str]:
    """Return the text of each context in an episode, without the agent's own actions."""
    texts = ["\n".join(message["content"] for message in memory.reset(scenario))]
    for action in actions:
        step = memory.step(action)
        text = "\n".join(message["content"] for message in step.observation)
        texts = [*texts, text] if step.new_context else [*texts[:-1], f"{texts[-1]}\n{text}"]
    return texts


def test_the_solver_answers_every_question_within_ten_turns(subtests):
    for seed in [0, 1]:
        with subtests.test(seed=seed):
            memory = Memory(seed)
            for split in checks.SPLITS:
                for scenario in memory.scenarios(split):
                    assert checks.solved(memory, scenario)
                    assert len(memory.solve(scenario)) <= 10


def test_the_context_of_the_question_holds_no_number(memory):
    """The solution without its `read`: nothing that the agent then sees has a number."""
    for scenario in memory.scenarios("heldout"):
        *_, question = contexts(memory, scenario, memory.solve(scenario)[:-2])
        assert scenario.input["asked"] in question
        assert not re.search("[0-9]", question)


def test_a_session_shows_its_own_sentences_only(memory):
    scenario = of(memory, 5)
    *sessions, _ = contexts(memory, scenario, memory.solve(scenario)[:-2])
    assert len(sessions) == LEVELS[5].sessions
    for text, own in zip(sessions, scenario.input["sessions"], strict=True):
        others = {sentence for sentences in scenario.input["sessions"] for sentence in sentences} - set(own)
        assert all(sentence in text for sentence in own)
        assert not any(sentence in text for sentence in others)


def test_without_the_memory_the_answer_is_a_guess():
    """A policy that remembers nothing, and one that reads a memory in which it wrote nothing."""
    scenarios = Memory(train=600, heldout=1).scenarios("train")
    memory = Memory(train=600, heldout=1)

    def guess(draw, _):
        return said(str(draw.randrange(10, 100)))

    def read_and_guess(draw, messages):
        asked = re.search(r"What is the number of (\w+)\?$", messages[-1]["content"])
        return call("read", {"key": asked[1]}) if asked else guess(draw, messages)

    for policy in (guess, read_and_guess):
        assert checks.success_of(memory, scenarios, policy, turns=10) < 0.04


def test_an_update_replaces_the_number(memory):
    for difficulty in (3, 5):
        scenario = of(memory, difficulty, "updated")
        asked = [
            number for facts in scenario.input["facts"] for name, number in facts if name == scenario.input["asked"]
        ]
        assert len(asked) == 2
        assert scenario.input["answer"] == asked[1]
        *actions, _ = memory.solve(scenario)
        assert not checks.play(memory, scenario, [*actions, said(asked[0])])[-1].info["success"]


def test_only_the_important_facts_fit_into_the_memory():
    """A policy that writes every fact of every session loses important ones."""
    memory = Memory(train=200, heldout=1, difficulties=[4, 5])

    def write_all(draw, messages):
        text = next(message["content"] for message in reversed(messages) if message["role"] == "user")
        if asked := re.search(r"What is the number of (\w+)\?$", text):
            last = messages[-1]
            return said(last["content"]) if last["role"] == "tool" else call("read", {"key": asked[1]})
        facts = re.findall(r"The number of (\w+) is (\d+)", text)
        after = messages[messages.index({"role": "user", "content": text}) :]
        written = sum(message["role"] == "tool" for message in after)
        return call("write", dict(zip(("key", "value"), facts[written], strict=True))) if written < len(facts) else DONE

    assert checks.success_of(memory, memory.scenarios("train"), write_all, turns=30) < 0.7
    fitting = Memory(train=60, heldout=1, difficulties=[1, 2, 3])
    assert checks.success_of(fitting, fitting.scenarios("train"), write_all, turns=30) == 1


def test_difficulties(memory):
    for scenario in memory.scenarios("train"):
        level, task = LEVELS[scenario.difficulty], scenario.input
        facts = [fact for facts in task["facts"] for fact in facts]
        askable = level.important or level.facts
        assert len({name for name, _ in facts}) == task["entries"] == askable
        assert len(facts) == askable + level.updates
        assert sum(map(len, task["sessions"])) == level.facts + level.updates + level.distractors
        assert sum("Important: " in sentence for sentences in task["sessions"] for sentence in sentences) == (
            len(facts) if level.important else 0
        )
        numbers = re.findall("[0-9]+", " ".join(sentence for sentences in task["sessions"] for sentence in sentences))
        assert len(set(numbers)) == len(numbers)
    types = Counter((scenario.difficulty, scenario.type) for scenario in memory.scenarios("train"))
    assert {level for level, kind in types if kind == "updated"} == {3, 5}
    assert {level for level, kind in types if kind == "stated"} == {1, 2, 3, 4, 5}
    assert max(map(len, NAMES)) <= MOST_CHARACTERS


def test_the_tools(memory):
    memory.reset(of(memory, 1))
    assert result(memory.step(call("list", {}))) == "none"
    assert result(memory.step(call("write", {"key": "Ana", "value": "1"}))) == "kept"
    assert result(memory.step(call("write", {"key": " Ben ", "value": "2"}))) == "kept"
    assert result(memory.step(call("list", {}))) == "Ana, Ben"
    assert result(memory.step(call("write", {"key": "Ana", "value": "3"}))) == "kept"
    assert result(memory.step(call("write", {"key": "Eva", "value": "4"}))) == "kept, Ben is lost"
    assert result(memory.step(call("read", {"key": "Ana"}))) == "3"
    assert result(memory.step(call("read", {"key": "Ben"}))) == "error: no such key"
    assert memory.step(call("list", {})).info == {
        "success": False, "progress": 0.0, "stored": False, "entries": 2, "invalid_actions": 1,
    }  # fmt: skip


def test_an_entry_is_too_short_for_several_facts(memory, subtests):
    for key, value in [("", "1"), ("  ", "1"), ("a", ""), ("a" * 13, "1"), ("a", "1" * 13)]:
        with subtests.test(key=key):
            memory.reset(of(memory, 1))
            text = result(memory.step(call("write", {"key": key, "value": value})))
            assert re.fullmatch(r"error: the (key|value) has \d+ characters; 1 to 12 fit", text)
            assert memory.memory == {}


def test_the_answer_is_the_only_number_of_the_last_message(memory):
    scenario = of(memory, 1)
    right, (*actions, _) = scenario.input["answer"], memory.solve(scenario)
    for text in (right, f" {right}.", f"{scenario.input['asked']} has {right}."):
        assert checks.play(memory, scenario, [*actions, said(text)])[-1].info["success"]
    for text in ("", "done", f"{right} or 11", f"{right}0", f"1{right}", " ".join(map(str, range(10, 100)))):
        step = checks.play(memory, scenario, [*actions, said(text)])[-1]
        assert step.done
        assert (step.info["success"], step.info["progress"], step.info["stored"]) == (False, 0.5, True)


def test_an_answer_in_an_earlier_session_ends_that_session_only(memory):
    scenario = of(memory, 1)
    first = checks.play(memory, scenario, [said(scenario.input["answer"])])[-1]
    assert (first.done, first.new_context, first.info["success"]) == (False, True, False)


def test_more_scenarios_than_tasks_are_not_needed():
    assert len(Memory(train=20_000, heldout=1000, difficulties=[1]).scenarios("train")) == 20_000
