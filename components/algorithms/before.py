"""What the policy before the first gradient step of a training, and the reference, say of the sampled tokens.

Both are measured once, before the first step, and kept in the stage's scratch folder: a training that is killed later
goes on with the same numbers, though its policy has moved since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from components.algorithms import losses
from components.algorithms.packing import Sequence_, pack
from components.algorithms.policy import Policy
from components.errors import ArtifactDamaged
from components.models.distribution import Cut
from components.trajectories.schema import Trajectory

FILE = "before.safetensors"


class Before:
    """Log-probabilities of the sampled tokens of each history, under both policies; empty before `measure`."""

    def __init__(self, scratch: Path):
        self._file = scratch / FILE
        self._old: dict[tuple[str, int], list[float]] = {}
        self._reference: dict[tuple[str, int], list[float]] = {}

    def of(self, trajectory: Trajectory, history: int) -> tuple[list[float], list[float]]:
        """(S,) each, of one history; empty where it was not measured."""
        place = trajectory.id, history
        return self._old.get(place, []), self._reference.get(place, [])

    def kl(self, trajectory: Trajectory, estimator: losses.Estimator) -> list[float]:
        """Of each sampled token, over all histories: an estimate of the KL of the policy to the reference."""
        pairs = [self.of(trajectory, place) for place in range(len(trajectory.histories))]
        old_S, reference_S = (torch.tensor([value for pair in pairs for value in pair[side]]) for side in (0, 1))
        return losses.kl(old_S, reference_S, estimator).tolist()

    def measure(
        self, policy: Policy, trajectories: Sequence[Trajectory], most_tokens: int, *, reference: bool, first: bool
    ) -> None:
        """Measures all trajectories, or, where `first` is False, reads what was measured before the first step. Raises
        ArtifactDamaged where that is gone."""
        from safetensors.torch import load_file, save_file

        places = [(one, place) for one in trajectories for place in range(len(one.histories))]
        if first:
            flat = {"old": self._logprobs(policy, places, most_tokens)}
            if reference:
                with policy.as_reference():
                    flat["reference"] = self._logprobs(policy, places, most_tokens)
            aside = self._file.with_suffix(".part")
            save_file(flat, aside)
            aside.replace(self._file)
        elif self._file.is_file():
            flat = load_file(self._file)
        else:
            raise ArtifactDamaged(f"{self._file} is gone: the training cannot go on; remove {self._file.parent}")
        for name, kept in (("old", self._old), ("reference", self._reference)):
            values = iter(flat[name].tolist() if name in flat else ())
            for one, place in places if name in flat else ():
                kept[one.id, place] = [next(values) for _ in range(sum(one.histories[place].sampled_mask()))]

    def _logprobs(self, policy: Policy, places: Sequence[tuple[Trajectory, int]], most_tokens: int) -> torch.Tensor:
        """(S,) over all places, in their order."""
        by_cut: dict[Cut, list[int]] = defaultdict(list)
        for index, (one, _) in enumerate(places):
            by_cut[Cut.of(one)].append(index)
        found: dict[int, torch.Tensor] = {}
        for cut, indices in by_cut.items():
            made = []
            for index in indices:
                one, place = places[index]
                history = one.histories[place]
                targets = [at for at, is_sampled in enumerate(history.sampled_mask()) if is_sampled]
                made.append(Sequence_(history.token_ids, targets))
            for part in pack(made, most_tokens):
                with torch.no_grad():
                    logprob_S, _ = policy.logprobs(part.to(policy.device), cut)
                for number, member in enumerate(part.members):
                    found[indices[member]] = logprob_S[part.sequence_S.to(logprob_S.device) == number].float().cpu()
        return torch.cat([found[index] for index in sorted(found)]) if found else torch.zeros(0)
