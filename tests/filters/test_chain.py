"""Chains and unions of filters, and AgentEvol's selection as a chain."""

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


def reasons(filter_, rows):
    return [selection.reason for selection in selections_of(filter_, rows)]


def test_each_filter_sees_what_the_previous_ones_kept():
    rows = [episode("a", i, reward=reward) for i, reward in enumerate((0.0, 1.0, 2.0, None))]
    high_before_best = Chain({"high": Between("reward", maximum=1.0), "best": Best(1)})
    best_before_high = Chain({"best": Best(1), "high": Between("reward", maximum=1.0)})
    assert reasons(high_before_best, rows) == ["best/not_among_best", "kept", "high/reward_above_maximum", "unscored"]
    assert reasons(best_before_high, rows) == ["best/not_among_best"] * 2 + ["high/reward_above_maximum", "unscored"]


def test_an_emptied_group_is_not_passed_on():
    class NeverEmpty:
        def select(self, group):
            assert group
            return Best(1).select(group)

    rows = [episode("a", 0, reward=0.0), episode("b", 0, reward=1.0), episode("c", 0, failure=FAILURE)]
    chain = Chain({"good": Between("reward", 0.5), "mine": NeverEmpty()})
    assert reasons(chain, rows) == ["good/reward_below_minimum", "kept", "failed"]


def test_a_survey_covers_the_remaining_episodes_only():
    """Half of the 8 episodes would be 4; half of the 4 that reach 0.5 is 2."""
    rows = [episode(str(i), 0, reward=i / 8) for i in range(8)]
    chain = Chain({"good": Between("reward", 0.5), "top": Top(0.5), "again": Top(0.5)})
    assert reasons(chain, rows) == [
        *["good/reward_below_minimum"] * 4,
        *["top/below_top_share"] * 2,
        "again/below_top_share",
        "kept",
    ]


def test_reasons_distinguish_filters_with_the_same_rule():
    rows = [episode("a", 0, reward=0.0), episode("a", 1, reward=0.0), episode("b", 0, reward=1.0)]
    rows += [episode("b", 1, reward=0.0), episode("b", 2, reward=1.0)]
    chain = Chain({"before": Signal(), "best": Best(2), "after": Signal()})
    assert reasons(chain, rows) == ["before/no_spread"] * 2 + [
        "after/no_spread",
        "best/not_among_best",
        "after/no_spread",
    ]


def test_chains_may_be_nested_and_hold_functions():
    def odd(row):
        return row.sample % 2 == 1

    rows = [episode("a", i, reward=float(i)) for i in range(4)]
    chain = Chain({"inner": Chain({"own": odd}), "best": Best(1)})
    assert reasons(chain, rows) == ["inner/own/odd", "best/not_among_best", "inner/own/odd", "kept"]


def test_an_object_that_is_not_a_filter_is_refused():
    with pytest.raises(SpecError, match="str is not a filter"):
        reasons(Chain({"a": Best(), "b": "best"}), [episode("a", 0, reward=1.0)])


def test_the_filters_of_a_configured_chain_and_their_places():
    best = {"_target_": "components.filters.best.Best"}
    inner = {"_target_": "components.filters.chain.Chain", "filters": {"x": best}}
    target = Target.model_validate(
        {"_target_": "components.filters.chain.Chain", "filters": {"a": best, "b": inner, "c": 3}}
    )
    assert [(end, getattr(filter_, "target", filter_)) for end, filter_ in links(target).items()] == [
        (".filters.a", "components.filters.best.Best"),
        (".filters.b.filters.x", "components.filters.best.Best"),
        (".filters.c", 3),
    ]
    assert list(links(Target.model_validate(best))) == [""]
    listed = {"_target_": "components.filters.chain.Chain", "filters": [best]}  # refused where it is built
    assert list(links(Target.model_validate(listed))) == [""]


def test_the_selection_of_agent_evol(subtests):
    """Compare with a reference implementation in plain loops: reward threshold, best episode per scenario, distinct
    conversations, best share of the remaining episodes."""
    for share in [1.0, 0.3]:
        with subtests.test(share=share):
            draw = random.Random(1)
            rows = []
            for number in range(60):
                for sample in range(4):
                    history = talk("the same task" if number % 3 else f"task {number}", f"answer {draw.randint(0, 5)}")
                    rows.append(
                        episode(str(number), sample, reward=draw.choice([0.0, 0.5, 1.0, 2.0]), histories=[history])
                    )
            filter_ = compose(
                ["filter=agent_evol", "algorithm=sft", f"filter.filters.share.share={share}"]
            ).filter.build()
            chosen = [row for row, selection in zip(rows, selections_of(filter_, rows), strict=True) if selection.kept]

            good = [row for row in rows if row.reward >= 0.99]
            best_per_scenario, texts = {}, set()
            for row in sorted(good, key=lambda row: -row.reward):
                best_per_scenario.setdefault(row.group, row)
            distinct = []
            for row in (row for row in rows if row in best_per_scenario.values()):
                text = tuple(message.content for message in row.histories[0].messages)
                if text not in texts:
                    texts.add(text)
                    distinct.append(row)
            if share == 1.0:
                assert chosen == distinct
                assert 0 < len(distinct) < len(best_per_scenario) < len({row.group for row in rows})
            else:
                rewards = sorted((row.reward for row in distinct), reverse=True)
                assert {row.id for row in chosen} < {row.id for row in distinct}
                assert sorted((row.reward for row in chosen), reverse=True) == rewards[: -(-len(rewards) * 3 // 10)]


def test_failures_are_kept_beside_the_selection_of_agent_evol():
    draw = random.Random(2)
    rows = [
        episode(str(number), sample, reward=draw.choice([0.0, 0.3, 0.49, 0.5, 0.98, 0.99, 1.0, None]))
        for number in range(40)
        for sample in range(4)
    ]
    share = "filter.filters.{}share.share=0.5"
    alone = compose(["filter=agent_evol", "algorithm=sft", share.format("")]).filter.build()
    both = compose(["filter=agent_evol_with_failures", share.format("winners.filters.")]).filter.build()
    for row, winner, reason in zip(rows, reasons(alone, rows), reasons(both, rows), strict=True):
        if winner == "kept" or (row.reward is not None and row.reward <= 0.49):
            assert reason == "kept"
        else:
            assert reason == ("unscored" if row.reward is None else f"winners/{winner}")


def test_distinct_compares_with_remaining_episodes_only():
    rows = [episode(name, 0, reward=reward, histories=[talk("?", "yes")]) for name, reward in (("a", 0.0), ("b", 1.0))]
    chain = Chain({"good": Between("reward", 0.5), "distinct": Distinct(of="collection")})
    assert reasons(chain, rows) == ["good/reward_below_minimum", "kept"]
