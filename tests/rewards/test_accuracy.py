"""Accuracy rewards: places of answers, comparisons, and unscored episodes if a comparison is impossible."""

from __future__ import annotations

import math

import pytest

from components.answer_text import last_number
from components.errors import SpecError
from components.rewards import judge as judging
from components.rewards.rules.accuracy import Choice, Exact, Numeric
from components.rewards.rules.answers import AnswerReader, agent_messages, field, last_text
from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory
from tests.trajectories.builders import episode, talk


def judged(reward, *trajectories):
    return list(judging.judge(reward, trajectories))


def asked(answer, text, **more):
    """Return an episode whose scenario has an answer, and that ends with a text."""
    return Trajectory(
        "s/0", Scenario("s", {"answer": answer}, "train"), 0, [talk("Question?", text)], outcome={"given": text}, **more
    )


def reward_of(rule, answer, text):
    (score,) = judged(rule, asked(answer, text))
    return score.reward


class TestWhereTheAnswerIs:
    def test_it_is_read_from_there(self):
        cases = {
            ("text", "  Paris \n"): "Paris",
            ("text", "   "): None,
            ("tag:answer", "<think>no <answer>x</answer></think><answer> 42\n</answer> end"): "42",
            ("tag:answer", "<answer>open"): None,
            ("tag:answer", "</answer><answer>"): None,
            ("boxed", r"so \boxed{1} and \boxed{\frac{1}{2}}."): r"\frac{1}{2}",
            ("boxed", r"\boxed{open"): None,
            ("boxed", "none"): None,
            ("line", "Let me think.\n\nAnswer: 7\n\n"): "7",
            ("line", "work\n#### 1,234"): "1,234",
            ("line", "**Final answer:** Rome"): "Rome",
            ("outcome.given", "as it is"): "as it is",
            ("outcome.lacking", "as it is"): None,
        }
        assert {(where, text): AnswerReader(where).of(asked("", text)) for where, text in cases} == cases

    def test_from_the_last_call_of_a_tool_wherever_it_was(self):
        calls = [ToolCall("0", "submit", '{"answer": "one"}'), ToolCall("1", "submit", '{"answer": [1, 2]}')]
        history = History([Message("user", "?"), *(Message("assistant", "", [call]) for call in calls)])
        history.messages.append(Message("assistant", "done"))
        sample = episode(histories=[history])
        assert AnswerReader("call:submit.answer").of(sample) == "[1, 2]"
        assert AnswerReader("call:submit.other").of(sample) is None
        assert AnswerReader("call:send.answer").of(sample) is None
        calls[1] = ToolCall("1", "submit", "[" * 100_000)
        history.messages[2] = Message("assistant", "", [calls[1]])
        assert AnswerReader("call:submit.answer").of(sample) is None

    def test_of_several_histories_the_last_one_of_the_agent_that_began_counts(self):
        sample = episode(histories=[talk("a", "first"), talk("w", "worker", agent="worker"), talk("b", "last")])
        assert last_text(sample) == "last"

    def test_messages_that_a_later_history_repeats_are_read_once(self):
        first, again = talk("q", "one"), talk("q", "one", "more", "two")
        assert [message.content for message in agent_messages(episode(histories=[first, again]))] == ["one", "two"]
        for history, spans in ((first, [None, (1, 2)]), (again, [None, None, None, (3, 4)])):
            for message, span in zip(history.messages, spans, strict=True):
                message.span = span
        assert [message.content for message in agent_messages(episode(histories=[first, again]))] == ["one", "two"]

    def test_a_place_that_there_is_not_is_refused(self, subtests):
        for where in ["", "tag:", "tag:a b", "call:submit", "outcome.", "last", "tag", "call:.x"]:
            with (
                subtests.test(where=where),
                pytest.raises(SpecError, match=r"reward\.answer: .* is no place of an answer; expected text, messages"),
            ):
                Exact(where)


class TestWhatWasExpected:
    def test_it_is_a_field_of_the_episode(self):
        sample = Trajectory(
            "s/0",
            Scenario("s", {"answer": 1, "both": "in"}, "train", type="t"),
            0,
            [],
            outcome={"gold": 2, "both": "out"},
            metrics={"turns": 3.0},
        )
        collected = [
            field(sample, path) for path in ("answer", "gold", "both", "input.both", "outcome.both", "metrics.turns")
        ]
        assert collected == [1, 2, "in", "in", "out", 3.0]
        assert field(sample, "scenario.type") == "t"
        assert field(sample, "success") is False

    def test_where_it_is_lacking_the_episode_is_unscored_and_told_what_there_is(self):
        (score,) = judged(Exact(expected="input.solution"), asked("x", "x"))
        assert score.reward is None
        assert score.failure.message == "there is no 'input.solution' in the episode's input; it has answer"

    def test_a_field_of_nothing_is_refused(self):
        with pytest.raises(SpecError, match=r"reward\.expected"):
            Exact(expected="scenario.answer")


