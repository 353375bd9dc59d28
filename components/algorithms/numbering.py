"""Which sampled token is which, once sequences lie in packs: each target carries its number through them.

The number travels in the column of advantages, for uses that have no advantages or look them up by the number.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from components.algorithms.packing import Pack, Sequence_

MOST = 2**24
"""Up to here float32, the type of the column, counts exactly."""


def numbered(sequence: Sequence_, first: int) -> Sequence_:
    """The sequence with its targets numbered from `first`."""
    return replace(sequence, advantages=number_range(first, len(sequence.targets)))


def number_range(first: int, count: int) -> list[float]:
    """`count` numbers from `first`, as a column."""
    assert first + count <= MOST, f"more than {MOST} sampled tokens in one round"
    return [float(number) for number in range(first, first + count)]


def numbers(pack: Pack) -> torch.Tensor:
    """(S,) the number of each sampled token."""
    return pack.advantage_S.long()
