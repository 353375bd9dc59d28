"""Demonstrations by a teacher: on this machine, or behind a URL."""

from __future__ import annotations

import pytest

from components.algorithms.foreign import TOKENIZER, UNKNOWN
from components.errors import SpecError
from components.inference.server import ModelServer
from components.models.spec import FrozenModelSpec
from components.models.weights import folder, prepare, tokenizer_digest
from components.specs import validate
from components.trajectories.store import read_trajectories
from flows.experiment.spec import ExperimentSpec
from flows.stages.execute import run_stage
from tests.algorithms.builders import make_policy
from tests.deployment.tiny import TINY
from tests.flows.test_online_rl import DATA, WARMUP, Recorder, changed, rounds
from tests.refusals import wrong_refusals

TEACHER = {"name": "tiny", "source": "random", "device": "cpu"}
REMOTE = {"name": "remote", "url": "http://there/v1", "model": "large", "tokens": False}


def warmup(**teacher):
    return {"warmup": {**DATA["warmup"], "teacher": teacher}}


def test_the_teacher_plays_the_demonstrations(tmp_path):
    run = Recorder(tmp_path, **warmup(model=TEACHER, samples=3, temperature=0.4, top_p=0.9))
    shown = run.requests["collect[sft]"]
    assert list(run.keys)[1:6] == WARMUP
    assert (shown.spec["actor"], shown.spec["teacher"]["name"], shown.inputs) == ("teacher", "tiny", {})
    collect = {name: shown.spec["collect"][name] for name in ("scenarios", "group_size", "temperature", "top_p")}
    assert collect == {"scenarios": 4, "group_size": 3, "temperature": 0.4, "top_p": 0.9}
    assert run.requests["collect[1]"].spec["actor"] == "policy"
    assert [one.name for one in run.spec.teachers()] == ["tiny"]


def test_another_student_learns_from_the_same_episodes(tmp_path):
    """Those of a server are paid for once."""
    student = {"model": {"name": "other", "source": "random", "max_length": 512}}
    for teacher, found_again in (({"model": None, "inference": REMOTE}, True), ({"model": TEACHER}, False)):
        first, other = Recorder(tmp_path, **warmup(**teacher)), Recorder(tmp_path, **student, **warmup(**teacher))
        assert ("collect[sft]" not in changed(first, other)) == found_again  # ours play in model.max_length
    moved = {**REMOTE, "url": "http://elsewhere/v1"}
    first, same, larger = (
        Recorder(tmp_path, **warmup(inference=server)) for server in (REMOTE, moved, {**REMOTE, "model": "larger"})
    )
    assert changed(first, same) == []
    assert changed(first, larger) == [*WARMUP, *rounds(1, 2), "evaluate[final]", "deploy"]


REFUSED = [
    ({}, r"warmup\.teacher\.model: null, but inference\.name=embedded"),
    ({"model": TEACHER, "inference": REMOTE}, r"warmup\.teacher\.model: set, but a server generates"),
    ({"model": {"name": "./gone"}}, r"warmup\.teacher\.model\.name: folder '\./gone' does not exist"),
    ({"model": {**TEACHER, "adapter": "/nowhere"}}, r"warmup\.teacher\.model\.adapter: /nowhere contains no adapter"),
]


def test_what_cannot_be_a_teacher_is_named(tmp_path):
    data = {**DATA, "root": str(tmp_path)}
    assert wrong_refusals(REFUSED, lambda teacher: validate(ExperimentSpec, {**data, **warmup(**teacher)})) == []


def test_an_environment_that_cannot_solve_its_scenarios_needs_a_teacher(tmp_path):
    lost = {"environment": {"_target_": "tests.flows.parity_environment.Parity"}, "allow": ["tests"]}
    data = {**DATA, "root": str(tmp_path), "rounds": 0, "warmup": {**DATA["warmup"], "demonstrations": 1}, **lost}
    with pytest.raises(SpecError, match="warmup=teacher"):
        validate(ExperimentSpec, data)
    data["warmup"]["teacher"] = {"model": TEACHER}
    assert validate(ExperimentSpec, data)


def played(tmp_path, context, **teacher):
    changes = {"agent": {"max_turns": 2, "max_tokens": 12}, "model": {**TINY.model_dump(), "max_length": 2048}}
    run = Recorder(tmp_path, **changes, **warmup(**teacher))
    artifact, _ = run_stage(run.requests["collect[sft]"], context)
    return list(read_trajectories(artifact.path / "trajectories.parquet"))


def test_episodes_say_whose_tokens_they_hold(tmp_path, context):
    plain = played(tmp_path, context, model=TEACHER, samples=2)
    base_dir = folder(FrozenModelSpec(**TEACHER).model(2048), context.cache)
    assert len(plain) == 8
    assert {one.policy for one in plain} == {"teacher"}
    assert {one.sampling[TOKENIZER] for one in plain} == {tokenizer_digest(base_dir)}
    make_policy(base_dir, seed=3).save(tmp_path / "adapter")
    trained = played(tmp_path, context, model={**TEACHER, "adapter": str(tmp_path / "adapter")}, samples=2)
    assert [one.histories[0].logprobs for one in trained] != [one.histories[0].logprobs for one in plain]
    context.warm.close()


def test_a_server_plays_without_saying_its_tokens(tmp_path, tmp_path_factory, context):
    from components.inference.transformers.engine import TransformersEngine

    base_dir = prepare(TINY, tmp_path_factory.getbasetemp() / "models")
    with ModelServer(TransformersEngine(base_dir, max_length=2048, device="cpu"), "large") as running:
        found = played(tmp_path, context, inference={**REMOTE, "url": running.url})
        context.warm.close()
    assert {one.sampling[TOKENIZER] for one in found} == {UNKNOWN}
    assert {tuple(history.token_ids) for one in found for history in one.histories} == {()}
    assert {message.role for one in found for message in one.histories[0].messages} >= {"user", "assistant"}
