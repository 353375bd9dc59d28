"""Other ways of collecting, in a run: what is played, what is in a stage key, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from components.errors import SpecError
from components.specs import validate
from components.trajectories.store import read_trajectories
from flows.spec import ExperimentSpec
from flows.stages import STAGES
from flows.stages.execute import run_stage
from tests.deployment.tiny import TINY
from tests.flows.test_online_rl import DATA, Recorder, changed


def run(tmp_path, *, agent=None, model=None, environment=None, **collect) -> Recorder:
    """Of episodes that a random model plays: it never succeeds."""
    changes = {
        "agent": {"max_turns": 1, "max_tokens": 4, **(agent or {})},
        "model": {**TINY.model_dump(), "max_length": 4096, **(model or {})},
        "collect": {**DATA["collect"], **collect},
        "environment": environment or DATA["environment"],
    }
    return Recorder(tmp_path, warmup=None, **changes)


def test_second_attempts_are_counted_apart(tmp_path, context):
    artifact, _ = run_stage(run(tmp_path, reflection={"max_tokens": 4}).requests["collect[1]"], context)
    context.warm.close()
    found = list(read_trajectories(artifact.path / "trajectories.parquet"))
    first = [one for one in found if "~" not in one.id]
    assert artifact.metrics["episodes"] == artifact.metrics["second/episodes"] == len(first) == len(found) / 2
    assert artifact.metrics["second/success"] == 0
    assert all(len(one.histories) >= 2 for one in found if one not in first)


def test_a_scenario_counts_once_however_many_groups_of_it_are_kept(tmp_path, context):
    recorded = run(tmp_path, reflection={"max_tokens": 4})
    everything = {"filter": {"_target_": "components.filters.everything.Everything"}}
    collected, _ = run_stage(recorded.requests["collect[1]"], context)
    keys = {"trajectories": collected.key}
    judged, _ = run_stage(replace(recorded.requests["judge[1]"], inputs=keys), context)
    keys["scores"] = judged.key
    kept, _ = run_stage(replace(recorded.requests["filter[1]"], inputs=keys, spec=everything), context)
    context.warm.close()
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"collect": {"reflection": {"demonstrate": True}}},
            r"collect\.reflection\.demonstrate: true: demonstrations are text, and grpo",
        ),
        (
            {"collect": {"reflection": {}}, "agent": {"function": "tests.flows.test_own_agent.agent"}},
            r"collect\.reflection: is a way of the agent loop",
        ),
    ],
)
def test_what_cannot_be_is_named(tmp_path, changes, message):
    parts = {name: {**DATA.get(name, {}), **change} for name, change in changes.items()}
    with pytest.raises(SpecError, match=message):
        validate(ExperimentSpec, {**DATA, "root": str(tmp_path), "allow": ["tests"], **parts})
