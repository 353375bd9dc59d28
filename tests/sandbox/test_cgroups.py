"""Location of control groups, on fake folders with the kernel's layout of hierarchies. `test_memory_attacks.py` tests
the limits of real groups on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.sandbox import Limits, cgroups

VERSION_1 = "30 23 0:26 / {} rw,nosuid shared:4 - cgroup cgroup rw,memory"
VERSION_2 = "30 23 0:26 / {} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Create a hierarchy with our own group in it, and return its root."""
    monkeypatch.setattr(cgroups, "_works", lambda hierarchy: True)

    def lay_out(own: str, mount: str) -> Path:
        (tmp_path / own.strip("/")).mkdir(parents=True)
        membership = f"0::{own}" if mount == VERSION_2 else f"4:memory:{own}\n1:cpu:/\n0::/"
        files = {"/proc/self/cgroup": membership, "/proc/self/mountinfo": mount.format(tmp_path)}
        monkeypatch.setattr(cgroups, "_lines", lambda path: files[path].splitlines())
        cgroups.hierarchy.cache_clear()
        return tmp_path

    yield lay_out
    cgroups.hierarchy.cache_clear()


def test_version_2_uses_a_group_beside_our_own(layout):
    place = layout("/app.slice/espalier.scope", VERSION_2) / "app.slice"
    (place / "cgroup.procs").touch()
    (place / "cgroup.subtree_control").write_text("cpu memory pids")
    stale = place / "espalier-sandbox-4194999-7"  # of a process that is gone
    stale.mkdir()
    assert cgroups.hierarchy() == cgroups.Hierarchy(place, 2)
    assert not stale.exists()


def test_version_2_bounds_memory_swap_and_processes(tmp_path: Path):
    for name in ("memory.swap.max", "pids.max"):
        (tmp_path / name).touch()
    group = cgroups.ControlGroup.__new__(cgroups.ControlGroup)
    group.folder, group._version = tmp_path, 2
    group._bound(Limits(memory_mb=100, processes=8))
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert files == {"memory.max": str(100 << 20), "memory.swap.max": "0", "pids.max": "12"}
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 0\noom_group_kill 0\n")
    assert not group.exceeded
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert group.exceeded


def test_version_2_without_the_right_to_move_processes_is_not_used(layout):
    layout("/user.slice/session.scope", VERSION_2)  # no cgroup.procs that could be written
    assert cgroups.hierarchy() is None


def test_version_2_without_the_memory_controller_is_not_used(layout, monkeypatch: pytest.MonkeyPatch):
    place = layout("/service/espalier", VERSION_2) / "service"
    (place / "cgroup.procs").touch()
    (place / "cgroup.subtree_control").mkdir()  # refuses to be written, as the kernel does
    assert cgroups.hierarchy() is None


def test_version_1_uses_a_group_in_our_own(layout):
    folder = layout("/docker/espalier", VERSION_1)
    assert cgroups.hierarchy() == cgroups.Hierarchy(folder / "docker/espalier", 1)


def test_a_hierarchy_that_refuses_processes_is_not_used(tmp_path: Path):
    assert not cgroups._works(cgroups.Hierarchy(tmp_path / "missing", 2))