class TestExact:
    def test_what_does_not_count_is_taken_out_of_both(self, subtests):
        for options, given, right in [
            ({}, "  paris\t FRANCE ", True),
            ({"case": True}, "paris france", False),
            ({"space": True}, "Paris  France", False),
            ({}, "Paris, France", False),
            ({"punctuation": False}, "Paris, France!", True),
            ({}, "Paris France.", False),
        ]:
            with subtests.test(given=given):
                assert reward_of(Exact(**options), "Paris France", given) == float(right)

    def test_punctuation_of_a_number_always_counts(self, subtests):
        for expected, given in [
            ("5", "-5"),
            ("3.14", "314"),
            ("12", "1/2"),
            ("50", "50%"),
            ("5", ".5"),
            ("3,14", "314"),
            ("202407", "2024-07"),
        ]:
            with subtests.test(expected=expected, given=given):
                assert reward_of(Exact(punctuation=False), expected, given) == 0.0
                assert reward_of(Exact(punctuation=False), given, f"({given}).") == 1.0

    def test_thousands_separators_are_punctuation(self):
        assert reward_of(Exact(punctuation=False), "1234567", "1,234,567") == 1.0

    def test_composed_and_decomposed_letters_are_the_same(self):
        assert reward_of(Exact(case=True, space=True), "caf\u00e9", "cafe\u0301") == 1.0

    def test_of_several_right_answers_one_is_enough(self):
        assert reward_of(Exact(), ["four", 4], "4") == 1.0
        assert reward_of(Exact(), ["four", 4], "5") == 0.0

    def test_what_is_wrong_says_why(self):
        (score,) = judged(Exact(), asked("Rome", "Paris"))
        assert (score.reward, score.explanation) == (0.0, "Paris is not Rome")
        (score,) = judged(Exact("boxed"), asked("Rome", "Rome"))
        assert (score.reward, score.explanation) == (0.0, "no answer, expected Rome")


class TestNumeric:
    def test_tolerances_are_those_of_the_formula(self, subtests):
        for absolute, relative in [(0.5, 0.0), (0.0, 0.01), (0.5, 0.01)]:
            for given in [99.0, 99.4, 99.5, 100.0, 100.5, 100.51, 101.0, 101.2, 102.0, -100.0]:
                with subtests.test(given=given, absolute=absolute, relative=relative):
                    right = abs(given - 100.0) <= max(absolute, relative * 100.0)
                    assert reward_of(Numeric(absolute=absolute, relative=relative), 100, f"It is {given}.") == float(
                        right
                    )

    def test_a_relative_tolerance_is_of_what_was_expected(self):
        assert reward_of(Numeric(absolute=0, relative=0.5), 100, "150") == 1.0
        assert reward_of(Numeric(absolute=0, relative=0.5), 150, "100") == 1.0
        assert reward_of(Numeric(absolute=0, relative=0.5), 100, "151") == 0.0

    def test_the_last_number_of_a_text(self):
        cases = {
            "42": 42.0,
            "x = 1,234,567.50 euros": 1234567.5,
            "-3.5e2": -350.0,
            "\u22127": -7.0,
            "from 3-5": None,
            "12,34": None,
            "x7 and v1.7 of 2024-07 at 3:45": None,
            "1,2,3,4,5,6,7": None,
            "1, 2, 3": 3.0,
            "It is 5 (of 2024-07).": 5.0,
            "3/4": 0.75,
            "1/0": None,
            "50%": 0.5,
            r"50 \%": 0.5,
            "Answer:42km/h": 42.0,
            "_-7_.": -7.0,
            ".5": 0.5,
            "first 1 then 2.": 2.0,
            "none": None,
            "": None,
            "9" * 5000: math.inf,
        }
        assert {text: last_number(text) for text in cases} == cases

    def test_only_refuses_several_numbers(self):
        cases = {
            "It is 7.": 1.0,
            "7 or 8": 0.0,
            "8, so 7": 0.0,
            "x7": 0.0,
        }
        assert {text: reward_of(Numeric(number="only"), 7, text) for text in cases} == cases

    def test_a_percent_sign_may_be_left_out_on_one_side(self):
        cases = {
            ("25", "25%"): 1.0,
            (0.25, "25 %"): 1.0,
            ("25%", "25"): 1.0,
            ("25%", "0.25"): 1.0,
            ("25%", "25%"): 1.0,
            ("25%", "0.25%"): 0.0,
            ("0.25%", "25%"): 0.0,
            ("2500", "25%"): 0.0,
            ("25", "0.25"): 0.0,
        }
        assert {(expected, text): reward_of(Numeric(), expected, text) for expected, text in cases} == cases

    def test_expected_may_be_text_with_a_number(self):
        assert reward_of(Numeric(), "thus #### 1,200", "1200") == 1.0

    def test_what_was_expected_and_is_no_number_leaves_the_episode_unscored(self, subtests):
        for expected in ["none", True, math.nan, {}]:
            with subtests.test(expected=expected):
                (score,) = judged(Numeric(), asked(expected, "3"))
                assert score.reward is None
                assert "is no number" in score.failure.message


class TestChoice:
    def test_a_letter_counts_where_it_is_written_as_a_choice(self):
        cases = {
            "B": "B",
            "(b)": "B",
            "**C**": "C",
            "B) Paris": "B",
            "d. because": "D",
            "The answer is D.": "D",
            "Answer: E": "E",
            "I thought (A) at first, but it is (C)": "C",
            "A dog ate it": None,
            "Answer: a's": None,
            "F": None,
            "": None,
        }
        assert {text: Choice().chosen(text) for text in cases} == cases

    def test_expected_is_a_letter_or_a_place(self):
        assert reward_of(Choice(), "c", "(C)") == 1.0
        assert reward_of(Choice(), 2, "(C)") == 1.0
        assert reward_of(Choice(), 1, "(C)") == 0.0

    def test_what_was_expected_and_is_no_choice_leaves_the_episode_unscored(self, subtests):
        for expected in ["F", 7, -1, "AB", True, 1.0]:
            with subtests.test(expected=expected):
                (score,) = judged(Choice(), asked(expected, "A"))
                assert score.reward is None
                assert "none of the choices ABCDE" in score.failure.message

    def test_choices_that_are_none_are_refused(self, subtests):
        for choices in ["A", "AA", "aA", "A,B", ""]:
            with subtests.test(choices=choices), pytest.raises(SpecError, match=r"reward\.choices"):
                Choice(choices=choices)
