"""Other ways of collecting, in a run: what is played, what is in a stage key, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.algorithms.foreign import TOKENIZER
from components.specs import validate
from components.trajectories.step_labels import CONTINUED, read
from components.trajectories.store import read_trajectories
from flows.experiment.spec import ExperimentSpec
from flows.stages import STAGES
from flows.stages.execute import run_stage
from tests.deployment.tiny import TINY
from tests.flows.test_online_rl import DATA, Recorder, changed
from tests.refusals import wrong_refusals

SFT = {"name": "sft"}


def run(tmp_path, *, agent=None, model=None, environment=None, algorithm=None, **collect) -> Recorder:
    """Of episodes that a random model plays: it never succeeds."""
    changes = {
        "agent": {"max_turns": 1, "max_tokens": 4, **(agent or {})},
        "model": {**TINY.model_dump(), "max_length": 4096, **(model or {})},
        "collect": {**DATA["collect"], **collect},
        "environment": environment or DATA["environment"],
        "algorithm": algorithm or DATA["algorithm"],
    }
    return Recorder(tmp_path, warmup=None, **changes)


def played(recorded, context, label="collect[1]"):
    """Return the artifact of a stage and its episodes."""
    artifact, _ = run_stage(recorded.requests[label], context)
    context.warm.close()
    return artifact, list(read_trajectories(artifact.path / "trajectories.parquet"))


def judged(recorded, context, label="1", **changes):
    """Return the artifacts of a collection and of its judgement, and the inputs that they are."""
    collected, _ = played(recorded, context, f"collect[{label}]")
    inputs = {"trajectories": collected.key}
    request = replace(recorded.requests[f"judge[{label}]"], inputs=inputs)
    scores, _ = run_stage(replace(request, spec={**request.spec, **changes}, allow=("tests",)), context)
    return collected, scores, {**inputs, "scores": scores.key}


def test_second_attempts_are_counted_apart(tmp_path, context):
    artifact, found = played(run(tmp_path, reflection={"max_tokens": 4}), context)
    first = [one for one in found if "~" not in one.id]
    assert artifact.metrics["episodes"] == artifact.metrics["second/episodes"] == len(first) == len(found) / 2
    assert artifact.metrics["second/success"] == 0
    assert all(len(one.histories) >= 2 for one in found if one not in first)


class Named:
    """Gives each episode a reward by whose it is."""

    def __call__(self, trajectory):
        return {"teacher": 1.0}.get(trajectory.policy, 0.25 if "~" in trajectory.id else 0.0)


@pytest.mark.parametrize(
    ("ways", "others"),
    [
        ({"reflection": {"max_tokens": 4}}, {"second/reward": 0.25}),
        ({"opponent": "policy", "environment": "game"}, {"other/reward": 0.25}),
        ({"teacher": "tiny", "algorithm": SFT}, {"teacher/reward": 1.0}),
    ],
)
def test_the_reward_of_a_round_is_that_of_the_policys_own_attempts(tmp_path, context, ways, others):
    named = {"game": GAME, "tiny": TEACHER}
    recorded = run(tmp_path, **{name: named.get(str(way), way) for name, way in ways.items()})
    _, scores, _ = judged(recorded, context, reward={"_target_": f"{__name__}.Named"})
    found = {name: value for name, value in scores.metrics.items() if name.endswith("reward")}
    assert found == {"reward": 0.0, **others}


def test_a_scenario_counts_once_however_many_groups_of_it_are_kept(tmp_path, context):
    recorded = run(tmp_path, reflection={"max_tokens": 4})
    everything = {"filter": {"_target_": "components.filters.everything.Everything"}}
    inputs = judged(recorded, context)[2]
    kept, _ = run_stage(replace(recorded.requests["filter[1]"], inputs=inputs, spec=everything), context)
    assert (kept.metrics["kept"], kept.metrics["scenarios"]) == (16, 4)


def test_who_does_without_finds_what_was_collected_before(tmp_path):
    plain = run(tmp_path)
    for way, more in [("temperature_step", 0.25), ("reflection", {"max_tokens": 4})]:
        assert "collect[1]" in changed(plain, run(tmp_path, **{way: more}))
        without = {"temperature_step": 0.0}.get(way)
        part = validate(STAGES["collect"].spec, run(tmp_path, **{way: without}).requests["collect[1]"].spec).key_part()
        assert way not in part["collect"]


def test_a_teacher_shows_once_what_the_policy_plays_in_other_ways(tmp_path):
    teacher = {"warmup": {**DATA["warmup"], "teacher": {"model": {"name": "tiny", "source": "random"}}}}
    plain = Recorder(tmp_path, **teacher)
    ways = {**DATA["collect"], "temperature_step": 0.5, "reflection": {}}
    assert "collect[sft]" not in changed(plain, Recorder(tmp_path, **teacher, collect=ways))


GAME = {"_target_": "components.environments.games.tictactoe.TicTacToe", "train": 8, "heldout": 4}
LEARNED = {"continuations": 2, "algorithm": {"name": "process_reward_model", "heads": {"continued": 1.0}}}
TEACHER = {"model": {"name": "tiny", "source": "random", "device": "cpu"}, "temperature": 0.4}


def test_a_teacher_plays_where_the_policy_had_no_success(tmp_path, context):
    recorded = run(tmp_path, teacher=TEACHER, algorithm=SFT)
    artifact, found = played(recorded, context)
    groups = {one.group for one in found}
    assert [(one.id, one.policy) for one in found] == [
        (f"{group}/{sample}", "teacher" if sample == 2 else "base")
        for group in dict.fromkeys(one.group for one in found)
        for sample in range(3)
    ]
    shown = [one for one in found if one.policy == "teacher"]
    assert {one.sampling["temperature"] for one in shown} == {0.4}
    assert all(TOKENIZER in one.sampling for one in shown)
    assert not any(TOKENIZER in one.sampling for one in found if one not in shown)
    assert artifact.metrics["episodes"] == 2 * len(groups)
    assert artifact.metrics["teacher/episodes"] == len(groups) == 4
    assert [one.name for one in recorded.spec.teachers()] == ["tiny"]


def test_where_a_server_of_a_teacher_is_changes_nothing(tmp_path):
    server = {"name": "remote", "url": "http://there/v1", "model": "large", "tokens": False}
    plain, moved, other = (
        run(tmp_path, teacher={"inference": {**server, **more}}, algorithm=SFT)
        for more in ({}, {"url": "http://elsewhere/v1"}, {"model": "larger"})
    )
    assert "collect[1]" not in changed(plain, moved)
    assert "collect[1]" in changed(plain, other)


def test_the_rounds_are_played_by_both_sides_and_evaluations_against_the_script(tmp_path, context):
    recorded = run(tmp_path, environment=GAME, opponent="policy")
    spec = recorded.requests["collect[1]"].spec
    assert spec["environment"]["opponent"] == "agent"
    assert "opponent" not in recorded.requests["evaluate[start]"].spec["environment"]
    artifact, found = played(recorded, context)
    assert len(found) == 2 * artifact.metrics["episodes"] == 2 * artifact.metrics["other/episodes"]
    artifact, found = played(run(tmp_path, environment=GAME, opponent="base"), context)
    assert artifact.metrics["episodes"] == len(found) == 8


def test_labels_of_continuations_teach_a_process_reward_model(tmp_path, context):
    heads = {"name": "process_reward_model", "heads": {"continued": 1.0}, "held_out": 0.0}
    learned = {"scenarios": 2, "group_size": 2, "continuations": 2, "algorithm": heads}
    model = {**TINY.model_dump(), "max_length": 4096, "lora": {"rank": 4}}
    recorded = Recorder(
        tmp_path,
        warmup=None,
        reward_model=learned,
        model=model,
        agent={"max_turns": 2, "max_tokens": 4},
        environment=GAME,  # goes on where an answer is no move
    )
    assert recorded.requests["collect[1]"].spec["collect"]["continuations"] == 0
    collected, _, inputs = judged(recorded, context, "reward")
    found = list(read_trajectories(collected.path / "trajectories.parquet"))
    assert [len(read(CONTINUED, one)) for one in found] == [one.metrics["turns"] for one in found] == [2.0] * 4
    assert collected.metrics["continued/episodes"] == sum(2 * (one.metrics["turns"] - 1) for one in found)
    assert collected.metrics["continued/sampled_tokens"] > 0
    trained, _ = run_stage(replace(recorded.requests["train[reward]"], inputs=inputs), context)
    context.warm.close()
    assert trained.metrics["labelled_episodes"] == 4


def test_planner_and_workers_play_rounds_and_evaluations(tmp_path, context):
    recorded = run(tmp_path, agent={"roles": {"worker_turns": 1}, "max_turns": 3})
    agents = {}
    for label in ("collect[1]", "evaluate[start]"):
        artifact, found = played(recorded, context, label)
        agents[label] = {history.agent for one in found for history in one.histories}
        assert {one.failure for one in found} == {None}
        assert artifact.metrics["subgoals"] >= ("worker" in agents[label])
    assert agents["collect[1]"] == {"planner", "worker"}
    assert "planner" in agents["evaluate[start]"]


REFUSED = [
    (
        {"collect": {"reflection": {"demonstrate": True}}},
        r"collect\.reflection\.demonstrate: true: demonstrations are text, but grpo",
    ),
    (
        {"collect": {"reflection": {}}, "agent": {"function": "tests.flows.test_own_agent.agent"}},
        r"collect\.reflection: needs the agent loop",
    ),
    ({"collect": {"reflection": {}, "continuations": 2}}, r"collect\.continuations: cannot be combined with"),
    ({"collect": {"teacher": TEACHER}}, r"collect\.teacher: grpo learns only from tokens that the policy sampled"),
    (
        {"collect": {"teacher": {}}, "algorithm": SFT},
        r"collect\.teacher\.model: null, but inference\.name=embedded",
    ),
    (
        {"collect": {"teacher": {**TEACHER, "samples": 7}}, "algorithm": SFT},
        r"collect\.teacher\.samples: 7: a group has collect\.group_size=2",
    ),
    ({"collect": {"opponent": "policy"}}, r"collect\.opponent: policy: .*Shop has no parameter `opponent`"),
    (
        {"environment": {**GAME, "opponent": "agent"}},
        r"environment\.opponent: agent: leaves the opponent's moves to the agent",
    ),
    ({"agent": {"roles": {}, "format": "chat"}}, r"agent\.format: chat: workers act by tool calls"),
    (
        {"agent": {"roles": {}}, "algorithm": {"credit": "turns"}},
        r"algorithm\.credit: turns: the turns of planner",
    ),
    (
        {"agent": {"roles": {}}, "collect": {"continuations": 1}},
        r"collect\.continuations: supports a single agent",
    ),
    (
        {"reward_model": {**LEARNED, "algorithm": {"name": "process_reward_model"}}},
        r"reward_model\.continuations: 2: continuations label steps, but no head learns these labels",
    ),
    ({"reward_model": {**LEARNED, "continuations": 0}}, r"reward_model\.algorithm\.heads: continued learns"),
]


def test_what_cannot_be_is_named(tmp_path):
    kept = {name: part for name, part in DATA.items() if name in ("collect", "algorithm")}

    def specify(changes):
        parts = {name: {**kept.get(name, {}), **change} for name, change in changes.items()}
        validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "allow": ["tests"], **parts})

    assert wrong_refusals(REFUSED, specify) == []
