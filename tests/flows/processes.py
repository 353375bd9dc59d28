"""Processes that tests start: Python in the checkout, the command of one stage, and a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.stages.base import Request

ROOT = Path(__file__).parents[2]


def python(*arguments: str, timeout: float = 600, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the checkout, without an input; return its output."""
    line = [sys.executable, *arguments]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(line, cwd=ROOT, timeout=timeout, **streams, **options)


def stage_line(root: Path, request: Request | dict[str, Any]) -> list[str]:
    """Write a request into a root; return the arguments of Python that run the stage there."""
    data = request.to_json() if isinstance(request, Request) else request
    file = root / "request.json"
    file.write_text(json.dumps(data))
    return ["-m", "flows.stage", "--request", str(file), f"root={root}"]


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    """Yield a browser, controlled by playwright. Skips the test if one of them is not installed."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("there is no browser; install one: apt-get install chromium")
    sync = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", *arguments]
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()
