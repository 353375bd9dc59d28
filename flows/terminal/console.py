"""Console output and log file of a run.

The console writes to stderr: a progress bar with an ETA for each running stage if stderr is a terminal, otherwise
periodic lines; one line per round; warnings of any library. One log file gets the same in more detail. stdout is
reserved for the result.

Prefect and Hydra would each configure logging. Here the root logger's two handlers are the only ones: Prefect's
handlers are removed, and its messages (state changes, crashes that are reported anyway) go to the file.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from components.exceptions import FirstTraceback
from components.redaction import mask_text

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.progress import Progress, TaskID
    from rich.table import Table

logger = logging.getLogger(__name__)

PLAIN_EVERY = 15.0
"""Seconds between two progress lines of the same stage if stderr is not a terminal."""
FILE_ONLY = ("prefect", "py.warnings", "httpx", "httpcore", "uvicorn", "fastapi", "alembic")
"""Loggers that write to the log file only."""
PROGRESS_METRICS = {
    "running": "running",
    "failed": "failed",
    "loss": "loss",
    "kl": "kl",
    "success": "success",
    "reward": "reward",
    "tokens_per_s": "tokens/s",
}
"""Metrics shown beside a progress bar, by name, with their display names."""

QUIET = {
    "TQDM_DISABLE": "1",  # Espalier shows its own progress bar
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables that disable progress bars, telemetry and chatter of libraries. Values that the user has set
take precedence."""


def hush() -> None:
    """Set the `QUIET` environment variables. Call it before the libraries are imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


class Console:
    """Console on stderr that writes everything it shows to the log, too."""

    def __init__(self, stream: TextIO | None = None):
        from rich.console import Console as RichConsole

        stream = stream or sys.stderr
        width = None if stream.isatty() else 120
        self.rich = RichConsole(file=stream, width=width, highlight=False, soft_wrap=True)
        self.took: dict[tuple[str, int], float] = {}
        """Seconds that the last stage of a kind took, by (kind, number of units)."""

    @property
    def interactive(self) -> bool:
        return self.rich.is_terminal

    @cached_property
    def bars(self) -> _Bars:
        return _Bars(self.rich)

    def line(self, text: str, style: str = "") -> None:
        """Print one line verbatim, without markup."""
        self.rich.print(printable_lines(text.splitlines()), style=style, markup=False)
        logger.info(text)

    def table(self, table: Table) -> None:
        self.rich.print(table)
        for row in zip(*(column.cells for column in table.columns), strict=True):
            logger.info("  ".join(str(cell) for cell in row))

    @contextmanager
    def stage(self, label: str, unit: str) -> Iterator[StageView]:
        """Show the progress of one stage. unit: name of its counter (episodes, gradient steps)."""
        view: StageView = _Bar(self, label, unit) if self.interactive else StageView(self, label, unit)
        try:
            yield view
        finally:
            view.close()


class StageView:
    """Progress of one stage as lines of text. An instance is the progress callback that `components` calls."""

    def __init__(self, console: Console, label: str, unit: str):
        self.console = console
        self.label = label
        self.unit = unit
        self._kind = label.partition("[")[0]
        self._start = self._last_line = time.monotonic()
        self._first: int | None = None
        self._done = self._total = 0

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        now = time.monotonic()
        self._count(done, total)
        if now - self._last_line < PLAIN_EVERY or done >= total:
            return
        self._last_line = now
        remaining = self.remaining_seconds(now)
        eta = f", about {duration(remaining)} left" if remaining else ""
        elapsed = duration(now - self._start)
        self.console.line(f"  {self.label}: {done}/{total} {self.unit}, {elapsed}{eta}{_metrics_text(values)}")

    def remaining_seconds(self, now: float) -> float | None:
        """Return the estimated remaining seconds of the stage, or None if there is no estimate yet.

        The estimate is the duration of the last stage of the same kind and size: episodes tend to end late and
        together, so the first ones predict little. Without such a stage the estimate uses the current speed, once a
        tenth of the units is done.
        """
        elapsed, first = now - self._start, self._first or 0
        last = self.console.took.get((self._kind, self._total), 0.0) * (1 - first / max(self._total, 1))
        if last > elapsed:
            return last - elapsed
        completed = self._done - first
        return elapsed / completed * (self._total - self._done) if 0 < completed >= self._total / 10 else None

    def close(self) -> None:
        """Record the duration of the stage if it ran to its end without resuming."""
        if self._total and self._done == self._total and not self._first:
            self.console.took[self._kind, self._total] = time.monotonic() - self._start

    def _count(self, done: int, total: int) -> None:
        if self._first is None:
            self._first = done  # finished by an earlier attempt, so not part of this one's speed
        self._done, self._total = done, total


class _Bar(StageView):
    """Progress of one stage as a progress bar."""

    def __init__(self, console: Console, label: str, unit: str):
        super().__init__(console, label, unit)
        self._bars = console.bars
        self._bar = self._bars.add(self)

    def __call__(self, done: int, total: int, values: Mapping[str, float] | None = None) -> None:
        self._count(done, total)
        self._bars.update(self._bar, done, total, _metrics_text(values))

    def close(self) -> None:
        super().close()
        self._bars.remove(self._bar)


class _Bars:
    """Progress bars of all running stages, which share the terminal's one live display."""

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

    class RemainingTimeColumn(ProgressColumn):
        def render(self, task):
            remaining = task.fields["view"].remaining_seconds(time.monotonic())
            return Text("-" if remaining is None else duration(remaining))

    return Progress(
        TextColumn("  {task.description}", markup=False),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[view].unit}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        RemainingTimeColumn(),
        TextColumn("{task.fields[values]}"),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class MaskingFormatter(logging.Formatter):
    """Formatter that masks secrets in log lines and stack traces."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class BriefFormatter(MaskingFormatter):
    """Formatter for the terminal and Prefect's UI: omits stack traces, which the log file has, and control codes."""

    def format(self, record: logging.LogRecord) -> str:
        record = copy.copy(record)
        record.exc_info = record.exc_text = record.stack_info = None
        return printable_lines(super().format(record).splitlines())


