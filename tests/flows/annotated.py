"""Runs with episodes for tests of annotation."""

from __future__ import annotations

from pathlib import Path

from components.trajectories.schema import Failure, History, Message, Scenario, ToolCall, Trajectory
from flows.annotation.episodes import StageEpisodes, load, stage_named
from flows.history.records import RunRecord
from tests.flows.pretend import pretend
from tests.trajectories.builders import TOOLS

ATTACK = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'></textarea>\"'><svg onload=hacked=3>"


def talk(name: str, sample: int, answer: str, *, success: bool, failure: Failure | None = None) -> Trajectory:
    call = ToolCall("call_0", "look_up", f'{{"id": "{name}", "note": "<b>x</b>"}}')
    messages = [
        Message("system", "You serve customers."),
        Message("user", f"Where is {name}? {ATTACK}"),
        Message("assistant", "", [call]),
        Message("tool", f"shipped {ATTACK}", tool_call_id="call_0"),
        Message("assistant", answer),
    ]
    return Trajectory(
        f"{name}/{sample}",
        Scenario(name, {}, "train", "refund", 2),
        sample,
        [History(messages)],
        tools=TOOLS,
        outcome={"success": success, "said": ATTACK, "odd": float("nan")},
        failure=failure,
        policy="51878a8b1593",
        reward=None if failure else 0.9 if success else 0.125,
    )


EPISODES = [
    talk("order-A7", 0, "It is on its way.", success=True),
    talk("order-A7", 1, f"I do not know. {ATTACK}", success=False),
    talk("order-A7", 2, "\ud800 odd", success=False),
    talk("order-B1", 0, "Refunded.", success=True),
    talk("order-B1", 1, "", success=False, failure=Failure("environment", "EnvironmentFailed", f"step: {ATTACK}")),
]


def played(root: Path) -> RunRecord:
    """Create a run with the first round's episodes and their scores."""
    others = {f"evaluate[{name}]": "+-" for name in ("start", "sft", "final")}
    others |= {"collect[sft]": "+", "judge[sft]": "+"}
    return pretend(root, rounds=1, episodes={"collect[1]": EPISODES, "judge[1]": EPISODES, **others})


def loaded(root: Path, run: RunRecord, label: str | None = None) -> StageEpisodes:
    return load(root, run, stage_named(run, label))
