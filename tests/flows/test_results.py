"""Results of a run."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.artifacts import Artifact
from components.errors import SpecError
from components.evaluation.metrics import states_success, summarise
from components.trajectories.schema import Scenario, Score, Trajectory
from components.trajectories.store import write_scores, write_trajectories
from components.trajectories.truncation import TURNS
from flows.experiment.early_stopping import EvaluatedPolicy
from flows.experiment.requests import Requests
from flows.recipes.outcome import RunOutcome
from flows.reporting.report import round_figures, summary_of, titles_by, titles_of
from flows.reporting.results import ReleaseResult, Results, passes_of
from flows.stages.episode_figures import figures
from flows.stages.execute import key_part
from tests.flows.pretend import spec_of

MEASURE = {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}
SUMMARY = {"success": MEASURE, "reward": {**MEASURE, "mean": 0.4}, "turns": {**MEASURE, "low": None, "high": None}}
DIFFERENCE = {"difference": 0.25, "low": 0.1, "high": 0.4, "n": 8, "improved": ["a", "b"], "regressed": []}


def results(**changes):
    data = {
        "run_id": "run",
        "release": ReleaseResult("digest"),
        "summaries": {"start": SUMMARY, "final": SUMMARY},
        "titles": {"start": "start", "final": "after GRPO"},
        "differences": {"after GRPO against start": DIFFERENCE},
        "episodes": 20,
        "seconds": 12.345,
        "stages": {"evaluate[start]": "cached", "train[1]": "ran"},
        "report": "/runs/report.html",
    }
    return Results(**{**data, **changes})


def test_the_json_line_has_every_field_and_null_for_what_there_is_not():
    data = json.loads(results().to_json())
    assert data == {
        "run_id": "run",
        "policy_digest": "digest",
        "success": 0.5,
        "success_interval": [0.25, 0.75],
        "success_start": 0.5,
        "success_start_interval": [0.25, 0.75],
        "success_sft": None,
        "success_sft_interval": None,
        "success_feedback": None,
        "success_feedback_interval": None,
        "gain": 0.25,
        "gain_interval": [0.1, 0.4],
        "reward": 0.4,
        "reward_interval": [0.25, 0.75],
        "loss": None,
        "loss_before": None,
        "accuracy": None,
        "accuracy_before": None,
        "step": 0,
        "rounds": 0,
        "stopped_early": False,
        "pruned": None,
        "success_by_round": {},
        "training_reward_by_round": {},
        "guards": [],
        "reported": {},
        "seed": 0,
        "episodes": 20,
        "seconds": 12.35,
        "stage_seconds": {},
        "cached_seconds": 0.0,
        "cost": 0.0,
        "unpriced_calls": 0,
        "peak_memory_gb": 0.0,
        "stages": {"evaluate[start]": "cached", "train[1]": "ran"},
        "export": None,
        "champion": None,
        "deployment": None,
        "model": None,
        "report": "/runs/report.html",
    }


def test_the_gain_is_against_the_start_of_the_rounds_not_against_an_evaluation_between():
    titles = {"start": "start", "sft": "after SFT", "first": "after first", "final": "after GRPO"}
    differences = {
        "after GRPO against after first": {**DIFFERENCE, "difference": 0.0},
        "after GRPO against after SFT": {**DIFFERENCE, "difference": 0.125},
        "after GRPO against start": DIFFERENCE,
    }
    line = json.loads(results(titles=titles, differences=differences, reported={"forgetting": 0.5}).to_json())
    assert (line["gain"], line["reported"]) == (0.125, {"forgetting": 0.5})
    warmup_only = {"start": "start", "sft": "after SFT"}
    line = json.loads(results(titles=warmup_only, differences={"after SFT against start": DIFFERENCE}).to_json())
    assert line["gain"] == 0.25


def test_a_gain_on_one_scenario_has_no_interval():
    """Of several episodes of one scenario there is no bootstrap over scenarios; a mean over seeds needs both limits."""
    differences = {"after GRPO against start": {**DIFFERENCE, "low": None, "high": None}}
    line = json.loads(results(differences=differences).to_json())
    assert (line["gain"], line["gain_interval"]) == (0.25, None)


def test_the_table_shows_intervals_where_there_are_some():
    assert results().rows()[1] == ["after GRPO", "0.500 [0.250, 0.750]", "0.400 [0.250, 0.750]", "0.500"]


def test_evaluations_in_the_rounds_stand_between_and_the_final_policy_last():
    early, late = ({**SUMMARY, "success": {**MEASURE, "mean": mean}} for mean in (0.6, 0.3))
    found = results(
        titles={"start": "start", "final": "after GRPO, round 2 (best)"},
        step=2,
        rounds=4,
        in_rounds={2: early, 4: late},
    )
    assert [row[:2] for row in found.rows()] == [
        ["start", "0.500 [0.250, 0.750]"],
        ["round 4", "0.300 [0.250, 0.750]"],
        ["after GRPO, round 2 (best)", "0.500 [0.250, 0.750]"],
    ]
    line = json.loads(found.to_json())
    assert (line["step"], line["rounds"], line["success_by_round"]) == (2, 4, {"2": 0.6, "4": 0.3})


TITLES = [
    ("last", 4, "after GRPO"),
    ("last", 2, "after GRPO, round 2"),
    ("best", 4, "after GRPO, round 4 (best)"),
    ("best", 2, "after GRPO, round 2 (best)"),
    ("best", 0, "start of the rounds (best)"),
]


def test_the_final_policy_is_called_by_its_round_where_it_is_not_simply_the_last(tmp_path):
    evaluation = Artifact("key", "evaluation", "evaluate", 1, "digest", tmp_path, {}, {}, (), 0.0)
    evaluations, measured = {"start": evaluation, "final": evaluation}, [EvaluatedPolicy(0, None, evaluation)]
    for policy, step, title in TITLES:
        spec = spec_of(tmp_path, rounds=4, deploy={"policy": policy})
        assert titles_of(spec, RunOutcome(evaluations, measured, step=step)) == {"start": "start", "final": title}


def test_success_that_no_environment_states_is_unknown(tmp_path):
    """An answer to a prompt without expected answer, as in flow=rlhf."""
    answer = Trajectory("a/0", Scenario("a", {}, "test"), 0, [], policy="p", outcome={}, reward=0.25)
    for name, outcome in (("unknown", {}), ("failed", {"success": False})):
        folder = tmp_path / name
        folder.mkdir()
        write_trajectories(folder / "trajectories.parquet", [replace(answer, outcome=outcome)])
        write_scores(folder / "scores.parquet", [Score("a/0", 0.25)])
        (folder / "summary.json").write_text(json.dumps(summarise([replace(answer, outcome=outcome)])))
    unknown, failed = (summary_of(SimpleNamespace(path=tmp_path / name)) for name in ("unknown", "failed"))
    rows = results(summaries={"start": failed, "final": unknown}).rows()
    assert [row[1][:5] for row in rows] == ["0.000", "–"]
    assert rows[1][2] == "0.250"
    null, failed, cut = (
        replace(answer, outcome=outcome, metrics=metrics)
        for outcome, metrics in (({"success": None}, {}), ({"success": False}, {}), ({}, {TURNS: 1.0}))
    )
    for episodes in ([answer], [null], [cut], [null, failed], [answer, cut]):  # the metric of stages, and of MLflow
        assert ("success" in figures(episodes)) == states_success(episodes), episodes


def test_differences_are_told_in_words():
    (text,) = results().differences_text()
    assert text == (
        "after GRPO against start: success +0.250 [0.100, 0.400] on the same 8 scenarios, 2 better, 0 worse"
    )


def test_the_summary_for_prefect_links_the_report():
    text = results().markdown()
    assert "[Report](file:///runs/report.html)" in text
    assert "| after GRPO | 0.500 [0.250, 0.750] |" in text
    assert "(https://host/report.html)" in results(report="https://host/report.html").markdown()


def test_policies_after_a_warmup_and_after_rounds_of_the_same_algorithm_have_names_of_their_own():
    before = {"start": "start", "sft": "after SFT", "feedback": "after feedback"}
    assert titles_by("grpo", True) == {**before, "final": "after GRPO"}
    assert titles_by("sft", True) == {**before, "final": "after the rounds"}
    assert titles_by("sft", False)["final"] == "after SFT"


def figures_of(**metrics):
    """Return the figures of a round with these metrics of its stages."""
    artifacts = {
        stage: Artifact(stage, stage, stage, 1, stage, Path(), values, {}, (), 2.0) for stage, values in metrics.items()
    }
    return round_figures(artifacts)


def test_a_round_is_told_under_the_names_of_the_report():
    row = figures_of(
        collect={"success": 0.5, "turns": 3.0, "tokens_per_episode": 40.0, "tokens_per_s": 600.0},
        judge={"reward": 0.4},
        filter={"kept": 8.0},
        train={"kl": 0.01, "entropy": 0.5, "tokens_per_s": 150.0, "sampled_tokens": 320.0},
    )
    assert (row["reward"], row["success"], row["kl"], row["entropy"], row["turns"]) == (0.4, 0.5, 0.01, 0.5, 3.0)
    assert (row["sampled_tokens"], row["tokens_per_s"], row["sampling_tokens_per_s"]) == (40.0, 150.0, 600.0)
    assert (row["collect_s"], row["train_s"]) == (2.0, 2.0)


def test_whoever_plays_beside_the_policy_is_told_apart():
    collect = {"episodes": 4.0, "success": 0.25, "second/episodes": 3.0, "second/success": 0.5, "second/failed": 0.0}
    row = figures_of(collect=collect, judge={"reward": 0.2, "second/reward": 0.4})
    assert {name: value for name, value in row.items() if "/" in name} == {
        "second/episodes": 3.0,
        "second/success": 0.5,
        "second/reward": 0.4,
    }


def test_several_samples_add_pass_at_k_to_the_json_line():
    """Against the probability over all subsets of k of the n samples, written out for k = n."""
    episodes = [
        Trajectory(
            f"s{number}-{index}", Scenario(f"s{number}", {}, "heldout"), index, [], outcome={"success": mark == "+"}
        )
        for number, marks in enumerate(("++", "+-", "--", "++"))
        for index, mark in enumerate(marks)
    ]
    passes = passes_of(episodes, 2)
    data = json.loads(results(passes=passes, samples=2).to_json())
    assert (data["samples"], data["pass_at_k"], data["pass_hat_k"]) == (2, 0.75, 0.5)
    assert data["pass_at_k_interval"][0] < 0.75 <= data["pass_at_k_interval"][1]
    assert passes_of(episodes, 1) == {}


def test_samples_of_an_evaluation_are_part_of_its_key_only_above_one_and_are_not_greedy(tmp_path):
    one = Requests(spec_of(tmp_path)).evaluate(None)
    several = Requests(spec_of(tmp_path, evaluate={"samples": 3, "temperature": 0.5})).evaluate(None)
    sampled = Requests(spec_of(tmp_path, evaluate={"temperature": 0.5})).evaluate(None, samples=3)
    assert "samples" not in json.dumps(key_part(one))
    assert key_part(several)["samples"] == 3
    assert key_part(several) == key_part(sampled)
    with pytest.raises(SpecError, match="greedy episodes of a scenario are equal"):
        spec_of(tmp_path, evaluate={"samples": 4})
