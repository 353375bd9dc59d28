"""Filters in an experiment: what is refused before the start, and what is told of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from components.artifacts import Artifact
from components.errors import SpecError
from components.specs import validate
from flows.execution.executor import Execution
from flows.experiment.compose import compose
from flows.experiment.spec import ExperimentSpec
from flows.reporting.console_lines import round_teller
from flows.stages import selections
from flows.stages.base import Context, Request
from tests.flows.pretend import spec_of
from tests.flows.test_online_rl import DATA
from tests.refusals import wrong_problems

SHOP = "components.environments.worlds.shop.Shop"
METRICS = {"kept": 5.0, "scenarios": 2.0, "dropped": 3.0, "kept_share": 5 / 8}
METRICS |= {"dropped/good/unspoken": 1.0, "dropped/no_spread": 2.0}


REFUSED = [
        (["filter=threshold", "filter.minimum=null"], "filter.minimum", "the filter drops no reward"),
        (["filter=threshold", "filter.minimum=5"], "filter.minimum", "5: Outcome gives at most 1, so no episode"),
        (["algorithm=kto", "filter=everything", "algorithm.threshold=2"], "algorithm.threshold", "2: Outcome gives"),
        (["filter=turns", "filter.minimum=5", "filter.maximum=2"], "filter.minimum", "5 is more than maximum=2"),
        (["filter=percentiles", "filter.highest=20"], "filter.lowest", "50 is more than highest=20"),
        (["filter=type"], "filter.keep", "keep and drop are both null"),
        (["filter=type", "filter.keep=[refnd]"], "filter.keep",
         "'refnd': no scenario of split 'train' has this type; types that exist: address, exchange, refund"),
        (["filter=type", "filter.drop=[refund,exchange,address]"], "filter.drop", "drops all types that exist"),
        (["filter=difficulty", "filter.drop=[9]"], "filter.drop", "difficulties that exist: 1, 2, 3, 4, 5"),
        (["filter=agent_evol", "algorithm=sft",
          "+filter.filters.hard={_target_: components.filters.among.Among, by: difficulty, keep: [9]}"],
         "filter.filters.hard.keep", "difficulties that exist"),
        (["filter@warmup.filter=type", "warmup.filter.drop=[returns]"], "warmup.filter.drop", "types that exist"),
        (["filter=top", "filter.share=0"], "filter.share", "more than 0"),
        (["filter=best"], "filter.count", "grpo compares episodes within a group"),
        (["filter=agent_evol"], "filter.filters.one.count", "grpo compares"),
        (["filter=agent_evol", "algorithm=sft", "filter.filters.good.minimum=null"], "filter.filters.good.minimum",
         "the filter drops no reward"),
        (["filter=agent_evol", "algorithm=sft", "+filter.filters.more=3"], "filter.filters.more", "3 is not a filter"),
        (["filter=agent_evol", "algorithm=sft", "+filter.filters={a b: {_target_: components.filters.top.Top}}"],
         "filter.filters", "'a b' is not a valid filter name"),
        (["filter=agent_evol", "algorithm=sft", f"filter.filters.share._target_={SHOP}",
          "~filter.filters.share.share", "~filter.filters.share.of"],
         "filter.filters.share._target_", "is not a filter; expected a function"),
        (["filter@warmup.filter=threshold", "warmup.filter.minimum=null"], "warmup.filter.minimum", "drops no reward"),
        (["filter=best", "filter.count=2", "collect.refills=1"], "collect.refills", "filter Best drops none"),
        (["filter=top", "filter.of=group", "collect.refills=1"], "collect.refills", "filter Top drops none"),
        (["filter=distinct", "collect.refills=1"], "collect.refills", "filter Distinct drops none"),
]  # fmt: skip
"""Overrides, the key that is refused, and why."""


def test_what_makes_no_sense_is_refused_before_the_start():
    assert wrong_problems(REFUSED, compose) == []


def test_what_makes_sense_is_not():
    for overrides in (
        ["filter=best", "filter.count=2"],
        ["filter=type", "filter.keep=[refund,exchange]", "collect.refills=1"],
        ["filter=best", "algorithm=sft"],
        ["filter=top", "collect.refills=1"],
        ["filter=distinct", "filter.of=collection", "collect.refills=1"],
        ["filter=agent_evol", "algorithm=sft", "collect.refills=1"],
    ):
        compose(overrides)


OWN = """
def short(trajectory, most=3):
    return trajectory.metrics["turns"] <= most

