"""A run whose artifacts are shared between machines: found elsewhere, handed on, refused at the start."""

import json
import logging
import os
import re
from dataclasses import replace

import pytest

from components.artifacts import MANIFEST, Store
from components.errors import ArtifactDamaged, SchemaMismatch
from components.specs import validate
from flows.compare import main as compare_main
from flows.execution.executor import Execution
from flows.experiment.compose import check
from flows.experiment.spec import ExperimentSpec
from flows.history import store_reader
from flows.history.lineage_graph import Lineage
from flows.history.records import Records
from flows.reporting.comparison import compare
from flows.reporting.lineage import show
from flows.runs.lineage import main as lineage_main
from flows.stages import STAGES
from flows.stages.base import Context, Request
from flows.stages.execute import find_stage, run_stage
from tests.artifacts.conftest import aws, bucket, s3, uri  # noqa: F401  fixtures
from tests.flows.pretend import pretend
from tests.flows.processes import python, stage_line
from tests.flows.test_online_rl import DATA
from tests.refusals import wrong_refusals

SHOP = {"_target_": "components.environments.worlds.shop.Shop", "train": 8, "heldout": 4}
COLLECT = Request(
    "collect",
    {
        "model": {"name": "tiny", "source": "random"},
        "environment": SHOP,
        "agent": {},
        "collect": {"scenarios": 2},
        "actor": "solver",
    },
)


def judge(trajectories):
    reward = {"_target_": "components.rewards.rules.outcome.Outcome"}
    return Request("judge", {"reward": reward}, {"trajectories": trajectories.key})


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_one_machine_ran_another_finds_and_runs_nothing(tmp_path, uri, monkeypatch):  # noqa: F811
    here = Context.at(tmp_path / "a", uri)
    played, ran = run_stage(COLLECT, here)
    scores, also_ran = run_stage(judge(played), here)
    assert (ran, also_ran) == ("ran", "ran")

    def never(*_):
        raise AssertionError("nothing is to be done")

    for name in ("collect", "judge"):
        monkeypatch.setitem(STAGES, name, replace(STAGES[name], function=never))
    elsewhere = Context.at(tmp_path / "b", uri)
    found, status = run_stage(judge(played), elsewhere)  # its input is fetched too: the key holds its digest
    assert (status, found.digest, found.metrics) == ("cached", scores.digest, scores.metrics)
    assert contents(found.path) == contents(scores.path)
    again = Context.at(tmp_path / "c", uri)
    assert find_stage(COLLECT, again).digest == played.digest
    with pytest.raises(ArtifactDamaged, match="not in"):
        run_stage(judge(played), Context.at(tmp_path / "d"))


def test_a_stage_in_its_own_process_shares_what_it_makes(tmp_path, uri, screen):  # noqa: F811
    root = tmp_path / "a"
    spec = validate(ExperimentSpec, {**DATA, "root": str(root), "store": uri, "compute": {"default": "process"}})
    execution = Execution(spec, Context.at(root, spec.store), screen[0], None, root / "logs" / "log")
    done = execution.stage("collect[sft]", 0, COLLECT)
    execution.close()
    assert done.status == "ran"
    assert find_stage(COLLECT, Context.at(tmp_path / "b", uri)).digest == done.artifact.digest
    written = b"".join(contents(root).values())
    assert os.environ["AWS_SECRET_ACCESS_KEY"].encode() not in written


def test_the_command_of_one_stage_takes_a_store(tmp_path, uri):  # noqa: F811
    def command(root, store):
        root.mkdir()
        done = python(*stage_line(root, COLLECT), "--store", store)
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    made = run_stage(COLLECT, Context.at(tmp_path / "a", uri))[0]
    assert command(tmp_path / "b", uri) == (0, {"key": made.key, "digest": made.digest, "status": "cached"})
    code, last = command(tmp_path / "c", "s3://user:secret@bucket")
    assert code == 2
    assert "store: 's3://user:***@bucket': expected a URI without user and password" in last["error"]["message"]


@pytest.mark.parametrize("store", ["s3://no-such-bucket/runs", "file:///proc/nowhere"])
@pytest.mark.usefixtures("aws")
def test_a_store_that_cannot_be_used_is_refused_before_anything_starts(tmp_path, store):
    done = python("-m", "flows.run", "+experiment=smoke", f"root={tmp_path}/runs", f"store={store}")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("store: ")
    assert store in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


ADDRESSES = [
    ("store=s3://me:secret@bucket", "store: holds a secret (a credential in a URL)"),
    ("store=s4://bucket", "fsspec does not support the protocol s4"),
    ("store=bucket", "store: 'bucket': expected a URI such as s3://BUCKET/PREFIX"),
    (
        "root=s3://bucket",
        "root: 's3://bucket': expected a local folder; to share artifacts between",
    ),
]


