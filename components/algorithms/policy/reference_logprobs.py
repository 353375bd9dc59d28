"""What the policy before the first gradient step of a training, and the reference, say of the sampled tokens.

Both are measured once, before the first step, and kept in the stage's scratch folder: a training that is killed later
goes on with the same numbers, though its policy has moved since. Values of a critic are measured with them, or later,
before the first step of the policy, where the critic is pretrained (`measure_values`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from components.algorithms.loop import distributed
from components.algorithms.policy.packing import Pack, Sequence_, pack
from components.algorithms.policy.policy import Policy
from components.algorithms.policy_gradient import losses
from components.algorithms.ppo.critic import Critic
from components.errors import ArtifactDamaged
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory

FILE = "before.safetensors"
Place = tuple[Trajectory, int]
"""A history."""


class Before:
    """Log-probabilities of the sampled tokens of each history, under both policies, and their normalised values where
    there is a critic; empty before `measure`."""

    def __init__(self, scratch: Path):
        self._file = scratch / FILE
        self._flat: dict[str, torch.Tensor] = {}
        """What the file holds."""
        self._columns: dict[str, dict[tuple[str, int], list[float]]] = {}

    def old(self, trajectory: Trajectory, history: int) -> list[float]:
        """(S,) of one history under the policy; empty where it was not measured."""
        return self._column("old", trajectory, history)

    def kl(self, trajectory: Trajectory, estimator: losses.Estimator) -> list[float]:
        """Of each sampled token, over all histories: an estimate of the KL of the policy to the reference."""
        old_S, reference_S = (torch.tensor(self.whole(name, trajectory)) for name in ("old", "reference"))
        return losses.kl(old_S, reference_S, estimator).tolist()

    def whole(self, name: Literal["old", "reference", "values"], trajectory: Trajectory) -> list[float]:
        """(S,) of one of the columns, over all histories."""
        return [value for place in range(len(trajectory.histories)) for value in self._column(name, trajectory, place)]

    def measure(
        self,
        policy: Policy,
        trajectories: Sequence[Trajectory],
        most_tokens: int,
        *,
        reference: bool,
        first: bool,
        critic: Critic | None = None,
    ) -> None:
        """Measures all trajectories, or, where `first` is False, reads what was measured before the first step. Raises
        ArtifactDamaged where that is gone."""
        from safetensors.torch import load_file

        def logprobs(one: Pack, cut: Cut) -> tuple[torch.Tensor]:
            return (policy.logprobs(one, cut)[0],)

        measured = partial(_measured, _places(trajectories), most_tokens=most_tokens, padded=policy.padded)
        if first:
            with torch.no_grad(), policy.without_dropout():
                if critic is None:
                    flat = measured(("old",), logprobs)
                else:
                    flat = measured(("old", "values"), critic.logprobs_and_values)
            if reference:
                with policy.as_reference():
                    flat |= measured(("reference",), logprobs)
            self._write(flat)
        elif self._file.is_file():
            flat = load_file(self._file)
        else:
            raise ArtifactDamaged(f"{self._file} is gone: the training cannot go on; remove {self._file.parent}")
        self._take(flat, trajectories)

    def measure_values(
        self, critic: Critic, trajectories: Sequence[Trajectory], most_tokens: int, *, padded: bool
    ) -> None:
        """Measure the values of the critic as it stands now, in place of those measured before. padded: as
        `Policy.padded`."""

        def values(one: Pack, _: Cut) -> tuple[torch.Tensor]:
            with critic.values(one) as value_S:
                return (value_S,)

        with torch.no_grad():
            flat = _measured(_places(trajectories), ("values",), values, most_tokens=most_tokens, padded=padded)
        self._write(self._flat | flat)
        self._take(self._flat | flat, trajectories)

    def _write(self, flat: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        if distributed.first():
            aside = self._file.with_suffix(".part")
            save_file(flat, aside)
            aside.replace(self._file)

    def _take(self, flat: dict[str, torch.Tensor], trajectories: Sequence[Trajectory]) -> None:
        self._flat = flat
        for name, column in flat.items():
            values = iter(column.tolist())
            self._columns[name] = {
                (one.id, place): [next(values) for _ in range(sum(one.histories[place].sampled_mask()))]
                for one, place in _places(trajectories)
            }

    def _column(self, name: str, trajectory: Trajectory, history: int) -> list[float]:
        return self._columns.get(name, {}).get((trajectory.id, history), [])


def _places(trajectories: Sequence[Trajectory]) -> list[Place]:
    return [(one, place) for one in trajectories for place in range(len(one.histories))]


def _measured(
    places: Sequence[Place],
    names: Sequence[str],
    read: Callable[[Pack, Cut], tuple[torch.Tensor, ...]],
    *,
    most_tokens: int,
    padded: bool,
) -> dict[str, torch.Tensor]:
    """(S,) of each name, over all places, in their order. read: gives one (S,) for each name, of a pack."""
    by_cut: dict[Cut, list[Sequence_]] = defaultdict(list)
    total = 0
    for one, place in places:
        history = one.histories[place]
        targets = [at for at, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
        by_cut[Cut.of(one)].append(Sequence_(history.token_ids, targets, first=total))
        total += len(targets)
    found = {name: torch.zeros(total) for name in names}
    for cut, sequences in by_cut.items():
        for part, real in distributed.share(pack(sequences, most_tokens, padded=padded)):
            for name, values_S in zip(names, read(part, cut), strict=True):
                if real:
                    found[name][part.number_S.cpu()] = values_S.float().cpu()
    return {name: distributed.add_up(column) for name, column in found.items()}
