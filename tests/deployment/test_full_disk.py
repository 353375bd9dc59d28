"""Export to a full disk: a clear error, and no partial files."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.deployment.export import export_adapter, export_merged
from components.errors import ArtifactError, ResourceError

pytestmark = pytest.mark.security


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of 128 kB if possible; otherwise limit the file size of the process."""
    folder.mkdir()
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)], capture_output=True
        ).returncode
        == 0
    ):
        try:
            yield
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    with limited_files():
        yield


@contextlib.contextmanager
def limited_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.parametrize("limit", [small_disk, lambda folder: limited_files()], ids=["disk", "limit"])
def test_partial_export_is_removed(base_dir, adapter_dir, tmp_path, limit):
    disk = tmp_path / "disk"
    out = disk / "export"
    works = (
        lambda: export_merged(base_dir, adapter_dir, out, "card"),
        lambda: export_adapter(base_dir, adapter_dir, out, "x" * 2**18, base="tiny", revision=None),
    )
    with limit(disk):
        for work in works:
            with pytest.raises(ResourceError, match=r"does not fit on the disk .*was removed\. Free space"):
                work()
            assert not out.exists()
            assert not disk.exists() or list(disk.iterdir()) == []


def test_export_needs_an_empty_folder(base_dir, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(ArtifactError, match="is not empty"):
        export_merged(base_dir, None, tmp_path / "out", "card")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
