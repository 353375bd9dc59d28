"""The last line of a test run: how many tests were left out, and how to run them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

REMEDIES: tuple[tuple[str, str], ...] = (
    (r"bubblewrap|bwrap", "need bubblewrap (apt-get install bubblewrap)"),
    (r"browser|playwright", "need a browser (apt-get install chromium)"),
    (r"VERIFIERS_PYTHON|OPENENV_PYTHON|alfworld, whose domain", "need a package in an environment of its own"),
    (r"\bJava\b", "need Java (apt-get install default-jre-headless)"),
    (r"\bnode\b", "need Node (apt-get install nodejs)"),
    (r"\bcurl\b", "need curl (apt-get install curl)"),
    (r"could not import|is not installed|wants mcp", "need packages (make test-all installs them)"),
    (r"HARBOR\b", "need Harbor's package (make test-harbor)"),
    (r"HARNESSES", "need published coding agents and clients (make test-harnesses)"),
    (r"make test-logs", "need libraries that write logs (make test-logs)"),
    (r"ESPALIER_MODELS", "need published tokenizers (make test-models)"),
    (r"root|control group|user|mount|x86_64|no table|C libraries", "do not fit this machine or its user"),
    (r"make test-slurm|cluster", "need a cluster (make test-slurm)"),
)
"""Pattern of a reason to skip a test, and what to do about it; the first that matches holds."""

MARKERS = ("slow", "vllm", "slurm", "models")
"""Markers of tests that `make test` leaves out."""


def summary(reasons: Iterable[str], deselected: int) -> str | None:
    """Return the line for the reasons of all skipped tests and the number of tests that a marker left out; None where
    every test ran."""
    counts = Counter(remedy(reason) for reason in reasons)
    if deselected:
        counts["need time, a server or models (make test-slow, test-vllm, test-slurm, test-models)"] = deselected
    if not counts:
        return None
    listed = "; ".join(f"{count} {what}" for what, count in counts.most_common())
    return f"{sum(counts.values())} tests left out: {listed}"


def remedy(reason: str) -> str:
    """Return what to do about one reason to skip a test."""
    return next((what for pattern, what in REMEDIES if re.search(pattern, reason)), f"skipped: {reason:.80}")
