"""Episodes as columns: a batch of whole groups with one value per episode, as arrays.

A batch has the columns that its reader asked for (`components.trajectories.sources`), next to the id, the group, the
reward and the failure, which every batch has. Whole trajectories are decoded only where `trajectories` is called, for
the episodes that the batch has then.

Legend of array names: N episodes, G groups, in the order of the collection.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from components.trajectories.decode import distinct_jsons, scored_trajectories, texts
from components.trajectories.schema import Trajectory
from components.trajectories.tables import column_batch, stored_text

Array: TypeAlias = np.ndarray


class EpisodeColumns:
    """A batch of whole groups, or of the episodes of whole groups that remain after a selection."""

    def __init__(self, batch: pa.RecordBatch, rows: Sequence[Trajectory] | None = None):
        self._batch = batch
        self._rows = rows
        """The trajectories, if they are in memory anyway."""

    @classmethod
    def of(cls, rows: Sequence[Trajectory]) -> EpisodeColumns:
        """Return trajectories in memory, with their rewards, as a batch."""
        return cls(column_batch(rows), rows)

    def __len__(self) -> int:
        return len(self._batch)

    @property
    def ids(self) -> pa.StringArray:
        """(N,) ids as they are stored (`components.trajectories.tables`)."""
        return self._batch.column("id")

    @property
    def names(self) -> list[str]:
        """(N,) ids."""
        return texts(self.ids)

    @property
    def groups(self) -> pa.StringArray:
        """(N,) names of the groups as they are stored."""
        return self._scenario("id")

    @property
    def group_names(self) -> list[str]:
        """Names of the groups, each once, in the order of their first episodes."""
        return texts(pc.unique(self.groups))

    @property
    def group_texts(self) -> list[str]:
        """(N,) name of the group."""
        return texts(self.groups)

    @property
    def types(self) -> list[str]:
        """(N,) types of the scenarios."""
        return texts(self._scenario("type"))

    @property
    def difficulties(self) -> list[int]:
        """(N,) difficulties of the scenarios."""
        difficulties: list[int] = self._scenario("difficulty").to_pylist()
        return difficulties

    @property
    def boundaries(self) -> list[str | None]:
        """(N,) boundaries that failed; None for a finished episode."""
        boundaries = self._batch.column("failure").field("boundary").to_pylist()
        return [name if failed else None for name, failed in zip(boundaries, self.failed_N.tolist(), strict=True)]

    @cached_property
    def group_N(self) -> Array:
        """(N,) index of the group in the batch."""
        groups = self.groups
        changed_N = np.ones(len(groups), bool)
        if len(groups) > 1:
            changed_N[1:] = pc.not_equal(groups[1:], groups[:-1]).to_numpy(zero_copy_only=False)
        return np.cumsum(changed_N) - 1

    @cached_property
    def first_G(self) -> Array:
        """(G,) position of the first episode of each group."""
        return np.flatnonzero(np.diff(self.group_N, prepend=-1))

    @cached_property
    def scored_N(self) -> Array:
        """(N,) True if the episode has a reward."""
        return self._batch.column("reward").is_valid().to_numpy(zero_copy_only=False)

    @cached_property
    def reward_N(self) -> Array:
        """(N,) reward; NaN without one."""
        return _floats(self._batch.column("reward"))

    @cached_property
    def failed_N(self) -> Array:
        """(N,) True if the episode failed."""
        return self._batch.column("failure").is_valid().to_numpy(zero_copy_only=False)

    @cached_property
    def success_N(self) -> Array:
        """(N,) True if the environment reported success; False for a failed episode."""
        index_N, outcomes = self._outcomes
        succeeded = np.array([bool(outcome.get("success", False)) for outcome in outcomes], bool)
        return succeeded[index_N] & ~self.failed_N

    @cached_property
    def stated_N(self) -> Array:
        """(N,) True if the environment stated success or no success."""
        index_N, outcomes = self._outcomes
        return np.array([outcome.get("success") is not None for outcome in outcomes], bool)[index_N]

    def metric_N(self, name: str) -> Array:
        """(N,) metric of the episode; NaN if it is missing."""
        return self._mapped("metrics", name)[0]

    def number_N(self, name: str) -> Array:
        """(N,) number with this name: a metric, or a component of the score, or a value of the outcome. NaN if it is
        missing, NaN or not a number. A component does not hide a value of the outcome with the same name."""
        values_N, present_N = self._mapped("metrics", name)
        if not present_N.all():
            index_N, outcomes = self._outcomes
            reported = np.array([_number(outcome.get(name)) for outcome in outcomes], float)[index_N]
            is_reported = np.array([name in outcome for outcome in outcomes], bool)[index_N]
            parts_N, has_part_N = self._mapped("components", name)
            values_N = np.where(present_N, values_N, np.where(has_part_N & ~is_reported, parts_N, reported))
        return values_N

    def number_names(self) -> set[str]:
        """Return the names of the numbers of scored episodes."""
        scored = self.take(np.flatnonzero(self.scored_N))
        names: set[str] = set()
        for column in ("metrics", "components"):
            if column in scored._batch.schema.names:
                names.update(texts(pc.unique(_slice(scored._batch.column(column), "keys"))))
        index_N, outcomes = scored._outcomes
        for place in set(index_N.tolist()):
            names.update(name for name, value in outcomes[place].items() if not math.isnan(_number(value)))
        return {name for name in names if not np.isnan(scored.number_N(name)).all()}

    def rank_N(self) -> Array:
        """(N,) rank of the reward in the episode's group, from 0 for the highest; ties go to the earlier episode, and
        episodes without a reward come last."""
        order_N = np.lexsort((-self.reward_N, ~self.scored_N, self.group_N))
        rank_N = np.empty(len(self), np.int64)
        rank_N[order_N] = np.arange(len(self)) - self.first_G[self.group_N]
        return rank_N

    def reward_range(self) -> tuple[Array, Array]:
        """Return the (G,) lowest and the (G,) highest reward of each group; both NaN without rewards."""
        return np.fmin.reduceat(self.reward_N, self.first_G), np.fmax.reduceat(self.reward_N, self.first_G)

    def in_groups_N(self, names: Collection[str]) -> Array:
        """(N,) True if the group has one of these names."""
        stored = pa.array(map(stored_text, names), pa.string())
        return pc.is_in(self.groups, stored).to_numpy(zero_copy_only=False)

    def scenario_values(self, field: str) -> list[Any]:
        """Return the distinct values of a field of the scenarios, `type` or `difficulty`."""
        values = pc.unique(self._scenario(field))
        return texts(values) if pa.types.is_string(values.type) else values.to_pylist()

    def with_scenario_N(self, field: str, values: Sequence[str | int]) -> Array:
        """(N,) True if the field of the scenario, `type` or `difficulty`, has one of these values."""
        column = self._scenario(field)
        stored = [stored_text(value) if isinstance(value, str) else value for value in values]
        return pc.is_in(column, pa.array(stored, column.type)).to_numpy(zero_copy_only=False)

    def ordered_rewards(self) -> tuple[Array, Array]:
        """Return the rewards of the scored episodes, ascending within each group, and the (G,) number of each group."""
        order = np.lexsort((self.reward_N, self.group_N))
        order = order[self.scored_N[order]]
        return self.reward_N[order], np.bincount(self.group_N[self.scored_N], minlength=len(self.first_G))

    def place(self, name: str) -> int | None:
        """Return the position of the episode with this id; None if there is none."""
        place: int = pc.index(self.ids, stored_text(name)).as_py()
        return None if place < 0 else place

    def take(self, index: Array) -> EpisodeColumns:
        """Return the episodes at these ascending positions."""
        if len(index) == len(self):
            return self
        rows = None if self._rows is None else [self._rows[place] for place in index.tolist()]
        return EpisodeColumns(self._batch.take(pa.array(index)), rows)

    def where(self, mask_N: Array) -> pa.RecordBatch:
        """Return the columns of the episodes where the mask is True."""
        return self._batch.filter(pa.array(mask_N, pa.bool_()))

    def trajectories(self) -> list[Trajectory]:
        """Return the whole trajectories with their rewards, and score components among their metrics. The batch was
        read with WHOLE."""
        if self._rows is None:
            self._rows = list(scored_trajectories(self._batch))
        return list(self._rows)

    def trajectory_groups(self) -> Iterator[list[Trajectory]]:
        """Yield the trajectories of each group."""
        rows, bounds = self.trajectories(), [*self.first_G.tolist(), len(self)]
        for start, end in pairwise(bounds):
            yield rows[start:end]

    @cached_property
    def _outcomes(self) -> tuple[Array, list[dict[str, Any]]]:
        """The distinct outcomes, and the (N,) position of each episode's."""
        return distinct_jsons(self._batch.column("outcome"))

    def _scenario(self, name: str) -> pa.Array:
        return self._batch.column("scenario").field(name)

    def _mapped(self, column: str, key: str) -> tuple[Array, Array]:
        """Return the (N,) values of a key in a column of maps, NaN where it is missing, and where it is present."""
        values_N, present_N = np.full(len(self), np.nan), np.zeros(len(self), bool)
        if column in self._batch.schema.names:
            maps = self._batch.column(column)
            places = pc.indices_nonzero(pc.equal(_slice(maps, "keys"), stored_text(key))).to_numpy()
            offsets = maps.offsets.to_numpy()
            rows = np.searchsorted(offsets - offsets[0], places, side="right") - 1
            values_N[rows] = _floats(_slice(maps, "items"))[places]
            present_N[rows] = True
        return values_N, present_N


def _number(value: Any) -> float:
    return float(value) if isinstance(value, Real) else math.nan


def _floats(array: pa.Array) -> Array:
    """Return numbers as floats; NaN for null."""
    return array.to_numpy(zero_copy_only=False).astype(float, copy=False)


def _slice(maps: pa.MapArray, part: str) -> pa.Array:
    """Return the keys or items of the maps; those of a sliced array are those of the whole one."""
    offsets = maps.offsets
    return getattr(maps, part)[offsets[0].as_py() : offsets[-1].as_py()]
