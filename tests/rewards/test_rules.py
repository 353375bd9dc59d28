"""Reward rules, against their formulas, on adversarial text."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest

from components.errors import ResourceError, SpecError
from components.rewards import judge as judging
from components.rewards.answer_worker import AnswerWorker
from components.rewards.rules import mathematics
from components.rewards.rules.answer_format import Matches, Tags
from components.rewards.rules.costs import Costs
from components.rewards.rules.json_schema import JsonSchema
from components.rewards.rules.language import Language
from components.rewards.rules.length import Length, Steps
from components.rewards.rules.outcome import Outcome
from components.rewards.rules.repetition import Repetition
from components.rewards.rules.tool_use import Calls, ToolUse
from components.trajectories.schema import History, Message, Scenario, Score, ToolCall, Trajectory
from tests.trajectories.builders import episode, talk


def judged(reward, *trajectories):
    return list(judging.judge(reward, trajectories))


def of(reward, text, **scenario):
    """Return the score of an episode that ends with a text."""
    sample = Trajectory("s/0", Scenario("s", scenario, "train"), 0, [talk("Question?", text)])
    return judged(reward, sample)[0]


class TestMatches:
    def test_it_searches_or_matches_the_whole(self):
        assert of(Matches(r"\d+"), "I have 3.").reward == 1.0
        assert of(Matches(r"\d+", whole=True), "I have 3.").reward == 0.0
        assert of(Matches(r"\d+", "tag:n", whole=True), "I <n>33</n>.").reward == 1.0
        assert of(Matches(r"\d+", "boxed"), "33").explanation == "no answer"

    def test_a_content_rule_reads_every_message_of_the_agent_and_no_other(self):
        sample = Trajectory(
            "s/0", Scenario("s", {}, "train"), 0, [talk("a bad question", "bad", "a bad reply", "good")]
        )
        for answer, expected in (("messages", 1.0), ("text", 0.0)):
            assert judged(Matches(r"(?m)^bad$", answer), sample)[0].reward == expected
        assert judged(Matches("question|reply", "messages"), sample)[0].reward == 0.0

    def test_a_pattern_that_backtracks_without_end_holds_nothing_up(self):
        score = of(Matches(r"(a+)+$|(a|a)+b", whole=True, seconds=0.2), "a" * 5000 + "!")
        assert score.reward == 0.0
        assert "was not done after 0.2 s; make it backtrack less" in score.explanation

    def test_what_is_no_pattern_is_refused(self, subtests):
        for pattern in ["(", "[a", "*", "(?P<a>x)(?P<b", "a{99999999999999999999}"]:
            with (
                subtests.test(pattern=pattern),
                pytest.raises(SpecError, match=r"reward\.pattern: .* is no regular expression"),
            ):
                Matches(pattern)


class TestTags:
    def test_each_once_in_order_and_nothing_else(self, subtests):
        for text, why in [
            ("<think>a</think>\n <answer>b</answer>\n", ""),
            ("<think>a</think>", "<answer> is missing, not closed, or not in its place"),
            ("<answer>b</answer><think>a</think>", "text before <think>"),
            ("Well. <think>a</think><answer>b</answer>", "text before <think>"),
            ("<think>a</think> so <answer>b</answer>", "text before <answer>"),
            ("<think>a</think><answer>b</answer> bye", "text after the last tag"),
            ("<think> </think><answer>b</answer>", "<think> is empty"),
            ("<think>a <answer>x</answer></think><answer>b</answer>", "<answer> inside of <think>"),
            ("<think>a</think><answer>b</answer><answer>c</answer>", "text after the last tag"),
            ("", "<think> is missing, not closed, or not in its place"),
        ]:
            with subtests.test(text=text):
                score = of(Tags(["think", "answer"]), text)
                assert (score.reward, score.explanation) == (float(not why), why)

    def test_the_reasoning_of_a_message_is_what_it_thinks(self):
        sample = Trajectory("s/0", Scenario("s", {}, "train"), 0, [talk("Question?", "<answer>b</answer>")])
        assert judged(Tags(["think", "answer"]), sample)[0].reward == 0.0
        sample.histories[0].messages[-1].reasoning = "a"
        assert judged(Tags(["think", "answer"]), sample)[0].reward == 1.0
        assert judged(Tags(["answer"]), sample)[0].reward == 1.0
        sample.histories[0].messages[-1] = Message("assistant", "", reasoning="never ends", finish_reason="length")
        assert judged(Tags(["think"]), sample)[0].explanation == "<think> is missing, not closed, or not in its place"
        sample.histories[0].messages[-1].finish_reason = "stop"
        assert judged(Tags(["think"]), sample)[0].reward == 1.0

    def test_empty_ones_may_be_allowed(self):
        assert of(Tags(["think"], filled=False), "<think></think>").reward == 1.0

    def test_of_all_messages_it_is_the_share(self):
        sample = episode(histories=[talk("q", "<a>1</a>", "more", "2", "more", "<a>3</a>", "more", "4")])
        assert judged(Tags(["a"], of="all"), sample)[0].reward == 0.5

    def test_what_is_no_tag_is_refused(self, subtests):
        for tags in [["a b"], ["<a>"], ["a", "a"]]:
            with subtests.test(tags=tags), pytest.raises(SpecError, match=r"reward\.tags"):
                Tags(tags)


def counted(tokens=None, turns=2.0, success=True):
    sample = episode(success=success, turns=turns)
    if tokens is not None:
        sample.metrics["sampled_tokens"] = tokens
    return sample


class TestLength:
    def test_it_is_the_formula(self, subtests):
        for success in [True, False]:
            for tokens in [1.0, 99.0, 100.0, 101.0, 350.0]:
                with subtests.test(tokens=tokens, success=success):
                    (score,) = judged(Length(Outcome(), alpha=0.01, target=100), counted(tokens, success=success))
                    penalty = 0.01 * max(0, tokens - 100)
                    assert score.reward == pytest.approx(float(success) - penalty)
                    assert score.components == pytest.approx(
                        {"task": float(success), "task/success": float(success), "length": -penalty}
                    )

    def test_alone_it_is_the_penalty(self):
        assert judged(Length(alpha=0.5, target=2), counted(6.0))[0].reward == -2.0

    def test_tokens_that_nobody_counted_leave_the_episode_unscored(self):
        (score,) = judged(Length(Outcome()), counted())
        assert score.failure.message == "there is no 'metrics.sampled_tokens' in the episode's metrics; it has turns"

    def test_an_engine_that_does_not_say_its_tokens_is_told_of(self):
        for rule in (Length(), Repetition()):
            assert "with inference=remote: tokens=true" in judged(rule, counted(0.0))[0].failure.message

    def test_a_demonstration_was_not_sampled_and_costs_nothing(self):
        sample = episode()
        sample.policy = "solver"
        assert judged(Length(alpha=1.0, target=0), sample)[0].reward == 0.0
        assert judged(Repetition(), sample)[0].reward == 0.0


class TestSteps:
    def test_it_is_the_formula(self, subtests):
        for turns in [0.0, 1.0, 7.0]:
            with subtests.test(turns=turns):
                (score,) = judged(Steps(Outcome(), beta=0.25), counted(turns=turns))
                assert score.reward == 1.0 + 0.25 * turns
                assert score.components["steps"] == 0.25 * turns

    def test_steps_may_be_what_a_pattern_finds_and_have_a_limit(self):
        text = "Step 1: a\nStep 2: b\nand Step 3: c\nStep 4"
        assert of(Steps(beta=1.0, pattern=r"(?m)^Step \d+"), text).reward == 3.0
        assert of(Steps(beta=1.0, pattern=r"(?m)^Step \d+", most=2), text).reward == 2.0

    def test_what_it_adds_falls_to_the_last_step(self):
        task = lambda sample: Score(sample.id, 1.0, step_rewards=[0.5, 0.5])  # noqa: E731
        (score,) = judged(Steps(task, beta=0.25), counted(turns=2.0))
        assert score.step_rewards == [0.5, 1.0]


class TestRepetition:
    def tokens(self, *ids):
        message = Message("assistant", "x", span=(1, 1 + len(ids)))
        sample = episode(histories=[History([Message("user", "q"), message], [0, *ids], [0.0] * (1 + len(ids)))])
        sample.metrics["sampled_tokens"] = float(len(ids))
        return sample

    def test_it_costs_the_share_of_what_was_said_before(self):
        # Bigrams of 1 2 1 2 1: 12 21 12 21, two of four are new.
        (score,) = judged(Repetition(cost=0.5, ngram=2), self.tokens(1, 2, 1, 2, 1))
        assert (score.reward, score.components) == (-0.25, {"share": 0.5})

    def test_without_sampled_tokens_it_is_unscored(self):
        assert "no 'metrics.sampled_tokens'" in judged(Repetition(), episode())[0].failure.message


class TestLanguage:
    def test_letters_outside_of_the_scripts_cost(self, subtests):
        for scripts, text, share in [
            (["Latin"], "Only Latin: naïve, Straße, 42 × 3!", 0.0),
            (["Latin"], "ab где", 3 / 5),
            (["Cyrillic"], "ab где", 2 / 5),
            (["Latin", "Cyrillic"], "ab где", 0.0),
            (["Latin"], "答案 is 4", 2 / 4),
            (["Han", "Hiragana", "Katakana"], "答えはカメ", 0.0),
            (["Arabic"], "مرحبا ok", 2 / 7),
            (["Latin"], "123 + 4 = 127 😀", 0.0),
            (["Latin"], "µ ª", 0.0),  # a sign of no script, and one that is Latin
            (["Latin"], "", 0.0),
        ]:
            with subtests.test(scripts=scripts, text=text):
                score = of(Language(scripts, cost=2.0), text)
                assert score.reward == pytest.approx(-2.0 * share)
                assert score.components == pytest.approx({"share": share})

    def test_it_reads_all_messages_or_the_last_one(self):
        sample = episode(histories=[talk("где", "abc", "q", "где")])
        assert judged(Language(["Latin"]), sample)[0].reward == -0.5
        assert judged(Language(["Latin"], of="last"), sample)[0].reward == -1.0

    def test_what_is_no_script_is_refused(self, subtests):
        for script in ["Latn1", "", "Latin}", "English", "Latin}\\p{L"]:
            with (
                subtests.test(script=script),
                pytest.raises(SpecError, match=r"reward\.scripts: .* is no script of Unicode"),
            ):
                Language([script])


def called(*calls, needed=None):
    """Return an episode with calls: name, arguments, result."""
    messages = [Message("user", "Do it.")]
    for name, arguments, answer in calls:
        messages.append(Message("assistant", "", [ToolCall("call_0", name, arguments)]))
        if answer is not None:
            messages.append(Message("tool", answer, tool_call_id="call_0"))
    inputs = {} if needed is None else {"needed": needed}
    return Trajectory("s/0", Scenario("s", inputs, "train"), 0, [History(messages)])


FIND, SEND = ("find", '{"id": 1}', "found"), ("send", "{}", "sent")


class TestToolUse:
    def test_it_is_the_formula(self, subtests):
        for needed in [None, 0, 1, 2, 5]:
            for calls, counts in [
                ([], (0, 0, 0)),
                ([FIND, SEND], (2, 0, 0)),
                ([FIND, FIND, SEND], (3, 1, 0)),
                ([FIND, ("find", '{ "id":1 }', "found")], (2, 1, 0)),
                ([FIND, ("find", '{"id": 1}', "now there are two")], (2, 0, 0)),
                ([("find", "{}", "error: no such order"), SEND], (2, 0, 1)),
                ([("find", "[", "Error: no JSON"), ("find", "[", "Error: no JSON")], (2, 1, 2)),
                ([FIND, ("send", "{}", None)], (2, 0, 0)),
            ]:
                with subtests.test(calls=calls, counts=counts, needed=needed):
                    reward = ToolUse(needed=None if needed is None else "input.needed")
                    (score,) = judged(reward, called(*calls, needed=needed))
                    assert tuple(score.components[name] for name in ("calls", "repeated", "failed")) == counts
                    wasted = {(2, 1, 2): 2}.get(counts, counts[1] + counts[2])
                    useful = counts[0] - wasted
                    most = max(counts[0], useful if needed is None else needed)
                    without_calls = float(needed == 0)  # unknown needs: the episode did not succeed
                    assert score.reward == pytest.approx(
                        min(useful, useful if needed is None else needed) / most if most else without_calls
                    )

    def test_an_episode_that_succeeds_without_a_call_needed_none(self):
        succeeded, failed = (replace(called(needed=None), outcome={"success": success}) for success in (True, False))
        assert [score.reward for score in judged(ToolUse(), succeeded, failed)] == [1.0, 0.0]

    def test_a_list_is_as_many_calls(self):
        assert judged(ToolUse("needed"), called(FIND, needed=["find", "send"]))[0].reward == 0.5

    def test_what_is_no_count_leaves_the_episode_unscored(self, subtests):
        for needed in ["two", -1, True, float("nan")]:
            with subtests.test(needed=needed):
                (score,) = judged(ToolUse("needed"), called(FIND, needed=needed))
                assert "expected a number of calls" in score.failure.message

    def test_calls_can_be_counted_by_tool_and_by_argument(self):
        sample = called(FIND, SEND, ("delete", '{"path": "/etc"}', "gone"))
        assert judged(Calls(), sample)[0].reward == 3.0
        assert judged(Calls(["find", "delete"]), sample)[0].reward == 2.0
        assert judged(Calls(pattern=r"^delete .*/etc"), sample)[0].reward == 1.0
        assert judged(Calls({"delete": "/etc", "find": None, "send": "nobody"}), sample)[0].reward == 2.0
        with pytest.raises(SpecError, match=r"reward\.tools\.find: '\(' is no regular expression"):
            Calls({"find": "("})


class TestCosts:
    def test_costs_are_shown_and_count_nothing(self):
        reward = Costs(Outcome(), {"deletes": Calls(["delete"]), "waste": ToolUse()})
        (score,) = judged(reward, called(("delete", "{}", "gone"), FIND, FIND))
        assert score.reward == 0.0
        assert score.components["deletes"] == 1.0
        assert score.components["waste/repeated"] == 1.0

    def test_the_constrained_algorithm_finds_them_by_name(self, tmp_path):
        from components.algorithms.policy_gradient.cost_constraints import mean_costs
        from components.algorithms.spec import CostSpec
        from components.trajectories.store import read_scored, write_scores, write_trajectories

        rows = [called(("delete", "{}", "gone")), called(FIND)]
        rows[1].id = "s/1"
        scores = judged(Costs(Outcome(), {"deletes": Calls(["delete"]), "waste": ToolUse()}), *rows)
        write_trajectories(tmp_path / "trajectories.parquet", rows)
        write_scores(tmp_path / "scores.parquet", scores)
        read = read_scored(tmp_path / "trajectories.parquet", tmp_path / "scores.parquet", components=True)
        costs = {"deletes": CostSpec(limit=0.1), "waste/calls": CostSpec(limit=1.0)}
        assert mean_costs(costs, read) == {"deletes": 0.5, "waste/calls": 1.0}

    def test_costs_without_a_name_of_their_own_are_refused(self, subtests):
        for costs in [{}, {"task": Calls()}, {"a/b": Calls()}]:
            with subtests.test(costs=costs), pytest.raises(SpecError, match=r"reward\.costs"):
                Costs(Outcome(), costs)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


class TestJsonSchema:
    @pytest.fixture(scope="class")
    @classmethod
    def rule(cls):
        return JsonSchema(SCHEMA)

    def test_an_answer_fits_or_says_what_does_not(self, rule, subtests):
        for text, said in [
            ('{"n": 3}', ""),
            ('```json\n{"n": 3}\n```', ""),
            ('{"n": "3"}', "$.n: '3' is not of type 'integer'"),
            ('{"n": 3, "m": 1}', "$: Additional properties are not allowed ('m' was unexpected)"),
            ("{}", "$: 'n' is a required property"),
            ('{"n": NaN}', "no JSON: NaN is no JSON"),
            ("n: 3", "no JSON: Expecting value"),
            ("", "no answer"),
            ("[" * 100_000, "no JSON: "),
            ('{"n": ' + "9" * 10_000 + "}", "no JSON: "),
        ]:
            with subtests.test(text=text):
                score = of(rule, text)
                assert score.reward == float(not said)
                assert score.explanation.startswith(said)

    def test_the_schema_may_be_the_scenarios(self, rule):
        assert of(JsonSchema("input.form"), '{"n": 3}', form=SCHEMA).reward == 1.0
        assert "is no JSON schema" in of(JsonSchema("input.form"), "{}", form={"type": 3}).failure.message

    def test_a_pattern_of_a_schema_that_backtracks_without_end_is_ended(self):
        rule = JsonSchema({"type": "string", "pattern": "^(a+)+$"}, seconds=0.5)
        score = of(rule, '"' + "a" * 40 + '!"')
        assert (score.reward, score.explanation) == (0.0, "the answer could not be validated: not done after 0.5 s")
        assert of(rule, '"aaa"').reward == 1.0  # another process does the next

    def test_what_is_no_schema_is_refused(self):
        with pytest.raises(SpecError, match=r"reward\.schema: is no JSON schema: \$\.type"):
            JsonSchema({"type": "integr"})

    def test_a_schema_fetches_nothing(self):
        schema = {"$ref": "http://127.0.0.1:9/schema.json"}
        with pytest.raises(SpecError, match=r"refers to 'http://127\.0\.0\.1:9/schema\.json', which is not in it"):
            JsonSchema(schema)
        assert "which is not in it" in of(JsonSchema("input.form"), "{}", form=schema).failure.message


class TestApart:
    """Functions in a subprocess worker."""

    def test_it_answers_and_what_is_printed_is_no_answer(self):
        worker = AnswerWorker("tests.rewards.beside:echo", 10)
        assert [worker(a=1), worker(text="ä\n\u2028")] == [{"a": 1}, {"text": "ä\n\u2028"}]

    def test_what_hangs_dies_or_raises_is_an_error_and_the_next_call_is_answered(self):
        from components.errors import JudgeError

        for name, said in (("hang", "not done after 0.3 s"), ("die", "ended with 7"), ("echo", "")):
            worker = AnswerWorker(f"tests.rewards.beside:{name}", 0.3 if name == "hang" else 10)
            if said:
                for _ in range(2):
                    with pytest.raises(JudgeError, match=said):
                        worker()
            else:
                with pytest.raises(TypeError):
                    worker(a={1, 2})
        with pytest.raises(JudgeError, match="unexpected keyword argument 'b'"):
            AnswerWorker("tests.rewards.beside:hang", 10)(b=1)

    def test_a_process_that_cannot_start_is_a_missing_resource(self):
        with pytest.raises(ResourceError, match="did not start"):
            AnswerWorker("components.rewards.nowhere:nothing", 1)()


@pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed")
class TestMathematics:
    @pytest.fixture(scope="class")
    @classmethod
    def rule(cls):
        return mathematics.Mathematics(seconds=20.0)

    def test_the_same_expression_is_right(self, rule, subtests):
        for expected, given, right in [
            ("1/2", "0.5", True),
            (r"\frac{1}{2}", r"so it is \boxed{\frac{2}{4}}", True),
            (0.5, "$1/2$", True),
            (r"\{1, 2, 3\}", r"$\{3, 2, 1\}$", True),
            ("2", "It is 3.", False),
            (r"x^2 + 2x + 1", r"$(x+1)^2$", True),
            (r"\sqrt{8}", r"$2\sqrt{2}$", True),
            ("12", "no idea", False),
        ]:
            with subtests.test(expected=expected):
                assert of(rule, given, answer=expected).reward == float(right)

    def test_what_takes_for_ever_is_wrong_and_says_so(self):
        score = of(mathematics.Mathematics(seconds=1.0), r"$9^{9^{9^{9}}} + 1$", answer="5")
        assert score.reward == 0.0

    def test_what_was_expected_and_cannot_be_read_leaves_the_episode_unscored(self, rule):
        assert "cannot be read as mathematics" in of(rule, "3", answer="$$").failure.message

    def test_a_truth_in_words_leaves_the_episode_unscored(self, rule, subtests):
        for expected in ["Paris", "New York", "$yes$", r"\text{Paris}", "Washington D.C.", "not a number"]:
            with subtests.test(expected=expected):
                score = of(rule, f"It is {expected}.", answer=expected)
                assert "cannot be read as mathematics" in score.failure.message

    def test_letters_that_are_mathematics_are_compared(self, rule, subtests):
        for expected in ["x", "abc", "$ab$", r"\pi", r"\sin(x)", "3 apples", r"\text{(A)}", r"\alpha"]:
            with subtests.test(expected=expected):
                assert of(rule, f"${expected}$", answer=expected).failure is None


def test_without_math_verify_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mathematics, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"pip install -e '\.\[math\]'"):
        mathematics.Mathematics()
