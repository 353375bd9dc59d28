"""Fixtures of the tests of remote stores: one S3 server per session, started only if a test requests it."""

import multiprocessing
import os
import time

import pytest

from components.artifacts import Store, Times
from tests.artifacts.s3 import S3, Wire

KEY = "a" * 64
QUICK = Times(patience=20, beat=0.3, stale=4, poll=0.2)


@pytest.fixture(scope="session")
def s3():
    server = S3()
    yield server
    server.close()


@pytest.fixture
def aws(s3, monkeypatch, tmp_path):
    """Return the environment of a user with access to the server."""
    environment = {
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret-words",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def wire(aws, monkeypatch):
    """Route connections to the server through a proxy."""
    wire = Wire(aws.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", wire.url)
    yield wire
    wire.down()


@pytest.fixture
def bucket(aws):
    return aws.bucket()


@pytest.fixture
def uri(bucket):
    return f"s3://{bucket}/artifacts"


@pytest.fixture
def machine(tmp_path, uri):
    """Return a function that creates the store of a machine by name; each has its own folder."""

    def machine(name, uri=uri, times=QUICK):
        return Store(tmp_path / name / "artifacts", uri, times)

    return machine


def make(store, key=KEY, files=None, **options):
    """Create an artifact and return it as found afterwards."""
    options = {"stage": "collect", "kind": "trajectories", "schema_version": 1, "inputs": {}} | options
    with store.draft(key, **options) as draft:
        for name, text in (files or {"data.txt": "hello"}).items():
            path = draft.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        draft.metrics["reward"] = 0.5
    return store.find(key)


def race(*stores):
    """Return what processes that race for one key did, `ran` or `cached`. stores: the arguments of the store of each
    process."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(stores)), context.Queue()
    processes = [context.Process(target=_racer, args=(arguments, barrier, results)) for arguments in stores]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(600)
    return sorted(outcomes)


def _racer(arguments, barrier, results):
    store = Store(*arguments)
    barrier.wait(600)
    with store.lock(KEY, 60):
        if store.find(KEY) is not None:
            results.put("cached")
            return
        with store.draft(KEY, stage="s", kind="k", schema_version=1, inputs={}) as draft:
            (draft.path / "data.txt").write_text(str(os.getpid()))
            time.sleep(0.5)
    results.put("ran")
