"""From a finished run to training on what people said of its episodes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from components.algorithms.policy.policy import Policy
from components.artifacts import Store
from components.data.served.rows import ServedSource
from components.data.spec import SourceSpec
from components.errors import ResourceError, SpecError
from components.models.weights import folder, load_tokenizer
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.feedback import FOLDER, append, read
from components.trajectories.store import load_scored, read_trajectories
from flows.experiment import feedback
from flows.experiment.requests import Requests
from flows.experiment.starting_point import StartingPoint
from flows.history.lineage_graph import Lineage
from flows.history.records import RunRecord
from flows.recipes.run import Run
from flows.reporting.lineage import show
from flows.stages.base import Context
from flows.stages.execute import run_stage
from tests.data.test_served import Served
from tests.flows.annotated import EPISODES, played
from tests.flows.declarations import check_artifact
from tests.flows.pretend import planned, run_stages, spec_of
from tests.refusals import wrong_problems
from tests.trajectories.said import chose, corrected, labelled_step, rated

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
    after, learned = run(root, fork=before.id, feedback={"path": str(file.parent), "scores": SFT})
    labels = [one.label for one in after.stages]
    trained = ["feedback[scores]", "train[scores]"]
    assert labels == ["evaluate[start]", *trained, "evaluate[feedback]"]
    assert after.stage("train[scores]").request["inputs"]["start"] == before.stage("train[1]").key
    told = Store(root / "artifacts").find(after.stage("feedback[scores]").key)
    assert told.metrics == {"episodes": 2.0, "authors": 1.0, "scored": 1.0, "corrected": 1.0, "pairs": 0.0}
    assert told.inputs == {"episodes_1": artifact.key}
    stages = {check_artifact(path.parent) for path in (root / "artifacts").glob("*/manifest.json")}
    assert stages == {"collect", "judge", "filter", "train", "evaluate", "feedback"}
    gain, was = (logprob(root, one.checkpoint, b, "512") for one in (learned, outcome))
    assert gain > was + 0.5
    assert learned.evaluations["feedback"].key != outcome.last.key
    # The file, in place of its folder.
    again, _ = run(root, fork=before.id, feedback={"path": str(file), "scores": SFT})
    assert {one.status for one in again.stages} == {"cached"}
    append(file, [rated(c, 1, artifact=artifact.digest)])
    more, _ = run(root, fork=before.id, feedback={"path": str(file), "scores": SFT})
    assert {one.label for one in more.stages if one.status == "ran"} >= {"feedback[scores]", "train[scores]"}


@pytest.mark.timeout(1800)
def test_choices_train_preferences_exactly_as_people_chose(finished):
    root, before, outcome = finished
    artifact, (a, b, c, *_) = episodes_of(outcome)
    file = root / "chosen" / "x.jsonl"
    append(file, [chose(a, b, "b", artifact=artifact.digest), chose(b, c, "tie", artifact=artifact.digest)])
    after, learned = run(root, fork=before.id, feedback={"path": str(file), "choices": DPO})
    told = Store(root / "artifacts").find(after.stage("feedback[choices]").key)
    scored = load_scored(told.path / "trajectories.parquet", told.path / "scores.parquet", None)
    assert {one.id.partition("~")[0]: one.reward for one in scored} == {a.id: 0.0, b.id: 1.0}
    found = [repr(one.histories) for one in sorted(scored, key=lambda one: one.id)]
    assert found == [repr(a.histories), repr(b.histories)]  # NaN equals nothing but reads alike
    log = [json.loads(line) for line in (learned.checkpoint.path / "log.jsonl").read_text().splitlines()]
    assert [round(log[0]["margin"], 4), log[-1]["accuracy"]] == [0.0, 1.0]
    assert log[-1]["margin"] > 0
    assert after.stage("train[choices]").request["inputs"]["reference"] == before.stage("train[1]").key


@pytest.mark.timeout(1800)
def test_one_file_of_all_kinds_trains_each_for_its_purpose_in_one_run(finished):
    root, before, outcome = finished
    artifact, (a, b, c, *_) = episodes_of(outcome)
    file, here = root / "mixed" / "answers.jsonl", artifact.digest
    answers = [rated(a, 5, artifact=here), corrected(b, 2, "512", artifact=here), chose(a, c, "b", artifact=here)]
    append(file, answers)
    part = {"feedback": {"path": str(file), "scores": SFT, "choices": DPO}}
    plan = planned(root, **TINY, fork=before.id, **part)
    after, learned = run(root, fork=before.id, **part)
    trained = ["feedback[scores]", "train[scores]", "feedback[choices]", "train[choices]", "evaluate[feedback]"]
    assert list(plan) == [one.label for one in after.stages] == ["evaluate[start]", *trained]  # no round is left
    key = {label: after.stage(label).key for label in trained}
    inputs = {label: after.stage(label).request["inputs"] for label in trained}
    assert inputs["train[scores]"]["start"] == before.stage("train[1]").key
    assert inputs["train[choices]"]["start"] == inputs["train[choices]"]["reference"] == key["train[scores]"]
    assert learned.checkpoint.key == key["train[choices]"]
    store = Store(root / "artifacts")
    used = {label: read(store.find(key[label]).path / "feedback.jsonl") for label in trained if "feedback[" in label}
    assert used == {"feedback[scores]": answers[:2], "feedback[choices]": answers[2:]}
    log = (store.find(key["train[choices]"]).path / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["accuracy"] == 1.0

    append(file, [chose(b, c, "a", artifact=here)])  # resumes: the training on scores is that of before
    again, _ = run(root, fork=before.id, **part)
    assert {one.label: one.status for one in again.stages if one.label in trained} == {
        "feedback[scores]": "cached",
        "train[scores]": "cached",
        "feedback[choices]": "ran",
        "train[choices]": "ran",
        "evaluate[feedback]": "ran",
    }


@pytest.mark.timeout(1800)
def test_feedback_of_users_trains_as_that_of_annotators_does(finished):
    """A further choice trains on choices alone again, also while the server goes on recording."""
    root, before, _ = finished
    served = Served(root / "served")
    served.say("a", score=1.0)
    served.say("b", correction={"text": "Sold.", "calls": [{"name": "find", "arguments": "{}"}]})
    served.say("c", better_than="a")
    part = {"feedback": {"path": str(served.folder), "scores": SFT, "choices": DPO}, "fork": before.id}
    plan = planned(root, **TINY, **part)
    after, learned = run(root, **part)
    trained = ["train[scores]", "train[choices]", "evaluate[feedback]"]
    labels = ["import[scores]", "import[choices]", "evaluate[start]", *trained]
    assert list(plan) == [one.label for one in after.stages] == labels
    assert plan["train[choices]"].inputs["trajectories"] == "import[choices]"
    key = {label: after.stage(label).key for label in labels}
    inputs = {label: after.stage(label).request["inputs"] for label in trained}
    assert inputs["train[scores]"]["start"] == before.stage("train[1]").key
    assert inputs["train[choices]"]["start"] == inputs["train[choices]"]["reference"] == key["train[scores]"]
    assert learned.checkpoint.key == key["train[choices]"]
    store = Store(root / "artifacts")
    episodes = {
        name: load_scored(folder / "trajectories.parquet", folder / "scores.parquet", None)
        for name in ("scores", "choices")
        for folder in [store.find(key[f"import[{name}]"]).path]
    }
    answers = {
        name: [(one.histories[0].messages[-1].content, one.reward) for one in own] for name, own in episodes.items()
    }
    assert answers == {"scores": [("Here.", 1.0), ("Sold.", 1.0)], "choices": [("There.", 1.0), ("Here.", 0.0)]}

    served.answer("d", "And now?", [], "Sold.", [], conversation="third", prompt="p2")
    served.say("d", better_than="b")
    again, _ = run(root, **part)
    assert {one.label for one in again.stages if one.status == "ran"} == {
        "import[choices]",
        "train[choices]",
        "evaluate[feedback]",
    }


@pytest.mark.timeout(1800)
def test_the_rounds_go_on_from_what_people_taught(finished):
    root, before, outcome = finished
    artifact, (a, *_) = episodes_of(outcome)
    append(root / "more" / "x.jsonl", [rated(a, 5, artifact=artifact.digest)])
    part = {"feedback": {"path": str(root / "more"), "scores": SFT}}
    after, _ = run(root, fork=before.id, rounds=2, **part)
    assert after.stage("train[2]").request["inputs"]["start"] == after.stage("train[scores]").key
    assert after.stage("collect[2]").request["inputs"]["policy"] == after.stage("train[scores]").key
    fresh, _ = run(root, rounds=0, **part)  # of the base model
    assert "start" not in fresh.stage("train[scores]").request["inputs"]
    text = show(Lineage(root), after.stage("train[scores]").key)
    assert "feedback" in text


def test_a_plan_knows_what_will_be_learned(tmp_path, caplog):
    run = played(tmp_path)
    here = run.stage("collect[1]").digest
    tie = chose(*EPISODES[:2], "tie", artifact=here)
    append(tmp_path / FOLDER / "x.jsonl", [rated(EPISODES[0], 5, artifact=here), tie])
    part = {"path": str(tmp_path / FOLDER), "scores": SFT, "choices": DPO}
    found = planned(tmp_path, rounds=1, fork=run.id, feedback=part)
    assert list(found)[:4] == ["evaluate[start]", "feedback[scores]", "train[scores]", "evaluate[feedback]"]
    (line,) = caplog.messages
    assert line.startswith("train[choices] is left out: all its answers in ")
    assert found["feedback[scores]"].inputs == {"episodes_1": "annotated episodes_1"}
    assert found["train[scores]"].inputs["trajectories"] == "feedback[scores]"


# --- mistakes -------------------------------------------------------------------------------------------------------


def said(tmp_path, *answers, **algorithms):
    file = tmp_path / "said.jsonl"
    file.unlink(missing_ok=True)
    append(file, answers)
    return spec_of(tmp_path, feedback={"path": str(file), **(algorithms or {"scores": SFT})}).feedback


def test_what_cannot_be_learned_is_said_before_the_start(tmp_path):
    run: RunRecord = played(tmp_path)
    store, here = Store(tmp_path / "artifacts"), run.stage("collect[1]").digest
    a, b, *_ = EPISODES
    both = {"scores": SFT, "choices": DPO}
    other = EPISODES[3]
    cases = [
        ([rated(a, 5, artifact="b" * 64)], both, r"1 answers in .* artifact bbbbbbbbbbbb, which is not in"),
        ([rated(a, 5, artifact=here)], {"choices": DPO}, "no choices of .*, which dpo trains on"),
        ([chose(a, b, artifact=here)], {"scores": SFT}, "no scores and no corrections of .*, which sft trains on"),
        ([labelled_step(a, 2, True, artifact=here)], both, "learns labels of steps: flows.runs annotate RUN --labels"),
        (
            [chose(a, b, "tie", artifact=here)],
            both,
            "no scores and no corrections and no choices of finished episodes of split train, which sft or dpo trains",
        ),
        (
            [rated(a, 5, artifact=here), rated(replace(b, id="order-A7/9"), 5, artifact=here)],
            both,
            r"said\.jsonl, line 2: there is no episode 'order-A7/9' in artifact",
        ),
        ([corrected(b, 1, artifact=here)], both, r"said\.jsonl, line 1: message 1 .* is not the assistant's"),
        ([chose(a, other, artifact=here)], both, r"said\.jsonl, line 1: .* of different scenarios"),
        (
            [rated(a, 5, artifact=here), chose(a, b, "a", artifact=here), chose(b, a, "a", artifact=here)],
            both,
            r"said\.jsonl, line 3: contradicts .*said\.jsonl, line 2 \(choice of 'order-A7/1' by Ada at 2026",
        ),
    ]
    for answers, algorithms, words in cases:
        with pytest.raises(SpecError, match=words):
            feedback.resolve(said(tmp_path, *answers, **algorithms), store)
    spec = said(tmp_path, chose(a, b, artifact=here))
    with open(tmp_path / "said.jsonl", "a") as file:
        file.write("{}\n")
    with pytest.raises(SpecError, match=r"feedback\.path: .*said\.jsonl, line 2: kind is None"):
        feedback.resolve(spec, store)
    (tmp_path / "said.jsonl").unlink()
    with pytest.raises(SpecError, match=r"feedback\.path: there is no file"):
        feedback.resolve(spec, store)
    refused = [
        ({"scores": {"name": "sft"}}, "feedback.scores.weight_temperature", "null: gives episodes that annotators"),
        ({"scores": {"name": "grpo"}}, "feedback.scores.name", "'grpo'"),
        ({"scores": DPO}, "feedback.scores", "an algorithm that trains on scores or corrections; dpo does not"),
        ({"choices": SFT}, "feedback.choices", "an algorithm that trains on choices; sft does not"),
        ({}, "feedback", "trains on nothing: scores and choices are null"),
    ]
    assert wrong_problems(refused, lambda part: spec_of(tmp_path, feedback={"path": "x", **part})) == []


def test_feedback_of_users_that_nothing_learns_from_is_refused_before_the_start(tmp_path):
    served, store = Served(tmp_path / "served"), Store(tmp_path / "artifacts")
    both, folder = {"scores": SFT, "choices": DPO}, str(served.folder)
    nothing = "has no scores and no corrections and no choices of recorded answers, which sft or dpo trains on"

    def refused(words, path=folder, **algorithms):
        spec = spec_of(tmp_path, feedback={"path": path, **(algorithms or both)}).feedback
        with pytest.raises(SpecError, match=words):
            feedback.resolve(spec, store)

    refused(rf"feedback\.path: .*served {nothing}")
    served.say("a", text="Solved at once.")
    refused(f"{nothing}. Free text is not trained on")
    now = ServedSource.of(SourceSpec(path=folder)).until_now().path
    served.say("c", better_than="a")
    refused(nothing, now)
    refused(r"no scores and no corrections of .* It has choices, which feedback\.choices = null does not", scores=SFT)
    served.say("a", correction={"text": "Sold.", "calls": []})
    refused(r"no scores of .* It has corrections, which feedback\.scores = kto does", scores={"name": "kto"})
    refused("'yesterday' is no time; expected FOLDER@2026", f"{folder}@yesterday")
    (tmp_path / "other").mkdir()
    refused(r"feedback\.path: .*other holds no feedback: expected", str(tmp_path / "other"))


def test_rows_of_users_that_fail_a_check_end_the_run_before_its_other_stages(tmp_path):
    served, context = Served(tmp_path / "served"), Context.at(tmp_path)
    served.answer("d", "Where?", [], " ", [], conversation="third")
    for name in "ad":
        served.say(name, score=1.0)
    called, part = [], {"path": str(served.folder), "scores": SFT}

    def begin(**settings):
        def call(label, step, request):
            called.append(label)
            return run_stage(request, context)[0]

        spec = spec_of(tmp_path, **TINY, data=settings, feedback=part)
        Run(spec, call, start=StartingPoint.resolve(spec, context.store)).begin()

    with pytest.raises(SpecError, match=r"data\.max_dropped: 0.1: 1 of 2 rows fail a check") as error:
        begin()
    assert [problem.path for problem in error.value.problems] == ["feedback.path", "data.max_dropped"]
    begin(max_dropped=0.5)
    assert called == ["import[scores]", "import[scores]", "evaluate[start]"]


def test_an_answer_given_after_the_start_is_not_mixed_in(tmp_path):
    run = played(tmp_path)
    context, here = Context.at(tmp_path), run.stage("collect[1]").digest
    spec = said(tmp_path, rated(EPISODES[0], 5, artifact=here))
    (found,) = feedback.resolve(spec, context.store)
    request = Requests(spec_of(tmp_path)).request("feedback", found.source, found.artifacts)
    append(tmp_path / "said.jsonl", [rated(EPISODES[1], 1, artifact=here)])
    with pytest.raises(ResourceError, match="changed after the start of the run"):
        run_stage(request, context)


def test_held_out_episodes_alone_teach_nothing(tmp_path):
    run = played(tmp_path)
    context, stage = Context.at(tmp_path), run.stage("evaluate[final]")
    artifact = context.store.find(stage.key)
    (held_out, *_) = read_trajectories(artifact.path / "trajectories.parquet")
    spec = said(tmp_path, rated(held_out, 5, artifact=stage.digest))

    with pytest.raises(SpecError, match="no scores and no corrections of finished episodes of split train"):
        feedback.resolve(spec, context.store)
