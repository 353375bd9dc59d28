"""Calibration command: good judges, bad judges, and user errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from components.errors import ResourceError
from components.evaluation.spec import CalibrateSpec, EvaluateSpec
from components.specs import Target, validate
from components.trajectories.schema import History, Message, Scenario, Trajectory
from components.trajectories.store import read_scores
from flows.evaluation.calibration import has_solutions, read_people
from flows.experiment.checks.judging import other_rewards
from flows.explain import calibrate as command
from flows.stages.base import Request
from flows.stages.calibrate import CalibrateStage, reseeded, rotated
from flows.stages.execute import request_key, run_stage
from tests.flows.declarations import check_artifact
from tests.flows.pretend import pretend
from tests.trajectories.builders import FAILURE

JUDGES = "tests.flows.judges"

pytestmark = pytest.mark.usefixtures("root_logger")


def answer(scenario: int, sample: int) -> Trajectory:
    """Every third succeeds; the longer the text, the later the sample."""
    name, text = f"s{scenario:02}", "so " * (1 + (5 * sample + scenario) % 7)
    history = History([Message("user", f"Task {scenario}"), Message("assistant", text)])
    outcome = {"success": (scenario + sample) % 3 == 0}
    return Trajectory(f"{name}/{sample}", Scenario(name, {}, "heldout"), sample, [history], outcome=outcome)


EPISODES = [answer(scenario, sample) for scenario in range(12) for sample in range(4)]


@pytest.fixture
def run(tmp_path):
    """Create a finished run whose last evaluation has `EPISODES`."""
    played = {"start": EPISODES[::4], "sft": EPISODES[1::4], "final": EPISODES}
    return pretend(tmp_path, episodes={f"evaluate[{name}]": episodes for name, episodes in played.items()})


@pytest.fixture(scope="session")
def tracked(tmp_path_factory):
    """Return the URI of a database shared by the tests, because its creation takes seconds."""
    from components.tracking import store

    return store.local_uri(tmp_path_factory.mktemp("tracked"))


@pytest.fixture
def measured(tmp_path, run, capsys, tracked):
    """Return a function that calls the command on the last evaluation of that run."""
    (tmp_path / "conf" / "reward").mkdir(parents=True)

    def call(judge: str, *arguments: str, label: str | None = "evaluate[final]", **keys) -> tuple[int, dict, str]:
        target = judge if "." in judge else f"{JUDGES}.{judge}"
        lines = ["# A judge.", f"_target_: {target}", *(f"{name}: {json.dumps(value)}" for name, value in keys.items())]
        (tmp_path / "conf" / "reward" / "mine.yaml").write_text("\n".join(lines) + "\n")
        labels = [] if label is None else ["--label", label]
        line = ["+experiment=smoke", "reward=mine", "allow=[tests]", f"root={tmp_path}", f"tracking.uri={tracked}"]
        line += ["--run", run.short, *labels]
        code = command.main([*line, "--config-dir", str(tmp_path / "conf"), *arguments])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else {}, captured.err

    return call


def test_a_judge_that_says_the_truth_is_found_to_be_good(measured, tmp_path):
    before = set((tmp_path / "artifacts").iterdir())
    code, result, stderr = measured("components.rewards.rules.outcome.Outcome", "calibrate.marks.auc=0.9", "--strict")
    new = [path for path in (tmp_path / "artifacts").glob("*/manifest.json") if path.parent not in before]
    assert [check_artifact(path.parent) for path in new] == ["calibrate"]
    assert (code, result["warnings"]) == (0, [])
    assert (result["auc"]["value"], result["agreement"]["value"]) == (1.0, 1.0)
    assert (result["episodes"], result["groups"], result["truth"], result["reward"]) == (48, 12, "success", "Outcome")
    assert result["marks"] == {"auc": {"mark": 0.9, "found": 1.0, "met": True}}
    assert "Outcome against success: 48 episodes of 12 scenarios" in stderr


def test_a_judge_that_says_nothing_is_warned_of_and_with_strict_the_command_fails(measured, tmp_path, tracked):
    from components.tracking import store

    code, result, stderr = measured("constant", "calibrate.marks.auc=0.8")
    assert (code, result["auc"]["value"]) == (0, 0.5)
    assert result["warnings"] == [
        "the judge is worse than its mark: auc is 0.500, below its mark of 0.8",
        "the judge is not better than chance: auc 0.500 [0.500, 0.500]",
        "every score is 0.5, so the judge distinguishes no episodes. A judge that compares the episodes of a group is "
        "not called if all of them are identical",
    ]
    assert "warning: the judge is worse than its mark: auc is 0.500" in stderr
    client = store.connect(tracked, tmp_path / "mlflow" / "artifacts")
    run = client.get_run(result["mlflow_run"])
    assert (run.data.metrics["calibrate/auc"], run.data.tags["calibrates"]) == (0.5, "constant")
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id)} >= {"calibration.html"}
    assert measured("constant", "calibrate.marks.auc=0.8", "--strict")[0] == 1
    assert measured("constant", "--strict")[0] == 0  # no mark, nothing asked


def test_a_judge_that_likes_length_is_found_out(measured):
    _, result, _ = measured("length")
    assert result["length_bias"]["low"] > 0.9
    words = "the scores correlate with the length of an episode"
    assert any(warning.startswith(words) for warning in result["warnings"])


def test_noise_is_seen_where_the_judge_has_a_seed(measured):
    _, noisy, _ = measured("Noisy", "calibrate.repeats=3", noise=1.0)
    assert 0.6 < noisy["noise"]["value"] < 1.1  # of 3 draws with deviation 1: 0.886
    assert 0.5 < noisy["auc"]["value"] < 1.0
    assert noisy["position_bias"]["value"] is None  # it sees one episode at a time
    assert measured("Noisy", "calibrate.repeats=1", noise=1.0)[1]["noise"]["value"] is None


def test_a_judge_that_favours_who_is_shown_first_is_found_out(measured):
    _, result, _ = measured("First", "calibrate.repeats=4")
    assert result["position_bias"]["value"] == pytest.approx(-1.0)
    words = "the scores correlate with the position at which it is shown"
    assert any(warning.startswith(words) for warning in result["warnings"])
    assert measured("Shuffled", "calibrate.repeats=4")[1]["position_bias"]["value"] == pytest.approx(-1.0)


def test_cost_and_what_could_not_be_scored(measured):
    for cost, per_thousand in ((0.002, pytest.approx(2.0)), (None, None), (0.0, 0.0)):
        _, result, stderr = measured("Priced", cost=cost)
        assert result["cost_per_thousand"] == per_thousand
        assert ("cost_per_thousand   unknown" in re.sub(" +", "   ", stderr)) == (cost is None)
        assert (result["unscored"], result["episodes"], result["without_truth"]) == (0.5, 24, 0.0)


def test_another_reward_may_be_the_truth(measured):
    truth = f"calibrate.truth={{_target_: {JUDGES}.length}}"
    _, result, _ = measured("length", truth)
    assert (result["truth"], result["auc"]["value"]) == ("length", 1.0)
    assert measured("constant", truth)[1]["spearman"]["value"] == 0.0


def test_people_may_say_the_truth(measured, tmp_path):
    lines = [{"trajectory_id": episode.id, "score": 5 if episode.success else 1} for episode in EPISODES[:24]]
    lines += [{"trajectory_id": EPISODES[0].id, "score": 4, "author": "A"}, {"trajectory_id": "elsewhere", "score": 3}]
    (tmp_path / "people.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    _, result, _ = measured("components.rewards.rules.outcome.Outcome", "--people", str(tmp_path / "people.jsonl"))
    figures = (result["truth"], result["episodes"], result["threshold"], result["auc"]["value"])
    assert figures == ("people", 24, 3.0, 1.0)
    assert read_people(tmp_path / "people.jsonl")[EPISODES[0].id] == fmean([5, 4])


def test_a_file_of_people_that_cannot_be_used_is_said(measured, tmp_path):
    path = tmp_path / "people.jsonl"
    for text, why in {
        '{"trajectory_id": "s00/0"}': "line 1: .* expected .*trajectory_id",
        '{"trajectory_id": "s00/0", "score": 3}\nnonsense': "line 2: 'nonsense'",
        '{"trajectory_id": "s00/0", "score": NaN}': "line 1",
        '{"trajectory_id": "s00/0", "score": true}': "line 1",
        '{"trajectory_id": 3, "score": 3}': "line 1",
        "\n": "no line",
    }.items():
        path.write_text(text)
        with pytest.raises(ResourceError, match=why):
            read_people(path)
    path.write_text('{"trajectory_id": "elsewhere", "score": 3}')
    code, result, stderr = measured("constant", "--people", str(path))
    assert (code, result) == (2, {})
    assert re.search(r"--people: none of the 1 ids .* such as 's00/0', found 'elsewhere'", stderr)


def test_several_evaluations_are_judged_together_under_their_labels(measured):
    _, result, _ = measured("components.rewards.rules.outcome.Outcome", label=None)
    assert (result["episodes"], result["groups"]) == (72, 12)


def test_the_same_command_finds_what_was_judged_and_another_mark_changes_the_page_alone(measured):
    first = measured("Noisy", noise=3.0)[1]
    _, result, stderr = measured("Noisy", "calibrate.marks.auc=0.99", noise=3.0)
    assert (first["key"], first["auc"]) == (result["key"], result["auc"])
    assert measured("Noisy", "calibrate.repeats=3", noise=3.0)[1]["key"] != first["key"]
    page, picture = (Path(result[name]).read_text() for name in ("html", "plot"))
    assert "the judge is worse than its mark" in page
    assert "Largest disagreements between judge and truth" in page
    assert page.count('<svg class="plot"') == 2
    assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "Noisy against success" in picture
    assert result["html"] in stderr


def test_a_truth_that_never_differs_is_said(measured):
    _, result, _ = measured("length", label="evaluate[start]")
    assert result["auc"]["value"] is not None  # some of the first samples succeed
    _, result, _ = measured("length", f"calibrate.truth={{_target_: {JUDGES}.constant}}")
    assert result["auc"]["value"] is None
    assert "the truth is 0.5 for all 48 episodes" in result["warnings"][0]


def test_mistakes_are_named(measured, tmp_path, capsys):
    for arguments, why in (
        (["--label", "train[1]"], ["--label train[1]: has no episodes"]),
        (["--label", "evaluate[9]"], ["has no stage 'evaluate[9]'"]),
        (["calibrate.repeats=0", "calibrate.marks.auc=2"], ["calibrate.repeats: 0", "calibrate.marks.auc: 2"]),
        (["calibrate.marks.acu=0.5"], ["calibrate.marks.auc"]),
        (["calibrate.truth={_target_: tests.flows.judges.nobody}"], ["calibrate.truth"]),
        (["calibrate.truth={_target_: components.filters.signal.Signal}"], ["calibrate.truth._target_"]),
    ):
        code, _, stderr = measured("constant", *arguments, label=None)
        assert (code, [words in stderr for words in why]) == (2, [True] * len(why)), stderr


def test_a_run_that_is_not_there_is_named(tmp_path, capsys):
    assert command.main(["+experiment=smoke", f"root={tmp_path}", "--run", "latest"]) == 2
    assert "there is no run below" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["+experiment=smoke", "--label", "collect[1]"])


def test_every_key_that_is_lacking_is_named_at_once_and_those_of_engines_only_where_they_play(tmp_path, capsys):
    asks = ["reward=ruler", "reward.model.url=http://127.0.0.1:9/v1", "reward.model.model=judge"]
    judge = "{name: served, url: 'http://127.0.0.1:9/v1', model: judge, key_variable: OTHER_KEY}"
    truth = f"calibrate.truth={{_target_: components.rewards.judges.ruler.Ruler, model: {judge}}}"
    engine = ["inference=remote", "inference.url=http://127.0.0.1:9/v1", "inference.model=m"]
    keys = ["reward.model.key_variable=ONE_KEY", "inference.key_variable=ENGINE_KEY"]

    def missing_keys(*more):
        assert command.main(["+experiment=smoke", f"root={tmp_path}", *asks, truth, *engine, *keys, *more]) == 2
        text = capsys.readouterr().err
        return [f"{name}_KEY is not set" in text for name in ("ONE", "OTHER", "ENGINE")]

    assert missing_keys() == [True, True, True]
    assert missing_keys("--run", "latest") == [True, True, False]


def test_solutions_need_an_environment_that_has_them():
    none = validate(Target, {"_target_": f"{JUDGES}.First"}, allow=("tests",))
    (problem,) = other_rewards(EvaluateSpec(), CalibrateSpec(solutions=True), none)
    assert str(problem) == (
        "calibrate.solutions: true, but tests.flows.judges.First has no method solve(scenario); expected null or false"
    )
    assert not list(other_rewards(EvaluateSpec(), CalibrateSpec(), none))


def test_solutions_are_judged_beside_the_policy_where_there_are_any():
    shop = validate(Target, {"_target_": "components.environments.worlds.shop.Shop", "train": 4, "heldout": 4})
    scenarios = shop.build().scenarios("heldout")
    assert has_solutions(shop, scenarios)
    gym = validate(Target, {"_target_": "components.environments.adapters.gym.Gym", "id": "CartPole-v1"})
    assert not has_solutions(gym, list(gym.build().scenarios("heldout")))
    assert not has_solutions(validate(Target, {"_target_": f"{JUDGES}.First"}, allow=("tests",)), scenarios)


# --- the stage ------------------------------------------------------------------------------------------------------


def test_every_turn_shows_each_episode_at_another_place():
    group = EPISODES[:4]
    orders = [[one.id for one in rotated("s", group, turn, 4, 0)] for turn in range(4)]
    assert all(sorted(order) == sorted(one.id for one in group) for order in orders)
    for one in group:
        assert sorted(order.index(one.id) for order in orders) == [0, 1, 2, 3]
    assert orders[0] == [one.id for one in rotated("s", group, 0, 2, 0)]
    assert len({tuple(one.id for one in rotated("s", group, 0, 2, seed)) for seed in range(9)}) > 1


def test_the_seed_of_a_reward_and_of_those_inside_it_moves_from_turn_to_turn():
    inner = {"_target_": f"{JUDGES}.Noisy", "noise": 1.0, "seed": 5}
    target = validate(Target, inner, allow=("tests",))
    assert reseeded(target, 0) is target
    assert reseeded(target, 2).arguments == {"noise": 1.0, "seed": 7}
    default = validate(Target, {"_target_": f"{JUDGES}.Noisy", "noise": 1.0}, allow=("tests",))
    assert reseeded(default, 1).arguments["seed"] == 1
    learned = {"_target_": "components.rewards.judges.learned.Learned", "path": "x", "task": inner}
    outer = validate(Target, learned, allow=("tests",))
    assert reseeded(outer, 3).arguments["task"].arguments["seed"] == 8
    assert "seed" not in reseeded(outer, 3).arguments


def test_ruler_says_at_which_place_it_shows_each():
    from components.rewards.judges.ruler import Ruler, _Table
    from components.rewards.llm.models.local import PolicyJudge

    ruler = Ruler(PolicyJudge(), seed=4)
    table = _Table(EPISODES[:4], 4)
    assert [table.order[place] for place in ruler.places(EPISODES[:4])] == table.place


def test_failed_episodes_are_left_out_and_counted(context, tmp_path):
    from flows.history.records import Records

    played = [*EPISODES[:5], replace(EPISODES[5], failure=FAILURE)]
    pretend(tmp_path, episodes={"evaluate[final]": played})
    key = Records(tmp_path).get("latest").stage("evaluate[final]").key
    request = Request("calibrate", {"reward": {"_target_": f"{JUDGES}.First"}}, {"a": key}, 0, ("tests",))
    artifact, _ = run_stage(request, context)
    assert (artifact.metrics["episodes"], artifact.metrics["failed"]) == (5.0, 1.0)
    rows = json.loads((artifact.path / "judged.json").read_text())
    first = {score.trajectory_id: score.reward for score in read_scores(artifact.path / "scores-1.parquet")}
    assert {row["id"]: row["scores"][0] for row in rows} == first
    assert all(len(row["scores"]) == len(row["positions"]) == 2 for row in rows)
    wide = replace(request, spec={**request.spec, "judge": {"concurrency": 3}})
    assert request_key(wide, context) == request_key(request, context)
    outcome = {"_target_": "components.rewards.rules.outcome.Outcome"}
    assert CalibrateStage.model_validate({"reward": outcome}).key_part() == {
        "reward": {"_target_": "reward.outcome", "turn_cost": 0.0, "invalid_cost": 0.0,
                   "progress_weight": 0.0, "repetition_cost": 0.0, "repetition_ngram": 3},
        "truth": None, "people": None, "repeats": 2,
    }  # fmt: skip
