"""Tampered stores: nothing is read or written outside their folders."""

import fcntl
import json
import os
import shutil
import stat
import tempfile
import threading
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.artifacts import MANIFEST, Store, Times, lock_file, parse_manifest, read_artifact
from components.artifacts.keys import file_digest
from components.artifacts.manifest import content_digest
from components.errors import ArtifactDamaged, ArtifactError, WaitTimeout
from tests.artifacts.conftest import KEY, make

pytestmark = pytest.mark.security

TIMES = Times(patience=0.5, beat=0.2, stale=30, poll=0.05)
NESTED = b"[" * 200_000


def manifest(names, key=KEY, content=b"planted", **changes):
    """Return a manifest as an attacker writes it: consistent, with arbitrary names."""
    try:
        digest = content_digest({name: {"sha256": sha256(content).hexdigest()} for name in names}, [])
    except UnicodeEncodeError:  # half of a surrogate pair
        digest = "0" * 64
    files = {name: {"sha256": sha256(content).hexdigest(), "bytes": len(content)} for name in names}
    data = {
        "manifest_version": 1,
        "kind": "checkpoint",
        "schema_version": 1,
        "stage": "train",
        "key": key,
        "digest": digest,
        "seconds": 1.0,
        "inputs": {},
        "metrics": {},
        "files": files,
        "volatile": [],
        "spec": None,
    }
    return json.dumps(data | changes).encode()


def tree(folder):
    """Return everything below a folder: kind, target or content, by relative path."""
    entries = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entries[name] = ("link", os.readlink(path))
        else:
            entries[name] = ("file", path.read_bytes()) if stat.S_ISREG(mode) else (stat.S_IFMT(mode), None)
    return entries


@contextmanager
def places():
    """Return a shared folder, a machine's root, and a victim's folder beside them."""
    with tempfile.TemporaryDirectory() as top:
        base = Path(top).resolve()
        for name in ("shared", "root", "victim"):
            (base / name).mkdir()
        (base / "victim" / "authorized_keys").write_text("mine")
        yield base


def in_reach(name, base):
    """Return True if a name leads at worst into the test's own folder."""
    try:
        worst = os.path.normpath(os.path.join(base / "root" / "artifacts" / ".downloads" / KEY, name))
    except ValueError:
        return True
    return Path(os.path.normpath(worst.replace("//", "/"))).is_relative_to(base)


SEGMENTS = st.sampled_from(
    [
        *("a", "A", "b", "data.txt", "..", ".", "", "VICTIM", "link", MANIFEST, "\u00e9", "e\u0301"),
        *("a\\b", "C:", "x\0y", "\x1b[2J", "line\nbreak", " ", "a ", "\u202e", "n" * 300, "\ud800"),
    ]
)
NAMES = st.one_of(
    st.text(max_size=40),
    st.lists(SEGMENTS, min_size=1, max_size=5).map("/".join),
    st.builds("{}{}{}".format, st.sampled_from(["/", "//", "///", "./", "../"]), SEGMENTS, SEGMENTS),
    st.sampled_from(
        ["//VICTIM/new", "/VICTIM/new", "///VICTIM/authorized_keys", "a/..//VICTIM/new", "../../victim/new"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=3, unique=True))
def test_names_in_a_remote_manifest_stay_inside_the_folder(names):
    with places() as base:
        names = [name.replace("VICTIM", str(base / "victim").lstrip("/")) for name in names]
        if any(not in_reach(name, base) for name in names):  # must not be tried for real, should the check fail
            with pytest.raises(ArtifactDamaged):
                parse_manifest(manifest(names), base, "store")
            return
        folder = base / "shared" / KEY
        folder.mkdir()
        for name in names:  # the attacker's objects, as far as a file system can hold them
            try:
                path = Path(os.path.normpath(f"{folder}/{name}"))
                if path.is_relative_to(folder) and path.relative_to(folder).parts[:1] not in ((), (MANIFEST,)):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(b"planted")
            except (ValueError, OSError):
                pass
        (folder / MANIFEST).write_bytes(manifest(names))
        before = tree(base / "victim")
        store = Store(base / "root" / "artifacts", f"file://{base}/shared", TIMES)
        artifact = store.find(KEY)
        assert tree(base / "victim") == before
        assert {path.name for path in base.iterdir()} == {"shared", "root", "victim"}
        assert {path.name for path in (base / "root").iterdir()} == {"artifacts"}
        inside = {name for name, (kind, _) in tree(store.root).items() if kind == "file"}
        inside = {name for name in inside if not name.startswith((".locks/", ".remote/"))}
        if artifact is None:
            assert inside == set()
        else:
            assert inside == {f"{KEY}/{name}" for name in [*names, MANIFEST]}


@settings(max_examples=300, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_names_are_rejected_or_denote_distinct_files_below_the_folder(names):
    folder = Path("/srv/artifacts") / KEY
    try:
        parse_manifest(manifest(names), folder, "store")
    except ArtifactDamaged:
        return
    landed = [os.path.normpath(f"{folder}/{name}") for name in names]
    assert all(path.startswith(f"{folder}/") for path in landed)
    assert landed == [f"{folder}/{name}" for name in names]
    assert len({path.casefold() for path in landed}) == len(names)
    assert all(name.isprintable() and "\\" not in name for name in names)


@pytest.mark.parametrize(
    "names",
    [
        ["//x"], ["/x"], ["a//b"], ["a/../b"], ["a/"], ["."], [""], ["a\\..\\b"], ["C:x"], ["a\0b"], ["a\x1b[2Jb"],
        ["a "], ["a", "A"], ["a", "a/b"], ["A", "a/b"], ["a/b", "a", "c"], ["\u00e9", "e\u0301"], [MANIFEST],
        ["Manifest.JSON"],
        [f"{MANIFEST}/x"], ["n" * 256], ["/".join("d" * 200 for _ in range(5))], ["/".join("a" * 40)],
        [f"f{number}" for number in range(10_001)],
    ],
    ids=lambda names: ascii(names[0][:20]) + f"-{len(names)}",
)  # fmt: skip
def test_names_that_a_file_system_would_change_are_rejected(names):
    with pytest.raises(ArtifactDamaged, match=MANIFEST) as caught:
        parse_manifest(manifest(names), Path("/srv") / KEY, "store")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "../../victim"}, {"key": 5}, {"inputs": {"policy": {"key": "/etc"}}},
        {"inputs": {"policy": {"key": 5}}},
        {"kind": "\x1b]0;owned\x07"}, {"kind": ["checkpoint"]}, {"stage": "../train"}, {"schema_version": "1"},
        {"seconds": "soon"}, {"metrics": {"reward": "high"}}, {"metrics": []}, {"volatile": [["a"]]}, {"files": []},
        {"files": {"a": {"sha256": "0" * 64, "bytes": -1}}}, {"files": {"a": {"sha256": "0" * 64, "bytes": True}}},
        {"files": {"a": {"sha256": 0, "bytes": 1}}}, {"files": {"a": None}}, {"manifest_version": "2"},
        {"digest": None},
        {"spec": "nothing"},
    ],
    ids=str,
)  # fmt: skip
def test_manifest_values_of_wrong_type_or_format_are_damage(changes):
    with pytest.raises(ArtifactDamaged) as caught:
        parse_manifest(manifest(["a"], **changes), Path("/srv") / KEY, "store")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", [NESTED, b'{"files":' * 50_000, b"\xff\xfe", b"", b"[]", b"null"], ids=range(6))