def nothing():
    return True

class Good:
    def select(self, group):
        return []

class Late:
    def survey(self, groups):
        return Good()

class Bare:
    pass

class Raises:
    def __init__(self):
        raise OSError("no such file")

    def select(self, group):
        return []
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_filters.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name, **more: validate(
        ExperimentSpec, {**DATA, "allow": ["own_filters"], "filter": {"_target_": f"own_filters.{name}", **more}}
    )
    sys.modules.pop("own_filters", None)


def test_a_function_or_class_of_the_user_is_a_filter(own):
    assert own("short", most=2).filter.build()(SimpleNamespace(metrics={"turns": 2.0}))
    assert own("Good")
    assert own("Late")


def test_what_is_no_filter_of_the_user_is_refused(own):
    with pytest.raises(SpecError, match=r"filter\.least: no such key"):
        own("short", least=2)
    for name, said in {
        "shorter": r"filter\._target_: 'shorter' does not exist .* Did you mean 'own_filters\.short'",
        "nothing": r"filter\._target_: own_filters\.nothing takes no positional argument, but is called with one",
        "Bare": r"filter\._target_: own_filters\.Bare is not a filter",
        "Raises": r"filter: own_filters\.Raises cannot be built: OSError: no such file",
    }.items():
        with pytest.raises(SpecError, match=said):
            own(name)


def test_what_a_filter_has_left_in_words():
    assert selections.summary_text(METRICS) == "kept 5 of 8 (2 no_spread, 1 good/unspoken)"
    assert selections.summary_text({"kept": 4.0, "dropped": 0.0}) == "kept 4 of 4"
    assert selections.summary_text({}) == ""
    assert (
        selections.summary_text(selections.total([METRICS, METRICS])) == "kept 10 of 16 (4 no_spread, 2 good/unspoken)"
    )


def test_the_line_of_a_round_says_what_was_kept_of_all_its_collections_and_why_not_the_rest(tmp_path, screen):
    def artifact(stage, metrics):
        return Artifact(stage, stage, stage, 1, stage, tmp_path, metrics, {}, (), 2.0)

    console, stream = screen
    execution = Execution(spec_of(tmp_path), Context.at(tmp_path), console, None, tmp_path / "log")
    artifacts = {stage: artifact(stage, METRICS if stage == "filter" else {}) for stage in ("collect", "filter")}
    for label, one in (("collect[1]", artifacts["collect"]), ("filter[1]", artifacts["filter"]),
                       ("filter[1+1]", artifacts["filter"])):  # fmt: skip
        execution.done[label] = SimpleNamespace(artifact=one, status="ran", waited=1.0, seconds=1.0)
    round_teller(execution)(1, artifacts)
    assert "kept 10 of 16 (4 no_spread, 2 good/unspoken)" in stream.getvalue()


def test_the_line_of_a_filter_before_the_rounds_says_it_too(tmp_path, tiny_stages, screen, monkeypatch):
    execution = Execution(spec_of(tmp_path), Context.at(tmp_path), screen[0], None, tmp_path / "log")
    found = Artifact("key", "selection", "filter", 1, "digest", tmp_path, METRICS, {}, (), 2.0)
    monkeypatch.setattr(execution, "_artifact", lambda *_: (found, "ran"))
    execution.stage("filter[sft]", 0, Request("add", {"amount": 1.0}))
    assert "filter[sft] ran in" in screen[1].getvalue()
    assert "kept 5 of 8 (2 no_spread, 1 good/unspoken)" in screen[1].getvalue()
