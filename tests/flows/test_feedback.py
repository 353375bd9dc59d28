"""From a finished run to training on what people said of its episodes."""

from __future__ import annotations

import json

import pytest
import torch

from components.algorithms.policy.policy import Policy
from components.artifacts import Store
from components.errors import ResourceError, SpecError
from components.models.weights import folder, load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.feedback import FOLDER, append
from components.trajectories.store import load_scored, read_trajectories
from flows.experiment import feedback
from flows.experiment.requests import Requests
from flows.history.lineage_graph import Lineage
from flows.history.records import RunRecord
from flows.reporting.lineage import show
from flows.stages.base import Context
from flows.stages.execute import run_stage
from flows.stages.feedback import FeedbackStage
from tests.flows.annotated import EPISODES, played
from tests.flows.declarations import check_artifact
from tests.flows.pretend import planned, run_stages, spec_of
from tests.refusals import wrong_problems
from tests.trajectories.said import chose, corrected, rated

SFT = {"name": "sft", "weight_temperature": 0.25, "learning_rate": 1e-2, "epochs": 3, "pack_tokens": 512}
DPO = {"name": "dpo", "reference": "start", "learning_rate": 1e-2, "epochs": 3, "pack_tokens": 512}
TINY = {
    "rounds": 1,
    "warmup": None,
    "model": {"name": "tiny", "source": "random", "max_length": 512, "lora": {"rank": 4}, "device": "cpu"},
    "environment": {"_target_": "components.environments.games.guess.Guess", "train": 4, "heldout": 2},
    "filter": {"_target_": "components.filters.everything.Everything"},
    "agent": {"max_turns": 2, "max_tokens": 10},
    "collect": {"scenarios": 2, "group_size": 3},
    "deploy": {"mode": "none"},
}