def test_manifest_must_be_a_json_object(tmp_path, text):
    with pytest.raises(ArtifactDamaged):
        parse_manifest(text, tmp_path, "store")
    store = Store(tmp_path / "artifacts", f"file://{tmp_path}/shared", TIMES)
    (tmp_path / "shared" / KEY).mkdir(parents=True)
    (tmp_path / "shared" / KEY / MANIFEST).write_bytes(text)
    assert store.find(KEY) is None
    here = Store(tmp_path / "artifacts")
    here.path(KEY).mkdir(parents=True)
    (here.path(KEY) / MANIFEST).write_bytes(text)
    assert list(here.manifests()) == []
    assert here.find(KEY) is None
    assert (here.root / f"{KEY}.damaged-1").is_dir()


@pytest.mark.parametrize(
    "key", ["../victim", "/victim", "a/b", "", ".", "..", ".locks", "a.damaged-1", "a\0", "k" * 300, "*"]
)
def test_key_must_not_be_a_path(tmp_path, key):
    store = Store(tmp_path / "root" / "artifacts")
    (tmp_path / "root" / "victim").mkdir(parents=True)
    (tmp_path / "root" / "victim" / MANIFEST).write_text("{}")
    before = tree(tmp_path)
    for use in (store.path, store.find, store.scratch, lambda key: store.lock(key, 0).__enter__()):
        with pytest.raises(ArtifactError, match="key"):
            use(key)
    assert tree(tmp_path) == before


# Links in the local folder


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "root" / "artifacts")


@pytest.fixture
def artifact(store):
    return make(store, files={"data.txt": "hello", "sub/more.txt": "more"})


def move_out(path, tmp_path):
    """Move a path elsewhere and leave a link in its place: a check of contents sees no difference."""
    outside = tmp_path / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


@pytest.mark.parametrize("name", ["data.txt", "sub", "sub/more.txt", MANIFEST, "."])
def test_a_link_in_an_artifact_counts_as_damage(store, artifact, tmp_path, name):
    move_out(artifact.path / name if name != "." else artifact.path, tmp_path)
    with pytest.raises(ArtifactDamaged, match="link"):
        read_artifact(artifact.path)
    before = tree(tmp_path / "outside") if (tmp_path / "outside").is_dir() else (tmp_path / "outside").read_bytes()
    assert Store(store.root).find(KEY) is None
    assert not os.path.lexists(artifact.path)
    assert os.path.lexists(store.root / f"{KEY}.damaged-1")
    after = tree(tmp_path / "outside") if (tmp_path / "outside").is_dir() else (tmp_path / "outside").read_bytes()
    assert after == before
    assert make(Store(store.root)) is not None


