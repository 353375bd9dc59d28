"""Recipes: the built-in ones by the order of their stages, and one of a user's package."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.errors import SpecError
from components.specs import validate
from flows import chat
from flows.experiment.compose import compose
from flows.experiment.flow import SHARED_KEYS
from flows.experiment.spec import ExperimentSpec
from flows.experiment.starting_point import StartingPoint
from flows.planning.plan import plan
from flows.recipes.continual import forgetting
from flows.recipes.rehearsal import rehearse
from tests.docs.pages import ROOT, own_package
from tests.flows.test_online_rl import DATA, WARMUP, Recorder, rounds
from tests.refusals import wrong_refusals

PAGE = ROOT / "docs" / "guides" / "own_recipe.md"
EVOL = {"_target_": "flows.recipes.agent_evol.agent_evol"}
CURRICULUM = {"_target_": "flows.recipes.curriculum.curriculum", "levels": [1, 2, 3]}
TICTACTOE = {"_target_": "components.environments.games.tictactoe.TicTacToe", "train": 16, "heldout": 4}
SFT = {"algorithm": {"name": "sft"}, "filter": {"_target_": "components.filters.everything.Everything"}}


def test_agent_evol_trains_on_all_episodes_so_far(tmp_path):
    for start, label in (("base", None), ("start", "train[sft]"), ("last", "train[1]")):
        run = Recorder(tmp_path, flow={**EVOL, "evolve_from": start}, **SFT)
        assert list(run.keys) == ["evaluate[start]", *WARMUP, *rounds(1, 2), "evaluate[final]", "deploy"]
        inputs = run.requests["train[2]"].inputs
        for suffix, collection in {"": "sft", "+1": "1", "+2": "2"}.items():
            assert inputs[f"trajectories{suffix}"] == run.keys[f"collect[{collection}]"]
            assert inputs[f"selection{suffix}"] == run.keys[f"filter[{collection}]"]
        assert inputs.get("start") == (label and run.keys[label])
        assert run.requests["collect[2]"].inputs == {"policy": run.keys["train[1]"]}


def test_a_curriculum_adds_a_level_when_a_round_reaches_the_threshold(tmp_path):
    success = {"collect[1]": {"success": 0.8}, "collect[2]": {"success": 0.7}, "collect[3]": {"success": 0.9}}
    run = Recorder(tmp_path, success, flow=CURRICULUM, environment=TICTACTOE, rounds=4)
    levels = [run.requests[f"collect[{part}]"].spec["environment"]["difficulties"] for part in ("sft", 1, 2, 3, 4)]
    assert levels == [[1, 2, 3], [1], [1, 2], [1, 2], [1, 2, 3]]
    assert "difficulties" not in run.requests["evaluate[final]"].spec["environment"]
    assert run.outcome.reported == {"levels unlocked": 3}


GUESS = {"_target_": "components.environments.games.guess.Guess", "train": 16, "heldout": 4}
CONTINUAL = {
    "flow": {"_target_": "flows.recipes.continual.continual"},
    "environment": {
        "_target_": "components.environments.mixture.Mixture",
        "environments": {"tictactoe": TICTACTOE, "guess": GUESS},
    },
    "rounds": 4,
    "replay": {"share": 0.5, "rounds": 1},
    "ewc": {"coefficient": 1.0, "rounds": 2},
}


BY_ENVIRONMENT = {**CURRICULUM, "levels": ["guess", "tictactoe"], "threshold": 0.5, "warmup_levels": 1}


def test_a_curriculum_over_environments_unlocks_one_after_the_other_or_has_all_at_once(tmp_path):
    mixture = {"environment": CONTINUAL["environment"], "rounds": 2}
    for unlocked, expected in ((1, [["guess"], ["guess", "tictactoe"]]), (2, [["guess", "tictactoe"]] * 2)):
        flow = {**BY_ENVIRONMENT, "unlocked": unlocked}
        run = Recorder(tmp_path, {"collect[1]": {"success": 0.5}}, flow=flow, **mixture)
        environments = {label: request.spec.get("environment", {}) for label, request in run.requests.items()}
        assert [list(environments[f"collect[{n}]"]["environments"]) for n in (1, 2)] == expected
        assert list(environments["collect[sft]"]["environments"]) == ["guess"]
        assert list(environments["evaluate[final]"]["environments"]) == ["tictactoe", "guess"]


def written_summary(folder: Path, **rates: float) -> None:
    """Write the summary of an evaluation with these success rates by type of scenario."""
    by_type = {name.replace("_", "/"): {"success": {"mean": rate, "n": 4}} for name, rate in rates.items()}
    (folder / "summary.json").write_text(json.dumps({"by_type": by_type}))


def test_continual_trains_on_the_environments_in_sequence_and_preserves_the_one_before(tmp_path):
    written_summary(tmp_path, tictactoe_first=0.5, tictactoe_second=1.0, guess_spare=0.25)
    run = Recorder(tmp_path, **CONTINUAL)
    evaluations = ["evaluate[tictactoe]", "evaluate[final]"]
    labels = ["evaluate[start]", *WARMUP, *rounds(1, 2), evaluations[0], *rounds(3, 4), evaluations[1], "deploy"]
    assert list(run.keys) == labels
    environments = [list(run.requests[f"collect[{n}]"].spec["environment"]["environments"]) for n in (1, 2, 3, 4)]
    assert environments == [["tictactoe"], ["tictactoe"], ["guess"], ["guess"]]
    assert list(run.requests["evaluate[final]"].spec["environment"]["environments"]) == ["tictactoe", "guess"]
    inputs = {n: run.requests[f"train[{n}]"].inputs for n in (1, 2, 3, 4)}
    replayed = {n: [key for name, key in inputs[n].items() if name.startswith("trajectories-")] for n in inputs}
    last = run.keys["collect[2]"]
    assert replayed == {1: [], 2: [], 3: [last], 4: [last]}
    assert [inputs[n]["anchor"] for n in inputs] == [run.keys["train[sft]"]] * 2 + [run.keys["train[2]"]] * 2
    fisher = [inputs[4][f"anchored-trajectories-{ago}"] for ago in (1, 2)]
    assert fisher == [run.keys["collect[2]"], run.keys["collect[1]"]]
    assert inputs[1]["anchored-trajectories-1"] == run.keys["collect[sft]"]
    assert run.outcome.reported == {"success tictactoe": 0.75, "success guess": 0.25, "forgetting": 0.0}


def test_forgetting_is_the_mean_loss_of_success_on_the_earlier_environments():
    after = [{"a": 0.5, "b": 0.0, "c": 0.0}, {"a": 0.25, "b": 0.5, "c": 0.0}, {"a": 0.125, "b": 0.25, "c": 1.0}]
    assert forgetting(["a", "b", "c"], after) == pytest.approx(((0.5 - 0.125) + (0.5 - 0.25)) / 2)
    assert forgetting(["a", "b"], [{}, {}]) is None


ROLES = {
    "flow": {"_target_": "flows.recipes.multi_agent.multi_agent", "order": ["worker", "planner", "all"]},
    "agent": {"roles": {}},
    "rounds": 4,
}


def test_multi_agent_trains_the_roles_in_order_and_evaluates_after_each(tmp_path):
    run = Recorder(tmp_path, **ROLES)
    evaluations = ["evaluate[1_worker]", "evaluate[2_planner]"]
    labels = ["evaluate[start]", *WARMUP, *rounds(1, 2), evaluations[0], *rounds(3), evaluations[1], *rounds(4)]
    assert list(run.keys) == [*labels, "evaluate[final]", "deploy"]
    assert [run.requests[f"train[{n}]"].spec.get("roles") for n in (1, 2, 3, 4)] == [["worker"]] * 2 + [
        ["planner"],
        None,
    ]


OVERLAP = {"collect": {**DATA["collect"], "overlap": 1}}
REFUSED = [
    ({"flow": CURRICULUM}, "Shop has no difficulties"),
    ({"flow": {**CURRICULUM, "levels": []}, "environment": TICTACTOE}, "flow.levels.*at least 1"),
    ({"flow": {**CURRICULUM, "threshold": 1.5}, "environment": TICTACTOE}, "flow.threshold: 1.5: expected at most 1"),
    ({"flow": {**CURRICULUM, "threshold": -0.1}, "environment": TICTACTOE}, "flow.threshold: -0.1: expected at"),
    ({"flow": {**CURRICULUM, "levels": [1, 9]}, "environment": TICTACTOE}, "flow.levels: 9: .* difficulties 1, 2, 3,"),
    ({"flow": {**CURRICULUM, "unlocked": 4}, "environment": TICTACTOE}, "flow.unlocked: 4: flow.levels has 3"),
    (
        {"flow": {**CURRICULUM, "levels": [1, 2, 1]}, "environment": TICTACTOE},
        "flow.levels: 1: repeated; expected each",
    ),
    (
        {"flow": {**CURRICULUM, "warmup_levels": 1}, "environment": TICTACTOE, "warmup": None},
        "flow.warmup_levels: set, but there is no warmup",
    ),
    ({**CONTINUAL, "flow": {**BY_ENVIRONMENT, "levels": ["gess"]}}, "flow.levels: gess: .* Did you mean guess"),
    ({"flow": CURRICULUM, "environment": TICTACTOE, **OVERLAP}, "collect.overlap: 1: flow=curriculum chooses the env"),
    ({**CONTINUAL, "replay": None, "ewc": None, **OVERLAP}, "collect.overlap: 1: flow=continual chooses the environm"),
    ({**CONTINUAL, "environment": TICTACTOE}, "expected environment=mixture"),
    ({**CONTINUAL, "rounds": 1}, "2 environments in 1 rounds"),
    ({**ROLES, "agent": {}}, "agent.roles: null: one agent plays"),
    ({**ROLES, "flow": {**ROLES["flow"], "order": ["critic"]}}, "flow.order: critic: the agent has no such role"),
    ({**ROLES, "rounds": 2}, "rounds: 2: fewer than the 3 phases"),
]


def test_what_a_recipe_cannot_do_is_refused_before_the_first_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "__call__", lambda *arguments: pytest.fail("a stage ran"))
    assert wrong_refusals(REFUSED, lambda changes: Recorder(tmp_path, **changes)) == []


def test_a_shared_key_that_a_flow_does_not_read_is_rejected():
    keys = sorted({*SHARED_KEYS} - {"rounds", "early_stopping", "warmup", "data", "reward_model"})
    overrides = []
    for key in keys:
        value = "none" if key == "feedback" else "null"
        overrides += [f"{key}={value}", f"+{key}={value}"] + ([f"+{key}.part=1"] if value == "null" else [])
    cases = [(override, "flow=agent_evol does not read it") for override in overrides]
    cases += [("flow.evolve=base", "expected one of _target_, evolve_from. Did you mean 'flow.evolve_from'")]
    assert wrong_refusals(cases, lambda line: compose(["+experiment=smoke", "flow=agent_evol", line])) == []


# --- a recipe of a user's package -----------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path) -> Iterator[Path]:
    """Write the files of the page, and make their package importable."""
    with own_package(PAGE, tmp_path, "goals") as folder:
        yield folder


def composed(mine: Path, *overrides: str) -> ExperimentSpec:
    return compose(["+experiment=until_goal", f"root={mine.parent}/runs", *overrides], config_dir=mine / "conf")


def test_the_plan_walks_it(mine):
    planned = plan(composed(mine))
    labels = [stage.label for stage in planned.stages]
    assert labels == ["evaluate[start]", *WARMUP, *rounds(1, 2), "evaluate[final]", "deploy"]
    (trained,) = (stage for stage in planned.stages if stage.label == "train[2]")
    assert trained.inputs["trajectories+2"] == "collect[2]"
    assert trained.inputs["start"] == "train[sft]"


def test_it_ends_its_rounds_where_it_wants(mine, tmp_path):
    spec = composed(mine)
    changes = {**spec.model_dump(mode="json", by_alias=True), "root": str(tmp_path)}
    run = Recorder(tmp_path, {"collect[2]": {"success": 0.95}}, **changes)
    assert "train[2]" not in run.keys
    assert run.outcome.checkpoint.key == run.keys["train[1]"]
    assert list(run.keys)[-2:] == ["evaluate[final]", "deploy"]


def test_it_runs_to_its_export_and_again_from_the_cache(mine, run):
    spec = composed(mine, "rounds=1")
    first = run(spec)
    assert first["stages"]["train[1]"] == "ran"
    assert Path(first["export"]).is_dir()
    again = run(spec)
    assert set(again["stages"].values()) == {"cached"}
    assert again["policy_digest"] == first["policy_digest"]
    fork = plan(composed(mine, "rounds=2", f"fork={first['run_id']}@1"))
    assert [stage.label for stage in fork.stages][:2] == ["evaluate[start]", "collect[2]"]


BROKEN = {
    "return None": "until_goal returned NoneType; expected the trained policy: return policy",
    "return run.train([run.collect(run.begin())], 'x', algorithm=spec.algorithm, start=run.policy)": (
        "trains on the episodes 1, which did not pass run.judge and run.filter; call it before train"
    ),
    "return run.filter(run.collect(run.begin()))": "filters the episodes 1 before they are judged",
    "return run.train([], 'x', algorithm=spec.algorithm, start=run.begin())": "trains on no episodes",
    "[None for round in run.rounds(run.begin())]": "does not train in round 1; call round.train in each round",
    "return undefined": "raises NameError: name 'undefined' is not defined (goals/flow.py:4, in until_goal)",
    "while True: run.evaluate(run.begin(), 'x')": "called more than 10200 stages while their results are unknown",
}


@pytest.mark.parametrize(("body", "message"), BROKEN.items(), ids=range(len(BROKEN)))
def test_a_mistake_is_reported_before_the_first_stage(mine, body, message):
    head = (
        "from flows.recipes import recipe\n@recipe('rounds', 'warmup', 'fork')\ndef until_goal(run, spec, *, goal):\n"
    )
    (mine / "goals" / "flow.py").write_text(f"{head}    {body}\n")
    spec = composed(mine)
    with pytest.raises(SpecError) as caught:
        rehearse(spec, StartingPoint())
    assert message in str(caught.value)
    assert not (mine.parent / "runs").exists()


def test_a_function_without_the_decorator_is_refused(mine):
    (mine / "goals" / "flow.py").write_text("def until_goal(run, spec, *, goal): ...\n")
    with pytest.raises(SpecError, match="is not a recipe; write @recipe"):
        composed(mine)


def test_it_is_stored_and_read_back(mine):
    spec = composed(mine)
    data = json.loads(spec.model_dump_json(by_alias=True))
    assert data["flow"] == {"_target_": "goals.flow.until_goal", "goal": 0.9}
    assert validate(ExperimentSpec, data) == spec


def test_only_known_keys_can_be_shared():
    from flows.experiment.flow import recipe

    with pytest.raises(ValueError, match=r"recipe\(round\): expected some of rounds, fork"):
        recipe("round")


# --- data of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture
def chats(tmp_path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [[{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": str(n + 1)}] for n in range(12)]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


OFFLINE = {"flow": {"_target_": "flows.recipes.offline.offline"}, "rounds": 0}


def test_offline_training_continues_from_the_warmup_on_imported_data(tmp_path, chats):
    run = Recorder(tmp_path, **OFFLINE, **SFT, data={"path": str(chats)})
    assert list(run.keys) == [
        "import",
        "filter[import]",
        "evaluate[start]",
        *WARMUP,
        "train[data]",
        "evaluate[final]",
        "deploy",
    ]
    assert run.steps["evaluate[start]"] == -1


def test_held_out_rows_are_validated_before_and_after_offline_training(tmp_path, chats):
    run = Recorder(tmp_path, **OFFLINE, **SFT, data={"path": str(chats), "heldout": 0.5})
    labels = list(run.keys)
    first = labels.index("validate[before]")
    before, after = ["validate[before]", "sample[before]"], ["validate[after]", "sample[after]"]
    assert labels[first:][:5] == [*before, "train[data]", *after]
    for labels, policy in ((before, "train[sft]"), (after, "train[data]")):
        for label in labels:
            assert run.requests[label].inputs == {"data": run.keys["import"], "policy": run.keys[policy]}


def test_offline_training_without_an_environment_plays_no_episode(tmp_path, chats):
    run = Recorder(tmp_path, **OFFLINE, **SFT, data={"path": str(chats)}, environment=None, warmup=None)
    assert run.spec.data.heldout == 0.1
    labels = ["validate[before]", "sample[before]", "train[data]", "validate[after]", "sample[after]", "deploy"]
    assert list(run.keys) == ["import", "filter[import]", *labels]
    assert run.outcome.evaluations == {}
    everything = {"data": {"path": str(chats), "heldout": 0}, "deploy": {"mode": "none"}}
    unmeasured = Recorder(tmp_path, **OFFLINE, **SFT, **everything, environment=None, warmup=None)
    assert list(unmeasured.keys) == ["import", "filter[import]", "train[data]"]
    inputs = {"policy": "train[data]"}
    inputs |= {f"validation_{name}": f"validate[{name}]" for name in ("before", "after")}
    inputs |= {f"answers_{name}": f"sample[{name}]" for name in ("before", "after")}
    assert run.requests["deploy"].inputs == {name: run.keys[label] for name, label in inputs.items()}


WITHOUT_ENVIRONMENT = [
    (
        {"flow": {"_target_": "flows.recipes.online_rl.online_rl"}},
        "environment: null: flow=online_rl plays episodes",
    ),
    ({}, "warmup: set, but its demonstrations are episodes of an environment, and environment=none"),
    ({"warmup": None, "certify": True}, "certify: true: the certificate reads the prompts of an environment"),
]


def test_parts_that_play_an_environment_are_refused_without_one(tmp_path, chats):
    data = {**OFFLINE, **SFT, "data": {"path": str(chats)}, "environment": None}
    assert wrong_refusals(WITHOUT_ENVIRONMENT, lambda changes: Recorder(tmp_path, **{**data, **changes})) == []


def test_held_out_rows_are_validated_before_and_after_a_warmup_on_data(tmp_path, chats):
    run = Recorder(tmp_path, data={"path": str(chats), "heldout": 0.5})
    labels = list(run.keys)
    measured = [["validate[before]", "sample[before]"], ["validate[after]", "sample[after]"]]
    assert labels[labels.index("filter[import]") + 1 :][:5] == [*measured[0], "train[sft]", *measured[1]]
    assert run.requests["validate[before]"].inputs == {"data": run.keys["import"]}


def test_a_warmup_trains_on_the_data_if_it_is_set(tmp_path, chats):
    run = Recorder(tmp_path, data={"path": str(chats)})
    assert list(run.keys)[:4] == ["import", "evaluate[start]", "filter[import]", "train[sft]"]
    assert run.requests["train[sft]"].inputs["trajectories"] == run.keys["import"]
    assert run.requests["train[sft]"].inputs["selection"] == run.keys["filter[import]"]


def test_offline_training_needs_data(tmp_path):
    with pytest.raises(SpecError, match=r"data.path: needs a value: data.path=FILE, or data.dataset=NAME"):
        Recorder(tmp_path, **OFFLINE, **SFT)


def test_data_that_no_training_reads_is_refused(tmp_path, chats):
    with pytest.raises(SpecError, match=r"data.path: is set, but warmup=none, and flow=online_rl"):
        Recorder(tmp_path, data={"path": str(chats)}, warmup=None)


def test_an_environment_that_is_named_is_evaluated_before_and_after_offline_training(chats, run):
    lines = ["name=offline", "model=tiny", "flow=offline", "environment=shop", f"data.path={chats}"]
    limits = ["evaluate.scenarios=2", "agent.max_turns=1", "agent.max_tokens=4", f"root={chats.parent}/runs"]
    result = run(compose([*lines, *limits]))
    assert result["success"] is not None
    assert result["loss"] is None
    assert list(result["stages"]) == [
        *("import", "filter[import]", "evaluate[start]", "train[data]", "evaluate[final]", "deploy")
    ]
    assert Path(result["export"]).is_dir()


def test_training_on_pairs_without_an_environment_improves_held_out_rows(tmp_path, run, monkeypatch, capsys):
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"Say {n}.", "chosen": "Yes.", "rejected": "No, never."} for n in range(32)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    lines = ["flow=offline", "algorithm=orpo", f"data.path={rows}", "size=tiny", f"root={tmp_path}/runs"]
    result = run(compose([*lines, "data.heldout=0.25", "algorithm.learning_rate=1e-2", "agent.max_tokens=4"]))
    assert not any(label.startswith("evaluate") for label in result["stages"])
    assert result["success"] is result["reward"] is None
    assert result["loss"] < result["loss_before"]
    assert result["accuracy"] > result["accuracy_before"]
    console = capsys.readouterr().err
    assert re.search(rf"after training +{result['loss']:.3f} +{result['accuracy']:.3f}", console)
    assert re.search(r"prompt of a held-out row: Say \d+\.\n  data:   Yes\.\n  before: .*\n  after:  .*\n", console)
    page = Path(result["report"]).read_text()
    assert "<h2>Held-out rows</h2>" in page
    assert "Answer of the data" in page
    monkeypatch.setattr("sys.stdin", io.StringIO("Say 3.\n"))
    assert chat.main([result["run_id"], f"root={tmp_path}/runs"]) == 0
    assert "assistant> " in capsys.readouterr().out
    card = next(Path(result["export"]).parent.glob("*/README.md")).read_text()
    assert f"| after training | {result['loss']:.3f} | {result['accuracy']:.3f} |" in card


def test_data_of_another_kind_than_the_algorithm_needs_is_refused(chats, run):
    lines = ["name=offline", "model=tiny", "flow=offline", f"data.path={chats}", "data.heldout=0.5"]
    limits = ["agent.max_turns=1", "agent.max_tokens=4", f"root={chats.parent}/runs"]
    with pytest.raises(SpecError, match=r"algorithm=dpo learns nothing from this data; it needs preference pairs"):
        run(compose([*lines, *limits, "algorithm=dpo"]))
    with pytest.raises(SpecError, match=r"algorithm.name: grpo learns from episodes that the policy itself plays"):
        compose([*lines, *limits, "algorithm=grpo"])


def test_rejected_answers_are_not_imitated(tmp_path, run):
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{n} + 1?", "chosen": str(n + 1), "rejected": "7 or so"} for n in range(6)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["name=offline", "model=tiny", "flow=offline", "data.heldout=0.5", f"data.path={pairs}", "deploy.mode=none"]
    limits = ["agent.max_turns=1", "agent.max_tokens=4", f"root={tmp_path}/runs"]
    with pytest.raises(SpecError, match=r"filter: keeps \d rejected answers, which algorithm=sft would imitate"):
        run(compose([*lines, *limits]))
    spec = compose([*lines, *limits, "filter=successful"])
    assert run(spec)["stages"]["train[data]"] == "ran"
