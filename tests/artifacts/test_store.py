"""Artifact store: death while writing, damage, races, and the order of keys."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.artifacts import MANIFEST, Store, read_artifact, stage_key
from components.errors import ArtifactDamaged, ArtifactError, SpecError, WaitTimeout
from tests.artifacts.conftest import KEY, make, race


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "artifacts")


def test_an_artifact_is_found_with_what_was_written(store):
    source = make(store, "b" * 64)
    artifact = make(store, files={"data.txt": "hello", "sub/more.txt": "grüße"}, inputs={"policy": source})
    assert (artifact.path / "sub/more.txt").read_text() == "grüße"
    assert (artifact.key, artifact.kind, artifact.stage, artifact.schema_version) == (KEY, "trajectories", "collect", 1)
    assert artifact.metrics == {"reward": 0.5}
    assert artifact.inputs == {"policy": source.key}
    manifest = json.loads((artifact.path / MANIFEST).read_text())
    assert manifest["inputs"]["policy"] == {"key": source.key, "digest": source.digest}
    assert manifest["files"]["data.txt"]["bytes"] == 5
    assert Store(store.root).find(KEY) == artifact
    assert store.find("c" * 64) is None


def test_an_exception_leaves_nothing_and_links_are_refused(store):
    def die():
        with store.draft(KEY, stage="s", kind="k", schema_version=1, inputs={}) as draft:
            (draft.path / "data.txt").write_text("hel")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        die()
    assert store.find(KEY) is None
    assert list((store.root / ".drafts").iterdir()) == []
    with (
        pytest.raises(ValueError, match="link"),
        store.draft(KEY, stage="s", kind="k", schema_version=1, inputs={}) as draft,
    ):
        (draft.path / "link").symlink_to("/etc/hostname")


def test_digest_covers_content_and_names_without_volatile_files_and_key(store):
    keys = iter("0123456789")

    def digest(files, volatile=()):
        return make(store, next(keys) * 64, files, volatile=volatile).digest

    plain = digest({"a": "1", "log": "x"})
    assert digest({"a": "1", "log": "x"}) == plain
    assert digest({"a": "2", "log": "x"}) != plain
    assert digest({"b": "1", "log": "x"}) != plain
    assert digest({"a": "1", "log": "x"}, ["log"]) == digest({"a": "1", "log": "later"}, ["log"]) != plain


@pytest.mark.parametrize("damage", ["change", "remove", "manifest", "volatile"])
def test_damaged_artifact_is_renamed_and_recomputed(store, caplog, damage):
    artifact = make(store, files={"data.txt": "hello", "log": "x"}, volatile=["log"])
    victim = artifact.path / {"manifest": MANIFEST, "volatile": "log"}.get(damage, "data.txt")
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_text("jello")
    with pytest.raises(ArtifactDamaged, match=victim.name):
        read_artifact(artifact.path)
    fresh = Store(store.root)
    assert fresh.find(KEY) is None
    assert victim.name in caplog.text
    assert (store.root / f"{KEY}.damaged-1").is_dir()
    assert (make(fresh).path / "data.txt").read_text() == "hello"
    (artifact.path / "data.txt").write_text("again")
    assert Store(store.root).find(KEY) is None
    assert (store.root / f"{KEY}.damaged-2").is_dir()


def test_manifest_under_the_wrong_key_is_ignored(store):
    make(store).path.rename(store.root / ("c" * 64))
    assert Store(store.root).find("c" * 64) is None


def test_scratch_survives_a_failure_and_is_removed_by_commit(store):
    (store.scratch(KEY) / "episode").write_text("done")
    with pytest.raises(RuntimeError), store.draft(KEY, stage="s", kind="k", schema_version=1, inputs={}):
        raise RuntimeError
    assert (store.scratch(KEY) / "episode").read_text() == "done"
    make(store)
    assert not (store.root / ".scratch" / KEY).exists()


def test_a_second_commit_keeps_the_first(store):
    first = make(store, files={"data.txt": "first"})
    make(store, files={"data.txt": "second"})
    assert (first.path / "data.txt").read_text() == "first"


def test_lock_reports_its_holder(store):
    messages = []
    with store.lock(KEY, 1):

        def wait():
            with (
                pytest.raises(WaitTimeout, match=f"process {os.getpid()}"),
                Store(store.root).lock(KEY, 0.1, messages.append),
            ):
                pass

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(600)
    assert len(messages) == 1
    assert f"process {os.getpid()}" in messages[0]
    with store.lock(KEY, 0):
        pass


def test_uri_as_root_is_rejected():
    with pytest.raises(SpecError, match=r"local folder.*store=URI"):
        Store("s3://bucket/runs")


def rewrite(artifact, **changes):
    file = artifact.path / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_artifact_of_a_newer_version_is_rejected_and_kept(store):
    rewrite(make(store), manifest_version=2, files="laid out in another way")
    for _ in range(2):
        with pytest.raises(
            ArtifactError, match=r"newer Espalier .*version 2, this one reads 1.*: update, or"
        ) as caught:
            Store(store.root).find(KEY)
        assert not isinstance(caught.value, ArtifactDamaged)
    assert not list(store.root.glob("*.damaged-*"))


def test_lineage_goes_both_ways(store):
    played = make(store, "1" * 64)
    scores = make(store, "2" * 64, inputs={"trajectories": played})
    selection = make(store, "3" * 64, inputs={"trajectories": played, "scores": scores})
    make(store, "4" * 64)
    assert {consumer.key for consumer in store.made_from(played)} == {scores.key, selection.key}
    assert store.made_from(scores) == [selection]
    assert store.made_from(selection) == []
    assert {name: store.find(key) for name, key in selection.inputs.items()} == {
        "trajectories": played,
        "scores": scores,
    }
    assert len(list(store.manifests())) == 4


def test_manifests_skip_damaged_artifacts_with_a_warning(store, caplog):
    good, damaged, unreadable = (make(store, letter * 64) for letter in "123")
    (damaged.path / "data.txt").write_text("jello")
    assert Store(store.root).find(damaged.key) is None
    (unreadable.path / MANIFEST).write_text("{")
    assert list(store.manifests()) == [good]
    assert unreadable.key in caplog.text


def test_a_process_killed_while_writing_leaves_nothing_behind(store):
    code = f"""
        import time
        from components.artifacts import Store
        store = Store({str(store.root)!r})
        with store.draft({KEY!r}, stage="s", kind="k", schema_version=1, inputs={{}}) as draft:
            (draft.path / "data.txt").write_text("half")
            (store.scratch({KEY!r}) / "episode").write_text("done")
            print("writing", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    with pytest.raises(WaitTimeout, match=f"process {process.pid}"), store.lock(KEY, 0):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=600)
    assert store.find(KEY) is None
    assert (store.scratch(KEY) / "episode").read_text() == "done"
    assert make(store).metrics == {"reward": 0.5}
    assert list((store.root / ".drafts").iterdir()) == []