def run(root, **changes):
    """Run real stages on a tiny model."""
    return run_stages(spec_of(root, **{**TINY, **changes}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    return root, *run(root)


def episodes_of(outcome):
    artifact = outcome.rounds[0]["collect"]
    return artifact, list(read_trajectories(artifact.path / "trajectories.parquet"))


def logprob(root, checkpoint, episode, target):
    """Of an answer, given all before it, under a checkpoint."""
    spec = spec_of(root, **TINY).model
    base_dir = folder(spec, root / "models")
    policy = Policy(base_dir, spec, 0)
    policy.load(policy.folder(checkpoint.path))
    chat = ChatFormat(load_tokenizer(base_dir))
    messages = [to_openai(message) for message in episode.histories[0].messages[:2]]
    ids = chat.prompt_ids(messages, episode.tools)
    answer = chat.encode(target)
    tokens = torch.tensor([ids + answer])
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        found = torch.log_softmax(policy.model(tokens, attention_mask=causal).logits[0], -1)
    return sum(found[len(ids) + place - 1, token].item() for place, token in enumerate(answer))


@pytest.mark.timeout(1800)
def test_corrections_and_scores_train_the_policy_that_was_annotated(finished):
    root, before, outcome = finished
    artifact, (a, b, c, *_) = episodes_of(outcome)
    file = root / "corrected" / f"{artifact.digest}.jsonl"
    append(file, [rated(a, 5, artifact=artifact.digest), corrected(b, 2, "512", artifact=artifact.digest)])
    after, learned = run(root, fork=before.id, feedback={"path": str(file.parent), "algorithm": SFT})
    labels = [one.label for one in after.stages]
    assert labels == ["evaluate[start]", "feedback", "train[feedback]", "evaluate[feedback]", "evaluate[final]"]
    assert after.stage("train[feedback]").request["inputs"]["start"] == before.stage("train[1]").key
    told = Store(root / "artifacts").find(after.stage("feedback").key)
    assert told.metrics == {"episodes": 2.0, "authors": 1.0, "scored": 1.0, "corrected": 1.0, "pairs": 0.0}
    assert told.inputs == {"episodes_1": artifact.key}
    stages = {check_artifact(path.parent) for path in (root / "artifacts").glob("*/manifest.json")}
    assert stages == {"collect", "judge", "filter", "train", "evaluate", "feedback"}
    gain, was = (logprob(root, one.checkpoint, b, "512") for one in (learned, outcome))
    assert gain > was + 0.5
    assert learned.evaluations["feedback"].key != outcome.last.key
    # The file, in place of its folder.
    again, _ = run(root, fork=before.id, feedback={"path": str(file), "algorithm": SFT})
    assert {one.status for one in again.stages} == {"cached"}
    append(file, [rated(c, 1, artifact=artifact.digest)])
    more, _ = run(root, fork=before.id, feedback={"path": str(file), "algorithm": SFT})
    assert {one.label for one in more.stages if one.status == "ran"} >= {"feedback", "train[feedback]"}


@pytest.mark.timeout(1800)
def test_choices_train_preferences_exactly_as_people_chose(finished):
    root, before, outcome = finished
    artifact, (a, b, c, *_) = episodes_of(outcome)
    file = root / "chosen" / "x.jsonl"
    append(file, [chose(a, b, "b", artifact=artifact.digest), chose(b, c, "tie", artifact=artifact.digest)])
    after, learned = run(root, fork=before.id, feedback={"path": str(file), "algorithm": DPO})
    told = Store(root / "artifacts").find(after.stage("feedback").key)
    scored = load_scored(told.path / "trajectories.parquet", told.path / "scores.parquet", None)
    assert {one.id.partition("~")[0]: one.reward for one in scored} == {a.id: 0.0, b.id: 1.0}
    found = [repr(one.histories) for one in sorted(scored, key=lambda one: one.id)]
    assert found == [repr(a.histories), repr(b.histories)]  # NaN equals nothing but reads alike
    log = [json.loads(line) for line in (learned.checkpoint.path / "log.jsonl").read_text().splitlines()]
    assert [round(log[0]["margin"], 4), log[-1]["accuracy"]] == [0.0, 1.0]
    assert log[-1]["margin"] > 0
    assert after.stage("train[feedback]").request["inputs"]["reference"] == before.stage("train[1]").key


@pytest.mark.timeout(1800)
def test_the_rounds_go_on_from_what_people_taught(finished):
    root, before, outcome = finished
    artifact, (a, *_) = episodes_of(outcome)
    append(root / "more" / "x.jsonl", [rated(a, 5, artifact=artifact.digest)])
    part = {"feedback": {"path": str(root / "more"), "algorithm": SFT}}
    after, _ = run(root, fork=before.id, rounds=2, **part)
    assert after.stage("train[2]").request["inputs"]["start"] == after.stage("train[feedback]").key
    assert after.stage("collect[2]").request["inputs"]["policy"] == after.stage("train[feedback]").key
    fresh, _ = run(root, rounds=0, **part)  # of the base model
    assert "start" not in fresh.stage("train[feedback]").request["inputs"]
    text = show(Lineage(root), after.stage("train[feedback]").key)
    assert "feedback" in text


def test_a_plan_knows_what_will_be_learned(tmp_path):
    run = played(tmp_path)
    append(tmp_path / FOLDER / "x.jsonl", [rated(EPISODES[0], 5, artifact=run.stage("collect[1]").digest)])
    part = {"path": str(tmp_path / FOLDER), "algorithm": SFT}
    found = planned(tmp_path, rounds=1, fork=run.id, feedback=part)
    assert list(found)[:3] == ["evaluate[start]", "feedback", "train[feedback]"]
    assert found["feedback"].inputs == {"episodes_1": "annotated episodes_1"}
    assert found["train[feedback]"].inputs["trajectories"] == "feedback"


# --- mistakes -------------------------------------------------------------------------------------------------------


def said(tmp_path, *answers, algorithm=SFT):
    file = tmp_path / "said.jsonl"
    file.unlink(missing_ok=True)
    append(file, answers)
    return spec_of(tmp_path, feedback={"path": str(file), "algorithm": algorithm}).feedback


def test_what_cannot_be_learned_is_said_before_the_start(tmp_path):
    run: RunRecord = played(tmp_path)
    store, here = Store(tmp_path / "artifacts"), run.stage("collect[1]").digest
    a, b, *_ = EPISODES
    cases = [
        (rated(a, 5, artifact="b" * 64), SFT, r"1 answers in .* artifact bbbbbbbbbbbb, which is not in"),
        (rated(a, 5, artifact=here), DPO, "no choices, which dpo trains on"),
        (chose(a, b, artifact=here), SFT, "no scores and no corrections, which sft trains on"),
    ]
    for answer, algorithm, words in cases:
        with pytest.raises(SpecError, match=words):
            feedback.resolve(said(tmp_path, answer, algorithm=algorithm), store)
    spec = said(tmp_path, chose(a, b, artifact=here))
    with open(tmp_path / "said.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(SpecError, match=r"feedback\.path: .*said\.jsonl, line 2: kind is None"):
        feedback.resolve(spec, store)
    (tmp_path / "said.jsonl").unlink()
    with pytest.raises(SpecError, match=r"feedback\.path: there is no file"):
        feedback.resolve(spec, store)
    refused = [
        ({"name": "sft"}, "feedback.algorithm.weight_temperature", "null: gives episodes that annotators"),
        ({"name": "grpo"}, "feedback.algorithm.name", "'grpo'"),
    ]
    found = wrong_problems(refused, lambda algorithm: spec_of(tmp_path, feedback={"path": "x", "algorithm": algorithm}))
    assert found == []


def request_of(tmp_path, spec, data):
    stage = FeedbackStage(path=data.path, answers=data.answers, learns=spec.learns)
    return Requests(spec_of(tmp_path, feedback=spec.model_dump())).request("feedback", stage, data.artifacts)


def test_an_answer_given_after_the_start_is_not_mixed_in(tmp_path):
    run = played(tmp_path)
    context, here = Context.at(tmp_path), run.stage("collect[1]").digest
    spec = said(tmp_path, rated(EPISODES[0], 5, artifact=here))
    found = feedback.resolve(spec, context.store)

    request = request_of(tmp_path, spec, found)
    append(tmp_path / "said.jsonl", [rated(EPISODES[1], 1, artifact=here)])
    with pytest.raises(ResourceError, match="changed after the start of the run"):
        run_stage(request, context)


def test_held_out_episodes_alone_teach_nothing(tmp_path):
    run = played(tmp_path)
    context, stage = Context.at(tmp_path), run.stage("evaluate[final]")
    artifact = context.store.find(stage.key)
    (held_out, *_) = read_trajectories(artifact.path / "trajectories.parquet")
    spec = said(tmp_path, rated(held_out, 5, artifact=stage.digest))

    found = feedback.resolve(spec, context.store)
    with pytest.raises(
        SpecError, match="has nothing to train on: no scores or corrections of finished episodes of split train"
    ):
        run_stage(request_of(tmp_path, spec, found), context)
