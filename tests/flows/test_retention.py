"""Artifacts that registered versions and deployments point to outlive their runs: real MLflow store, real weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.artifacts import Store
from components.deployment.targets.base import Deployment, Release
from components.models.weights import load_model, load_tokenizer, prepare
from components.tracking.mlflow_tracker import Tracker
from components.tracking.spec import TrackingSpec
from flows.history.records import Records
from flows.release.deployment_ledger import ActiveRelease, Ledger
from flows.runs.clean import main
from tests.deployment.tiny import TINY
from tests.flows.pretend import pretend

LAST = ("train[1]", "evaluate[final]", "deploy")
"""Labels of the artifacts that a version points to: checkpoint, evaluation, export."""


@pytest.fixture(scope="session")
def weights(tmp_path_factory) -> Path:
    return prepare(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> Path:
    """Return an empty MLflow database, shared because creating its tables is slow."""
    root = tmp_path_factory.mktemp("mlflow")
    client(root)
    return root / "mlflow" / "mlflow.db"


@pytest.fixture
def mlflow(tmp_path, database) -> None:
    """Copy the database below the root."""
    (tmp_path / "mlflow").mkdir()
    shutil.copy(database, tmp_path / "mlflow" / "mlflow.db")


@pytest.fixture
def registered(tmp_path, weights, mlflow):
    """Return a function that simulates a run with a real export and registers it in MLflow as a run does."""

    def register(seed: int, alias: str | None = "champion", name: str = "shop"):
        def export(folder: Path) -> None:
            shutil.copytree(weights, folder / "merged")

        changes = {"rounds": 1, "seed": seed, "deploy": {"name": name}, "warmup": None}
        run = pretend(tmp_path, files={"deploy": export}, **changes)
        store, records = Store(tmp_path / "artifacts"), Records(tmp_path)
        with Tracker.open(tmp_path, TrackingSpec(), "shop") as tracker:
            checkpoint, evaluation, deployed = (run.stage(label).key for label in LAST)
            tags = {"policy_key": checkpoint, "evaluation_key": evaluation}
            export_of_run = store.find(deployed)
            assert export_of_run is not None
            version = tracker.register_model(name, export_of_run, policy_digest="f" * 64, tags=tags)
            if alias:
                tracker.registry.alias(name, alias, version)
            records.forget(run)
            run.id = tracker.run_id  # a record has the id of its MLflow run
            records.write(run)
        return run, version

    return register


@pytest.fixture
def clean(tmp_path, capsys):
    """Return a function that runs the command and returns exit code, standard output and standard error."""

    def run(*arguments: str) -> SimpleNamespace:
        code = main([f"root={tmp_path}", *arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def client(root: Path):
    from components.tracking.store import connect, local_uri

    return connect(local_uri(root), root / "mlflow" / "artifacts")


def load(root: Path, reference: str) -> float:
    """Load the weights of an MLflow reference with MLflow and transformers only; return their sum."""
    import mlflow

    from components.tracking.store import local_uri

    mlflow.set_tracking_uri(local_uri(root))
    mlflow.set_registry_uri(local_uri(root))
    folder = Path(mlflow.artifacts.download_artifacts(reference))
    model = load_model(folder / "merged", dtype="float32", device="cpu")
    assert load_tokenizer(folder / "merged").chat_template
    return sum(float(parameter.detach().sum()) for parameter in model.parameters())


def kept(root: Path) -> set[str]:
    return {path.name for path in (root / "artifacts").glob("?" * 64)}


def keys(run, labels=LAST) -> set[str]:
    return {run.stage(label).key for label in labels}


def test_a_champion_loads_from_mlflow_after_its_run_is_forgotten(tmp_path, registered, clean):
    run, version = registered(seed=1)
    before = load(tmp_path, "models:/shop@champion")
    done = clean("--forget", run.short, "--delete")
    assert done.code == 0, done.err
    assert load(tmp_path, "models:/shop@champion") == before
    assert kept(tmp_path) == keys(run)  # what the next run needs to be compared with it, too
    assert f"export {run.stage('deploy').key[:20]} is retained: shop version {version} (champion)" in done.out
    assert "--forget-champion" in done.out
    assert client(tmp_path).get_run(run.id).info.lifecycle_stage == "active"
    assert Records(tmp_path).all() == []
    again = clean("--delete")  # no record names it any more
    assert (again.code, kept(tmp_path)) == (0, keys(run))
    assert load(tmp_path, "models:/shop@champion") == before


def test_a_version_that_is_not_champion_is_kept_too(tmp_path, registered, clean):
    first, _ = registered(seed=1)
    other, version = registered(seed=2, alias=None)
    done = clean("--forget", other.short, "--delete", "--json")
    data = json.loads(done.out)
    assert {(item["kind"], item["why"]) for item in data["retained"]} == {
        (kind, f"shop version {version} points to it") for kind in ("checkpoint", "evaluation", "export")
    }
    assert kept(tmp_path) == {stage.key for stage in first.stages} | keys(other)
    load(tmp_path, f"models:/shop/{version}")


def test_a_champion_goes_where_it_is_said_and_mlflow_says_so(tmp_path, registered, clean):
    from mlflow.exceptions import MlflowException

    first, one = registered(seed=1, alias=None)
    champion, two = registered(seed=2)
    shown = clean("--forget", champion.short, "--forget-champion")
    assert "shop version 2 (champion) is deleted in MLflow's registry" in shown.out
    assert load(tmp_path, "models:/shop@champion")  # nothing is touched without --delete
    done = clean("--forget", champion.short, "--forget-champion", "--delete")
    assert done.code == 0, done.err
    store = client(tmp_path)
    assert [found.version for found in store.search_model_versions("name='shop'")] == [int(one)] != [int(two)]
    with pytest.raises(MlflowException, match="alias champion not found"):
        store.get_model_version_by_alias("shop", "champion")
    assert store.get_run(champion.id).info.lifecycle_stage == "deleted"
    assert store.get_run(first.id).info.lifecycle_stage == "active"
    assert kept(tmp_path) == {stage.key for stage in first.stages}


def test_a_run_without_a_version_is_marked_deleted(tmp_path, mlflow, clean):
    with Tracker.open(tmp_path, TrackingSpec(), "shop") as tracker:
        run = pretend(tmp_path, rounds=1)
        Records(tmp_path).forget(run)
        run.id = tracker.run_id
        Records(tmp_path).write(run)
    assert clean("--forget", run.short).code == 0
    assert client(tmp_path).get_run(run.id).info.lifecycle_stage == "active"
    assert clean("--forget", run.short, "--delete").code == 0
    assert client(tmp_path).get_run(run.id).info.lifecycle_stage == "deleted"
    assert kept(tmp_path) == set()


def test_what_another_run_needs_stays_registered(tmp_path, registered, clean):
    run, version = registered(seed=1)
    pretend(tmp_path, rounds=1, seed=1, deploy={"name": "shop"}, warmup=None)  # the same stages, all cached
    done = clean("--forget", run.short, "--forget-champion", "--delete")
    assert done.code == 0, done.err
    assert client(tmp_path).get_model_version_by_alias("shop", "champion").version == int(version)
    load(tmp_path, "models:/shop@champion")


def test_an_artifact_named_by_its_key_is_refused_while_a_version_points_to_it(tmp_path, registered, clean):
    run, version = registered(seed=1)
    assert clean("--forget", run.short, "--delete").code == 0
    key = run.stage("deploy").key
    refused = clean(key[:12], "--delete")
    assert (refused.code, kept(tmp_path)) == (2, keys(run))
    assert f"export {key[:12]} is retained: shop version {version} (champion) points to it" in refused.err
    assert "--forget-champion" in refused.err
    assert clean(key[:12], "--forget-champion", "--delete").code == 0
    assert kept(tmp_path) == keys(run, ("train[1]", "evaluate[final]"))
    assert client(tmp_path).search_model_versions("name='shop'") == []
    assert clean("--delete").code == 0
    assert kept(tmp_path) == set()


def test_a_deployed_export_stays(tmp_path, registered, clean):
    run, version = registered(seed=1)
    client(tmp_path).delete_model_version("shop", version)
    folder = Store(tmp_path / "artifacts").path(run.stage("deploy").key) / "merged"
    release = Release("shop", version, "a" * 64, folder, 64)
    ledger = Ledger(tmp_path, "shop")
    ledger.write(ActiveRelease(release, Deployment("hub", version, "a" * 64, None, "user/shop")), "deployed", "")
    done = clean("--forget", run.short, "--delete")
    assert f"is retained: shop version {version} is deployed (hub user/shop)" in done.out
    assert kept(tmp_path) == keys(run, ("deploy",))
    assert clean(run.stage("deploy").key, "--delete", "--forget-champion").code == 0
    assert kept(tmp_path) == set()


def test_a_server_that_is_up_is_stopped_first(tmp_path, registered, clean):
    import psutil

    run, version = registered(seed=1)
    folder = Store(tmp_path / "artifacts").path(run.stage("deploy").key) / "merged"
    me = psutil.Process()
    details = {"pid": str(me.pid), "began": repr(me.create_time())}
    served = Deployment("local", version, "a" * 64, "http://127.0.0.1:1/v1", "shop", details=details)
    Ledger(tmp_path, "shop").write(
        ActiveRelease(Release("shop", version, "a" * 64, folder, 64), served), "deployed", ""
    )
    refused = clean("--forget", run.short, "--forget-champion", "--delete")
    assert refused.code == 2
    assert f"python -m flows.runs deployments root={tmp_path} --stop shop" in refused.err
    assert len(kept(tmp_path)) == len(run.stages)


def test_a_checkpoint_of_a_champion_is_no_intermediate_one(tmp_path, registered, clean):
    run, _ = registered(seed=1)
    longer = pretend(tmp_path, rounds=4, seed=1, deploy={"name": "shop"}, warmup=None)
    assert longer.stage("train[1]").key == run.stage("train[1]").key
    assert clean("--forget", run.short, "--intermediate", "--delete").code == 0
    assert run.stage("train[1]").key in kept(tmp_path)
    assert longer.stage("train[2]").key not in kept(tmp_path)


def test_a_registry_that_cannot_be_asked_keeps_everything(tmp_path, clean):
    run = pretend(tmp_path, rounds=1, tracking={"uri": "http://127.0.0.1:1"})
    refused = clean("--forget", run.short, "--delete")
    assert (refused.code, len(kept(tmp_path))) == (2, len(run.stages))
    assert "http://127.0.0.1:1" in refused.err
    assert f"--forget {run.short} --forget-champion" in refused.err
    done = clean("--forget", run.short, "--forget-champion", "--delete")
    assert (done.code, kept(tmp_path)) == (0, set())
    assert "http://127.0.0.1:1" in done.err  # MLflow was not told


def test_a_registry_elsewhere_is_remembered_after_its_runs(tmp_path, registered, clean):
    elsewhere = tmp_path / "elsewhere"
    run, _ = registered(seed=1)
    os.rename(tmp_path / "mlflow", elsewhere)
    run.spec["tracking"]["uri"] = f"sqlite:///{elsewhere}/mlflow.db"
    Records(tmp_path).write(run)
    assert clean("--forget", run.short, "--delete").code == 0
    assert clean("--delete").code == 0
    assert kept(tmp_path) == keys(run)
