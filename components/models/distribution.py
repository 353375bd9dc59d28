"""The distribution that tokens are drawn from: softmax of the logits over a temperature, cut to its likely tokens.

The engine draws from it and the trainer computes log-probabilities under it, so that both mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from components.errors import ArtifactError
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Cut:
    """Which distribution."""

    temperature: float = 1.0
    """Above 0: a greedy choice has no distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0

    @classmethod
    def of(cls, trajectory: Trajectory) -> Cut:
        """From which a trajectory was sampled. Raises ArtifactError where it was greedy."""
        sampling = trajectory.sampling
        found = cls(
            float(sampling.get("temperature", 1.0)),
            float(sampling.get("top_p", 1.0)),
            int(sampling.get("top_k", 0)),
            float(sampling.get("min_p", 0.0)),
        )
        if found.temperature <= 0:
            raise ArtifactError(
                f"trajectory {trajectory.id} was sampled with {sampling}: greedy choices have no probability to learn "
                "from. Collect with a temperature above 0"
            )
        return found

    @property
    def whole(self) -> bool:
        """Whether every token can be drawn."""
        return self.top_p >= 1 and self.top_k <= 0 and self.min_p <= 0


def kept(logps_RV: torch.Tensor, cut: Cut) -> torch.Tensor:
    """(R, V) True for the tokens that can be drawn, from log-probabilities at the temperature: of the top_k likeliest
    those whose mass reaches top_p (nucleus sampling, arXiv:1904.09751), and of them those with at least min_p times
    the probability of the likeliest (arXiv:2407.01082)."""
    import torch

    keep_RV = torch.ones_like(logps_RV, dtype=torch.bool)
    if cut.top_k > 0 or cut.top_p < 1:
        ordered_RV, index_RV = logps_RV.sort(dim=-1, descending=True)
        first_RV = torch.ones_like(keep_RV)
        if cut.top_k > 0:
            first_RV[:, cut.top_k :] = False
        if cut.top_p < 1:
            mass_RV = torch.where(first_RV, ordered_RV, -torch.inf).softmax(-1).cumsum(-1)
            before_RV = torch.cat([torch.zeros_like(mass_RV[:, :1]), mass_RV[:, :-1]], dim=-1)
            first_RV &= before_RV < cut.top_p
            first_RV[:, 0] = True  # also where top_p is 0 in this type
        keep_RV = torch.empty_like(first_RV).scatter(-1, index_RV, first_RV)
    if cut.min_p > 0:
        inside_RV = torch.where(keep_RV, logps_RV, -torch.inf)
        keep_RV &= logps_RV >= inside_RV.amax(-1, keepdim=True) + torch.tensor(cut.min_p).log().item()
    return keep_RV
