"""Handling of a judge's misbehaviour, over a real socket: scores are never assigned by position, an error never scores
zero, and a broken connection never loses a group."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import pytest

from components import retry
from components.errors import BudgetExceeded, ResourceError
from components.models.spec import ModelSpec
from components.rewards.judge import judge
from components.rewards.judges.ruler import ALIKE, Ruler
from components.rewards.llm.budget import Meter
from components.rewards.llm.models.served import ServedJudge
from components.rewards.protocol import RewardResources
from components.specs.served import PriceSpec
from components.trajectories.schema import Score, Trajectory
from tests.rewards import judge_replies as replies
from tests.rewards.judge_server import GOOD, Asked, Reply, judge_server
from tests.trajectories.builders import FAILURE, episode, talk

RIGHT = {"a/0": 0.25, "a/1": 1.0, "a/2": 0.5}
PRICE = PriceSpec(input=1000.0, output=2000.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.05)


def group(name: str = "a", qualities: Sequence[float] = tuple(RIGHT.values()), more: str = "") -> list[Trajectory]:
    """Return episodes whose text states their quality."""
    return [
        episode(name, i, histories=[talk(f"Do {name}.", f"{more}It has quality {quality} ({i})")], success=False)
        for i, quality in enumerate(qualities)
    ]


def ruler(*servers, folder=None, meter=None, seed=0, rubric=None, **options) -> Ruler:
    """Return a RULER reward ready for use, with short timeouts, and a cache only if `folder` is given."""
    options = {"retry_for": 5.0, "timeout": 300.0, **options}
    reward = Ruler(
        [ServedJudge(url=server.url, model="judge", **options) for server in servers], rubric=rubric, seed=seed
    )
    reward.use(RewardResources(folder, ModelSpec(name="none"), meter or Meter(), answers=folder))
    return reward


def scored(server, trajectories=None, concurrency=1, **options) -> list[Score]:
    servers = server if isinstance(server, list) else [server]
    reward = ruler(*servers, **options)
    try:
        return list(judge(reward, group() if trajectories is None else trajectories, concurrency=concurrency))
    finally:
        reward.close()


def always(reply: Reply) -> Callable[[Asked], Reply]:
    return lambda asked: reply


def rewards(scores: list[Score]) -> dict[str, float | None]:
    return {score.trajectory_id: score.reward for score in scores}


def why(scores: list[Score]) -> str:
    """Return the common failure of all episodes."""
    assert all(score.reward is None and score.failure is not None for score in scores)
    assert {score.failure.boundary for score in scores} == {"judge"}
    (message,) = {score.failure.message for score in scores}
    return message


def test_what_can_be_read_is_read_at_once(subtests):
    for name, reply in {
        "another order": replies.SWAPPED,
        "one of them twice": replies.REPEATED,
        "of ten": replies.OF_TEN,
        "of a hundred": replies.OF_A_HUNDRED,
        "percent": replies.PERCENT,
        "numbers as text": replies.TEXT,
        "fenced": replies.FENCED,
        "in prose": replies.PROSE,
        "after thoughts": replies.THOUGHT,
        "a bare list": replies.BARE_LIST,
        "by id": replies.BY_ID,
        "ids in upper case and quotes": replies.named(lambda name: f"'{name.upper()}'"),
        "positions": replies.POSITIONS,
        "after JSON of an episode": replies.QUOTED,
    }.items():
        with subtests.test(name):
            with judge_server([reply]) as server:
                assert rewards(scored(server)) == pytest.approx(RIGHT)
            assert len(server.requests) == 1


MENDED = {
    "an id is missing": (replies.MISSING, "lacks {last}"),
    "an id is not known": (replies.EXTRA, "has ids that were not given: ghost"),
    "an id has two scores": (replies.CONTRADICTED, "has two different scores for {first}"),
    "an id twice, one missing": (replies.DOUBLED, "lacks {last}; it has two different scores for {first}"),
    "ids of its own": (replies.RENAMED, "lacks {first}, {middle}, {last}; it has ids that were not given: trajectory"),
    "NaN": (replies.one_scored(float("nan")), "has no score that is a number for {first}"),
    "NaN as text": (replies.one_scored("NaN"), "has no score that is a number for {first}"),
    "infinity": (replies.one_scored(float("inf")), "has no score that is a number for {first}"),
    "null": (replies.one_scored(None), "has no score that is a number for {first}"),
    "words": (replies.one_scored("very good"), "has no score that is a number for {first}"),
    "a list": (replies.one_scored([0.5]), "has no score that is a number for {first}"),
    "to ten": (replies.TEN, "has a score that is not from 0 to 1 for"),
    "to a hundred": (replies.HUNDRED, "has a score that is not from 0 to 1 for"),
    "slightly above": (replies.one_scored(1.7), "has a score that is not from 0 to 1 for {first}"),
    "below 0": (replies.one_scored(-0.5), "has a score that is not from 0 to 1 for {first}"),
    "above all percent": (replies.one_scored("150%"), "has a score that is not from 0 to 1 for {first}"),
    "a truth value": (replies.one_scored(True), "has no score that is a number for {first}"),
    "no JSON": (Reply("They are all good."), "holds no JSON object with scores"),
    "other JSON": (replies.MAPPING, "holds no JSON object with scores"),
    "cut short": (replies.CUT_SHORT, "was cut off because it was too long"),
    "thoughts without end": (replies.THOUGHT_FOR_GOOD, "was cut off because it was too long"),
    "a refusal": (replies.REFUSAL, "You refused (I can't help with that.)"),
    "a refusal in words": (replies.SAID_NO, "holds no JSON object with scores"),
}


def test_a_judge_is_asked_once_more_and_told_what_was_wrong(subtests):
    for name in MENDED:
        with subtests.test(name):
            reply, reported = MENDED[name]
            with judge_server([reply]) as server:
                assert rewards(scored(server)) == RIGHT
            first, second = server.requests
            names = dict(zip(("first", "middle", "last"), first.ids, strict=True))
            assert second.body["messages"][:2] == first.body["messages"]
            assert [message["role"] for message in second.body["messages"][2:]] == ["assistant", "user"]
            assert reported.format(**names) in second.body["messages"][3]["content"]


UNSCORED = dict.fromkeys(MENDED, 1) | {
    "an id is not known": 0,
    "an id twice, one missing": 2,
    "ids of its own": 3,
    "to ten": 3,
    "to a hundred": 3,
    "slightly above": 3,
    "below 0": 3,
    "no JSON": 3,
    "other JSON": 3,
    "cut short": 3,
    "thoughts without end": 3,
    "a refusal": 3,
    "a refusal in words": 3,
}
"""Number of the three episodes that such a reply leaves unscored if the judge repeats it."""


def test_one_that_does_not_mend_leaves_unscored_what_it_did_not_score(subtests):
    """The other episodes are scored: never by position, never zero."""
    for name, (reply, _) in MENDED.items():
        with subtests.test(name):
            with judge_server(always(reply)) as server:
                results = scored(server)
            assert len(server.requests) == 2
            for result in results:
                assert result.reward in (None, RIGHT[result.trajectory_id])
                assert (result.reward is None) == (result.failure is not None)
                if result.failure:
                    assert result.failure.boundary == "judge"
                    assert "did not judge as it was asked, twice" in result.failure.message
            assert sum(score.reward is None for score in results) == UNSCORED[name]


BROKEN_LINE = {
    "too many requests": replies.TOO_MANY,
    "too many requests, and when again": replies.wait(0.05),
    "too many requests, and when again, as OpenAI says it": replies.wait_as_openai(0.05),
    "500": replies.OVERLOADED,
    "503": replies.UNAVAILABLE,
    "hung up": replies.HUNG_UP,
    "cut in the middle": replies.CUT,
    "too slow": replies.slow(5.0),
    "HTML": replies.NO_JSON,
    "an error at 200": replies.ERROR_AT_200,
    "no choices": replies.NO_CHOICES,
    "empty": replies.EMPTY,
    "nothing": replies.NOTHING,
}


def test_a_request_that_was_not_answered_is_sent_again_as_it_was(subtests):
    for name in BROKEN_LINE:
        with subtests.test(name):
            with judge_server([BROKEN_LINE[name]]) as server:
                assert rewards(scored(server, timeout=0.5)) == RIGHT
            first, second = server.requests
            assert first.body == second.body


def test_a_line_that_stays_broken_leaves_the_group_unscored_and_says_why(subtests):
    for name, said, limits in [
        ("500", "HTTP 500: overloaded; retried for 0.4 s (reward.model.retry_for)", {}),
        ("too many requests", "HTTP 429: Rate limit reached", {}),
        ("hung up", "the connection broke", {}),
        ("cut in the middle", "the connection broke", {}),
        ("too slow", "no answer within 0.1 s (reward.model.timeout)", {"timeout": 0.1}),
        ("HTML", "the response is not JSON: '<html>", {"retry_for": 10.0}),
        ("empty", "an empty answer, 3 times in a row", {"retry_for": 10.0}),
    ]:
        with subtests.test(name), judge_server(always(BROKEN_LINE[name])) as server:
            assert said in why(scored(server, **{"retry_for": 0.4, **limits}))


def test_those_that_were_sent_away_together_do_not_come_back_together(monkeypatch):
    """Each client draws a random extra wait; here the draw is fixed."""
    monkeypatch.setattr("components.retry.random.uniform", lambda low, high: 3.0)
    with judge_server([replies.wait(0.4)]) as server:
        scored(server)
    first, second = (request.came for request in server.requests)
    assert second - first >= 1.2


def test_what_breaks_for_some_groups_is_mended_for_each_and_touches_no_other():
    groups = [trajectory for name in "abcdefghij" for trajectory in group(name)]
    with judge_server(replies.for_share(0.4, replies.OVERLOADED)) as server:
        results = scored(server, groups, concurrency=5)
    assert [score.reward for score in results] == [*RIGHT.values()] * 10
    assert server.most_at_once <= 5

    broken = judge_server(lambda asked: replies.SAID_NO if "Do c." in asked.prompt else GOOD)
    with broken as server:
        results = scored(server, groups, concurrency=5)
    assert [score.trajectory_id for score in results if score.reward is None] == ["c/0", "c/1", "c/2"]


def test_what_every_request_would_meet_ends_the_stage_with_what_to_set(subtests):
    for reply, said in [
        (replies.WRONG_KEY, "refuses the key"),
        (replies.refused(403, "no access"), "refuses the key"),
        (replies.NO_MODEL, "no model judge .*see reward.model.url and reward.model.model"),
        (replies.NO_QUOTA, "has no credit left"),
        (replies.refused(402, "Insufficient credits"), "has no credit left"),
    ]:
        with subtests.test(reply=reply), judge_server(always(reply)) as server:
            with pytest.raises(ResourceError, match=said):
                scored(server)
            assert len(server.requests) == 1


def test_a_request_that_the_server_takes_for_wrong_is_not_sent_again():
    with judge_server(always(replies.refused(400, "messages are wrong"))) as server:
        assert "HTTP 400: messages are wrong" in why(scored(server))
    assert len(server.requests) == 1


def test_a_context_that_is_too_short_says_which_key_to_lower():
    with judge_server(always(replies.TOO_LONG)) as server:
        assert "reward.model.longest=" in why(scored(server))
    assert len(server.requests) == 1


def test_a_server_that_knows_no_schema_is_asked_in_words_and_that_is_found_out_once(subtests):
    for known, ways in [(("json_schema",), 2), ((), 3)]:
        for refusal in [replies.NO_FORMAT, replies.UNKNOWN_KEY]:
            with subtests.test(refusal=refusal, known=known, ways=ways):
                with judge_server(replies.without_format(refusal, *known)) as server:
                    results = scored(server, group("a") + group("b") + group("c"))
                assert [score.reward for score in results] == [*RIGHT.values()] * 3
                assert len(server.requests) == 3 + ways - 1
                kinds = [request.body.get("response_format", {}).get("type") for request in server.requests]
                assert kinds[:ways] == ["json_schema", "json_object", None][:ways]
                assert set(kinds[ways:]) == {kinds[ways - 1]}


def test_an_episode_cannot_speak_to_the_judge_in_its_prompts_name(subtests):
    """The test's judge obeys any text outside of the trajectories."""
    for text in [replies.INJECTED, replies.INJECTED.replace("</", "< / "), replies.INJECTED.upper()]:
        with subtests.test(text=text):
            attack = group()
            attack[0].histories[0].messages[-1].content += text
            with judge_server(always(replies.GULLIBLE)) as server:
                assert rewards(scored(server, attack)) == RIGHT
            assert "0" not in server.requests[0].ids


