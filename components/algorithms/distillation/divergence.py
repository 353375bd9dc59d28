"""The divergence of two policies over the whole vocabulary, at each node from which a sampled token is predicted.

Both see the same pack. Logits of either are made for `LOGIT_ROWS` nodes at a time, and again in the backward pass:
memory does not grow with tokens times vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from components.algorithms.policy import policy as policies
from components.algorithms.policy.logits import Head
from components.algorithms.policy.packing import Pack
from components.algorithms.policy.policy import Policy
from components.errors import ResourceError


def reverse_kl(logits_UV: torch.Tensor, teacher_UV: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """(U,) KL(policy || teacher) = Σ_v p(v) (log p(v) - log q(v)) in nats (MiniLLM, arXiv:2306.08543, eq. 1, of one
    token). Logits beyond the shorter of the two vocabularies belong to no token (models round the size of their head
    up) and take no part."""
    width = min(logits_UV.shape[-1], teacher_UV.shape[-1])
    own_UV, their_UV = (
        torch.log_softmax(each[:, :width].float() / temperature, dim=-1) for each in (logits_UV, teacher_UV)
    )
    return (own_UV.exp() * (own_UV - their_UV)).sum(-1)


def to_teacher(policy: Policy, teacher: Policy, pack: Pack, temperature: float) -> torch.Tensor:
    """(S,) reverse KL at the sampled tokens of the pack, with gradient to the policy. teacher: what it is as a
    reference is learned from; it may be the policy itself."""
    pack = pack.to(policy.device)
    with teacher.as_reference():
        their_UX, their_head = teacher.rows(pack)
        their_UX = their_UX.to(policy.device)
    if isinstance(their_head, Head) and their_head.adapted:
        raise ResourceError(
            "model.lora.target_modules puts an adapter on the output head, which algorithm=distill does not compute; "
            "expected all-linear, or names of other layers"
        )
    own_UX, head = policy.rows(pack)

    def read(own_UX: torch.Tensor, their_UX: torch.Tensor) -> Any:
        with torch.no_grad():
            their_UV = their_head(their_UX.to(teacher.device)).to(policy.device)
        return reverse_kl(head(own_UX), their_UV, temperature)

    rows, parts = policies.LOGIT_ROWS, []
    for first in range(0, len(own_UX), rows):
        given = own_UX[first : first + rows], their_UX[first : first + rows]
        again = torch.is_grad_enabled() and len(own_UX) > rows
        parts.append(checkpoint(read, *given, use_reentrant=False) if again else read(*given))
    return torch.cat(parts)[pack.row_S]
