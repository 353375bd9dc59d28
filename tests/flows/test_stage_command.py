"""`python -m flows.stage`: a single stage from a serialized request."""

import importlib
import json
import time
from dataclasses import replace

import pytest

from components.errors import SpecError
from flows import chat
from flows.history.records import Records, RunRecord, StageRecord, recording
from flows.history.trust import readable_store, recorded_reader
from flows.stage import main
from flows.stages.base import Context, Request
from flows.stages.execute import run_stage
from tests.flows.processes import python

SHOP = {"_target_": "components.environments.worlds.shop.Shop", "train": 8, "heldout": 4}
REQUEST = Request(
    "collect",
    {
        "model": {"name": "tiny", "source": "random"},
        "environment": SHOP,
        "agent": {},
        "collect": {"scenarios": 2},
        "actor": "solver",
    },
)


def run_of(tmp_path, *arguments):
    done = python("-m", "flows.stage", f"root={tmp_path}", *arguments)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def stage(tmp_path, text):
    file = tmp_path / "request.json"
    file.write_text(text)
    return run_of(tmp_path, "--request", str(file))


def test_it_makes_what_the_flow_would_make(tmp_path):
    code, lines, errors = stage(tmp_path, json.dumps(REQUEST.to_json()))
    assert code == 0, errors
    assert lines[0] == {"progress": [2, 2, {}]}
    here, status = run_stage(REQUEST, Context.at(tmp_path))
    assert lines[-1] == {"key": here.key, "digest": here.digest, "status": "ran"}
    assert status == "cached"


def test_a_mistake_is_exit_code_2_and_a_line(tmp_path):
    system = {"stage": "judge", "spec": {"reward": {"_target_": "os.system"}}}
    cases = {"no json": "not valid JSON", json.dumps(system): "belongs to Python's standard library"}
    for text, words in cases.items():
        code, lines, errors = stage(tmp_path, text)
        assert code == 2
        assert words in lines[-1]["error"]["message"]
        assert "Traceback" not in errors


@pytest.fixture
def recorded(tmp_path):
    """Create a run with one finished stage."""
    made, _ = run_stage(REQUEST, Context.at(tmp_path))
    with recording(tmp_path, RunRecord("abcdef01", "shown", 0, time.time())) as writer:
        one = StageRecord("collect[sft]", 0, REQUEST.to_json(), 3, made.key, made.digest, made.kind, "ran", 1.0)
        writer.add(one)
    return made


def test_a_stage_of_a_past_run_is_found_and_with_again_made_and_compared(tmp_path, recorded):
    code, lines, errors = run_of(tmp_path, "--run", "shown", "--label", "collect[sft]")
    assert (code, lines) == (0, [{"key": recorded.key, "digest": recorded.digest, "status": "cached"}]), errors
    code, lines, errors = run_of(tmp_path, "--run", "abcdef", "--label", "collect[sft]", "--again")
    assert code == 0, errors
    assert lines[-1] == {"key": recorded.key, "digest": recorded.digest, "status": "ran", "same": True}
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".again")] == []


def test_made_again_it_says_where_the_result_is_another(tmp_path, recorded):
    manifest = recorded.path / "manifest.json"
    data = json.loads(manifest.read_text())
    times = recorded.path / "trajectories.parquet"
    times.write_bytes(times.read_bytes() + b" ")  # as if made by other code
    store = Context.at(tmp_path).store
    with store.draft(
        "0" * 64, stage="collect", kind="trajectories", schema_version=1, inputs={}, volatile=data["volatile"]
    ) as draft:
        for name in data["files"]:
            (draft.path / name).write_bytes((recorded.path / name).read_bytes())
    other = json.loads((store.path("0" * 64) / "manifest.json").read_text())
    manifest.write_text(json.dumps({**data, "files": other["files"], "digest": other["digest"]}))
    _, lines, _ = run_of(tmp_path, "--run", "shown", "--label", "collect[sft]", "--again")
    assert (lines[-1]["same"], lines[-1]["digest"]) == (False, recorded.digest)
    assert Context.at(tmp_path).store.find(recorded.key).digest == other["digest"]  # it stays as it was


