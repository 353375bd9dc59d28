"""The watch for reward hacking: each rule strikes where it should, and nowhere else."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace

import pytest

from components.artifacts import Artifact
from components.errors import GuardTriggered, SpecError
from components.evaluation.metrics import bootstrap, paired_rewards
from components.pages.report import Finding, Report, render
from components.rewards.rules.outcome import repetition
from components.trajectories.policy_text import IdenticalTexts, policy_messages, text
from components.trajectories.schema import Score
from components.trajectories.store import write_scores, write_trajectories
from flows.experiment.guards import ADVICE, DRIFTS, RULES, GuardsSpec, RoundMetrics, RunGuards, drift_message
from flows.experiment.guards.drift import success_rose
from flows.history.records import GuardName, Notice, Records, RunRecord, SampleEpisode, recording
from flows.planning.plan import plan
from flows.recipes.run import Run
from flows.stages.base import Context
from flows.stages.episodes import figures
from flows.stages.execute import run_stage
from tests.flows import climber
from tests.flows.pretend import pretend, spec_of
from tests.refusals import wrong_problems
from tests.trajectories.builders import episode, talk, tool_talk

LENGTH, REPEATS = "tokens_per_episode", "repetition"


def rounds(name: str, *values: float | None, success=(), episodes: float = 100.0) -> dict[int, RoundMetrics]:
    known = dict(zip(range(1, 99), success, strict=False))
    return {
        n: RoundMetrics({} if value is None else {name: value}, known.get(n), episodes)
        for n, value in enumerate(values, 1)
    }


# --- the formula ----------------------------------------------------------------------------------------------------


DRIFT = [
    ((10, 12, 23, 24), True),  # above 22 twice
    ((10, 12, 23, 21), False),  # once
    ((10, 12, 21, 40), False),  # once
    ((10, 12, 22, 22), False),  # not above
    ((10, 12, 40), False),  # three rounds say nothing
    ((10, 12, 5.4, 5.3), True),  # below 5.5 twice
    ((10, 12, 5.4, 5.6), False),
    ((10, 12, 11, 13, 30, 31), True),
    ((10, 12, 30, 31, 13, 12), False),  # it came back
    ((0, 0, 30, 31), False),  # nothing to compare with
    ((10, None, 12, 30, 31), True),  # the first two that are known
    ((10, 12, 30, 31, None), False),  # of this round it is not known
]


def test_a_figure_has_drifted_where_two_rounds_in_a_row_are_beyond_the_limit():
    found = [drift_message(rounds(LENGTH, *values), LENGTH, "tokens", factor=2.0, both=True) for values, _ in DRIFT]
    assert [(values, bool(message)) for (values, _), message in zip(DRIFT, found, strict=True)] == DRIFT


def test_a_share_has_drifted_by_how_much_it_has_risen_and_a_fall_is_none():
    assert drift_message(rounds(REPEATS, 0.1, 0.2, 0.36, 0.5), REPEATS, "the share", rise=0.2) == (
        "the share rose from 0.15 (rounds 1 to 2) to 0.36 and 0.5 (rounds 3 to 4), above 0.35 (0.2)"
    )
    assert drift_message(rounds(REPEATS, 0.1, 0.2, 0.36, 0.34), REPEATS, "the share", rise=0.2) is None
    assert drift_message(rounds(REPEATS, 0.8, 0.8, 0.1, 0.1), REPEATS, "the share", rise=0.2) is None
    assert drift_message(rounds(REPEATS, 0.0, 0.0, 0.4, 0.4), REPEATS, "the share", rise=0.2) is not None


def test_what_success_has_risen_with_is_no_drift_and_a_little_success_is_not_enough():
    values = (10, 10, 30, 30)
    clear, chance, none = (0.2, 0.2, 0.6, 0.6), (0.2, 0.2, 0.24, 0.25), (0.2, 0.2, 0.1, 0.1)
    assert drift_message(rounds(LENGTH, *values, success=clear), LENGTH, "tokens", factor=2.0) is None
    for success in (chance, none):
        message = drift_message(rounds(LENGTH, *values, success=success), LENGTH, "tokens", factor=2.0)
        assert message is not None
        assert f"while success went from 0.200 to {sum(success[2:]) / 2:.3f}" in message
    clearly = rounds(LENGTH, *values, success=clear)
    assert drift_message(clearly, LENGTH, "t", factor=2.0, ignore_success=True) is not None


def test_success_has_clearly_risen_by_the_interval_of_two_shares():
    p, q, n = 0.2, 0.33, 200.0
    bound = 1.959964 * math.sqrt(p * (1 - p) / n + q * (1 - q) / n)
    looks = rounds(LENGTH, 1, 1, 1, 1, success=(p, p, q, q))
    assert (q - p > bound, success_rose(looks)) == (True, True)
    assert not success_rose(rounds(LENGTH, 1, 1, 1, 1, success=(p, p, p + 0.9 * bound * 0.9, p + 0.9 * bound * 0.9)))
    assert not success_rose(rounds(LENGTH, 1, 1, 1, 1, success=(p, p, q, q), episodes=20))
    assert not success_rose(rounds(LENGTH, 1, 1, 1, 1))  # not known


# --- what is measured of a round ------------------------------------------------------------------------------------


def spoken(group: str, sample: int, *texts: str, success: bool = False):
    return episode(group, sample, success=success, histories=[talk("Hello.", *texts)])


def identical(trajectories):
    texts = IdenticalTexts()
    for trajectory in trajectories:
        texts.add(trajectory)
    return texts.shares()


def test_what_a_policy_said_is_its_texts_and_calls():
    one = episode(histories=[tool_talk()])
    assert policy_messages(one) == (("", (("look_up", '{"id": "A7"}'),)), ("It is on its way.", ()))
    assert text(one) == 'look_up({"id": "A7"})\nIt is on its way.'


def test_shares_of_pairs_that_say_the_same_without_success():
    same = [spoken("a", 0, "x"), spoken("a", 1, "x"), spoken("a", 2, "y"), spoken("b", 0, "x"), spoken("b", 1, "z")]
    assert identical(same) == (1 / 4, 2 / 6)  # pairs of a: 3, of b: 1; between: 6, of which x-x twice
    solved = [spoken("a", n, "x", success=True) for n in range(3)]
    assert identical(solved) == (0.0, None)  # one right answer
    mixed = [spoken("a", 0, "yes", success=True), spoken("b", 0, "yes"), spoken("c", 0, "no")]
    assert identical(mixed) == (None, 1 / 3)
    assert identical([]) == (None, None)


def test_a_collection_states_them_and_invalid_actions_among_its_figures():
    found = figures([spoken("a", 0, "x"), spoken("a", 1, "x"), spoken("b", 0, "x")])
    assert (found["identical_within"], found["identical_between"]) == (1.0, 1.0)
    played = climber.play("train", 2, 2, 30, 0.5, 0)
    assert figures(played)["repetition"] == sum(repetition(one, 3) for one in played) / 4
    assert "identical_within" not in figures([spoken("a", 0, "x")])
    counts = [3, 0, "many"]  # the last one is no number of an environment that we know
    episodes = [replace(spoken("a", n, "x"), outcome={"invalid_actions": count}) for n, count in enumerate(counts)]
    assert figures(episodes)["invalid_actions"] == 1.5
    assert "invalid_actions" not in figures([spoken("a", 0, "x")])


def test_the_difference_of_rewards_is_paired_by_scenario():
    before = [episode(f"s{n}", reward=0.1 * n) for n in range(6)] + [episode("gone", reward=1.0)]
    after = [episode(f"s{n}", reward=0.1 * n - (0.2 if n else -0.1)) for n in range(6)] + [episode("new", reward=None)]
    found = paired_rewards(before, after)
    changes = [0.1, *[-0.2] * 5]
    assert found["difference"] == pytest.approx(sum(changes) / 6)
    assert (found["low"], found["high"]) == pytest.approx(bootstrap([[change] for change in changes]))
    assert (found["regressed"], found["improved"], found["n"]) == ([f"s{n}" for n in range(1, 6)], ["s0"], 6)
    assert found["left_out"] == ["gone", "new"]
    with pytest.raises(ValueError, match="share no scored"):
        paired_rewards(before, [episode("other", reward=1.0)])


# --- the rules in a run ---------------------------------------------------------------------------------------------


def figure(name: str, *values: float, stage: str = "collect", **more: float) -> dict[str, dict[str, float]]:
    played = {"episodes": 64.0, "failed": 0.0, "success": 0.5} if stage == "collect" else {}
    return {f"{stage}[{n}]": {**played, **more, name: value} for n, value in enumerate(values, 1)}


STRIKES = {
    "length_drift": figure("tokens_per_episode", 50.0, 52.0, 120.0, 130.0),
    "repetition_drift": figure("repetition", 0.05, 0.05, 0.4, 0.5),
    "identical_answers": figure("identical_between", 0.0, 0.1, 0.5, 0.6),
    "ensemble_disagreement": figure("components/spread", 0.1, 0.1, 0.3, 0.4, stage="judge"),
}
CALM = {
    "length_drift": figure("tokens_per_episode", 50.0, 52.0, 120.0, 90.0),
    "repetition_drift": figure("repetition", 0.3, 0.3, 0.4, 0.45),
    "identical_answers": figure("identical_within", 0.3, 0.4, 0.5, 0.6),
    "ensemble_disagreement": figure("components/spread", 0.1, 0.1, 0.15, 0.4, stage="judge"),
}


@pytest.mark.parametrize("rule", STRIKES)
def test_a_rule_warns_stops_or_is_off(tmp_path, rule):
    assert [(one.kind, one.step) for one in pretend(tmp_path / "a", rounds=4, metrics=STRIKES[rule]).notices] == [
        (rule, 4)
    ]
    assert pretend(tmp_path / "b", rounds=4, metrics=STRIKES[rule], guards={rule: "off"}).notices == []
    assert pretend(tmp_path / "c", rounds=4, metrics=CALM[rule]).notices == []
    stop = {"rounds": 4, "guards": {rule: "stop"}}
    with pytest.raises(GuardTriggered) as struck:
        pretend(tmp_path / "a", metrics=STRIKES[rule], **stop)
    assert str(struck.value).endswith(
        f"{ADVICE[rule]}. Finished stages are kept; the same command with guards.{rule}=warn resumes from here"
    )
    assert Records(tmp_path / "a").all()[0].stages[-1].label == "filter[4]"
    assert f"guards.{rule} may end" in plan(spec_of(tmp_path / "d", **stop)).notes[0]


def amplified(*rounds: tuple[float, float]) -> dict[str, dict[str, float]]:
    return {f"train[{n}]": {"advantage_divisor": d, "reward_range": r} for n, (d, r) in enumerate(rounds, 1)}


def test_tiny_differences_that_become_full_advantages_are_reported(tmp_path):
    """The second round has no large difference itself: the range is that of the run."""
    metrics = amplified((0.3, 1.0), (0.0005, 0.001), (0.0005, 0.001))
    (notice,) = pretend(tmp_path / "a", rounds=3, metrics=metrics).notices
    assert (notice.kind, notice.step) == ("amplified_rewards", 2)
    assert "standard deviation of at most 0.0005, which is 0.0005 of the range of rewards in this run (1)" in (
        notice.message
    )
    assert "algorithm.scale=none" in notice.message
    assert "arXiv:2503.20783" in notice.message
    off = {"amplified_rewards": False}
    assert pretend(tmp_path / "b", rounds=3, metrics=metrics, guards=off).notices == []
    lower = {"amplified_share": 0.0001}
    assert pretend(tmp_path / "c", rounds=3, metrics=metrics, guards=lower).notices == []
    with pytest.raises(GuardTriggered, match=r"guards\.amplified_rewards=warn resumes from here"):
        pretend(tmp_path / "a", rounds=3, metrics=metrics, guards={"amplified_rewards": "stop"})
    assert Records(tmp_path / "a").all()[0].stages[-1].label == "train[2]"
    same = amplified((0.0005, 0.001), (0.0004, 0.001))  # rewards that are small as such
    assert pretend(tmp_path / "small", rounds=2, metrics=same).notices == []
    assert pretend(tmp_path / "none", rounds=2, metrics={"train[1]": {"loss": 0.1}}).notices == []


def test_ensembles_inside_of_other_rewards_are_seen_too(tmp_path):
    inside = figure("components/second.spread", 0.1, 0.1, 0.3, 0.4, stage="judge")
    assert [one.kind for one in pretend(tmp_path, rounds=4, metrics=inside).notices] == ["ensemble_disagreement"]
    other = figure("components/widespread", 0.1, 0.1, 0.3, 0.4, stage="judge")
    assert pretend(tmp_path / "other", rounds=4, metrics=other).notices == []


def test_judges_that_were_trained_again_are_compared_with_themselves(tmp_path):
    spread = (0.1, 0.1, 0.3, 0.4, 0.3)
    model = {"scenarios": 4, "group_size": 2, "models": 2, "algorithm": {"name": "reward_model"}}
    metrics = figure("components/spread", *spread, stage="judge")
    again = pretend(tmp_path / "again", rounds=5, reward_model={**model, "every": 2}, metrics=metrics)
    once = pretend(tmp_path / "once", rounds=5, reward_model=model, metrics=metrics)
    assert ([one.step for one in again.notices], [one.step for one in once.notices]) == ([], [4])


def test_a_rule_that_goes_on_striking_is_heard_once_and_again_after_a_calm_round(tmp_path):
    lengths = figure("tokens_per_episode", 10, 10, 30, 30, 30, 10, 30, 30)
    assert [one.step for one in pretend(tmp_path, rounds=8, metrics=lengths).notices] == [4, 8]


def held(*rewards: float):
    return [episode(f"s{n:02}", reward=reward, success=True) for n, reward in enumerate(rewards)]


GOOD, BAD = held(*[0.9] * 20), held(*[0.9] * 4, *[0.3] * 16)
TRAINED = {"metrics": {f"judge[{n}]": {"reward": 0.1 * n} for n in range(1, 5)}, "rounds": 4, "evaluate": {"every": 2}}
OTHER = {"_target_": "components.rewards.rules.returned.Returned"}


def test_a_held_out_reward_that_falls_while_the_training_reward_rises(tmp_path):
    def evaluated(name, final, **changes):
        played = {"evaluate[sft]": GOOD, "evaluate[2]": GOOD, "evaluate[final]": final}
        own = {"evaluate": {"every": 2, "reward": OTHER}}
        return pretend(tmp_path / name, episodes=played, **{**TRAINED, **own, **changes}).notices

    (notice,) = evaluated("fallen", BAD)
    assert (notice.kind, notice.step) == ("heldout_reward", 4)
    assert "held-out reward fell from 0.900 (step 2) to 0.420 (step 4)" in notice.message
    assert evaluated("calm", GOOD) == []
    assert evaluated("slight", held(*[0.9] * 19, 0.0)) == []  # one of twenty: within its interval of none
    assert evaluated("dependent", BAD, evaluate={"every": 2}) == []
    with pytest.raises(GuardTriggered, match=r"guards\.heldout_reward=warn resumes from here"):
        evaluated("fallen", BAD, guards={"heldout_reward": "stop"})


def test_evaluations_have_the_reward_that_is_given_them(tmp_path):
    from flows.experiment.requests import Requests

    spec = spec_of(tmp_path, evaluate={"reward": OTHER})
    assert Requests(spec).evaluate(None).spec["reward"]["_target_"] == OTHER["_target_"]
    assert Requests(spec_of(tmp_path)).evaluate(None).spec["reward"]["_target_"].endswith("Outcome")


ENSEMBLE = {"rounds": 4, "reward_model": {"algorithm": {"name": "reward_model"}}}
NO_RULES = [
    ({"guards": {"length_drift": "stop"}, "rounds": 3}, "guards.length_drift", "rounds=3 is too few"),
    ({"guards": {"heldout_reward": "stop"}, "evaluate": {"every": 1}}, "guards.heldout_reward", "another reward"),
    ({"guards": {"heldout_reward": "stop"}, "evaluate": {"reward": OTHER}}, "guards.heldout_reward", "every=0"),
    ({"guards": {"ensemble_disagreement": "stop"}, **ENSEMBLE}, "guards.ensemble_disagreement",
     "needs an ensemble of reward models, but reward_model.models=1"),
    ({"guards": {"length_factor": 1.0}}, "guards.length_factor", "more than 1"),
    ({"guards": {"repetition_rise": 0}}, "guards.repetition_rise", "more than 0"),
    ({"guards": {"identical_answers": "halt"}}, "guards.identical_answers", "off, warn, stop"),
    ({"evaluate": {"reward": {"_target_": "components.filters.signal.Signal"}}}, "evaluate.reward._target_", "score"),
]  # fmt: skip


def test_what_could_never_strike_is_no_rule(tmp_path):
    assert wrong_problems(NO_RULES, lambda changes: spec_of(tmp_path, **changes)) == []


def test_an_ensemble_to_be_watched_that_none_is_is_said_after_the_first_round(tmp_path):
    alone = {"judge[1]": {"reward": 0.5, "scored": 8.0}}
    with pytest.raises(SpecError, match=r"guards\.ensemble_disagreement: stop, but the scores of round 1 have no"):
        pretend(tmp_path, rounds=4, metrics=alone, guards={"ensemble_disagreement": "stop"})


def test_every_guard_has_a_rule_advice_and_a_place_in_records():
    from typing import get_args

    thresholds = ("_factor", "_rise", "_alpha", "_share", "anchors")
    actions = {name for name in GuardsSpec.model_fields if not name.endswith(thresholds)}
    assert actions == set(RULES) == set(ADVICE) == set(get_args(GuardName))
    assert set(DRIFTS) == set(STRIKES) < actions


# --- the episodes that show it --------------------------------------------------------------------------------------


def artifact(folder, stage: str, metrics: dict[str, float]) -> Artifact:
    return Artifact("k", stage, stage, 1, "d", folder, metrics, {}, (), 0.0)


def shown_by(tmp_path, episodes, scores, metrics, judged=None, **rules):
    """What guards say of a fourth round with these episodes, after three whose figures were 1."""
    write_trajectories(tmp_path / "trajectories.parquet", episodes)
    write_scores(tmp_path / "scores.parquet", scores)
    told: list[Notice] = []
    guards = RunGuards(GuardsSpec(**rules), told.append)
    for number in (1, 2, 3, 4):
        values = {name: value if number > 2 else 0.1 for name, value in {**metrics}.items()}
        said_of = {name: value if number > 2 else 0.1 for name, value in (judged or {}).items()}
        played = {"episodes": float(len(episodes)), **values}
        guards.gathered(number, artifact(tmp_path, "collect", played), artifact(tmp_path, "judge", said_of))
    return told


def test_the_longest_episodes_show_length_drift_and_the_shortest_a_fall(tmp_path):
    played = [climber.answer("train", n, 0, length, False) for n, length in enumerate((5, 50, 9, 40, 30))]
    scores = [Score(one.id, one.metrics["sampled_tokens"]) for one in played]
    (notice,) = shown_by(tmp_path, played, scores, {LENGTH: 40.0})
    assert [one.id for one in notice.episodes] == ["train-01/0", "train-03/0", "train-04/0"]
    assert notice.episodes[0].why == "50 sampled tokens, reward 50"
    assert notice.episodes[0].excerpt.startswith("w7 w8 w9")
    assert notice.message.endswith("Example episodes of collect[4]: train-01/0, train-03/0, train-04/0")
    (notice,) = shown_by(tmp_path, played, scores, {LENGTH: 0.01})
    assert notice.episodes[0].id == "train-00/0"


def test_the_most_common_answer_shows_sameness_and_the_most_disputed_episodes_disagreement(tmp_path):
    played = [spoken("a", 0, "yes"), spoken("a", 1, "no"), spoken("b", 0, "yes"), spoken("c", 0, "why", success=True)]
    scores = [Score(one.id, 1.0, {"spread": 0.1 * n}) for n, one in enumerate(played)]
    (notice,) = shown_by(tmp_path, played, scores, {"identical_between": 0.9})
    assert [one.id for one in notice.episodes] == ["a/0", "b/0"]
    assert notice.episodes[0].why == "2 of 4 episodes say this without success, reward 1"
    (notice,) = shown_by(tmp_path, played, scores, {}, {"components/spread": 0.9})
    assert [one.id for one in notice.episodes] == ["c/0", "b/0", "a/1"]
    assert notice.episodes[0].why == "spread 0.3, reward 1"


def test_the_most_repetitive_episodes_show_repetition(tmp_path):
    played = [climber.answer("train", n, 0, 12, False) for n in range(3)]
    played[1].histories[0].token_ids[1:] = [4] * 12
    (notice,) = shown_by(tmp_path, played, [Score(one.id, 0.0) for one in played], {REPEATS: 0.5})
    assert notice.episodes[0].id == "train-01/0"
    assert notice.episodes[0].why == "90% of its 3-grams repeat, reward 0"


def test_a_long_answer_is_cut_and_a_notice_survives_its_record(tmp_path):
    played = [climber.answer("train", 0, 0, 500, False)]
    (notice,) = shown_by(tmp_path, played, [Score("train-00/0", None)], {LENGTH: 500.0})
    (one,) = notice.episodes
    assert (len(one.excerpt), one.excerpt[-1], one.why) == (400, "…", "500 sampled tokens, not scored")
    with recording(tmp_path, RunRecord("a" * 32, "x", 0, time.time())) as writer:
        writer.note(notice)
    assert Records(tmp_path).get("latest").notices == [notice]


def test_the_report_shows_what_was_found_and_escapes_what_the_policy_said():
    best = SampleEpisode("collect[4]", "s/1", "900 sampled tokens, reward 3", "<script>alert(1)</script>")
    page = render(Report("x", findings=[Finding("length_drift", 4, "tokens rose", [asdict(best)])]))
    for words in ("Findings of the guards", "length_drift", "after round 4", "Tokens rose.", "s/1", best.why):
        assert words in page
    assert "<script>alert" not in page
    assert "Findings of the guards" not in render(Report("x"))


# --- a policy that really hacks -------------------------------------------------------------------------------------

HACKED = {"_target_": "tests.flows.judges.length"}


def climb(root, monkeypatch, **changes):
    """A run of the climber, by the real stages for judge and filter; returns its notices and what it did."""
    climber.use(monkeypatch)
    everything = {"_target_": "components.filters.everything.Everything"}
    base = {"rounds": 7, "warmup": None, "filter": everything, "deploy": {"mode": "none"}, "allow": ["tests"]}
    spec = spec_of(root, **{**base, "collect": {"scenarios": 12, "group_size": 4}, "reward": HACKED, **changes})
    context = Context.at(root)
    notices: list[Notice] = []
    done: list[tuple[str, str]] = []

    def call(label, step, request):
        artifact, status = run_stage(request, context)
        done.append((label, status))
        return artifact

    error = None
    try:
        Run(spec, call, on_notice=notices.append).execute()
    except GuardTriggered as struck:
        error = struck
    return notices, done, error


def test_a_policy_that_learns_to_please_a_reward_that_likes_length_is_stopped_and_its_rounds_are_kept(
    tmp_path, monkeypatch
):
    notices, done, error = climb(tmp_path, monkeypatch, guards={"length_drift": "stop"})
    assert error is not None
    assert [(one.kind, one.step) for one in notices] == [("length_drift", 4)]
    assert done[-1] == ("filter[4]", "ran")
    assert ("train[3]", "ran") in done  # what was finished
    (best, *_) = notices[0].episodes
    assert best.label == "collect[4]"
    assert "sampled tokens, reward" in best.why
    notices, done, error = climb(tmp_path, monkeypatch)  # the same with warn goes on from there
    assert error is None
    assert next(label for label, status in done if status == "ran") == "train[4]"
    assert [(one.kind, one.step) for one in notices] == [("length_drift", 4)]


def test_a_policy_that_learns_to_solve_its_tasks_is_left_alone(tmp_path, monkeypatch):
    outcome = {"_target_": "components.rewards.rules.outcome.Outcome"}
    guards = dict.fromkeys(("length_drift", "repetition_drift", "identical_answers"), "stop")
    notices, done, error = climb(tmp_path, monkeypatch, reward=outcome, guards=guards)
    assert (notices, error, done[-1][0]) == ([], None, "evaluate[final]")
