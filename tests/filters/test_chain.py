"""Several filters in order, and the selection of AgentEvol made of them."""

from __future__ import annotations

import random

import pytest

from components.errors import SpecError
from components.filters.best import Best
from components.filters.between import Between
from components.filters.chain import Chain, links
from components.filters.distinct import Distinct
from components.filters.signal import Signal
from components.filters.top import Top
from components.specs import Target
from flows.experiment.compose import compose
from tests.filters.test_filters import selections_of
from tests.trajectories.builders import FAILURE, episode, talk


def found(filter_, rows):
    return [one.reason for one in selections_of(filter_, rows)]


def test_each_sees_what_those_before_it_have_kept():
    rows = [episode("a", i, reward=reward) for i, reward in enumerate((0.0, 1.0, 2.0, None))]
    low_first = Chain({"high": Between("reward", maximum=1.0), "best": Best(1)})
    best_first = Chain({"best": Best(1), "high": Between("reward", maximum=1.0)})
    assert found(low_first, rows) == ["best/not_among_best", "kept", "high/reward_above_maximum", "unscored"]
    assert found(best_first, rows) == ["best/not_among_best"] * 2 + ["high/reward_above_maximum", "unscored"]


def test_a_group_without_anything_left_is_not_shown_further():
    class NeverEmpty:
        def select(self, group):
            assert group
            return Best(1).select(group)

    rows = [episode("a", 0, reward=0.0), episode("b", 0, reward=1.0), episode("c", 0, failure=FAILURE)]
    chain = Chain({"good": Between("reward", 0.5), "mine": NeverEmpty()})
    assert found(chain, rows) == ["good/reward_below_minimum", "kept", "failed"]


def test_what_surveys_the_collection_surveys_what_is_left_of_it():
    """Half of all would be four; half of what reaches 0.5 are two."""
    rows = [episode(str(i), 0, reward=i / 8) for i in range(8)]
    chain = Chain({"good": Between("reward", 0.5), "top": Top(0.5), "again": Top(0.5)})
    assert found(chain, rows) == [
        *["good/reward_below_minimum"] * 4,
        *["top/below_top_share"] * 2,
        "again/below_top_share",
        "kept",
    ]


def test_the_same_rule_twice_is_told_apart_by_names():
    rows = [episode("a", 0, reward=0.0), episode("a", 1, reward=0.0), episode("b", 0, reward=1.0)]
    rows += [episode("b", 1, reward=0.0), episode("b", 2, reward=1.0)]
    chain = Chain({"before": Signal(), "best": Best(2), "after": Signal()})
    assert found(chain, rows) == ["before/no_spread"] * 2 + [
        "after/no_spread",
        "best/not_among_best",
        "after/no_spread",
    ]


def test_chains_may_be_nested_and_hold_functions():
    def odd(one):
        return one.sample % 2 == 1

    rows = [episode("a", i, reward=float(i)) for i in range(4)]
    chain = Chain({"inner": Chain({"own": odd}), "best": Best(1)})
    assert found(chain, rows) == ["inner/own/odd", "best/not_among_best", "inner/own/odd", "kept"]


def test_what_is_no_filter_is_refused():
    with pytest.raises(SpecError, match="str is no filter"):
        found(Chain({"a": Best(), "b": "best"}), [episode("a", 0, reward=1.0)])


def test_the_filters_of_a_configured_chain_and_their_places():
    best = {"_target_": "components.filters.best.Best"}
    inner = {"_target_": "components.filters.chain.Chain", "filters": {"x": best}}
    target = Target.model_validate(
        {"_target_": "components.filters.chain.Chain", "filters": {"a": best, "b": inner, "c": 3}}
    )
    assert [(end, getattr(one, "target", one)) for end, one in links(target).items()] == [
        (".filters.a", "components.filters.best.Best"),
        (".filters.b.filters.x", "components.filters.best.Best"),
        (".filters.c", 3),
    ]
    assert list(links(Target.model_validate(best))) == [""]


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_selection_of_agent_evol(share):
    """Against its steps written out as loops: reward over a threshold, one of each item, no conversation twice, a share
    of what is left."""
    draw = random.Random(1)
    rows = []
    for number in range(60):
        for sample in range(4):
            said = talk("the same task" if number % 3 else f"task {number}", f"answer {draw.randint(0, 5)}")
            rows.append(episode(str(number), sample, reward=draw.choice([0.0, 0.5, 1.0, 2.0]), histories=[said]))
    filter_ = compose(["filter=agent_evol", "algorithm=sft", f"filter.filters.share.share={share}"]).filter.build()
    chosen = [one for one, made in zip(rows, selections_of(filter_, rows), strict=True) if made.kept]

    good = [one for one in rows if one.reward >= 0.99]
    ones, texts = {}, set()
    for one in sorted(good, key=lambda one: -one.reward):
        ones.setdefault(one.group, one)
    distinct = []
    for one in (one for one in rows if one in ones.values()):
        text = tuple(message.content for message in one.histories[0].messages)
        if text not in texts:
            texts.add(text)
            distinct.append(one)
    if share == 1.0:
        assert chosen == distinct
        assert 0 < len(distinct) < len(ones) < len({one.group for one in rows})
    else:
        rewards = sorted((one.reward for one in distinct), reverse=True)
        assert {one.id for one in chosen} < {one.id for one in distinct}
        assert sorted((one.reward for one in chosen), reverse=True) == rewards[: -(-len(rewards) * 3 // 10)]


def test_what_is_left_of_a_collection_is_distinct_by_the_first_that_is_left():
    rows = [episode(name, 0, reward=reward, histories=[talk("?", "yes")]) for name, reward in (("a", 0.0), ("b", 1.0))]
    chain = Chain({"good": Between("reward", 0.5), "distinct": Distinct(of="collection")})
    assert found(chain, rows) == ["good/reward_below_minimum", "kept"]
