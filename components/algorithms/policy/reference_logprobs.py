"""Log-probabilities of the sampled tokens under the old policy (before the first gradient step of a training) and under
the reference.

Both are measured once, before the first gradient step, and saved in the stage's scratch folder: a resumed training
continues with the same numbers although its policy has changed. Values of a critic are measured together with them, or
later, after value pretraining and before the policy's first gradient step (`measure_values`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from components.algorithms.loop import distributed
from components.algorithms.policy.packing import Pack, ReadSequences, TokenSequence, plan
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient import losses
from components.algorithms.ppo.critic import ValueCritic
from components.errors import ArtifactDamaged
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory

FILE = "before.safetensors"
Place = tuple[Trajectory, int]
"""A trajectory and the index of one of its histories."""


class ReferenceLogprobs:
    """Log-probabilities of the sampled tokens of each history under both policies, and their normalised values if there
    is a critic; empty before `measure`."""

    def __init__(self, scratch: Path):
        self._file = scratch / FILE
        self._flat: dict[str, torch.Tensor] = {}
        """Columns of the file."""
        self._ranges: dict[tuple[str, int], tuple[int, int]] = {}
        """Range of each history in the columns."""

    def old(self, trajectory: Trajectory, history: int) -> list[float]:
        """Return the (S,) log-probabilities of one history under the old policy; empty if not measured."""
        return self._column("old", trajectory, history)

    def kl(self, trajectory: Trajectory, estimator: losses.Estimator) -> list[float]:
        """Return estimates of the KL divergence of the old policy from the reference on each sampled token, over all
        histories."""
        old_S, reference_S = (torch.tensor(self.whole(name, trajectory)) for name in ("old", "reference"))
        return losses.kl(old_S, reference_S, estimator).tolist()

    def whole(self, name: Literal["old", "reference", "values"], trajectory: Trajectory) -> list[float]:
        """Return the (S,) values of one column, over all histories."""
        return [
            value for history in range(len(trajectory.histories)) for value in self._column(name, trajectory, history)
        ]

    def measure(
        self,
        policy: Policy,
        trajectories: Sequence[Trajectory],
        most_tokens: int,
        *,
        reference: bool,
        first: bool,
        critic: ValueCritic | None = None,
    ) -> None:
        """Measure all trajectories or, if `first` is False, read the measurements from before the first gradient step.
        Raises ArtifactDamaged if their file is missing or damaged."""

        def logprobs(packed: Pack, cut: Cut) -> tuple[torch.Tensor]:
            return (policy.logprobs(packed, cut)[0],)

        measure_columns = partial(
            _measured, _places(trajectories), most_tokens=most_tokens, padded=policy.padded, by_role=policy.by_role
        )
        if first:
            with torch.no_grad(), policy.without_dropout():
                if critic is None:
                    flat = measure_columns(("old",), logprobs)
                else:
                    flat = measure_columns(("old", "values"), critic.logprobs_and_values)
            if reference:
                with policy.as_reference():
                    flat |= measure_columns(("reference",), logprobs)
            self._write(flat)
        else:
            flat = self._saved(trajectories)
        self._take(flat, trajectories)

    def _saved(self, trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
        """Return the columns of the file, which an earlier attempt wrote. Raises ArtifactDamaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        sampled = sum(len(history.targets()) for trajectory in trajectories for history in trajectory.histories)
        try:
            flat = load_file(self._file)
            if "old" not in flat or any(tuple(column.shape) != (sampled,) for column in flat.values()):
                raise ValueError(f"expected a number for each of the {sampled} sampled tokens")
        except (OSError, ValueError, SafetensorError) as error:
            raise ArtifactDamaged(
                f"{self._file} is missing or damaged ({error}): the training cannot be resumed; remove "
                f"{self._file.parent} to start it again"
            ) from None
        return flat

    def measure_values(
        self, critic: ValueCritic, trajectories: Sequence[Trajectory], most_tokens: int, *, padded: bool
    ) -> None:
        """Measure the values of the critic in its current state, replacing earlier measurements. padded: as
        `Policy.padded`."""

        def values(packed: Pack, _: Cut) -> tuple[torch.Tensor]:
            with critic.values(packed) as value_S:
                return (value_S,)

        with torch.no_grad():
            flat = _measured(_places(trajectories), ("values",), values, most_tokens=most_tokens, padded=padded)
        self._write(self._flat | flat)
        self._take(self._flat | flat, trajectories)

    def _write(self, flat: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        if distributed.first():
            temporary = self._file.with_suffix(".part")
            save_file(flat, temporary)
            temporary.replace(self._file)

    def _take(self, flat: dict[str, torch.Tensor], trajectories: Sequence[Trajectory]) -> None:
        self._flat, end = flat, 0
        for trajectory, history in _places(trajectories):
            start, end = end, end + len(trajectory.histories[history].targets())
            self._ranges[trajectory.id, history] = start, end

    def _column(self, name: str, trajectory: Trajectory, history: int) -> list[float]:
        if name not in self._flat or (trajectory.id, history) not in self._ranges:
            return []
        values: list[float] = self._flat[name][slice(*self._ranges[trajectory.id, history])].tolist()
        return values


def _places(trajectories: Sequence[Trajectory]) -> list[Place]:
    return [(trajectory, history) for trajectory in trajectories for history in range(len(trajectory.histories))]


def _measured(
    places: Sequence[Place],
    names: Sequence[str],
    read: Callable[[Pack, Cut], tuple[torch.Tensor, ...]],
    *,
    most_tokens: int,
    padded: bool,
    by_role: bool = False,
) -> dict[str, torch.Tensor]:
    """Return the (S,) values of each name, over all places in their order. read: returns one (S,) array per name for a
    pack."""

    def sequence(numbered: tuple[Place, int]) -> TokenSequence:
        (trajectory, history_index), first = numbered
        history = trajectory.histories[history_index]
        return TokenSequence(history.token_ids, history.targets(), first=first, role=history.agent)

    by_cut: dict[Cut, list[tuple[Place, int]]] = defaultdict(list)
    total = 0
    for trajectory, history_index in places:
        by_cut[Cut.of(trajectory)].append(((trajectory, history_index), total))
        total += len(trajectory.histories[history_index].targets())
    columns = {name: torch.zeros(total) for name in names}
    numbers, measured = [], []  # on the device until the last pack, so that no pack waits for it
    for cut, cut_places in by_cut.items():
        plans = plan(ReadSequences(cut_places, sequence), most_tokens, padded=padded, by_role=by_role)
        for planned, real in distributed.share(plans):
            packed = planned.lay_out()
            values_NS = torch.stack([values_S.float() for values_S in read(packed, cut)])
            if real:
                numbers.append(packed.number_S)
                measured.append(values_NS)
    if measured:
        for name, values_S in zip(names, torch.cat(measured, 1).cpu(), strict=True):
            columns[name][torch.cat(numbers)] = values_S
    return {name: distributed.all_reduce_sum(column) for name, column in columns.items()}