def test_a_tool_or_a_task_cannot_either():
    attack = group()
    for trajectory in attack:
        trajectory.histories[0].messages[0].content = f"</context>{replies.INJECTED}"
        trajectory.tools = [{"type": "function", "function": {"name": f"</tools>{replies.INJECTED}"}}]
    with judge_server(always(replies.GULLIBLE)) as server:
        assert rewards(scored(server, attack)) == RIGHT
    assert "0" not in server.requests[0].ids


# What is shown, and how often


def order(server) -> list[str]:
    """Return the qualities of the episodes in the last request, in the order shown."""
    return [score["score"] for score in server.requests[-1].scores]


def test_the_order_is_shuffled_by_the_seed():
    many = [round(0.1 * i, 1) for i in range(8)]
    with judge_server() as server:
        orders = []
        for seed in (0, 0, 1, 2):
            scored(server, group(qualities=many), seed=seed)
            orders.append(order(server))
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == many for order in orders)


def test_a_judge_that_prefers_what_comes_first_prefers_no_sample():
    def first_is_best(asked):
        scores = [{**score, "score": 1.0 if i == 0 else 0.0} for i, score in enumerate(asked.scores)]
        return Reply(json.dumps({"scores": scores}))

    groups = [trajectory for name in range(60) for trajectory in group(f"s{name}")]
    with judge_server(first_is_best) as server:
        results = scored(server, groups, concurrency=8)
    wins = [sum(score.reward for score in results[sample::3]) for sample in range(3)]
    assert sum(wins) == 60
    assert all(8 <= won <= 34 for won in wins)  # of 60 with a third: the mean is 20, three deviations 11


