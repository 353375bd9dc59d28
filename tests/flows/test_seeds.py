"""Runs of several seeds: `seeds: [0, 1]` is a sweep over the seed, with means over its points."""

import json

import pytest

from components.evaluation.metrics import mean_interval
from flows.experiment.compose import compose_points
from flows.planning.earlier_stages import SimilarStage
from flows.planning.plan import plan
from flows.sweeps.points import Point
from flows.sweeps.settings import Setting, difference, over_seeds
from tests.flows.pretend import pretend, spec_of
from tests.refusals import wrong_refusals


def point(number, *overrides, status="finished", **result):
    return Point(number, list(overrides), status, result=result)


def test_each_seed_is_a_point():
    specs, sweep = compose_points(["+experiment=smoke", "seeds=[3,5]"])
    assert [(spec.seed, spec.seeds) for spec in specs] == [(3, None), (5, None)]
    assert sweep.seeds == ["seeds=null", "seed=3,5"]


def test_seeds_multiply_with_the_axes_of_a_sweep():
    specs, _ = compose_points(["+experiment=smoke", "seeds=[0,1]", "algorithm=grpo,rloo"], multirun=True)
    assert [(spec.algorithm.name, spec.seed) for spec in specs] == [
        (name, seed) for name in ("grpo", "rloo") for seed in (0, 1)
    ]


def test_an_equal_seed_runs_once():
    assert [spec.seed for spec in compose_points(["+experiment=smoke", "seeds=[1,1]"])[0]] == [1]


REFUSED = [
    (["seeds=[]"], "seeds"),
    (["seeds=[a]"], "seeds.0: 'a': expected a whole number"),
    (["seeds=[-1]"], "seed"),
    (["seeds=[0,1]", "seed=2"], "seeds: is set together with seed; set one of them"),
]


def test_bad_seeds_are_refused():
    assert wrong_refusals(REFUSED, lambda lines: compose_points(["+experiment=smoke", *lines])) == []


def test_points_that_differ_in_their_seed_are_averaged():
    points = [
        point(0, "a=1", "seeds=null", "seed=0", success=0.2, gain=None),
        point(1, "a=1", "seeds=null", "seed=1", success=0.4, gain=0.1),
        point(2, "a=2", "seeds=null", "seed=0", success=0.9),
        point(3, "a=2", "seeds=null", "seed=1", status="failed"),
    ]
    (group,) = over_seeds(points)
    assert (group.overrides, group.seeds) == (["a=1"], [0, 1])
    assert group.measures["success"]["mean"] == pytest.approx(0.3)
    assert group.measures["gain"] == {"mean": 0.1, "low": None, "high": None, "n": 1}


def test_the_interval_is_that_of_students_t():
    interval = mean_interval([1.0, 2.0, 4.0])
    half = 4.302652729911275 * 1.5275252316519465 / 3**0.5  # t(0.975, 2 degrees of freedom), standard deviation
    assert interval["mean"] == pytest.approx(7 / 3)
    assert (interval["low"], interval["high"]) == pytest.approx((7 / 3 - half, 7 / 3 + half))


@pytest.mark.usefixtures("run")
def test_stages_that_do_not_sample_run_once(tmp_path, capsys):
    from flows.run import main

    main(["+experiment=smoke", f"root={tmp_path}", "seeds=[0,1]", "rounds=0", "warmup=none", "deploy.mode=none"])
    first, second, means = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["seed"], second["seed"]) == (0, 1)
    assert first["stages"] == {"evaluate[start]": "ran"}
    assert second["stages"] == {"evaluate[start]": "cached"}
    assert means["seeds"][0]["seeds"] == [0, 1]
    assert means["seeds"][0]["success"]["n"] == 2


def test_a_plan_covers_all_seeds_and_counts_shared_stages_once(tmp_path, capsys):
    from flows.plan import main

    arguments = ["+experiment=smoke", f"root={tmp_path}", "seeds=[3,5]"]
    assert main([*arguments, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["seeds"] == [3, 5]
    statuses = {(stage["seed"], stage["label"]): stage["status"] for stage in planned["stages"]}
    labels = [stage["label"] for stage in planned["stages"]]
    assert labels[: len(labels) // 2] == labels[len(labels) // 2 :]
    cached = {key for key, status in statuses.items() if status == "cached"}
    assert (5, "evaluate[start]") in cached
    assert all(seed == 5 for seed, _ in cached)
    assert statuses[5, "train[1]"] == statuses[5, "evaluate[final]"] == "run"  # of other policies
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.startswith("seed  stage")
    assert f"smoke, 2 seeds: {len(labels)} stages, {len(cached)} cached" in text


def test_the_time_of_a_plan_is_that_of_all_seeds(tmp_path, monkeypatch):
    pretend(tmp_path)
    monkeypatch.setattr(SimilarStage, "seconds_for", lambda similar, request: 10)
    first, second = spec_of(tmp_path, seed=1), spec_of(tmp_path, seed=2)
    assert plan(first, second).seconds == plan(first).seconds + plan(second).seconds
    assert plan(first, first).seconds == plan(first).seconds > 0


def test_the_interval_over_seeds_includes_those_within_each():
    """Two seeds without a success in 8 scenarios: Wilson's interval of each, not [0, 0]."""
    from components.evaluation.metrics import seeds_interval

    upper = 0.3244
    assert seeds_interval([0.0, 0.0], [(0.0, upper), (0.0, upper)])["high"] == pytest.approx(upper)
    wide = seeds_interval([0.2, 0.8], [(0.1, 0.3), (0.7, 0.9)])
    assert {**wide} == {**mean_interval([0.2, 0.8])}


def test_the_interval_of_a_difference_over_seeds_includes_those_within_each():
    """The example of Newcombe (1998, Stat Med 17:873, table II): 56/70 - 48/80 has the interval 0.0524 to 0.3339."""
    from components.evaluation.metrics import seeds_difference
    from components.evaluation.proportions import wilson

    pair = ((48 / 80, wilson(48, 80)), (56 / 70, wilson(56, 70)))
    equal = seeds_difference([pair, pair])
    assert (equal["low"], equal["high"]) == pytest.approx((0.0524, 0.3339), abs=1e-4)
    without = seeds_difference([((0.0, None), (0.2, (0.1, 0.3))), ((0.0, None), (0.4, (0.3, 0.5)))])
    assert without == mean_interval([0.2, 0.4])


def test_equal_rewards_of_two_seeds_do_not_decide_a_sweep():
    """Of a metric without a paired comparison: each seed has an interval of its own, over its scenarios."""

    def setting(name: str, reward: float) -> Setting:
        result = {"reward": reward, "reward_interval": [reward - 0.2, reward + 0.2]}
        overrides = [f"algorithm={name}"]
        points = [point(seed, *overrides, f"seed={seed}", **result) for seed in (0, 1)]
        return Setting(overrides, points)

    compared = difference(setting("grpo", 0.5), setting("rloo", 0.4), "reward", {})
    assert compared.equal
    assert (compared.low, compared.high) == pytest.approx((-0.1 - 0.08**0.5, -0.1 + 0.08**0.5))
