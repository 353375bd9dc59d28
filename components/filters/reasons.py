"""Decisions of column filters as arrays of reasons, in which None keeps an episode and a text drops it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from components.trajectories.columns import Array, EpisodeColumns
from components.trajectories.schema import KEPT, Selection
from components.trajectories.tables import SELECTION_SCHEMA, stored_text


def dropped(mask_N: Array, reason: str, otherwise: str | None = None) -> Array:
    """Return the (N,) reasons: `reason` where the mask is True, else `otherwise`. None keeps."""
    reasons_N = np.full(len(mask_N), otherwise, object)
    reasons_N[mask_N] = reason
    return reasons_N


def as_selections(episodes: EpisodeColumns, reasons_N: Array) -> list[Selection]:
    """Return the reasons as selections."""
    return [
        Selection(name, reason is None, reason or KEPT)
        for name, reason in zip(episodes.names, reasons_N.tolist(), strict=True)
    ]


def as_batch(episodes: EpisodeColumns, reasons_N: Array) -> pa.RecordBatch:
    """Return the reasons as columns of a selection file."""
    kept_N = np.equal(reasons_N, None)
    stored_N = reasons_N.copy()
    stored_N[kept_N] = KEPT
    for reason in set(reasons_N[~kept_N].tolist()):
        if not reason.isascii():
            stored_N[reasons_N == reason] = stored_text(reason)
    columns = [episodes.ids, pa.array(kept_N.astype(bool)), pa.array(stored_N, pa.string())]
    return pa.RecordBatch.from_arrays(columns, schema=SELECTION_SCHEMA)
