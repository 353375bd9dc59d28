"""The recipe `self_evolve`: window, start and variations of its generations, refused settings, plan and fork."""

from components.trajectories.schema import Scenario, Trajectory
from flows.experiment.compose import compose
from flows.planning.plan import plan
from tests.flows.pretend import pretend
from tests.flows.test_online_rl import WARMUP, Recorder, rounds
from tests.flows.test_recipes import SFT, TICTACTOE
from tests.refusals import wrong_refusals

EVOLVE = {"_target_": "flows.recipes.self_evolve.self_evolve"}
DPO = {"algorithm": {"name": "dpo"}}
SMOKE = ["+experiment=smoke", "flow=self_evolve", "algorithm=sft", "filter=rejection", "rounds=2"]


def trained_on(run: Recorder, generation: int) -> list[str]:
    """Return the labels of the collections that a generation was trained on, in order."""
    inputs = run.requests[f"train[{generation}]"].inputs
    labels = {run.keys[label]: label for label in run.keys if label.startswith("collect[")}
    names = ["trajectories", *(f"trajectories+{number}" for number in range(1, len(inputs)))]
    return [labels[inputs[name]] for name in names if name in inputs]


WINDOWS = [
    (None, ["collect[sft]", "collect[1]", "collect[2]", "collect[3]"]),
    (1, ["collect[3]"]),
    (2, ["collect[2]", "collect[3]"]),
]


def test_a_generation_trains_on_the_last_ones(tmp_path):
    for keep, window in WINDOWS:
        run = Recorder(tmp_path, flow={**EVOLVE, "keep_generations": keep}, rounds=3, **SFT)
        assert list(run.keys) == ["evaluate[start]", *WARMUP, *rounds(1, 2, 3), "evaluate[final]", "deploy"]
        assert trained_on(run, 3) == window


def test_a_generation_starts_from_the_chosen_policy(tmp_path):
    for start, label in (("base", None), ("start", "train[sft]"), ("last", "train[1]")):
        run = Recorder(tmp_path, flow={**EVOLVE, "evolve_from": start}, **SFT)
        assert run.requests["train[2]"].inputs.get("start") == (label and run.keys[label])
        assert run.requests["collect[2]"].inputs == {"policy": run.keys["train[1]"]}


def test_preferences_are_learned_from_attempts_without_demonstrations(tmp_path):
    run = Recorder(tmp_path, flow=EVOLVE, **DPO)
    assert [trained_on(run, generation) for generation in (1, 2)] == [["collect[1]"], ["collect[1]", "collect[2]"]]
    assert run.requests["train[2]"].inputs["reference"] == run.keys["train[sft]"]


def test_a_policy_gradient_trains_on_its_own_generation(tmp_path):
    run = Recorder(tmp_path, flow={**EVOLVE, "keep_generations": 1}, algorithm={"name": "grpo"})
    assert [trained_on(run, generation) for generation in (1, 2)] == [["collect[1]"], ["collect[2]"]]


def test_a_policy_that_judges_itself_is_that_of_the_generation(tmp_path):
    model = {"name": "policy", "max_tokens": 64, "longest": 3000}
    critic = {"_target_": "components.rewards.judges.critic.Critic", "model": model}
    run = Recorder(tmp_path, flow=EVOLVE, reward=critic, **SFT)
    assert run.requests["judge[1]"].inputs["policy"] == run.keys["train[sft]"]
    assert run.requests["judge[2]"].inputs["policy"] == run.keys["train[1]"]


def test_generations_take_turns_with_the_variations(tmp_path):
    variations = [{"difficulties": [1]}, {"difficulties": [1, 2], "seed": 1}]
    run = Recorder(tmp_path, flow={**EVOLVE, "variations": variations}, environment=TICTACTOE, rounds=3, **SFT)
    environments = [run.requests[f"collect[{number}]"].spec["environment"] for number in (1, 2, 3)]
    assert environments == [{**TICTACTOE, **variations[number]} for number in (0, 1, 0)]
    for label in ("collect[sft]", "evaluate[start]", "evaluate[final]"):
        assert run.requests[label].spec["environment"] == TICTACTOE