def test_a_run_or_a_stage_that_does_not_exist_is_refused(tmp_path, recorded, capsys):
    for arguments, words in (
        (("--run", "shown"), "--run and --label require each other"),
        (("--run", "shown", "--request", "x"), "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, f"root={tmp_path}"])
        assert words in capsys.readouterr().err
    code, _, errors = run_of(tmp_path, "--run", "nothing", "--label", "collect[sft]")
    assert code == 2
    assert "no run 'nothing'" in errors  # Records names a stage that a run does not have: test_records.py
    assert "Traceback" not in errors


@pytest.mark.security
def test_a_record_starts_no_program_and_imports_no_package_without_trust(tmp_path):
    planted = tmp_path / "planted"
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"task": f"Add {number}."} for number in range(4)]))
    arguments = {"scenarios": str(tasks), "command": ["touch", str(planted)], "start_timeout": 5.0}
    mcp = {"_target_": "components.environments.adapters.mcp.Mcp", **arguments}
    started = replace(REQUEST, spec={**REQUEST.spec, "environment": mcp, "actor": "policy"})
    imported = replace(REQUEST, allow=("planted_package",))
    (tmp_path / "planted_package.py").write_text(f"open({str(planted)!r}, 'w')")
    with recording(tmp_path, RunRecord("abcdef01", "foreign", 0, time.time())) as writer:
        for label, request in (("collect[1]", started), ("collect[2]", imported)):
            writer.add(StageRecord(label, 0, request.to_json(), 3, "0" * 64, "0" * 64, "trajectories", "ran", 1.0))
    for label, words in (("collect[1]", "environment.command = "), ("collect[2]", "allow = planted_package runs code")):
        code, lines, errors = run_of(tmp_path, "--run", "foreign", "--label", label)
        assert (code, lines) == (2, [])
        assert words in errors
        assert "run only with --trust" in errors
        assert not planted.exists()
    run_of(tmp_path, "--run", "foreign", "--label", "collect[1]", "--trust")
    assert planted.exists()


@pytest.fixture
def foreign(tmp_path):
    """A run of somebody else with a package of its own and a store outside of the root; and the package's trace."""
    planted = tmp_path / "planted"
    (tmp_path / "planted_package.py").write_text(f"open({str(planted)!r}, 'w')")
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    artifact, _ = run_stage(REQUEST, Context.at(outside))
    spec = {"allow": ["planted_package"], "store": f"file://{outside}/artifacts", "model": {"name": "tiny"}}
    request = replace(REQUEST, allow=("planted_package",)).to_json()
    for number in "12":
        with recording(root, RunRecord(f"abcdef0{number}", f"foreign{number}", 0, time.time(), spec=spec)) as writer:
            for label in ("collect[1]", "evaluate[final]", "train[1]"):
                kind = "checkpoint" if label == "train[1]" else artifact.kind
                sent = request | {"stage": label.partition("[")[0]}
                writer.add(StageRecord(label, 0, sent, 3, artifact.key, artifact.digest, kind, "ran", 1.0))
    return root, planted


@pytest.mark.security
def test_no_command_imports_what_a_record_allows_without_trust(foreign, monkeypatch, capsys):
    root, planted = foreign
    monkeypatch.syspath_prepend(root.parent)
    for line in ("explain.attribute", "explain.rejudge reward=length", f"runs.revise --out {root / 'out.jsonl'}"):
        command, *arguments = line.split()
        module = importlib.import_module(f"flows.{command}")
        assert module.main(["foreign1", *arguments, f"root={root}"]) == 2, line
        error = capsys.readouterr().err
        assert "allow = planted_package runs code" in error
        assert "run only with --trust" in error
    key = Records(root).get("foreign1").stages[0].key
    with pytest.raises(SpecError, match="allow = planted_package runs code"):
        chat._measurement(root, key, "foreign1", trust=False)
    assert not planted.exists()


@pytest.mark.security
@pytest.mark.parametrize(
    "line",
    ["compare foreign2", "runs.lineage", "runs.lineage --why", "bundle --out FILE", "runs.annotate --export FILE"],
)
def test_a_command_reads_the_store_of_a_record_only_with_trust(foreign, line, capsys):
    root, planted = foreign
    command, *arguments = line.replace("FILE", str(root / "out")).split()
    module = importlib.import_module(f"flows.{command}")
    run = Records(root).get("foreign1")
    reference = run.stages[0].key if line == "runs.lineage" else "foreign1"
    module.main([reference, *arguments, f"root={root}"])
    assert "is read only with --trust; artifacts that only it has count as missing" in capsys.readouterr().err
    module.main([reference, *arguments, "--trust", f"root={root}"])
    assert "is read only with --trust" not in capsys.readouterr().err
    assert not planted.exists()


@pytest.mark.security
def test_the_store_of_a_record_is_not_read_without_trust(foreign):
    root, _ = foreign
    run = Records(root).get("foreign1")
    key = run.stages[0].key
    assert recorded_reader(root, run, trust=False).manifest(key) is None
    assert recorded_reader(root, run, trust=True).manifest(key) is not None
    assert recorded_reader(root, run, trust=False, own=run.spec["store"]).manifest(key) is not None
    inside = replace(run, spec={**run.spec, "store": f"file://{root}/shared"})
    assert readable_store(inside, root, trust=False) == f"file://{root}/shared"
    escaping = replace(run, spec={**run.spec, "store": f"file://{root}/../outside/artifacts"})
    assert readable_store(escaping, root, trust=False) is None
