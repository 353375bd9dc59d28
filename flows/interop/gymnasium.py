"""Gymnasium environments (gymnasium 1.x) over environments of Espalier, in the process of the caller.

    from flows.interop.gymnasium import make

    env = make("environment=maze", "agent.max_turns=72")
    observation, info = env.reset(seed=3)                     # scenario 3 of the split
    observation, reward, terminated, truncated, info = env.step("left")

Observations and actions are text (`flows.interop.actions`). `info` has the messages, the tools at a reset, and the
environment's outcome. The rewards of an episode sum to the score of the configured reward. After `agent.max_turns`
actions an episode is truncated.

Importing this module registers `Espalier-v0`, so `gymnasium.make("flows.interop.gymnasium:Espalier-v0",
overrides=["environment=maze"])` works too. Needs: pip install -e '.[gym]'.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from components.environments.optional_packages import import_optional
from components.environments.protocol import Messages
from flows.interop import actions
from flows.interop.actions import InvalidRequest
from flows.interop.episode import EpisodeThread
from flows.interop.source import SPLIT, EpisodeSource, load

gymnasium = import_optional("gymnasium", "gym", "flows.interop.gymnasium")
Env: Any = gymnasium.Env
Text: Any = gymnasium.spaces.Text

ID = "Espalier-v0"
"""Registered id."""
LONGEST_ACTION, LONGEST_OBSERVATION = 10_000, 1_000_000
"""Maximum lengths of texts in characters."""


class UnicodeText(Text):
    """Texts of any characters, up to a length. Samples consist of printable ASCII."""

    def __init__(self, max_length: int, seed: Any = None):
        super().__init__(max_length, min_length=0, charset="".join(map(chr, range(32, 127))), seed=seed)

    def contains(self, x: Any) -> bool:
        """Return True for a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random text, of at most 100 characters unless a mask gives the length."""
        if mask is None and probability is None:
            mask = (int(self.np_random.integers(0, min(100, self.max_length) + 1)), None)
        return str(super().sample(mask, probability))

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"


class TextEnv(Env):
    """Environment whose observations and actions are text.

    `reset(seed=N)` starts scenario N modulo their number; `reset(options={"scenario": ID})` a scenario by id; a reset
    with neither draws a scenario at random.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(self, source: EpisodeSource, render_mode: str | None = None):
        if render_mode not in (None, "ansi"):
            raise gymnasium.error.UnsupportedMode(f"render_mode = {render_mode!r}: expected None or 'ansi'")
        self.source, self.render_mode = source, render_mode
        self.observation_space = UnicodeText(LONGEST_OBSERVATION)
        self.action_space = UnicodeText(LONGEST_ACTION)
        self._has_tools = False
        self._conversation: Messages = []
        self._thread: EpisodeThread | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode. Raises gymnasium.error.Error for an unknown scenario or option."""
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"scenario"}:
            raise gymnasium.error.Error(f"options: {sorted(unknown)[0]!r} is unknown; expected scenario")
        number = seed if seed is not None else int(self.np_random.integers(len(self.source.scenarios)))
        try:
            scenario = self.source.scenario(id=options.get("scenario"), seed=number)
        except InvalidRequest as error:
            raise gymnasium.error.Error(str(error)) from None
        if self._thread is None:
            self._thread = EpisodeThread(self.source)
        start = self._thread.call(lambda episode: episode.reset(scenario))
        self._has_tools, self._conversation = bool(start.tools), list(start.messages)
        info = {
            "scenario": scenario.id,
            "type": scenario.type,
            "difficulty": scenario.difficulty,
            "messages": start.messages,
            "tools": start.tools,
        }
        return start.text[:LONGEST_OBSERVATION], copy.deepcopy(info)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Execute an action. Raises gymnasium.error.InvalidAction for one outside the action space or with an invalid
        message, ResetNeeded before a reset and after the end."""
        if not self.action_space.contains(action):
            raise gymnasium.error.InvalidAction(
                f"action = {action!r:.80}: expected text of at most {LONGEST_ACTION} characters"
            )
        if self._thread is None:
            raise gymnasium.error.ResetNeeded("step before reset: call reset() first")
        try:
            message = actions.from_text(action, self._has_tools)
        except InvalidRequest as error:
            raise gymnasium.error.InvalidAction(str(error)) from None
        try:
            transition = self._thread.call(lambda episode: episode.step(message))
        except InvalidRequest as error:
            raise gymnasium.error.ResetNeeded(str(error)) from None
        self._conversation = [*([] if transition.new_context else [*self._conversation, message]), *transition.messages]
        info = {
            "messages": transition.messages,
            "outcome": transition.info,
            "success": bool(transition.info.get("success", False)),
            "new_context": transition.new_context,
        }
        text = transition.text[:LONGEST_OBSERVATION]
        return text, transition.reward, transition.terminated, transition.truncated, copy.deepcopy(info)

    def render(self) -> str | None:
        """Return the conversation so far, with render_mode="ansi"."""
        if self.render_mode is None:
            return None
        return "\n".join(_shown(message) for message in self._conversation)

    def close(self) -> None:
        """Close the instance of the environment."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


def make(
    *overrides: str, split: str = SPLIT, config_dir: str | Path | None = None, render_mode: str | None = None
) -> TextEnv:
    """Return the environment that overrides of `flows.run` describe. Raises SpecError and ResourceError."""
    return TextEnv(load(overrides, split, config_dir), render_mode)


def _make_registered(
    overrides: Sequence[str] = (), split: str = SPLIT, config_dir: str | None = None, render_mode: str | None = None
) -> TextEnv:
    return make(*overrides, split=split, config_dir=config_dir, render_mode=render_mode)


def _shown(message: dict[str, Any]) -> str:
    calls = [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls") or ()]
    return f"{message['role']}: {' '.join([*filter(None, [message['content']]), *calls])}"


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=_make_registered, order_enforce=False, disable_env_checker=True)
