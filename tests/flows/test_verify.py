"""Bundles of runs, and their verification: equal bytes, a changed file, another result and where it begins."""

import gzip
import json
import resource
import shutil
import tarfile
from pathlib import Path

import numpy
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from safetensors.numpy import save_file

from components.artifacts import Artifact, stage_key
from components.artifacts.keys import json_digest
from components.errors import ArtifactDamaged, ResourceError
from flows import bundle as bundle_command
from flows import verify as verify_command
from flows.history.records import Records, RunRecord, StageRecord
from flows.history.store_reader import open_reader
from flows.stages import STAGES
from flows.stages.base import Context, Request, Stage
from flows.stages.execute import run_stage, stage_and_spec
from flows.verification.bundle import opened_bundle, write_bundle
from flows.verification.verify import Verification, compare_contents

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


def test_a_bundle_or_one_stage_of_it_is_recomputed_with_the_same_bytes(run, tmp_path):
    """One stage recomputes the stages before it only if their artifacts are left out."""
    record, root = run
    everything = tmp_path / "everything"
    write_bundle(record, open_reader(root, None), everything, "all")
    for path, recomputed in ((everything, ["add[2]"]), (bundled(run, tmp_path), ["add[1]", "add[2]"])):
        (work := tmp_path / f"of-{path.name}").mkdir()
        assert verified(path, work) == ("same", {f"add[{n}]": ("same", "") for n in (1, 2, 3)})
        (work := tmp_path / f"one-of-{path.name}").mkdir()
        assert list(verified(path, work, "add[2]")[1]) == recomputed
    with opened_bundle(tmp_path / "bundle") as (bundle, _):
        assert list(bundle.included) == [record.stages[0].request["inputs"]["fork"]]
        assert "root" not in bundle.spec, "a path of this machine"


DIFFERENT = {
    "all": ("different", ["same", "different", "same"], ("add[2]", "number: other bytes")),
    "needed": ("same", ["same", "not_comparable", "not_comparable"], ("add[3]", "other before")),
}
"""Verdict on what could be compared, verdicts of the stages, and the detail of one, by the contents of the bundle."""


@pytest.mark.parametrize("contents", DIFFERENT)
def test_the_first_difference_is_named_and_later_stages_are_verified_on_the_recorded_artifacts_if_there_are_any(
    run, tmp_path, monkeypatch, contents
):
    path = bundled(run, tmp_path, contents)
    add_one_more(monkeypatch, 2.0)
    verdict, stages = verified(path, tmp_path)
    expected, verdicts, (label, detail) = DIFFERENT[contents]
    assert (verdict, [stages[f"add[{n}]"][0] for n in (1, 2, 3)]) == (expected, verdicts)
    assert stages[label][1] == detail


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
    for name in ("../outside", "/tmp/outside", "link"):
        with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
            member = tarfile.TarInfo(name)
            if name == "link":
                member.type, member.linkname = tarfile.SYMTYPE, "file"
            archive.addfile(member)
        with pytest.raises(ResourceError, match="not a readable archive"), opened_bundle(tmp_path / "bad.tar.gz"):
            pass
        assert not (tmp_path.parent / "outside").exists()


def test_a_sparse_file_in_an_archive_is_refused(tmp_path):
    """A header of GNU tar states a size of 8 TB in 512 bytes: to check the digest of its holes takes an hour."""
    member = tarfile.TarInfo("run/bundle.json")
    member.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    size = tarfile.itn(8 * 1024**4, 12, tarfile.GNU_FORMAT)
    header[386:398] = header[483:495] = size  # offset of the last part, and size of the file
    header[398:410] = tarfile.itn(0, 12, tarfile.GNU_FORMAT)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "sparse.tar.gz").write_bytes(gzip.compress(bytes(header) + bytes(10240 - len(header))))
    with pytest.raises(ResourceError, match="no plain file or folder"), opened_bundle(tmp_path / "sparse.tar.gz"):
        pass


