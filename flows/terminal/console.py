"""The console and the log file of a run.

One readable console on stderr: a progress bar with an ETA for each stage that works where stderr is a terminal, a line
now and then where it is not; a line for each round; warnings of any library. Everything, and more of it, goes to one
log file. stdout belongs to the result.

Prefect and Hydra would each set up logging of their own. Here the root logger's two handlers are the only ones:
Prefect's are taken off its loggers, and what it says (state changes, crashes that are reported anyway) goes to the
file.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from components.redaction import mask_text

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress, TaskID
    from rich.table import Table

logger = logging.getLogger(__name__)

PLAIN_EVERY = 15.0
"""Seconds between two lines about the same stage where there is no terminal."""
FILE_ONLY = ("prefect", "py.warnings", "httpx", "httpcore", "uvicorn", "fastapi", "alembic")
"""Loggers that do not speak on the console."""
SHOWN = {
    "running": "running",
    "failed": "failed",
    "loss": "loss",
    "kl": "kl",
    "success": "success",
    "reward": "reward",
    "tokens_per_s": "tokens/s",
}
"""Figures worth showing beside a bar, and what they are called there."""

QUIET = {
    "TQDM_DISABLE": "1",  # one bar is ours
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment in which libraries keep to themselves; what the user has set wins."""


def hush() -> None:
    """Sets `QUIET`; before the libraries are imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


class Console:
    """Speaks with the person at the terminal, and writes the same to the log."""

    def __init__(self, stream: TextIO | None = None):
        from rich.console import Console as RichConsole

        stream = stream or sys.stderr
        width = None if stream.isatty() else 120
        self.rich = RichConsole(file=stream, width=width, highlight=False, soft_wrap=True)
        self.took: dict[tuple[str, int], float] = {}
        """Seconds that the last stage of a kind took, by kind and number of units."""

    @property
    def interactive(self) -> bool:
        return self.rich.is_terminal

    @cached_property
    def bars(self) -> _Bars:
        return _Bars(self.rich)

    def line(self, text: str, style: str = "") -> None:
        """One line, as it is."""
        self.rich.print(text, style=style, markup=False)
        logger.info(text)

    def table(self, table: Table) -> None:
        self.rich.print(table)
        for row in zip(*(column.cells for column in table.columns), strict=True):
            logger.info("  ".join(str(cell) for cell in row))

    @contextmanager
    def stage(self, label: str, unit: str) -> Iterator[StageView]:
        """Shows one stage while it works; `unit` is what it counts (episodes, gradient steps)."""
        view: StageView = _Bar(self, label, unit) if self.interactive else StageView(self, label, unit)
        try:
            yield view
        finally:
            view.close()


class StageView:
    """Progress of one stage as lines of text; `components`' progress callback."""

    def __init__(self, console: Console, label: str, unit: str):
        self.console = console
        self.label = label
        self.unit = unit
        self._kind = label.partition("[")[0]
        self._start = self._told = time.monotonic()
        self._first: int | None = None
        self._done = self._total = 0

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        now = time.monotonic()
        self._count(done, total)
        if now - self._told < PLAIN_EVERY or done >= total:
            return
        self._told = now
        left = self.left(now)
        ahead = f", about {duration(left)} left" if left else ""
        elapsed = duration(now - self._start)
        self.console.line(f"  {self.label}: {done}/{total} {self.unit}, {elapsed}{ahead}{_shown(values)}")

    def left(self, now: float) -> float | None:
        """Seconds that the stage will still take; None while that cannot be said.

        As long as the last one of its kind and size took: episodes end late and together, so the first ones say little.
        Without such a one by its own speed, once a tenth is done.
        """
        elapsed, first = now - self._start, self._first or 0
        last = self.console.took.get((self._kind, self._total), 0.0) * (1 - first / max(self._total, 1))
        if last > elapsed:
            return last - elapsed
        fresh = self._done - first
        return elapsed / fresh * (self._total - self._done) if 0 < fresh >= self._total / 10 else None

    def close(self) -> None:
        """The stage has ended."""
        if self._total and self._done == self._total and not self._first:
            self.console.took[self._kind, self._total] = time.monotonic() - self._start

    def _count(self, done: int, total: int) -> None:
        if self._first is None:
            self._first = done  # finished in an earlier try: says nothing about the speed
        self._done, self._total = done, total


class _Bar(StageView):
    """Progress of one stage as a bar."""

    def __init__(self, console: Console, label: str, unit: str):
        super().__init__(console, label, unit)
        self._bars = console.bars
        self._bar = self._bars.add(self)

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        self._count(done, total)
        self._bars.update(self._bar, done, total, _shown(values))

    def close(self) -> None:
        super().close()
        self._bars.remove(self._bar)


class _Bars:
    """The bars of the stages that work now, below each other: a terminal has one display, not one for each."""

    def __init__(self, console: RichConsole):
        self._console = console
        self._lock = threading.Lock()
        self._progress: Progress | None = None

    def add(self, view: StageView) -> TaskID:
        with self._lock:
            if self._progress is None:
                self._progress = _progress(self._console)
                self._progress.start()
            return self._progress.add_task(view.label, total=None, values="", view=view)

    def update(self, bar: TaskID, done: int, total: int, values: str) -> None:
        with self._lock:
            if self._progress is not None:
                self._progress.update(bar, completed=done, total=total, values=values)

    def remove(self, bar: TaskID) -> None:
        with self._lock:
            if self._progress is not None:
                self._progress.remove_task(bar)
                if not self._progress.tasks:
                    self._progress.stop()
                    self._progress = None


def _progress(console: RichConsole) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Left(ProgressColumn):
        def render(self, task):
            left = task.fields["view"].left(time.monotonic())
            return Text("-" if left is None else duration(left))

    return Progress(
        TextColumn("  {task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[view].unit}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        Left(),
        TextColumn("{task.fields[values]}"),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class Masked(logging.Formatter):
    """Log lines, stack traces included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class _Brief(Masked):
    """Messages without the stack traces that libraries add; those are in the log file."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_info = record.exc_text = record.stack_info = None
        return super().format(record)


class _File(logging.FileHandler):
    """A log on a full disk is silent: the run says what is wrong in its own words."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def logging_to(path: Path, console: Console) -> Iterator[None]:
    """Root logging while a run goes on: everything from INFO on to the file, warnings to the console too."""
    from rich.logging import RichHandler

    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, encoding="utf-8")
    file.setFormatter(Masked("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    file.setLevel(logging.INFO)
    screen = RichHandler(
        logging.WARNING, console=console.rich, show_time=False, show_path=False, markup=False, rich_tracebacks=False
    )
    screen.setFormatter(_Brief("%(name)s: %(message)s"))
    screen.addFilter(lambda record: not record.name.startswith(FILE_ONLY))
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.handlers = [file, screen]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers = before
        root.setLevel(level)
        file.close()


def silence_prefect() -> None:
    """Takes Prefect's own handlers away, after it was imported: its words go through the root logger's."""
    for name in ("prefect", "prefect._internal", "uvicorn", "fastapi"):
        found = logging.getLogger(name)
        found.handlers = []
        found.propagate = True


def printable(text: str) -> str:
    """Without characters that would steer the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _shown(values: Mapping[str, Any] | None) -> str:
    parts = [f"{title} {values[name]:.3g}" for name, title in SHOWN.items() if values and name in values]
    return "  " + ", ".join(parts) if parts else ""