REFUSED = [
    (
        {"flow": {**EVOLVE, "variations": [{}, {"difficulty": [1]}]}},
        r"flow.variations.1.difficulty: .*Did you mean 'difficulties'",
    ),
    ({"flow": {**EVOLVE, "variations": [{"difficulties": [7]}]}}, "flow.variations.0.difficulties"),
    ({"flow": {**EVOLVE, "variations": [{"train": 3}]}}, r"flow.variations.0: 4: expected at most 3"),
    (
        {"flow": {**EVOLVE, "variations": [{"seed": 1}]}, "collect": {"scenarios": 4, "group_size": 2, "overlap": 1}},
        "collect.overlap: 1: flow=self_evolve chooses the environment of a round when it begins",
    ),
    ({"algorithm": {"name": "grpo"}}, "flow.keep_generations: 3: grpo learns from tokens of the current policy"),
    (
        {"algorithm": {"name": "grpo"}, "flow": {**EVOLVE, "keep_generations": None, "evolve_from": "base"}},
        "flow.evolve_from: base: (.|\n)*flow.keep_generations: null: ",
    ),
    ({"flow": {**EVOLVE, "variations": []}}, "flow.variations"),
    ({"flow": {**EVOLVE, "keep_generations": 0}}, "flow.keep_generations"),
]


def test_a_wrong_setting_is_refused_before_the_first_stage(tmp_path):
    data = {"flow": EVOLVE, "environment": TICTACTOE, **SFT}
    assert wrong_refusals(REFUSED, lambda changes: Recorder(tmp_path, **{**data, **changes})) == []


def test_keys_that_it_does_not_read_are_rejected():
    cases = [
        (key, "flow=self_evolve does not read it")
        for key in ("+replay.share=0.5", "+ewc.coefficient=1", "+feedback=null")
    ]
    cases += [("+flow.keep_generation=2", r"Did you mean 'flow\.keep_generations'")]
    assert wrong_refusals(cases, lambda override: compose([*SMOKE, override])) == []


WAYS = [
    [],
    ["algorithm=dpo", "filter=signal"],
    ["reward=critic", "judge_model@reward.model=policy", "filter=top"],
    ["collect=reflection", "collect.reflection.demonstrate=true", "filter=successful"],
    ["reward_model=process", "reward_model.every=1"],
]


def test_the_plan_walks_the_ways_of_the_guide(tmp_path):
    for overrides in WAYS:
        planned = plan(compose([*SMOKE, f"root={tmp_path}", "warmup=none", *overrides]))
        labels = [stage.label for stage in planned.stages]
        assert [label for label in labels if label in rounds(1, 2)] == rounds(1, 2), overrides
        (trained,) = (stage for stage in planned.stages if stage.label == "train[2]")
        assert (trained.inputs["trajectories"], trained.inputs["trajectories+1"]) == ("collect[1]", "collect[2]")


def test_the_experiment_selects_the_shortest_of_the_won_games():
    spec = compose(["+experiment=self_evolve"])
    scenario = Scenario("game", {}, "train")
    games = [
        Trajectory(f"game/{sample}", scenario, sample, [], outcome={"success": won}, reward=float(won) - 0.01 * turns)
        for sample, (won, turns) in enumerate([(False, 3), (True, 5), (True, 4), (True, 4), (False, 5)])
    ]
    selections = spec.filter.build().select(games)
    reasons = ["accepted/reward_below_minimum", "best/not_among_best", "kept", "best/not_among_best"]
    assert [selection.reason for selection in selections] == [*reasons, "accepted/reward_below_minimum"]


def test_it_is_found_again_and_goes_on_from_a_fork(tmp_path):
    flow = {"flow": {**EVOLVE, "variations": [{"seed": 0}, {"seed": 1}]}, "environment": TICTACTOE, **SFT}
    first = pretend(tmp_path, **flow)
    assert {stage.status for stage in pretend(tmp_path, **flow).stages} == {"cached"}
    fork = pretend(tmp_path, **flow, rounds=3, fork=f"{first.short}@2")
    assert [stage.label for stage in fork.stages][:5] == ["evaluate[start]", *rounds(3)]
