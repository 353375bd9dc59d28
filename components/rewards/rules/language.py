"""Penalty for text in undeclared scripts.

The penalty is proportional to the share of the agents' letters that belong to none of the declared scripts. Scripts are
those of Unicode (`Latin`, `Cyrillic`, `Han`, `Arabic`, …), as defined in the package `regex`; `unicodedata` lacks this
property. Digits, punctuation, whitespace, and letters without a script of their own do not count.
"""

from __future__ import annotations

from typing import Annotated, Literal

import regex
from pydantic import Field

from components.errors import JudgeError, Problem, SpecError
from components.rewards.rules.answers import agent_messages, last_text
from components.specs.registered import registered
from components.trajectories.schema import Score, Trajectory

_LETTER = regex.compile(r"[\p{L}--\p{Script=Common}--\p{Script=Inherited}]", flags=regex.V1)


@registered("reward.language")
class Language:
    """Penalty: -cost · share of the letters outside the declared scripts.

    Args:
        scripts: Unicode scripts, such as [Latin]; Japanese is [Han, Hiragana, Katakana].
        cost: Penalty for a share of 1; 0 or more.
        of: Text that counts: `all` messages of the agents, or the `last` one.

    The component `share` is that share; for an episode without letters it is 0.
    """

    def __init__(
        self,
        scripts: Annotated[list[str], Field(min_length=1)],
        cost: Annotated[float, Field(ge=0)] = 1.0,
        of: Literal["all", "last"] = "all",
    ):
        for script in scripts:
            if not _is_script(script):
                message = f"{script!r} is no script of Unicode; expected such as Latin, Cyrillic, Han or Arabic"
                raise SpecError([Problem("reward.scripts", message)])
        inside = "".join(rf"\p{{Script={script}}}" for script in scripts)
        self._inside = regex.compile(f"[{inside}]")
        self.cost, self.of = cost, of

    def __call__(self, trajectory: Trajectory) -> Score:
        texts = (
            [last_text(trajectory)]
            if self.of == "last"
            else [message.content for message in agent_messages(trajectory)]
        )
        if not texts:
            raise JudgeError("the episode has no message of an agent")
        letters = [letter for text in texts for letter in _LETTER.findall(text)]
        outside = sum(self._inside.match(letter) is None for letter in letters)
        share = outside / len(letters) if letters else 0.0
        return Score(trajectory.id, -self.cost * share, {"share": share})


def _is_script(name: str) -> bool:
    try:
        regex.compile(rf"\p{{Script={name}}}")
    except regex.error:
        return False
    return name.replace("_", "").isalpha()
