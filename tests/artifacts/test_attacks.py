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


CHANGED_NAMES = [
    ["//x"],
    ["/x"],
    ["a//b"],
    ["a/../b"],
    ["a/"],
    ["."],
    [""],
    ["a\\..\\b"],
    ["C:x"],
    ["a\0b"],
    ["a\x1b[2Jb"],
    ["a "],
    ["a", "A"],
    ["a", "a/b"],
    ["A", "a/b"],
    ["a/b", "a", "c"],
    ["\u00e9", "e\u0301"],
    [MANIFEST],
    ["Manifest.JSON"],
    [f"{MANIFEST}/x"],
    ["n" * 256],
    ["/".join("d" * 200 for _ in range(5))],
    ["/".join("a" * 40)],
    [f"f{number}" for number in range(10_001)],
]


def test_names_that_a_file_system_would_change_are_rejected():
    for names in CHANGED_NAMES:
        with pytest.raises(ArtifactDamaged, match=MANIFEST) as caught:
            parse_manifest(manifest(names), Path("/srv") / KEY, "store")
        assert str(caught.value).isprintable(), names[:2]


WRONG_VALUES = [
    {"key": "../../victim"},
    {"key": 5},
    {"inputs": {"policy": {"key": "/etc"}}},
    {"inputs": {"policy": {"key": 5}}},
    {"kind": "\x1b]0;owned\x07"},
    {"kind": ["checkpoint"]},
    {"stage": "../train"},
    {"schema_version": "1"},
    {"seconds": "soon"},
    {"metrics": {"reward": "high"}},
    {"metrics": []},
    {"volatile": [["a"]]},
    {"files": []},
    {"files": {"a": {"sha256": "0" * 64, "bytes": -1}}},
    {"files": {"a": {"sha256": "0" * 64, "bytes": True}}},
    {"files": {"a": {"sha256": 0, "bytes": 1}}},
    {"files": {"a": None}},
    {"manifest_version": "2"},
    {"digest": None},
    {"spec": "nothing"},
]


def test_manifest_values_of_wrong_type_or_format_are_damage():
    for changes in WRONG_VALUES:
        with pytest.raises(ArtifactDamaged) as caught:
            parse_manifest(manifest(["a"], **changes), Path("/srv") / KEY, "store")
        assert str(caught.value).isprintable(), changes


def test_manifest_must_be_a_json_object(tmp_path):
    texts = [NESTED, b'{"files":' * 50_000, b"\xff\xfe", b"", b"[]", b"null"]
    for number, text in enumerate(texts):
        root = tmp_path / str(number)
        with pytest.raises(ArtifactDamaged):
            parse_manifest(text, root, "store")
        (root / "shared" / KEY).mkdir(parents=True)
        (root / "shared" / KEY / MANIFEST).write_bytes(text)
        assert Store(root / "artifacts", f"file://{root}/shared", TIMES).find(KEY) is None
        here = Store(root / "artifacts")
        here.path(KEY).mkdir(parents=True)
        (here.path(KEY) / MANIFEST).write_bytes(text)
        assert list(here.manifests()) == []
        assert here.find(KEY) is None
        assert (here.root / f"{KEY}.damaged-1").is_dir()


def test_key_must_not_be_a_path(tmp_path):
    store = Store(tmp_path / "root" / "artifacts")
    (tmp_path / "root" / "victim").mkdir(parents=True)
    (tmp_path / "root" / "victim" / MANIFEST).write_text("{}")
    before = tree(tmp_path)
    for key in ("../victim", "/victim", "a/b", "", ".", "..", ".locks", "a.damaged-1", "a\0", "k" * 300, "*"):
        for use in (store.path, store.find, store.scratch, lambda key: store.lock(key, 0).__enter__()):
            with pytest.raises(ArtifactError, match="key"):
                use(key)
    assert tree(tmp_path) == before


# Links in the local folder


