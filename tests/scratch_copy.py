"""Copy of the repository in which a test adds a component with exactly the files that CONTRIBUTING.md names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PARTS = ("components", "conf", "docs", "flows", "hydra_plugins", "tests", "sky", "README.md", "CONTRIBUTING.md")
FILES = ("pyproject.toml", "mkdocs.yml", "Makefile", "SECURITY.md")


class Checkout:
    """Copy of the repository without its virtual environment, runs and caches."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for name in (*PARTS, *FILES):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
            else:
                shutil.copy(source, folder / name)

    def add(self, files: Mapping[str, str]) -> None:
        """Write new files by path. Existing files are not changed."""
        for name, text in files.items():
            path = self.folder / name
            assert not path.exists(), name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def run(self, script: str, *arguments: str) -> Any:
        """Run a script in the copy, and return the JSON data of the last line that it prints."""
        return json.loads(self.output(script, *arguments).splitlines()[-1])

    def output(self, script: str, *arguments: str) -> str:
        """Run a script in the copy, and return what it prints."""
        return self._python("-c", script, *arguments)

    def test(self, *arguments: str) -> str:
        """Run tests in the copy. Returns the output."""
        return self._python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)

    def _python(self, *arguments: str) -> str:
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=variables | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
