"""Episodes of another model, in the tokens of the one in training.

`sampling["tokenizer"]` of a trajectory says whose token ids it holds, where that was not the model in training
(`weights.tokenizer_digest`). Where that is the very tokenizer, chat template included, its tokens are kept as they were
sampled. Else the ids mean nothing here: they are taken out, and what was said is laid out anew by the own chat template
(`ChatFormat.streams`), as any written conversation is. An answer that was cut off cannot be: laid out, it would end
with the end-of-turn token and teach to stop in the middle; its episode is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from components.errors import ArtifactError
from components.trajectories.schema import History, Message, Trajectory

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer"
"""Key of `Trajectory.sampling`."""
UNKNOWN = "unknown"
"""Its value where a server does not say which tokenizer it has."""


def in_own_tokens(trajectories: Sequence[Trajectory], base_dir: Path, *, sampled: bool) -> list[Trajectory]:
    """The trajectories without token ids of another tokenizer than that of the model in `base_dir`. sampled: they are
    to be the policy's own samples; raises ArtifactError where one is not."""
    if not any(TOKENIZER in one.sampling for one in trajectories):
        return list(trajectories)
    from components.models.weights import tokenizer_digest

    own = tokenizer_digest(base_dir)
    found = []
    for one in trajectories:
        if one.sampling.get(TOKENIZER, own) == own:
            found.append(one)
        elif sampled:
            raise ArtifactError(
                f"trajectory {one.id} was played by a model with another tokenizer: a policy gradient needs the "
                "policy's own tokens. Learn from such episodes with sft, distill or a preference algorithm"
            )
        elif not any(message.finish_reason == "length" for history in one.histories for message in history.messages):
            found.append(replace(one, histories=[_written(history) for history in _longest(one.histories)]))
    if len(found) < len(trajectories):
        log.warning(
            "episodes of another model left out of training, for an answer was cut off: %d of %d",
            *(len(trajectories) - len(found), len(trajectories)),
        )
    return found


def _longest(histories: Sequence[History]) -> list[History]:
    """Without those that a later one begins with: where the other model's template rewrites the past, each of its turns
    has a history of its own, with all that was said before."""
    return [
        one
        for index, one in enumerate(histories)
        if not any(
            later.agent == one.agent and _said(later)[: len(one.messages)] == _said(one)
            for later in histories[index + 1 :]
        )
    ]


def _said(history: History) -> list[Message]:
    return [replace(message, span=None, finish_reason=None) for message in history.messages]


def _written(history: History) -> History:
    return History(_said(history), agent=history.agent)
