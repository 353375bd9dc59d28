"""Episodes of a run exported in each form, and imported again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from components.data.export import PARQUET
from components.data.forms import FORMS as ROW_FORMS
from components.rewards.judges.ruler import Ruler
from components.trajectories.schema import Failure, History, Message, Scenario, ToolCall, Trajectory
from components.trajectories.store import load_scored
from flows.experiment.requests import Requests
from flows.history.records import RunRecord, StageRecord, recording
from flows.runs.export import FORMS, GRADES, JUDGEMENTS, main, scored_stages
from flows.stages import STAGES
from flows.stages.base import Context
from flows.stages.execute import run_stage
from tests.data import rows as samples
from tests.deployment.test_hub import TOKEN, FakeHub
from tests.flows.pretend import pretend, spec_of
from tests.flows.test_import import MODEL, write
from tests.rewards.judge_server import Asked, Reply, judge_server
from tests.rewards.judged import scores, spec

SOURCES = {
    "messages": "messages",
    "sharegpt": "messages",
    "prompt_completion": "prompt_completion",
    "preference": "preference",
    "thumbs": "thumbs",
    "agenttraj": "agenttraj",
    "ground_truth": "ground_truth",
    "ranking": "ranking",
    "step_labels": "step_labels",
    "steps": "steps",
    "parquet": "ranking",
}
"""Form of the rows whose import is exported, by form of the export."""


def request(root: Path, path: Path, **data):
    return Requests(spec_of(root, model=MODEL, data={"path": str(path), **data})).import_data()


def recorded(root: Path, *stages) -> RunRecord:
    """Record a finished run with these stages: pairs of label and (request, artifact)."""
    spec = spec_of(root, model=MODEL).model_dump(mode="json", by_alias=True)
    with recording(root, RunRecord("0abcdef01", "shop", 0, time.time(), spec=spec, git_commit="f00d")) as writer:
        for label, (made, artifact) in stages:
            version = STAGES[made.stage].version
            keys = (artifact.key, artifact.digest, artifact.kind)
            writer.add(StageRecord(label, 0, made.to_json(), version, *keys, "ran", 1.0))
        writer.finish("FINISHED")
    return writer.run


def imported(context: Context, path: Path, **data):
    made = request(context.cache.parent, path, **data)
    return made, run_stage(made, context)[0]


def content(artifact) -> list:
    """Return what training reads, without ids."""
    files = [artifact.path / name for name in ("trajectories.parquet", "scores.parquet", "selection.parquet")]
    groups: dict[str, int] = {}
    return [
        (
            groups.setdefault(trajectory.group, len(groups)),
            trajectory.reward,
            trajectory.step_rewards,
            trajectory.tools,
            trajectory.scenario.type,
            [
                (message.role, message.content, [(c.name, c.arguments) for c in message.tool_calls], message.trained)
                for history in trajectory.histories
                for message in history.messages
            ],
        )
        for trajectory in load_scored(*files)
    ]


def test_an_export_imports_as_the_same_examples(tmp_path, capsys):
    exported = {name for name, form in ROW_FORMS.items() if form.write is not None} | {PARQUET}
    assert set(FORMS) - {JUDGEMENTS, GRADES} == exported == set(SOURCES)
    for form, source in SOURCES.items():
        root, out = tmp_path / form, tmp_path / form / "out"
        context = Context.at(root)
        rows = [{**row, "type": "easy"} for row in samples.FORMS[source]]
        first = imported(context, write(tmp_path / "a.jsonl", rows))
        recorded(root, ("import", first))
        assert main(["latest", "--form", form, "--out", str(out), "--json", f"root={root}"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["exported"] == result["episodes"] == first[1].metrics["episodes"], form
        made, again = imported(context, out)
        assert made.spec["data"]["form"] == ("trajectories" if form == "parquet" else form)
        expected = content(first[1])
        if form == "agenttraj":  # the type is the beginning of item_id
            expected = [(*item[:4], "shop", item[5]) for item in expected]
        assert content(again) == expected, form


def test_the_card_has_counts_provenance_and_a_command(tmp_path, capsys):
    root = tmp_path / "root"
    first = imported(Context.at(root), write(tmp_path / "a.jsonl", samples.FORMS["thumbs"]))
    recorded(root, ("import", first))
    assert main(["shop", "--form", "thumbs", "--out", str(tmp_path / "out"), f"root={root}"]) == 0
    assert "rows: 4" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["configs"][0]["data_files"] == [{"split": "train", "path": "train.jsonl"}]
    assert "license" not in metadata
    for text in ("| Rows | 4 |", "`shop`, seed 0", "`f00d`", "`tiny`", "`import`", "Not set.", "data.form=thumbs"):
        assert text in card
    assert str(tmp_path) not in card


def episode(name: str, histories: list[History], **fields) -> Trajectory:
    return Trajectory(f"{name}/0", Scenario(name, {}, "train"), 0, histories, policy="abc", **fields)


def talk(answer: str) -> list[Message]:
    return [Message("user", "q"), Message("assistant", answer, span=(2, 3))]


@pytest.fixture
def judged(tmp_path):
    """A run of two rounds whose episodes were judged: sampled, failed, unscored, and of two histories."""
    nan = float("nan")
    sampled = [
        episode("a", [History(talk("good"), [5, 6, 7], [nan, nan, -1.0])], reward=1.0),
        episode("b", [History(talk("bad"), [5, 6, 8], [nan, nan, -1.0])], reward=0.25),
        episode("c", [History(talk("x"))], failure=Failure("engine", "EngineError", "gone")),
        episode("d", [History(talk("x"))]),
        episode("e", [History(talk("x")), History(talk("y"))], reward=1.0),
    ]
    labels = [f"{stage}[{number}]" for number in (1, 2) for stage in ("collect", "judge")]
    pretend(tmp_path / "root", rounds=2, warmup=None, episodes=dict.fromkeys(labels, sampled))
    return tmp_path / "root"


def test_judged_episodes_of_all_rounds_are_exported_and_the_others_counted(judged, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["latest", "--form", "messages", "--out", str(out), "--json", f"root={judged}"]) == 0
    result = json.loads(capsys.readouterr().out)
    counts = {name: result[name] for name in ("episodes", "failed", "unscored", "several", "low", "exported", "rows")}
    assert counts == {"episodes": 10, "failed": 2, "unscored": 2, "several": 2, "low": 0, "exported": 4, "rows": 4}
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert [(row["id"], row["reward"], row["messages"][-1]["content"]) for row in rows[:2]] == [
        ("a", 1.0, "good"),
        ("b", 0.25, "bad"),
    ]
    options = ["--form", "messages", "--json", f"root={judged}", "--min-reward", "0.5", "--stages", "judge[[]2]"]
    assert main(["latest", "--out", str(tmp_path / "best"), *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["episodes"], result["low"], result["rows"]) == (5, 1, 1)


def test_episodes_without_a_row_are_not_counted_as_exported(tmp_path, capsys):
    calls = [ToolCall("1", "look", "{}"), ToolCall("2", "go", "{}")]
    both = [Message("user", "q"), Message("assistant", "", calls), Message("tool", "seen", tool_call_id="1")]
    sampled = [
        episode("a", [History(talk("good"))], reward=1.0),
        episode("b", [History(both)], reward=1.0),
    ]
    root = tmp_path / "root"
    pretend(root, rounds=1, warmup=None, episodes={"collect[1]": sampled, "judge[1]": sampled})
    assert main(["latest", "--form", "steps", "--out", str(tmp_path / "out"), "--json", f"root={root}"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [result[name] for name in ("episodes", "exported", "unfit", "rows")] == [2, 1, 1, 1]
    assert "1 that the form cannot express" in (tmp_path / "out" / "README.md").read_text()
    assert main(["latest", "--form", "ranking", "--out", str(tmp_path / "no"), f"root={root}"]) == 2
    assert "2 that the form cannot express" in capsys.readouterr().err


def test_judgements_and_grades_are_questions_of_judges_answered_with_the_rewards(tmp_path, capsys):
    """A judge that answers as the rows of RULER do gives each episode its reward. Distinct episodes have one grade."""
    sampled = [
        Trajectory(f"a/{i}", Scenario("a", {}, "train"), i, [History(talk(text))], policy="abc", reward=reward)
        for i, (text, reward) in enumerate([("good", 1.0), ("bad", 0.25), ("good", 1.0)])
    ]
    root, out = tmp_path / "root", tmp_path / "out"
    pretend(root, rounds=1, warmup=None, episodes={"collect[1]": sampled, "judge[1]": sampled})
    assert main(["latest", "--form", JUDGEMENTS, "--out", str(out), f"root={root}"]) == 0
    (row,) = [json.loads(line)["messages"] for line in (out / "train.jsonl").read_text().splitlines()]

    def answer(asked: Asked) -> Reply:
        assert asked.body["messages"] == row[:-1]
        return Reply(row[-1]["content"])

    with judge_server(answer) as server:
        assert [score.reward for score in scores(Ruler(spec(server)), sampled)] == [1.0, 0.25, 1.0]
    assert main(["latest", "--form", GRADES, "--out", str(tmp_path / "grades"), f"root={root}"]) == 0
    rows = [json.loads(line)["messages"] for line in (tmp_path / "grades" / "train.jsonl").read_text().splitlines()]
    assert [json.loads(row[-1]["content"])["grade"] for row in rows] == [10.0, 2.5]


def test_parquet_holds_all_histories_and_an_import_drops_their_tokens(judged, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["latest", "--form", "parquet", "--out", str(out), f"root={judged}"]) == 0
    _, artifact = imported(Context.at(judged), out, near_duplicates="ignore")
    assert artifact.metrics["episodes"] == 3  # the second round repeats the first
    trajectories = load_scored(artifact.path / "trajectories.parquet", artifact.path / "scores.parquet", None)
    assert [len(trajectory.histories) for trajectory in trajectories] == [1, 1, 2]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.25, 1.0]
    assert {trajectory.group for trajectory in trajectories} == {f"{name}~judge[1]" for name in "abe"}
    assert not any(history.token_ids for trajectory in trajectories for history in trajectory.histories)


def test_mistakes_are_reported(judged, tmp_path, capsys):
    full = tmp_path / "full"
    full.mkdir()
    (full / "a").write_text("a")
    common = ["--form", "preference", f"root={judged}"]
    for arguments, message in (
        (["latest", "--out", str(full)], "is not empty; expected a new folder"),
        (["latest", "--out", str(tmp_path / "a")], "no row of form preference results from 10 episodes"),
        (["latest", "--out", str(tmp_path / "a")], "no row of form preference"),  # the folder is empty again
        (["latest", "--out", str(tmp_path / "b"), "--stages", "train*"], "has no such scored episodes"),
        (["nothing", "--out", str(tmp_path / "c")], "nothing"),
    ):
        assert main([*arguments, *common]) == 2
        assert message in capsys.readouterr().err


class DatasetHub(FakeHub):
    """Hub with one dataset repository. created: body of the request that created it."""

    created: dict[str, Any] = {}

    def answer(self, method: str, path: str, content: bytes, headers: Any) -> tuple[int, Any]:
        if path == "/api/repos/create":
            self.created = json.loads(content)
        return super().answer(method, path.replace("/api/datasets/", "/api/models/"), content, headers)


@pytest.fixture
def dataset_hub(monkeypatch):
    with DatasetHub() as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield hub


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own uploads
def test_a_push_uploads_rows_and_card_to_a_private_dataset(judged, dataset_hub, tmp_path, capsys):
    out = tmp_path / "out"
    options = ["--form", "thumbs", "--out", str(out), "--push", "me/shop", "--json", f"root={judged}"]
    assert main(["latest", *options]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == f"{dataset_hub.url}/datasets/me/shop"
    assert dataset_hub.created["type"] == "dataset"
    assert dataset_hub.created["visibility"] == "private"
    uploaded = dataset_hub.branches["main"]
    assert uploaded == {name: (out / name).read_bytes() for name in ("README.md", "train.jsonl")}


def test_a_push_that_the_hub_refuses_is_reported(judged, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    out = tmp_path / "out"
    options = ["--form", "thumbs", "--out", str(out), "--push", "me/shop", f"root={judged}"]
    assert main(["latest", *options]) == 2
    error = capsys.readouterr().err
    assert "--push me/shop: the hub did not accept the data" in error
    assert "hf_secret" not in error
    assert (out / "README.md").exists()


def test_held_out_episodes_are_exported_by_name_only():
    def stage(label):
        return SimpleNamespace(label=label, kind="scores", key=label, request={"inputs": {"trajectories": "t"}})

    record = SimpleNamespace(stages=[stage("judge[1]"), stage("judge[heldout final]")], short="r")
    for pattern, label in (("*", "judge[1]"), ("judge[[]held*", "judge[heldout final]")):
        assert [row[0] for row in scored_stages(record, pattern)] == [label]