class _File(logging.FileHandler):
    """Log file handler that ignores OSError (disk full), which the run itself reports."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def logging_to(path: Path, console: Console) -> Iterator[None]:
    """Configure root logging during a run: INFO and above to the file, warnings and above also to the console."""
    from rich.logging import RichHandler

    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, encoding="utf-8")
    file.setFormatter(MaskingFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    file.setLevel(logging.INFO)
    file.addFilter(FirstTraceback())
    screen = RichHandler(
        logging.WARNING, console=console.rich, show_time=False, show_path=False, markup=False, rich_tracebacks=False
    )
    screen.setFormatter(BriefFormatter("%(name)s: %(message)s"))
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
    """Remove Prefect's own log handlers after its import, so that its messages go through the root logger. Those of the
    runs would send them unmasked to the server."""
    for name in ("prefect", "prefect._internal", "prefect.flow_runs", "prefect.task_runs", "uvicorn", "fastapi"):
        target = logging.getLogger(name)
        target.handlers = []
        target.propagate = True


def printable(text: str) -> str:
    """Return the text with each unprintable character, such as a terminal control code, replaced by U+FFFD, and
    tabs expanded."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text.expandtabs())


def printable_lines(lines: Iterable[str]) -> str:
    """Return lines of foreign text as one text, each line printable."""
    return "\n".join(map(printable, lines))


def shorten(text: str, length: int) -> str:
    """Return the text, cut to at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def duration(seconds: float) -> str:
    """Return seconds as `4.2 s`, `3 min 05 s` or `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _metrics_text(values: Mapping[str, Any] | None) -> str:
    if values and values.get("loading"):
        return "  loading packages and the model"
    parts = [f"{title} {values[name]:.3g}" for name, title in PROGRESS_METRICS.items() if values and name in values]
    return "  " + ", ".join(parts) if parts else ""
