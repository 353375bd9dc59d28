"""Last line of a test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import left_out


def test_reasons_are_counted_by_what_to_do_about_them():
    reasons = [
        "Skipped: could not import 'textworld': No module named 'textworld'",
        "Skipped: reasoning_gym is not installed",
        "Skipped: there is no Java",
        "Skipped: bubblewrap: bwrap is not installed",
    ]
    assert left_out.summary(reasons, 3) == (
        "7 tests left out: 3 need time, a server or models (make test-slow, test-vllm, test-slurm, test-models); "
        "2 need packages (make test-all installs them); 1 need Java (apt-get install default-jre-headless); "
        "1 need bubblewrap (apt-get install bubblewrap)"
    )
    assert left_out.summary([], 0) is None


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["alone", "with xdist"])
def test_it_is_the_last_line(tmp_path, workers):
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "__init__.py").touch()
    for name in ("conftest.py", "left_out.py"):
        (tests / name).write_text((Path(__file__).parent / name).read_text())
    (tests / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('there is no Java')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), *workers]
    done = subprocess.run([*command, str(tests)], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ("1 tests left out: 1 need Java (apt-get install default-jre-headless)")
