"""Bundles of runs, and their verification: equal bytes, a changed file, another result and where it begins."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save_file

from components.artifacts import Artifact, stage_key
from components.errors import ArtifactDamaged, ResourceError
from flows import bundle as bundle_command
from flows import verify as verify_command
from flows.history.records import Records, RunRecord, StageRecord
from flows.history.store_reader import open_reader
from flows.stages import STAGES
from flows.stages.base import Context, Request, Stage
from flows.stages.execute import run_stage, stage_and_spec
from flows.verification.bundle import opened_bundle, write_bundle
from flows.verification.content import compare_contents
from flows.verification.verify import Verification

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "quickstart.bundle.json"


@pytest.fixture
def run(tmp_path, tiny_stages):
    """Three stages in a chain, of which the first also adds a checkpoint from elsewhere."""
    root = tmp_path / "root"
    context = Context.at(root)
    foreign, _ = run_stage(Request("add", {"amount": 100.0}), context)
    record = RunRecord("0123456789abcdef0123456789abcdef", "sums", 0, 1.0, "FINISHED", spec={"root": str(root)})
    inputs = {"fork": foreign.key}
    for number in (1, 2, 3):
        request = Request("add", {"amount": float(number)}, inputs)
        artifact, _ = run_stage(request, context)
        stage = StageRecord(
            f"add[{number}]", number, request.to_json(), 1, artifact.key, artifact.digest, artifact.kind, "ran", 0.1
        )
        record.stages.append(stage)
        inputs = {"before": artifact.key}
    Records(root).write(record)
    return record, root


def bundled(run, tmp_path, contents="needed", name="bundle"):
    record, root = run
    write_bundle(record, open_reader(root, None), tmp_path / name, contents)
    shutil.rmtree(root / "artifacts")  # nothing of the run helps the verification
    return tmp_path / name


def verified(path, tmp_path, *labels):
    with opened_bundle(path) as (bundle, folder):
        verification = Verification(bundle, folder, tmp_path / "work")
        verdict = verification.verify(labels)
    return verdict, {result.label: (result.verdict, result.detail) for result in verification.results}


def add_one_more(monkeypatch, amount):
    """Make the stage compute something else for one amount, as another processor might."""
    original = STAGES["add"].function

    def other(spec, inputs, draft, context):
        metrics = original(spec, inputs, draft, context)
        if spec.amount == amount:
            (draft.path / "number").write_text("7.5")
        return metrics

    changed = Stage("add", 1, STAGES["add"].spec, "number", 1, other, volatile=("log",))
    monkeypatch.setitem(STAGES, "add", changed)


@pytest.mark.parametrize("contents", ["needed", "all"])
def test_a_bundle_is_recomputed_with_the_same_bytes(run, tmp_path, contents):
    path = bundled(run, tmp_path, contents)
    assert verified(path, tmp_path) == ("same", {f"add[{number}]": ("same", "") for number in (1, 2, 3)})


def test_needed_artifacts_are_those_that_no_stage_computes(run, tmp_path):
    record, _ = run
    with opened_bundle(bundled(run, tmp_path)) as (bundle, _):
        assert list(bundle.included) == [record.stages[0].request["inputs"]["fork"]]
        assert "root" not in bundle.spec, "a path of this machine"


def test_one_stage_recomputes_the_stages_before_it_only_if_their_artifacts_are_left_out(run, tmp_path):
    record, root = run
    everything = tmp_path / "everything"
    write_bundle(record, open_reader(root, None), everything, "all")
    assert list(verified(everything, tmp_path, "add[2]")[1]) == ["add[2]"]
    assert list(verified(bundled(run, tmp_path), tmp_path, "add[2]")[1]) == ["add[1]", "add[2]"]


def test_the_first_difference_is_named_and_later_stages_are_verified_on_the_recorded_artifacts(
    run, tmp_path, monkeypatch
):
    path = bundled(run, tmp_path, "all")
    add_one_more(monkeypatch, 2.0)
    verdict, stages = verified(path, tmp_path)
    assert verdict == "different"
    assert [stages[f"add[{n}]"][0] for n in (1, 2, 3)] == ["same", "different", "same"]
    assert stages["add[2]"][1] == "number: other bytes"


def test_without_the_artifact_later_stages_run_on_the_recomputed_one_and_are_not_comparable(run, tmp_path, monkeypatch):
    path = bundled(run, tmp_path)
    add_one_more(monkeypatch, 2.0)
    verdict, stages = verified(path, tmp_path)
    assert [stages[f"add[{n}]"][0] for n in (1, 2, 3)] == ["same", "not_comparable", "not_comparable"]
    assert verdict == "same", "what could be compared"
    assert stages["add[3]"][1] == "other before"


def test_a_bundle_without_artifacts_skips_what_needs_one(run, tmp_path):
    verdict, stages = verified(bundled(run, tmp_path, "none"), tmp_path)
    assert verdict == "skipped"
    assert stages["add[1]"] == ("skipped", "no artifact for its input fork")


@pytest.mark.parametrize("name", ["number", "manifest.json", "bundle.json"])
def test_a_changed_file_is_named_before_anything_is_computed(run, tmp_path, name):
    path = bundled(run, tmp_path, "all")
    changed = path / name if name == "bundle.json" else next((path / "artifacts").glob(f"*/{name}"))
    changed.write_text(changed.read_text().replace("0", "1"))
    with pytest.raises(ArtifactDamaged, match=str(changed.parent)), opened_bundle(path):
        pass


def test_an_archive_is_a_bundle_too(run, tmp_path):
    path = bundled(run, tmp_path, name="bundle.tar.gz")
    assert verified(path, tmp_path)[0] == "same"


def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "file", arcname="../outside")
    with pytest.raises(ResourceError, match="not a readable archive"), opened_bundle(tmp_path / "bad.tar.gz"):
        pass
    assert not (tmp_path.parent / "outside").exists()


def test_commands(run, tmp_path, capsys):
    _, root = run
    assert bundle_command.main(["sums", f"root={root}", "--out", str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == 3
    assert bundle_command.main(["sums", f"root={root}", "--out", str(tmp_path / "b")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert verify_command.main([str(tmp_path / "b"), "--json", "--stage", "add[1]"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["verdict"], [stage["label"] for stage in line["stages"]]) == ("same", ["add[1]"])
    assert verify_command.main([str(tmp_path / "b"), "--stage", "train[1]"]) == 2
    assert "no stage 'train[1]'; it has: add[1], add[2], add[3]" in capsys.readouterr().err
    assert verify_command.main([str(tmp_path)]) == 2
    assert "holds no bundle.json" in capsys.readouterr().err
    assert verify_command.main([str(tmp_path / "none.tar.gz")]) == 2
    assert "none.tar.gz does not exist; expected a bundle" in capsys.readouterr().err


# --- contents ---


def artifact(path):
    path.mkdir()
    return Artifact("a" * 64, "checkpoint", "train", 1, "b" * 64, path, {}, {}, ("times.json",), 0.0)


@pytest.fixture
def pair(tmp_path):
    return artifact(tmp_path / "recorded"), artifact(tmp_path / "recomputed")


@pytest.mark.parametrize(("factor", "place"), [(1 + 1e-5, ""), (1.01, "w.safetensors: w differs by 0.01 of its norm")])
def test_tensors_agree_up_to_the_tolerance(pair, factor, place):
    weights = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    save_file({"w": weights}, pair[0].path / "w.safetensors")
    save_file({"w": weights * numpy.float32(factor)}, pair[1].path / "w.safetensors")
    difference = compare_contents(*pair, {"w.safetensors": {}})
    assert difference.place == place
    assert place or difference.largest == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({"tokens": [1, 2], "logprob": -1.00001}, ""),
        ({"tokens": [1, 2], "logprob": -1.1}, "t.parquet: row 1 logprob: -1.1, recorded -1"),
        ({"tokens": [1, 3], "logprob": -1.0}, "t.parquet: row 1 tokens[1]: 3, recorded 2"),
    ],
)
def test_tokens_are_equal_and_logprobs_agree_up_to_the_tolerance(pair, row, place):
    first = {"tokens": [5], "logprob": 0.0}
    for side, second in zip(pair, ({"tokens": [1, 2], "logprob": -1.0}, row), strict=True):
        parquet.write_table(pa.Table.from_pylist([first, second]), side.path / "t.parquet")
    assert compare_contents(*pair, {"t.parquet": {}}).place == place


def test_volatile_files_do_not_count_and_missing_ones_do(pair):
    (pair[0].path / "times.json").write_text("1")
    (pair[0].path / "card.json").write_text("1")
    assert compare_contents(*pair, {"times.json": {}}).place == ""
    assert compare_contents(*pair, {"card.json": {}, "times.json": {}}).place == "card.json: missing"


# --- the bundle of the README's result ---


def test_the_published_bundle_is_of_the_published_result():
    with opened_bundle(PUBLISHED) as (bundle, _):
        results = [json.loads(line) for line in PUBLISHED.with_name("quickstart.jsonl").read_text().splitlines()]
        [published] = [result for result in results if result["seed"] == bundle.seed]
        for name in ("policy_digest", "success", "success_start", "success_sft", "gain"):
            assert bundle.result[name] == published[name]


def test_the_published_bundle_has_the_keys_that_the_current_code_computes():
    """Otherwise `flows.verify` would answer `different`: run the quickstart and write its bundle again."""
    with opened_bundle(PUBLISHED) as (bundle, _):
        digests = {stage.key: stage.digest for stage in bundle.stages}
        assert len(bundle.stages) > 30
        for recorded in bundle.stages:
            request = Request.from_json(recorded.request)
            stage, spec = stage_and_spec(request)
            inputs = {name: digests[key] for name, key in request.inputs.items()}
            key = stage_key(stage.name, stage.version, spec.key_part(), inputs, request.seed)
            assert key == recorded.key, recorded.label
