"""Access checks of the run root: another user must not have prepared it."""

from __future__ import annotations

import importlib
import os
import re
import stat
from pathlib import Path

import pytest

from components.artifacts.roots import private_root
from components.errors import ResourceError
from flows.orchestration.server import client_environment
from flows.stages.base import Context

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
def test_a_root_of_another_user_is_refused(tmp_path):
    """Prefect executes PREFECT_HOME/logging.yml; locks that are links would be followed and truncated."""
    root = tmp_path / "runs"
    root.mkdir()
    os.chown(root, 65534, 65534)
    for check in (private_root, client_environment):
        with pytest.raises(ResourceError, match=r"root = .*/runs: belongs to user 65534, expected 0.*root=DIR"):
            check(root)
    assert list(root.iterdir()) == []


def test_world_writable_root_is_rejected(tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    for mode in (0o777, 0o1777, 0o703):
        root.chmod(mode)
        with pytest.raises(ResourceError, match=rf"every user can write to it \(mode {mode:o}\)"):
            private_root(root)


WITH_EXPERIMENT = ("explain.calibrate", "certify", "evaluate", "qualify", "plan", "run")
WITH_ROOT = ("runs.listing", "runs.lineage", "runs.clean", "compare", "explain.bisect")


def test_every_command_refuses_a_root_that_is_not_private(tmp_path, capsys, monkeypatch):
    root = tmp_path / "runs"
    root.mkdir()
    root.chmod(0o777)
    more = {"evaluate": ["policies=[base]"], "runs.lineage": ["latest"], "explain.bisect": ["a", "b"]}
    for name in (*WITH_EXPERIMENT, *WITH_ROOT):
        arguments = ["+experiment=smoke"] if name in WITH_EXPERIMENT else []
        arguments += [*more.get(name, []), f"root={root}"]
        monkeypatch.setattr("sys.argv", [name, *arguments])
        main = importlib.import_module(f"flows.{name}").main
        try:
            code = main() if name == "run" else main(arguments)
        except SystemExit as ended:
            code = ended.code
        assert code == 2, name
        assert "every user can write to it (mode 777)" in capsys.readouterr().err
        assert list(root.iterdir()) == []


def test_commands_that_create_the_root_make_it_private(tmp_path):
    context = Context.created(tmp_path / "a" / "runs")
    assert stat.S_IMODE((tmp_path / "a" / "runs").stat().st_mode) == 0o700
    assert context.store.root == tmp_path / "a" / "runs" / "artifacts"
    flows = Path(__file__).parents[2] / "flows"
    made = [path.name for path in flows.glob("*.py") if re.search(r"\broot\.mkdir\(", path.read_text())]
    assert made == []
