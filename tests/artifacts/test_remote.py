"""Remote artifact store on a real S3 server: killed processes, damage, races and broken connections.

A machine is a store with a folder of its own. Faults are real: processes are killed, bytes are flipped in the bucket,
connections are cut on the wire.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import fsspec
import pytest

from components.artifacts import MANIFEST, Store, Times, files, store_uri
from components.artifacts.remote import ID
from components.errors import ArtifactError, ResourceError, SpecError, WaitTimeout
from tests.artifacts.conftest import KEY, QUICK, make, race


def bucket_and_name(uri, name=""):
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return {"Bucket": bucket, "Key": f"{prefix}/{name}"}


def objects(s3, uri):
    """Return the content of every object below the URI except its id, by name."""
    client, place = s3.client(), bucket_and_name(uri)
    entries = client.list_objects_v2(Bucket=place["Bucket"], Prefix=place["Key"]).get("Contents", [])
    names = [entry["Key"].removeprefix(place["Key"]) for entry in entries]
    return {name: client.get_object(**bucket_and_name(uri, name))["Body"].read() for name in names if name != ID}


def put(s3, uri, name, data):
    s3.client().put_object(**bucket_and_name(uri, name), Body=data)


def remove(s3, uri, name):
    s3.client().delete_object(**bucket_and_name(uri, name))


def child(code, **values):
    """Return a process of another machine that runs the code with these values."""
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    program = "\n".join(["from components.artifacts import Store, Times", *lines, textwrap.dedent(code)])
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)


FILES = {"data.txt": "hello", "sub/more.txt": "grüße", "empty": "", "log": "x"}


def test_artifact_of_one_machine_is_fetched_by_another(machine, aws, uri):
    artifact = make(machine("a"), files=FILES, volatile=["log"])
    assert set(objects(aws, uri)) == {f"{KEY}/{name}" for name in [*FILES, MANIFEST]}  # no lock, no draft is left
    elsewhere = machine("b")
    fetched = elsewhere.find(KEY)
    assert fetched.path == elsewhere.path(KEY) != artifact.path
    assert {name: (fetched.path / name).read_text() for name in FILES} == FILES
    assert (fetched.path / MANIFEST).read_bytes() == (artifact.path / MANIFEST).read_bytes()
    assert (fetched.digest, fetched.metrics, fetched.size) == (artifact.digest, artifact.metrics, artifact.size)
    assert list((elsewhere.root / ".downloads").iterdir()) == []
    assert machine("c").find("b" * 64) is None


def test_multipart_upload_is_complete(machine, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 5 * 2**20)  # the smallest that S3 takes
    make(machine("a"), files={"weights": "0123456789abcdef" * 2**20})
    assert (machine("b").find(KEY).path / "weights").read_text() == "0123456789abcdef" * 2**20


def test_shared_artifact_needs_no_request(machine, wire):
    keys = [letter * 64 for letter in "123"]
    for key in keys:
        make(machine("a"), key)
    assert machine("b").find(keys[0]) is not None
    assert machine("b").find(keys[1]) is not None
    known = [machine("a"), machine("b")]
    for store in known:
        assert store.find(keys[0]) is not None  # asks which store it is
    wire.down()
    for store in known:
        assert store.find(keys[1]) is not None
    assert known[0].find(keys[2]) is not None


def test_emptied_store_is_filled_again(machine, aws, uri):
    artifact = make(machine("a"))
    for name in [*objects(aws, uri), ID]:
        remove(aws, uri, name)
    assert machine("a").find(KEY) == artifact
    assert machine("b").find(KEY).digest == artifact.digest


def interrupted_upload(machine, wire, aws, uri, monkeypatch):
    """Kill the process of the machine `killed` while it uploads the second of two files."""
    arrived, stalled = threading.Event(), threading.Event()
    wire.limit = (2**21, lambda: (arrived.set(), stalled.wait(60)))
    process = child(
        """
        with Store(root, uri).draft(key, stage="s", kind="k", schema_version=1, inputs={}) as draft:
            (draft.path / "a").write_text("first")
            (draft.path / "b").write_text("x" * 2**22)
        """,
        root=str(machine("killed").root), uri=uri, key=KEY,
    )  # fmt: skip
    assert arrived.wait(600)
    kill(process)
    stalled.set()
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws.url)
    assert objects(aws, uri)[f"{KEY}/a"] == b"first"


def test_killed_upload_leaves_no_artifact_and_is_repeated(machine, wire, aws, uri, monkeypatch):
    interrupted_upload(machine, wire, aws, uri, monkeypatch)
    other = machine("b")
    assert other.find(KEY) is None
    assert (make(other, files={"a": "again"}, lock_timeout=30).path / "a").read_text() == "again"
    assert (machine("c").find(KEY).path / "a").read_text() == "again"


def test_killed_uploader_uploads_at_its_next_start(machine, wire, aws, uri, monkeypatch):
    interrupted_upload(machine, wire, aws, uri, monkeypatch)
    artifact = machine("killed").find(KEY)
    assert artifact is not None
    assert machine("b").find(KEY).digest == artifact.digest


def flip(data):
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE = {
    "flipped bit": ("sub/more.txt", flip),
    "truncated": ("sub/more.txt", lambda data: data[:-2]),
    "empty": ("sub/more.txt", lambda data: b""),
    "missing": ("sub/more.txt", None),
    "volatile": ("log", flip),
    "manifest of half": (MANIFEST, lambda data: data[: len(data) // 2]),
    "manifest of another key": (MANIFEST, lambda data: data.replace(KEY.encode(), b"b" * 64)),
    "manifest with another sum": (MANIFEST, lambda data: data.replace(b'"sha256": "', b'"sha256": "0', 1)),
    "path that leads out": (MANIFEST, lambda data: data.replace(b'"empty"', b'"../../out"')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_remote_artifact_is_renamed_and_recomputed(machine, aws, uri, caplog, damage):
    name, change = DAMAGE[damage]
    make(machine("a"), files=FILES, volatile=["log"])
    if change is None:
        remove(aws, uri, f"{KEY}/{name}")
    else:
        put(aws, uri, f"{KEY}/{name}", change(objects(aws, uri)[f"{KEY}/{name}"]))
    manifest = objects(aws, uri)[f"{KEY}/{MANIFEST}"]
    other = machine("b")
    assert other.find(KEY) is None
    assert f"{uri}/{KEY}/{name}" in caplog.text
    assert f"renamed to {KEY}.damaged-1, will be recomputed" in caplog.text
    assert not other.path(KEY).exists()
    assert not (other.root.parent.parent / "out").exists()
    assert objects(aws, uri)[f"{KEY}.damaged-1/{MANIFEST}"] == manifest
    assert make(other, files=FILES, volatile=["log"]) is not None
    assert (machine("c").find(KEY).path / name).exists()
    put(aws, uri, f"{KEY}/data.txt", b"jello")
    assert machine("d").find(KEY) is None
    assert f"{KEY}.damaged-2/{MANIFEST}" in objects(aws, uri)


def test_corrupted_download_is_retried(machine, wire, aws, uri, caplog):
    make(machine("a"), files={"data.txt": "hello, this is the content"})
    hits = []

    def tamper(data):
        if b"this is the content" in data and not hits:
            hits.append(1)
            return data.replace(b"this is the content", b"that is the content")
        return data

    wire.tamper = tamper
    assert (machine("b").find(KEY).path / "data.txt").read_text() == "hello, this is the content"
    assert hits
    assert "damaged artifact" not in caplog.text


def test_artifact_of_a_newer_version_is_rejected_and_kept(machine, aws, uri):
    make(machine("a"))
    newer = json.loads(objects(aws, uri)[f"{KEY}/{MANIFEST}"]) | {"manifest_version": 9}
    put(aws, uri, f"{KEY}/{MANIFEST}", json.dumps(newer).encode())
    with pytest.raises(ArtifactError, match=f"{uri}/{KEY}.* newer Espalier .*: update, or use another root and store"):
        machine("b").find(KEY)
    assert set(objects(aws, uri)) == {f"{KEY}/data.txt", f"{KEY}/{MANIFEST}"}


def test_first_commit_wins_over_a_late_one(machine, tmp_path, caplog):
    alone = Store(tmp_path / "late" / "artifacts")
    make(alone, files={"data.txt": "mine"})
    make(machine("a"), files={"data.txt": "theirs"})
    assert (machine("late").find(KEY).path / "data.txt").read_text() == "mine"
    assert "has another result for trajectories aaaaaaaaaaaa" in caplog.text
    assert (machine("c").find(KEY).path / "data.txt").read_text() == "theirs"


def test_existing_folder_is_uploaded_on_use(machine, tmp_path):
    make(Store(tmp_path / "a" / "artifacts"))
    assert machine("a").find(KEY) is not None
    assert machine("b").find(KEY) is not None


# Locks


def test_machines_that_race_for_one_key_do_the_work_once(machine, uri):
    assert race(*((machine(name).root, uri, QUICK) for name in "abc")) == ["cached", "cached", "ran"]
    assert len({(machine(name).find(KEY).path / "data.txt").read_text() for name in "abc"}) == 1


def test_live_holder_keeps_its_lock_whatever_the_waiting_clock(machine, monkeypatch):
    messages = []
    with machine("a").lock(KEY, 5):
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 86400)
        words = rf"after \d s waiting for artifact aaaaaaaaaaaa, locked by process {os.getpid()} on"
        with pytest.raises(WaitTimeout, match=words), machine("b").lock(KEY, 6, messages.append):
            pass
    assert len(messages) == 1
    who = rf"process {os.getpid()} on {socket.gethostname()} \(since \d s\)"
    assert re.fullmatch(f"waiting for artifact aaaaaaaaaaaa, locked by {who}", messages[0])
    with machine("b").lock(KEY, 5):
        pass


HOLD = """
import time
with Store(root, uri, Times(beat=0.3)).lock(key, 5):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_dead_machine_is_taken_over_once_it_is_stale(machine, uri, caplog):
    process = child(HOLD, root=str(machine("dead").root), uri=uri, key=KEY)
    assert process.stdout.readline() == "held\n"
    kill(process)
    start = time.monotonic()
    with machine("b").lock(KEY, 30):
        assert time.monotonic() - start > 1  # moto's dates are whole seconds
        with pytest.raises(WaitTimeout), machine("c").lock(KEY, 0):
            pass
    assert f"the lock of process {process.pid} on {socket.gethostname()}" in caplog.text


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over_at_once(machine, uri):
    process = child(HOLD, root=str(machine("a").root), uri=uri, key=KEY)
    assert process.stdout.readline() == "held\n"
    kill(process)
    with machine("a", times=Times(stale=1000)).lock(KEY, 5):
        pass


