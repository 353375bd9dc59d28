"""The sampling distribution: softmax of the logits divided by the temperature, truncated to likely tokens.

The engine samples from it and the trainer computes log-probabilities under it.
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
    """Temperature and truncation of a sampling distribution."""

    temperature: float = 1.0
    """Divisor of the logits, above 0: greedy decoding has no distribution."""
    top_p: float = 1.0
    """Probability mass of the smallest token set to sample from; 1 means all tokens."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 means no limit."""
    min_p: float = 0.0
    """Minimum probability of a sampled token, as a share of the most likely token's probability."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> Cut:
        """Return the distribution that a trajectory was sampled from. Raises ArtifactError for greedy decoding."""
        sampling = trajectory.sampling
        cut = cls(
            float(sampling.get("temperature", 1.0)),
            float(sampling.get("top_p", 1.0)),
            int(sampling.get("top_k", 0)),
            float(sampling.get("min_p", 0.0)),
        )
        if cut.temperature <= 0:
            raise ArtifactError(
                f"trajectory {trajectory.id} was sampled with {sampling}: greedy choices have no probability to learn "
                "from. Collect with a temperature above 0"
            )
        return cut

    @property
    def whole(self) -> bool:
        """True if the distribution is not truncated."""
        return self.top_p >= 1 and self.top_k <= 0 and self.min_p <= 0


def support_mask(logps_RV: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Return an (R, V) mask, True for tokens that can be sampled, from log-probabilities after the temperature.

    These are the top_k most likely tokens, of them the smallest set with mass top_p (nucleus sampling,
    arXiv:1904.09751), and of them those with at least min_p times the highest probability (arXiv:2407.01082).
    """
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
            first_RV[:, 0] = True  # also if top_p underflows to 0 in this dtype
        keep_RV = torch.empty_like(first_RV).scatter(-1, index_RV, first_RV)
    if cut.min_p > 0:
        inside_RV = torch.where(keep_RV, logps_RV, -torch.inf)
        keep_RV &= logps_RV >= inside_RV.amax(-1, keepdim=True) + torch.tensor(cut.min_p).log().item()
    return keep_RV