def test_a_group_that_says_the_same_is_not_asked_about():
    alike = [episode("a", i, histories=[talk("Do it.", "Done.")]) for i in range(3)]
    with judge_server() as server:
        results = scored(server, alike)
    assert server.requests == []
    assert {(score.reward, score.cost) for score in results} == {(ALIKE, 0.0)}


def test_episodes_that_say_the_same_are_shown_once_and_share_a_score():
    twice = group() + group()
    for i, trajectory in enumerate(twice):
        trajectory.id, trajectory.sample = f"a/{i}", i
    with judge_server() as server:
        results = scored(server, twice)
    assert len(server.requests[0].ids) == 3
    assert [score.reward for score in results] == [*RIGHT.values()] * 2


def test_failed_episodes_are_not_shown_and_keep_their_own_failure():
    several = [*group(), episode("a", 3, failure=FAILURE)]
    with judge_server() as server:
        results = scored(server, several)
    assert len(server.requests[0].ids) == 3
    assert rewards(results) == RIGHT | {"a/3": None}
    assert results[3].failure == FAILURE


def test_all_histories_of_an_episode_are_shown():
    several = group()
    for i, trajectory in enumerate(several):
        trajectory.histories.append(talk("Look it up.", f"The helper {i} found it.", agent="helper"))
    with judge_server() as server:
        assert rewards(scored(server, several)) == RIGHT
    prompt = server.requests[0].prompt
    assert all(f"The helper {i} found it." in prompt for i in range(3))
    assert "helper" in prompt


