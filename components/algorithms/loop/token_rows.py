"""Tokenized histories of a training in files that are mapped into memory, for trainings on stored episodes.

Each process reads, checks and tokenizes its own share of the episodes (`mapped_files`). All processes read the rows of
a gradient step when it is taken. So the memory of a process grows by some bytes per row for their order, not by their
tokens, and the result does not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from components.algorithms.loop.mapped_files import open_mapped, own_share, write_share
from components.algorithms.policy.packing import TokenSequence
from components.trajectories.schema import Trajectory

FOLDER = "rows"
"""Folder of the files in the scratch folder of a training. A resumed training writes them again."""
ROWS_PER_BATCH = 256
"""Rows that are in memory at a time."""
_SCHEMA = pa.schema(
    [
        ("place", pa.int64()),
        ("group", pa.string()),
        ("type", pa.string()),
        ("reward", pa.float64()),
        ("weight", pa.float64()),
        ("role", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("spans", pa.list_(pa.int32())),
    ]
)
"""Columns; spans: start and end of each range of trained tokens."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A history to train on."""

    place: int
    """Position of its episode in the training."""
    token_ids: Sequence[int]
    targets: Sequence[int]
    """Indices of the tokens to train on."""
    weight: float = 1.0
    """Weight of the episode in the loss."""
    role: str = ""
    group: str = ""
    """Group of its episode, where the loss compares episodes."""
    type: str = ""
    """Type of its scenario, where the loss compares episodes."""
    reward: float = 0.0
    """Reward of its episode, where the loss compares episodes."""

    def sequence(self) -> TokenSequence:
        """Return the row for a pack."""
        return TokenSequence(self.token_ids, self.targets, weight=self.weight, role=self.role)


class TokenRows(Sequence[TokenRow]):
    """Rows in files, by the position of their episodes."""

    def __init__(self, files: Sequence[Path]):
        self._files = [open_mapped(file) for file in files]
        counts = [
            sum(file.get_batch(index).num_rows for index in range(file.num_record_batches)) for file in self._files
        ]
        self._ends = np.cumsum(counts)
        self._order_R = np.arange(sum(counts))
        self._order_R = np.argsort(self.column("place").to_numpy(), kind="stable")

    def column(self, name: str) -> pa.Array:
        """(R,) values of a column that takes some bytes per row."""
        columns = [
            file.get_batch(index).column(name) for file in self._files for index in range(file.num_record_batches)
        ]
        return pa.concat_arrays([pa.array([], _SCHEMA.field(name).type), *columns]).take(pa.array(self._order_R))

    def __len__(self) -> int:
        return len(self._order_R)

    @overload
    def __getitem__(self, row: int) -> TokenRow: ...
    @overload
    def __getitem__(self, row: slice) -> list[TokenRow]: ...
    def __getitem__(self, row: int | slice) -> TokenRow | list[TokenRow]:
        rows = range(len(self))[row]
        return self._read(rows) if isinstance(rows, int) else list(map(self._read, rows))

    def _read(self, row: int) -> TokenRow:
        position = int(self._order_R[row])
        file = int(np.searchsorted(self._ends, position, side="right"))
        batch, place = divmod(position - int(self._ends[file - 1] if file else 0), ROWS_PER_BATCH)
        columns = self._files[file].get_batch(batch).slice(place, 1).to_pydict()
        values = {name: column[0] for name, column in columns.items()}
        spans = values.pop("spans")
        values["targets"] = [index for span in zip(spans[::2], spans[1::2], strict=True) for index in range(*span)]
        return TokenRow(**values)


@dataclass(frozen=True, slots=True)
class EpisodeSequences(Sequence[TokenSequence]):
    """Sequences of the histories of one episode, read when they are asked for."""

    rows: TokenRows
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @overload
    def __getitem__(self, index: int) -> TokenSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenSequence]: ...
    def __getitem__(self, index: int | slice) -> TokenSequence | list[TokenSequence]:
        places = range(self.first, self.end)[index]
        if isinstance(places, int):
            return self.rows[places].sequence()
        return [self.rows[place].sequence() for place in places]


def tokenized(
    scratch: Path, episodes: Sequence[Trajectory], rows_of: Callable[[int, Trajectory], Iterable[TokenRow]]
) -> TokenRows:
    """Write the rows of all episodes to files, and map these. All processes must call this.

    rows_of: returns the rows of an episode; it is called for the episodes of this process, with their positions.
    """
    rows = (_columns(row) for place, episode in own_share(episodes) for row in rows_of(place, episode))
    return TokenRows(write_share(scratch / FOLDER, _SCHEMA, rows, ROWS_PER_BATCH))


def _columns(row: TokenRow) -> dict[str, Any]:
    target_T = np.asarray(row.targets)
    breaks = np.flatnonzero(np.diff(target_T) != 1) + 1
    spans = [bound for part in np.split(target_T, breaks) for bound in (part[0], part[-1] + 1)]
    return {
        **{name: getattr(row, name) for name in _SCHEMA.names if name != "spans"},
        "spans": spans,
    }
