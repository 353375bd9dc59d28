"""`make test-extras` tests only the extras that changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import extras

PYPROJECT = (extras.ROOT / "pyproject.toml").read_text(encoding="utf-8")
NAMES = list(extras.requirements(PYPROJECT))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Create a repository with the files of every extra, and its first commit."""
    for path in {"pyproject.toml", "README.md"}.union(*(extras.files(name) for name in NAMES)):
        write(tmp_path / path, (extras.ROOT / path).read_text(encoding="utf-8"))
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    return tmp_path, git(tmp_path, "rev-parse", "HEAD")


def test_each_extra_that_setup_does_not_install_has_a_module_and_tests():
    assert NAMES == ["alfworld", "reasoning", "scienceworld", "textarena", "textworld"]
    for name in NAMES:
        assert {f"components/environments/adapters/{name}.py", f"tests/environments/test_{name}.py"} <= extras.files(
            name
        )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("README.md", []),
        ("conf/environment/textarena.yaml", ["textarena"]),
        ("components/environments/adapters/textarena_games.py", ["textarena"]),
        ("tests/environments/test_scienceworld.py", ["scienceworld"]),
        ("components/environments/adapters/textworld.py", ["alfworld", "textworld"]),  # alfworld imports it
        ("components/environments/optional_packages.py", NAMES),
        ("requirements/extras-overrides.txt", NAMES),
    ],
)
def test_an_extra_changes_with_its_files(repository, path, expected):
    folder, first = repository
    write(folder / path, (folder / path).read_text(encoding="utf-8") + "\n# changed\n")
    assert extras.changed(first) == expected
    git(folder, "commit", "--quiet", "--all", "--message", "second")
    assert extras.changed(first) == expected
    assert extras.changed("HEAD") == []


def test_an_extra_changes_with_its_requirements_alone(repository):
    folder, first = repository
    write(folder / "pyproject.toml", PYPROJECT.replace("scienceworld>=1.2.3,<2", "scienceworld>=1.2.4,<2"))
    assert extras.changed(first) == ["scienceworld"]


@pytest.mark.parametrize("commit", [None, "", "0" * 40, "no-branch"])
def test_without_a_commit_that_is_known_every_extra_counts_as_changed(repository, commit):
    assert extras.changed(commit) == NAMES