def test_suspended_holder_loses_its_lock_with_a_warning(machine, uri, aws, caplog):
    sleeper = machine("a", times=Times(beat=2, stale=3, poll=0.2, patience=20))
    with sleeper.lock(KEY, 5):
        put(aws, uri, f".locks/{KEY}", json.dumps({"token": "other", "pid": 7, "host": "elsewhere", "seconds": 1}))
        deadline = time.monotonic() + 600
        while "is now locked by another machine" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.1)
    assert f"{uri}/.locks/{KEY} is now locked by another machine" in caplog.text
    assert json.loads(objects(aws, uri)[f".locks/{KEY}"])["token"] == "other"  # and leaves it alone


def test_unreadable_lock_becomes_stale(machine, uri, aws, caplog):
    put(aws, uri, f".locks/{KEY}", b"\xff no json")
    with machine("a").lock(KEY, 30, None):
        pass
    assert "took over the lock of another machine, last renewed" in caplog.text


# A store that cannot be used


def test_upload_is_retried_while_the_server_is_unreachable(machine, wire, aws, caplog):
    def away():
        wire.down()
        threading.Timer(2, wire.up).start()

    wire.limit = (wire.sent + 2**21, away)
    make(machine("a"), files={"first": "1", "second": "x" * 2**22})
    assert "retrying for 20 s" in caplog.text
    assert (machine("b").find(KEY).path / "second").stat().st_size == 2**22