def test_two_processes_that_race_for_one_key_do_the_work_once(store):
    assert race((store.root,), (store.root,)) == ["cached", "ran"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def _shuffled(value):
    if isinstance(value, dict):
        return {key: _shuffled(item) for key, item in reversed(value.items())}
    if isinstance(value, list):
        return [_shuffled(item) for item in value]
    return value


@given(st.dictionaries(st.text(), json_values), st.dictionaries(st.text(), st.text()))
def test_key_order_does_not_matter_and_json_round_trips(spec, inputs):
    key = stage_key("collect", 1, spec, inputs, 0)
    assert stage_key("collect", 1, _shuffled(spec), _shuffled(inputs), 0) == key
    assert stage_key("collect", 1, json.loads(json.dumps(spec)), inputs, 0) == key


@given(st.dictionaries(st.text(), json_values), json_values, json_values)
def test_another_value_gives_another_key(spec, first, second):
    same = json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    keys = {stage_key("s", 1, {**spec, "x": value}, {}, 0) for value in (first, second)}
    assert len(keys) == (1 if same else 2)


def test_every_part_of_a_key_counts():
    base = ("train", 1, {"a": 1}, {"policy": "d"}, 0)
    changes = [
        ("judge", 1, {"a": 1}, {"policy": "d"}, 0),
        ("train", 2, {"a": 1}, {"policy": "d"}, 0),
        ("train", 1, {"a": 2}, {"policy": "d"}, 0),
        ("train", 1, {"a": 1}, {"policy": "e"}, 0),
        ("train", 1, {"a": 1}, {"start": "d"}, 0),
        ("train", 1, {"a": 1}, {"policy": "d"}, 1),
    ]
    assert len({stage_key(*parts) for parts in [base, *changes]}) == len(changes) + 1


def test_values_outside_json_are_rejected():
    for value in ({1: "x"}, object(), {"x": {2}}, {"x": [{3: 4}]}):
        with pytest.raises(TypeError):
            stage_key("s", 1, {"value": value}, {}, 0)