def test_a_mistake_in_the_address_is_named():
    cases = [(line, re.escape(words)) for line, words in ADDRESSES]
    assert wrong_refusals(cases, lambda line: check(["+experiment=smoke", line])) == []


def test_files_of_a_newer_schema_are_refused_and_left_alone(tmp_path, caplog):
    context = Context.at(tmp_path)
    artifact, _ = run_stage(COLLECT, context)
    file = artifact.path / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 99}))
    for request in (COLLECT, judge(artifact)):
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(
                SchemaMismatch,
                match=r"newer version of Espalier: .* has schema version 99, expected at most \d+\. Update, or use",
            ),
        ):
            run_stage(request, Context.at(tmp_path))
    assert "damaged artifact" not in caplog.text
    assert artifact.path.is_dir()


EVALUATED = {
    f"evaluate[{name}]": shown
    for name, shown in {"start": "---", "sft": "+--", "1": "++-", "2": "+++", "final": "+++"}.items()
}


@pytest.fixture
def shared(tmp_path, uri):  # noqa: F811
    """The root of two runs whose artifacts are in a store as well; the ids of the runs."""
    root = tmp_path / "root"
    options = {"rounds": 3, "evaluate": {"every": 1}, "store": uri, "episodes": EVALUATED}
    runs = [pretend(root, **options, seed=seed).id for seed in (0, 1)]
    store = Store(root / "artifacts", uri)
    for artifact in list(store.manifests()):
        assert store.find(artifact.key)
    return root, runs


def names(aws, bucket) -> dict[str, str]:  # noqa: F811
    """Of all objects, and when each was written."""
    pages = aws.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return {found["Key"]: str(found["LastModified"]) for page in pages for found in page.get("Contents", [])}


def in_memory(comparison):
    """Return a comparison with the trajectories that are in files."""
    return replace(comparison, runs=[_in_memory(run) for run in comparison.runs])


def _in_memory(run):
    loaded = {
        name: replace(evaluation, trajectories=list(evaluation.trajectories))
        for name, evaluation in run.evaluations.items()
    }
    return replace(run, evaluations=loaded)


def test_a_comparison_reads_what_only_the_store_has_and_leaves_nothing(shared, aws, bucket):  # noqa: F811
    root, runs = shared
    before = compare(root, runs, trust=True)
    assert list(before.runs[0].heldout) == [0, 1, 2, 3]
    expected = in_memory(before)
    (root / "artifacts").rename(root / "elsewhere")
    objects = names(aws, bucket)
    after = compare(root, runs, trust=True)
    assert in_memory(after) == replace(expected, created=after.created)
    assert [list(run.notes) for run in after.runs] == [[], []]
    assert not (root / "artifacts").exists()
    assert names(aws, bucket) == objects
    broken = Records(root).get(runs[1]).stage("evaluate[2]").key
    aws.client().put_object(Bucket=bucket, Key=f"artifacts/{broken}/summary.json", Body=b"{}")
    (note,) = compare(root, runs, trust=True).runs[1].notes
    assert note == "no longer in the store, or damaged, so curves are incomplete: evaluate[2]"


def test_a_lineage_is_told_from_what_only_the_store_has(shared):
    root, runs = shared
    lineage = Lineage(root)
    key = lineage.resolve(runs[0])
    before = show(lineage, key)
    (root / "artifacts").rename(root / "elsewhere")
    assert show(Lineage(root, through=True, trust=True), key) == before
    assert "(deleted)" in show(Lineage(root), key)
    assert not (root / "artifacts").exists()


def test_what_is_in_the_folder_asks_no_store_and_one_that_cannot_be_read_is_told(shared, monkeypatch, capsys):
    root, runs = shared
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(store_reader, "PATIENCE", 0.0)
    assert [list(run.notes) for run in compare(root, runs, trust=True).runs] == [[], []]
    (root / "artifacts").rename(root / "elsewhere")
    assert compare_main([*runs, f"root={root}", "--trust"]) == 0
    out = capsys.readouterr().out
    for letter in "AB":
        assert (
            f"{letter}: its store cannot be read, so artifacts that only it has are missing: store: cannot read s3://"
            in out
        )
    assert lineage_main([runs[0], "--trust", f"root={root}"]) == 0
    shown = capsys.readouterr()
    assert "(deleted)" in shown.out
    assert shown.err.startswith(
        "cannot read this store; artifacts that only it has count as deleted: store: cannot read s3://"
    )