def test_unreachable_server_fails_the_stage_and_the_next_run_uploads(machine, wire, uri):
    store = machine("a", times=Times(patience=2))
    wire.limit = (wire.sent + 2**21, wire.down)
    with pytest.raises(ResourceError, match=f"store: cannot write {uri}/{KEY}/data.txt"):
        make(store, files={"data.txt": "x" * 2**22})
    assert (store.path(KEY) / "data.txt").stat().st_size == 2**22
    assert not (store.root / ".scratch" / KEY).exists()
    wire.up()
    assert machine("a").find(KEY) is not None
    assert machine("b").find(KEY) is not None


def test_broken_connection_during_a_download_is_not_damage(machine, wire, caplog):
    make(machine("a"), files={"data.txt": "x" * 2**22})
    byte_count = [0]

    def cut(data):
        byte_count[0] += len(data)
        if byte_count[0] > 2**21:
            byte_count[0] = -(2**40)
            wire.down()
            threading.Timer(1, wire.up).start()
        return data

    wire.tamper = cut
    assert machine("b").find(KEY) is not None
    assert "damaged artifact" not in caplog.text


def test_working_store_passes_the_check_without_leftovers(machine, aws, uri, caplog):
    machine("a").check()
    assert objects(aws, uri) == {}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def refused(store):
    with pytest.raises(ResourceError) as caught:
        store.check()
    message = str(caught.value)
    assert message.startswith("store: ")
    assert store.remote.uri in message
    assert "secret-words" not in message
    return message