def move_out(path, tmp_path):
    """Move a path elsewhere and leave a link in its place: a check of contents sees no difference."""
    outside = tmp_path / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


def test_a_link_in_an_artifact_counts_as_damage(tmp_path):
    for number, name in enumerate(["data.txt", "sub", "sub/more.txt", MANIFEST, "."]):
        (root := tmp_path / str(number)).mkdir()
        store = Store(root / "artifacts")
        artifact = make(store, files={"data.txt": "hello", "sub/more.txt": "more"})
        move_out(artifact.path / name if name != "." else artifact.path, root)
        with pytest.raises(ArtifactDamaged, match="link"):
            read_artifact(artifact.path)
        before = contents(root / "outside")
        assert Store(store.root).find(KEY) is None, name
        assert not os.path.lexists(artifact.path)
        assert os.path.lexists(store.root / f"{KEY}.damaged-1")
        assert contents(root / "outside") == before
        assert make(Store(store.root)) is not None


def contents(path):
    return tree(path) if path.is_dir() else path.read_bytes()


def test_unlisted_file_counts_as_damage(tmp_path):
    """Readers load every *.safetensors of a folder: an additional file would change the result unnoticed."""
    for number, name in enumerate(["extra.safetensors", "sub/extra.safetensors", "link", "sub/link", "pipe"]):
        artifact = make(Store(tmp_path / str(number)), files={"data.txt": "hello", "sub/more.txt": "more"})
        path = artifact.path / name
        if "link" in name:
            path.symlink_to("/etc")
        elif name == "pipe":
            os.mkfifo(path)
        else:
            path.write_text("planted")
        with pytest.raises(ArtifactDamaged, match=name):
            read_artifact(artifact.path)


def test_pipe_in_place_of_a_file_does_not_block(tmp_path):
    artifact = make(Store(tmp_path), files={"data.txt": "hello"})
    (artifact.path / "data.txt").unlink()
    os.mkfifo(artifact.path / "data.txt")
    with pytest.raises(ArtifactDamaged, match=r"data\.txt"):
        read_artifact(artifact.path)


# Links in a shared folder


def victim_and_shared(folder):
    """Return a shared folder beside one of a victim."""
    (folder / "victim").mkdir(parents=True)
    (folder / "victim" / "data.txt").write_text("mine")
    (folder / "shared").mkdir()
    return folder / "shared"


@pytest.fixture
def shared(tmp_path):
    return victim_and_shared(tmp_path)


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


def test_a_link_in_a_shared_folder_is_not_followed(tmp_path):
    for plant, (name, target) in PLANTS.items():
        shared = victim_and_shared(tmp_path / plant.replace(" ", "-"))
        victim = shared.parent / "victim"
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).symlink_to(shared.parent / target)
        before = tree(victim)
        store = machine(shared)
        for work in (store.check, lambda store=store: make(store, lock_timeout=0.5)):
            with unusable():
                work()
        assert tree(victim) == before, plant


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


def test_shared_lock_with_foreign_content(shared):
    (shared / ".locks").mkdir()
    for body in BODIES:
        (shared / ".locks" / KEY).write_bytes(body)
        waits = []
        with pytest.raises(WaitTimeout) as caught, machine(shared).lock(KEY, 0.5, waits.append):
            pass
        assert str(caught.value).isprintable(), body[:99]
        assert all(wait.isprintable() for wait in waits)
        assert waits


def test_local_lock_with_foreign_content(tmp_path):
    for body in BODIES:
        path = tmp_path / "lock"
        path.write_bytes(body.replace(b"seconds", b"since"))
        with open(path, "a+") as holder, open(path, "a+") as file:
            fcntl.flock(holder, fcntl.LOCK_EX)
            waits = []
            with pytest.raises(WaitTimeout) as caught:
                lock_file(file, "the weights", 0.3, waits.append)
        assert str(caught.value).isprintable(), body[:99]
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