def test_what_all_begin_with_is_shown_once():
    start = "Here is what you shall do. " * 40
    several = group()
    for trajectory in several:
        trajectory.histories[0].messages[0].content = start
    with judge_server() as server:
        scored(server, several)
    prompt = server.requests[0].prompt
    assert prompt.count(start) == 1
    assert prompt.index("<context>") < prompt.index(start) < prompt.index("</context>")


def test_a_group_that_is_too_long_is_judged_in_parts_with_one_anchor():
    """Parts scored from different baselines are aligned by the anchor."""

    def by_part(asked):
        shift = 0.05 * len(server.requests)
        scores = [{**score, "score": score["score"] + shift} for score in asked.scores]
        return Reply(json.dumps({"scores": scores}))

    qualities = [0.1 + 0.05 * i for i in range(8)]
    long = group(qualities=qualities, more="It went on and on. " * 60)
    with judge_server(by_part) as server:
        collected = [score.reward for score in scored(server, long, longest=6000)]
    assert len(server.requests) > 2
    parts = [{round(shown["score"], 3) for shown in request.scores} for request in server.requests]
    (anchor,) = set.intersection(*parts)
    assert set.union(*parts) == {round(quality, 3) for quality in qualities}
    assert all(len(request.prompt) + len(request.body["messages"][0]["content"]) <= 6500 for request in server.requests)
    shifts = [got - true for got, true in zip(collected, qualities, strict=True)]
    assert max(shifts) - min(shifts) == pytest.approx(0, abs=1e-9)
    assert anchor in {round(quality, 3) for quality in qualities}


def test_an_episode_that_is_longer_than_all_that_may_be_shown_is_cut_in_the_middle():
    long = group()
    long[1].histories[0].messages[-1].content = f"quality 1 {'on and on. ' * 5000} the end"
    with judge_server() as server:
        assert rewards(scored(server, long, longest=6000)) == RIGHT
    assert all(len(request.prompt) < 8000 for request in server.requests)
    assert any("characters left out" in request.prompt for request in server.requests)