def test_an_address_that_cannot_be_used_is_refused_with_what_to_do(machine, tmp_path, monkeypatch):
    message = refused(machine("a", "s3://no-such-bucket/artifacts"))
    assert "bucket does not exist" in message
    assert "Create the bucket or folder, or correct the address" in message
    assert "cannot read" in refused(machine("a", f"data://{KEY}"))
    (tmp_path / "file").write_text("no folder")
    assert "NotADirectoryError" in refused(machine("a", (tmp_path / "file" / "shared").as_uri()))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" in refused(machine("a"))


def test_a_store_needs_permission_to_read_write_list_and_delete(machine, aws, monkeypatch):
    reader = aws.user("s3:Get*", "s3:List*", "s3:Head*")
    user = aws.user("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket")
    aws.enforce(True)
    try:
        message = refused(machine("a"))
        assert "Grant permission to read, write, list and delete there" in message
        assert "AWS_ACCESS_KEY_ID" in message
        for name, value in reader.items():
            monkeypatch.setenv(name, value)
        message = refused(machine("a"))
        assert "cannot write" in message
        assert "Grant permission to read, write, list and delete there" in message
        for name, value in user.items():
            monkeypatch.setenv(name, value)
        machine("a").check()
        make(machine("a"))
        assert machine("b").find(KEY) is not None
    finally:
        aws.enforce(False)


def test_a_server_that_does_not_answer_and_a_missing_package_are_named(machine, wire, monkeypatch):
    wire.down()
    assert "AWS_ENDPOINT_URL" in refused(machine("a"))
    monkeypatch.setitem(files.OPTIONS["s3"]["config_kwargs"], "read_timeout", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "AWS_ENDPOINT_URL" in refused(machine("a"))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert f"pip install s3fs=={fsspec.__version__}" in refused(machine("a"))


ADDRESSES = [
    ("s3://user:secret-words@bucket/x", "without user and password"),
    ("s3://user@bucket", "without user and password"),
    ("s3://bucket/x?versionId=secret-words", "without a query"),
    ("s4://bucket", "fsspec does not support the protocol s4"),
    ("bucket/x", "a URI such as s3://BUCKET/PREFIX"),
    ("s3://", "a URI such as s3://BUCKET/PREFIX"),
    ("simplecache::s3://bucket", "a URI such as"),
    ("file://relative/folder", "an absolute path after file://"),
]


def test_invalid_address_is_rejected(tmp_path):
    for uri, words in ADDRESSES:
        with pytest.raises(SpecError, match=words) as caught:
            Store(tmp_path, uri)
        assert "@" not in uri or "secret-words" not in str(caught.value), uri


def test_address_is_canonical():
    assert store_uri("s3://bucket/x/") == store_uri("s3://bucket/x") == "s3://bucket/x"
    assert store_uri("s3a://bucket/x") == "s3://bucket/x"
    assert store_uri("file:///srv/x/") == "file:///srv/x"


# Other filesystems


@pytest.fixture(params=["s3", "file", "memory"])
def place(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("uri")
    return f"memory://{tmp_path.name}" if request.param == "memory" else (tmp_path / "shared").as_uri()


def test_objects_are_written_atomically_and_conditionally(place):
    remote_files = files.RemoteFiles(place, 0)
    assert remote_files.read("a/b") is None
    assert remote_files.state("a/b") is None
    assert remote_files.create("a/b", b"one")
    assert not remote_files.create("a/b", b"two")
    assert remote_files.read("a/b") == b"one"
    state = remote_files.state("a/b")
    assert remote_files.replace("a/b", b"three", state)
    time.sleep(0.01)
    assert not remote_files.replace("a/b", b"four", state)
    assert remote_files.read("a/b") == b"three"
    remote_files.write("a/b", b"")
    assert remote_files.read("a/b") == b""
    remote_files.delete("a/b")
    remote_files.delete("a/b")
    assert remote_files.read("a/b") is None
    assert not remote_files.replace("a/b", b"five", state)


def test_every_filesystem_shares_artifacts(place, tmp_path):
    first, second = (Store(tmp_path / name, place, QUICK) for name in "ab")
    first.check()
    artifact = make(first, files=FILES)
    fetched = second.find(KEY)
    assert {name: (fetched.path / name).read_text() for name in FILES} == FILES
    assert fetched.digest == artifact.digest


def test_full_local_disk_is_not_retried(machine, monkeypatch):
    import errno

    make(machine("a"))
    store = machine("b")

    tries = []

    def full(*_):
        tries.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    store.check()
    monkeypatch.setattr(store.remote._files._fs, "get_file", full)
    with pytest.raises(ResourceError, match=r"No space left.*Free space on this machine's disk"):
        store.find(KEY)
    assert len(tries) == 1