@pytest.mark.parametrize("name", ["extra.safetensors", "sub/extra.safetensors", "link", "sub/link", "pipe"])
def test_unlisted_file_counts_as_damage(store, artifact, name):
    """Readers load every *.safetensors of a folder: an additional file would change the result unnoticed."""
    path = artifact.path / name
    if "link" in name:
        path.symlink_to("/etc")
    elif name == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("planted")
    with pytest.raises(ArtifactDamaged, match=name):
        read_artifact(artifact.path)


def test_pipe_in_place_of_a_file_does_not_block(artifact):
    (artifact.path / "data.txt").unlink()
    os.mkfifo(artifact.path / "data.txt")
    with pytest.raises(ArtifactDamaged, match=r"data\.txt"):
        read_artifact(artifact.path)


# Links in a shared folder


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "data.txt").write_text("mine")
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def machine(shared, name="a"):
    return Store(shared.parent / name / "artifacts", f"file://{shared}", TIMES)


PLANTS = {
    "folder of the artifact": (KEY, "victim"),
    "file of the artifact": (f"{KEY}/data.txt", "victim/data.txt"),
    "file that is not there yet": (f"{KEY}/data.txt", "victim/new"),
    "manifest": (f"{KEY}/{MANIFEST}", "victim/new"),
    "locks": (".locks", "victim"),
    "lock": (f".locks/{KEY}", "victim/data.txt"),
    "id": (".id", "victim/new"),
    "checks": (".checks", "victim"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_link_in_a_shared_folder_is_not_followed(shared, tmp_path, plant):
    name, target = PLANTS[plant]
    (shared / name).parent.mkdir(parents=True, exist_ok=True)
    (shared / name).symlink_to(tmp_path / target)
    before = tree(tmp_path / "victim")
    store = machine(shared)
    for work in (store.check, lambda: make(store, lock_timeout=0.5)):
        with unusable():
            work()
    assert tree(tmp_path / "victim") == before


def unusable():
    return suppress(OSError, ArtifactError)  # ResourceError and WaitTimeout among them


def test_link_target_in_a_shared_folder_is_not_fetched(shared, tmp_path):
    (shared / KEY).mkdir()
    (shared / KEY / "data.txt").symlink_to(tmp_path / "victim" / "data.txt")
    (shared / KEY / MANIFEST).write_bytes(manifest(["data.txt"], content=b"mine"))
    store = machine(shared)
    with unusable():
        assert store.find(KEY) is None
    assert not store.path(KEY).exists()


def test_pipe_in_a_shared_folder_does_not_block(shared):
    os.mkfifo(shared / ".id")
    (shared / KEY).mkdir()
    os.mkfifo(shared / KEY / MANIFEST)
    ended = threading.Event()

    def work():
        with unusable():
            machine(shared).find(KEY)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(600)


def test_a_shared_folder_still_works_and_may_be_reached_by_a_link(shared, tmp_path):
    """The operator's own link to the store is followed; those below it are not."""
    (tmp_path / "link").symlink_to(shared)
    artifact = make(machine(tmp_path / "link"), files={"data.txt": "hello", "sub/more.txt": "more"})
    fetched = machine(shared, "b").find(KEY)
    assert fetched.digest == artifact.digest
    assert (fetched.path / "sub/more.txt").read_text() == "more"
    assert file_digest(shared / KEY / "data.txt") == file_digest(artifact.path / "data.txt")


# Locks that somebody has written something else into

BODIES = [
    b'{"token": "x", "pid": 1, "host": "h", "seconds": "soon", "written": 0}',
    b'{"pid": [], "host": {}, "seconds": null}',
    b'{"pid": 1, "host": "\\u001b[2J", "seconds": 1e999}',
    b"[1]",
    b"\xff\xfe",
    b"",
    NESTED,
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_shared_lock_with_foreign_content(shared, body):
    (shared / ".locks").mkdir()
    (shared / ".locks" / KEY).write_bytes(body)
    waits = []
    with pytest.raises(WaitTimeout) as caught, machine(shared).lock(KEY, 0.5, waits.append):
        pass
    assert str(caught.value).isprintable()
    assert all(wait.isprintable() for wait in waits)
    assert waits


@pytest.mark.parametrize("body", [body.replace(b"seconds", b"since") for body in BODIES], ids=range(len(BODIES)))
def test_local_lock_with_foreign_content(tmp_path, body):
    path = tmp_path / "lock"
    path.write_bytes(body)
    with open(path, "a+") as holder, open(path, "a+") as file:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waits = []
        with pytest.raises(WaitTimeout) as caught:
            lock_file(file, "the weights", 0.3, waits.append)
    assert str(caught.value).isprintable()
    assert all(wait.isprintable() for wait in waits)


# Rights


def test_files_are_not_world_writable_whatever_the_umask(tmp_path, shared):
    before = os.umask(0)
    try:
        artifact = make(machine(shared), files={"data.txt": "hello", "sub/more.txt": "more"})
        fetched = machine(shared, "b").find(KEY)
    finally:
        os.umask(before)
    for folder in (artifact.path, fetched.path):
        for path in [folder, *folder.rglob("*")]:
            assert not path.stat().st_mode & 0o022, path
