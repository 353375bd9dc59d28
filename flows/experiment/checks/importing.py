"""Checks of data of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from components.data.spec import DataSpec
from components.errors import Problem


def data(data: DataSpec) -> Iterator[Problem]:
    """Check that the settings of the source do not exclude each other."""
    for problem in DataSpec.cross_problems(dict(data)):
        yield replace(problem, path=f"data.{problem.path}")