@pytest.mark.parametrize("part", ["content", "header"])
def test_an_archive_that_expands_without_measure_is_refused(tmp_path, part):
    """300 MB of zeros in 1.3 MB, as a file and as an extended header that tarfile reads at once."""
    size = 300 * 1024**2
    member = tarfile.TarInfo("run/zeros")
    member.size = size
    if part == "header":
        member.type = tarfile.XHDTYPE
    chunk = bytes(1024**2)
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as archive:
        archive.write(member.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(size // len(chunk)):
            archive.write(chunk)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        pytest.raises(ResourceError, match=r"expands to more than|a header of"),
        opened_bundle(tmp_path / "bomb.tar.gz"),
    ):
        pass
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024, "kB"


# --- a bundle of somebody else ---


def hostile(tmp_path, part, allow=()):
    """The start evaluation of the published bundle, with parts of its request replaced, and a valid digest."""
    data = json.loads(PUBLISHED.read_text())
    stage = next(stage for stage in data["stages"] if stage["request"]["stage"] == "evaluate")
    stage["request"]["inputs"] = {}
    stage["request"]["spec"] |= part
    stage["request"]["allow"] = list(allow)
    data |= {"stages": [stage], "included": {}}
    del data["digest"], data["format"]
    path = tmp_path / "evil"
    path.mkdir()
    (path / "bundle.json").write_text(json.dumps({"format": 1, "digest": json_digest(data), **data}))
    return path


def mcp(**arguments):
    return {"_target_": "components.environments.adapters.mcp.Mcp", "scenarios": None, **arguments}


MIXTURE = {"_target_": "components.environments.mixture.Mixture", "environments": {"a": mcp(url="http://h")}}
HOSTILE = {
    "program": ({"environment": mcp(command=["touch", "MARKER"])}, "starts a program"),
    "server": ({"environment": mcp(url="http://127.0.0.1:1/mcp")}, "contacts a server"),
    "file": ({"reward": {"_target_": "components.rewards.rules.human.Human", "path": "/etc"}}, "reads or writes files"),
    "nested": ({"environment": MIXTURE}, "contacts a server"),
    "folder of a model": ({"model": {"name": "/srv/model"}}, "reads a model folder or downloads a model"),
    "function that is no component": ({"reward": {"_target_": "components.models.digests.folder_digest"}}, "runs code"),
}


def test_a_bundle_reaches_nothing_without_trust(tmp_path, capsys):
    for name, (part, access) in HOSTILE.items():
        (folder := tmp_path / name).mkdir()
        marker = folder / "marker"
        path = hostile(folder, json.loads(json.dumps(part).replace("MARKER", str(marker))))
        assert verify_command.main([str(path), "--work", str(folder / "work")]) == 1, name
        lines = capsys.readouterr()
        assert "recomputes 0 of 1 stages" in lines.err
        assert f"{access}; runs only with --trust" in lines.err
        assert lines.out == "skipped\n"
        assert not marker.exists()


def test_packages_that_a_bundle_allows_are_not_imported_without_trust(tmp_path, capsys):
    path = hostile(tmp_path, {"reward": {"_target_": "antigravity_of_the_test.reward"}}, ["antigravity_of_the_test"])
    assert verify_command.main([str(path)]) == 1
    assert "allow = antigravity_of_the_test runs code; runs only with --trust" in capsys.readouterr().err
    assert verify_command.main([str(path), "--trust"]) == 2
    assert "no module named 'antigravity_of_the_test'" in capsys.readouterr().err


def test_what_runs_is_printed_before_it_runs(tmp_path):
    with opened_bundle(hostile(tmp_path, {"environment": mcp(command=["touch", "x"])})) as (bundle, folder):
        [planned] = Verification(bundle, folder, tmp_path / "work", trust=True).planned()
    assert planned.skipped == ""
    assert "environment.command = ['touch', 'x'] starts a program" in planned.reaches


def test_the_published_bundle_needs_no_trust(tmp_path):
    with opened_bundle(PUBLISHED) as (bundle, folder):
        planned = Verification(bundle, folder, tmp_path / "work").planned()
    assert [entry.stage.label for entry in planned if entry.skipped] == []


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


def test_tensors_agree_up_to_the_tolerance(pair):
    weights = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    save_file({"w": weights}, pair[0].path / "w.safetensors")
    for factor, place in ((1 + 1e-5, ""), (1.01, "w.safetensors: w differs by 0.01 of its norm")):
        save_file({"w": weights * numpy.float32(factor)}, pair[1].path / "w.safetensors")
        difference = compare_contents(*pair, {"w.safetensors": {}})
        assert difference.place == place
        assert place or difference.largest == pytest.approx(1e-5, rel=0.1)


ROWS = [
    ({"tokens": [1, 2], "logprob": -1.00001}, ""),
    ({"tokens": [1, 2], "logprob": -1.1}, "t.parquet: row 1 logprob: -1.1, recorded -1"),
    ({"tokens": [1, 3], "logprob": -1.0}, "t.parquet: row 1 tokens[1]: 3, recorded 2"),
]


def test_tokens_are_equal_and_logprobs_agree_up_to_the_tolerance(pair):
    first = {"tokens": [5], "logprob": 0.0}
    for row, place in ROWS:
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
