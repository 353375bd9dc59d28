"""Access checks of the run root: another user must not have prepared it."""

from __future__ import annotations

import os
import stat

import pytest

from components.artifacts.roots import private_root
from components.errors import ResourceError
from flows.orchestration.server import client_environment

pytestmark = pytest.mark.security


def test_a_new_root_is_readable_for_its_owner_alone(tmp_path):
    before = os.umask(0o022)
    try:
        private_root(tmp_path / "a" / "runs")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "runs").stat().st_mode) == 0o700
    private_root(tmp_path / "a" / "runs")  # once more


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
@pytest.mark.parametrize("check", [private_root, client_environment])
def test_a_root_of_another_user_is_refused(tmp_path, check):
    """Prefect executes PREFECT_HOME/logging.yml; locks that are links would be followed and truncated."""
    root = tmp_path / "runs"
    root.mkdir()
    os.chown(root, 65534, 65534)
    with pytest.raises(ResourceError, match=r"root = .*/runs: belongs to user 65534, expected 0.*root=DIR"):
        check(root)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703])
def test_world_writable_root_is_rejected(tmp_path, mode):
    root = tmp_path / "runs"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ResourceError, match=rf"every user can write to it \(mode {mode:o}\)"):
        private_root(root)