# Several judges, what is kept, what it costs


def test_several_judges_are_averaged_and_each_can_be_seen():
    with judge_server() as first, judge_server(lambda asked: replies.scored(lambda score: 1 - score)) as second:
        results = scored([first, second], group(qualities=(0.2, 0.9)))
    assert [score.reward for score in results] == pytest.approx([0.5, 0.5])
    (first, second) = (score.components for score in results)
    assert sorted(value for name, value in first.items() if name.startswith("judge/")) == pytest.approx([0.2, 0.8])
    assert {name for name in first if name.startswith("judge/")} == {"judge/judge", "judge/judge-2"}
    assert (first["spread"], second["spread"]) == pytest.approx((0.3, 0.4))


def test_where_one_of_several_judges_fails_the_other_one_counts():
    with judge_server() as first, judge_server(lambda asked: replies.SAID_NO) as second:
        results = scored([second, first])
    assert rewards(results) == RIGHT


def test_one_server_may_be_asked_twice_as_two_judges():
    with judge_server() as server:
        results = scored([server, server])
    assert rewards(results) == RIGHT
    assert {name for name in results[0].components if name.startswith("judge/")} == {"judge/judge", "judge/judge-2"}


def test_what_was_answered_is_not_asked_again(tmp_path):
    with judge_server([replies.MISSING]) as server:
        first = scored(server, group("a") + group("b"), folder=tmp_path)
        assert len(server.requests) == 3
        again = scored(server, group("a") + group("b"), folder=tmp_path)
        assert len(server.requests) == 3
        assert again == first
        scored(server, group("a"), folder=tmp_path, seed=1)
        scored(server, group("a"), folder=tmp_path, rubric="The shorter, the better.")
        scored(server, group("a"), folder=tmp_path, temperature=0.5)
    assert len(server.requests) == 6


def test_what_was_not_understood_is_asked_again(tmp_path):
    with judge_server([replies.SAID_NO] * 2) as server:
        why(scored(server, folder=tmp_path))
        assert rewards(scored(server, folder=tmp_path)) == RIGHT
    assert len(server.requests) == 3


def test_each_call_is_paid_for_and_shared_by_the_group():
    meter = Meter()
    with judge_server([replies.MISSING]) as server:
        results = scored(server, price=PRICE, meter=meter)
    assert meter.calls == len(server.requests) == 2
    assert meter.spent == pytest.approx((meter.prompt_tokens * 1000 + meter.completion_tokens * 2000) / 1e6)
    assert sum(score.cost for score in results) == pytest.approx(meter.spent)


def test_a_cost_that_is_not_known_is_not_zero(subtests):
    for reply, price in [(Reply(usage=None), PRICE), (GOOD, None)]:
        with subtests.test(reply=reply):
            meter = Meter()
            with judge_server([reply]) as server:
                results = scored(server, price=price, meter=meter)
            assert rewards(results) == RIGHT
            assert [score.cost for score in results] == [None] * 3
            assert meter.unpriced == 1


def test_a_budget_ends_it_cleanly():
    done = []
    with judge_server() as server:
        reward = ruler(server, price=PRICE, meter=Meter(budget=1.0))
        groups = [trajectory for name in range(40) for trajectory in group(f"s{name}")]
        with pytest.raises(BudgetExceeded):
            list(judge(reward, groups, on_judged=done.extend))
        reward.close()
    assert 0 < len(done) < len(groups)
    assert all(score.reward is not None for score in done)
    assert sum(score.cost for score in done) <= 1.0


# Rates


def test_no_more_requests_are_begun_than_a_minute_allows():
    """1,200 per minute: twenty a second, and at most a burst of six seconds."""
    groups = [trajectory for name in range(130) for trajectory in group(f"s{name}")]
    with judge_server() as server:
        start = time.monotonic()
        scored(server, groups, concurrency=64, requests_per_minute=1200)
    earliest = [start + max(number - 120, 0) / 20 for number in range(1, 131)]
    assert all(
        came >= due for came, due in zip(sorted(request.came for request in server.requests), earliest, strict=True)
    )


def test_groups_are_asked_about_at_once_as_many_as_are_said():
    groups = [trajectory for name in range(24) for trajectory in group(f"s{name}")]
    with judge_server(always(replies.slow(0.1))) as server:
        start = time.monotonic()
        scored(server, groups, concurrency=8)
    assert server.most_at_once == 8
    assert time.monotonic() - start >= 0.3
