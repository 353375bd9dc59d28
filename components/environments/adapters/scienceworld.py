"""ScienceWorld: elementary-school experiments in a simulated house: boil water, grow a plant, test conductivity.

The simulator is a Java program. Each active instance has its own simulator process; a few processes of closed instances
are reused. The simulator's gold path is the solution. The score rises with the completed steps of the task; a wrong
`focus on` ends the episode with score 0.

Scenarios are variations of a task. As in the benchmark (up to one variation), the first half is for training and the
last quarter is held out.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from components.environments.optional_packages import import_optional
from components.environments.protocol import Messages, Step
from components.environments.restorable import RestorableActions
from components.environments.seeded import Count
from components.environments.tools import InvalidAction, acts, shorten
from components.errors import EnvironmentFailed, Problem, ResourceError, SpecError
from components.specs.base import nearest
from components.specs.registered import registered
from components.trajectories.schema import Scenario

SYSTEM = """You do science in a house of several rooms. Each turn, say one action: look around, look at X, look in X, \
open X, close X, go to ROOM, pick up X, put down X, move X to Y, pour X in Y, dunk X in Y, mix X, use X, use X on Y, \
activate X, deactivate X, connect X to Y, disconnect X, read X, eat X, flush X, wait, wait1, inventory, task, \
focus on X. Focus only on what the task asks for: focusing on anything else ends it."""
ACTION = re.compile(r"[A-Za-z0-9 ,.'()/:-]{0,200}")
UNKNOWN = "No known action matches that input."
WAIT = 120.0
"""Timeout of a simulator call, in seconds."""
IDLE = 4
"""Maximum number of idle simulators kept for reuse."""

TASKS: dict[str, tuple[int, int]] = {
    "boil": (30, 4),
    "melt": (30, 4),
    "freeze": (30, 3),
    "change-the-state-of-matter-of": (30, 3),
    "use-thermometer": (540, 3),
    "measure-melting-point-known-substance": (436, 3),
    "measure-melting-point-unknown-substance": (300, 4),
    "power-component": (20, 2),
    "power-component-renewable-vs-nonrenewable-energy": (20, 2),
    "test-conductivity": (900, 3),
    "test-conductivity-of-unknown-substances": (600, 3),
    "find-living-thing": (300, 2),
    "find-non-living-thing": (300, 1),
    "find-plant": (300, 1),
    "find-animal": (300, 1),
    "grow-plant": (126, 5),
    "grow-fruit": (126, 5),
    "chemistry-mix": (32, 3),
    "chemistry-mix-paint-secondary-color": (36, 1),
    "chemistry-mix-paint-tertiary-color": (36, 3),
    "lifespan-longest-lived": (125, 1),
    "lifespan-shortest-lived": (125, 1),
    "lifespan-longest-lived-then-shortest-lived": (125, 1),
    "identify-life-stages-1": (14, 4),
    "identify-life-stages-2": (10, 2),
    "inclined-plane-determine-angle": (168, 5),
    "inclined-plane-friction-named-surfaces": (1386, 4),
    "inclined-plane-friction-unnamed-surfaces": (162, 4),
    "mendelian-genetics-known-plant": (120, 5),
    "mendelian-genetics-unknown-plant": (480, 5),
}
"""Number of variations and difficulty of each task. Difficulty by the length of the gold path: 1 up to 10 actions, 2 up
to 16, 3 up to 30, 4 up to 50, 5 above."""


@registered("environment.scienceworld")
class ScienceWorld(RestorableActions):
    """ScienceWorld's tasks.

    Scenario types: the tasks. Difficulty: by the length of the gold path, see TASKS.

    Args:
        tasks: Names of tasks, in equal proportions; null takes all 30.
        simplifications: Simplifications of the simulator, separated by commas: `easy` (all of them), teleportAction,
            selfWateringFlowerPots, openContainers, openDoors, noElectricalAction; empty for none.
        seed: Seed of the choice of variations.
        train, heldout: Number of scenarios of the split.
        max_steps: Maximum number of steps of an episode.
    """

    blocking = True
    """Methods block, so they run in threads."""

    def __init__(
        self,
        tasks: Sequence[str] | None = None,
        simplifications: str = "easy",
        seed: int = 0,
        train: Count = 120,
        heldout: Count = 60,
        max_steps: Annotated[int, Field(ge=1)] = 200,
    ):
        import_optional("scienceworld.constants", "scienceworld")
        if shutil.which("java") is None:
            raise ResourceError(
                "environment: ScienceWorld needs `java`, which is not on the PATH; install a Java runtime"
            )
        self.tasks = list(TASKS) if tasks is None else list(tasks)
        problems = [] if self.tasks else [Problem("environment.tasks", "is empty; expected a task, or null")]
        for task in self.tasks:
            if task not in TASKS:
                message = f"ScienceWorld has no task {task!r}; it has {', '.join(TASKS)}"
                problems.append(Problem("environment.tasks", message, nearest(task, TASKS)))
        if problems:
            raise SpecError(problems)
        self.simplifications, self.max_steps = simplifications, max_steps
        self._scenarios = [
            *_choose(self.tasks, "heldout", heldout, seed, simplifications),
            *_choose(self.tasks, "train", train, seed, simplifications),
        ]
        self.system = SYSTEM + (" You can also say: teleport to ROOM." if _teleports(simplifications) else "")
        self.simulator: Simulator | None = None
        self._lock = threading.RLock()
        """Lock held while a thread uses the instance; after a timeout a thread may hold it for long."""
        self._closed = False

    def reset(self, scenario: Scenario) -> Messages:
        with self._lock:
            return super().reset(scenario)

    def step(self, action: dict[str, Any]) -> Step:
        with self._lock:
            return super().step(action)

    def begin(self, scenario: Scenario) -> str:
        self.score = 0.0
        simulator = self._simulator()
        simulator.load(scenario.input, gold=False)
        text = simulator.call("step", "look around")
        return f"{simulator.call('freeActionTaskDesc')}\n{shorten(text)}"

    def act(self, action: str) -> str:
        action = " ".join(action[:300].split())
        if not ACTION.fullmatch(action):
            raise InvalidAction("an action is at most 200 letters, digits and spaces")
        simulator = self._simulator()
        text = simulator.call("step", action)
        score = round(float(simulator.call("getScore")), 4)
        self.action_log.append(action)
        self.reward += score - self.score
        self.score = score
        self.done = bool(simulator.call("getCompleted")) or score < 0 or len(self.action_log) >= self.max_steps
        self.invalid_actions += text.startswith(UNKNOWN)
        return shorten(text)

    def outcome(self, answer: str) -> dict[str, Any]:
        return {"success": self.score >= 1.0, "progress": max(0.0, self.score), "steps": len(self.action_log)}

    def close(self) -> None:
        """Release the simulator for reuse; stop it if a thread still uses it."""
        free = self._lock.acquire(blocking=False)
        self._closed = not free
        simulator, self.simulator = self.simulator, None
        if simulator is not None:
            _release(simulator) if free else simulator.stop()
        if free:
            self._lock.release()

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Return the gold path. This ends the current episode, because it needs the simulator."""
        with self._lock:
            simulator = self._simulator()
            simulator.load(scenario.input, gold=True)
            return acts([str(action) for action in simulator.call("getGoldActionSequence")])

    def restore(self, scenario: Scenario, state: list[Any]) -> None:
        with self._lock:
            super().restore(scenario, state)

    def _simulator(self) -> Simulator:
        if self.simulator is None or self.simulator.broken:
            self.simulator = _acquire()
        simulator = self.simulator
        if self._closed:
            simulator.stop()
            raise EnvironmentFailed("the instance was closed during a call")
        return simulator


class Simulator:
    """A Java process with one ScienceWorld simulator."""

    def __init__(self) -> None:
        constants = import_optional("scienceworld.constants", "scienceworld")
        java = import_optional("py4j.java_gateway", "scienceworld")
        # Finalizers of its objects log an error for each simulator that was stopped; failures of calls are raised.
        logging.getLogger("py4j.java_gateway").setLevel(logging.CRITICAL)
        port, self.process = java.launch_gateway(
            classpath=constants.JAR_PATH,
            die_on_exit=True,
            javaopts=["-Xmx1g"],
            cwd=constants.BASEPATH,  # the simulator writes a table of its objects there
            return_proc=True,
        )
        parameters = java.GatewayParameters(auto_field=True, port=port, read_timeout=WAIT)
        self.gateway = java.JavaGateway(gateway_parameters=parameters, java_process=self.process)
        self.server = self.gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
        self.broken = False
        self.loaded: tuple[Any, ...] | None = None

    def load(self, task: dict[str, Any], gold: bool) -> None:
        """Load and start a task. gold: compute the gold path, which takes longer."""
        arguments = (task["task"], task["variation"], task["simplifications"], gold)
        if self.loaded != arguments:
            self.loaded = None
            self.call("load", *arguments)
            self.loaded = arguments
        self.call("reset")

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the simulator. Raises EnvironmentFailed; the simulator is unusable afterwards."""
        errors = import_optional("py4j.protocol", "scienceworld")
        try:
            return getattr(self.server, method)(*arguments)
        except (errors.Py4JError, OSError) as error:
            self.stop()
            text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise EnvironmentFailed(f"the simulator failed at {method}{arguments!r:.200}: {text}") from error

    def stop(self) -> None:
        """Kill the process and release its resources."""
        self.broken = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.gateway.close()


_idle: list[Simulator] = []
_lock = threading.Lock()


def _acquire() -> Simulator:
    with _lock:
        while _idle:
            simulator = _idle.pop()
            if simulator.process.poll() is None:
                return simulator
            simulator.stop()
    return Simulator()


def _release(simulator: Simulator) -> None:
    with _lock:
        keep = not simulator.broken and len(_idle) < IDLE
        if keep:
            _idle.append(simulator)
    if not keep and not simulator.broken:
        simulator.stop()


@atexit.register
def _stop_all() -> None:
    with _lock:
        while _idle:
            _idle.pop().stop()


def _choose(tasks: Sequence[str], split: str, count: int, seed: int, simplifications: str) -> list[Scenario]:
    """Return `count` scenarios, cycling through the tasks; exhausted tasks are skipped.

    Raises SpecError if the tasks have too few variations.
    """
    remaining: dict[str, list[int]] = {}
    for task in tasks:
        total = TASKS[task][0]
        numbers = list(range(max(1, total // 2 - 1)) if split == "train" else range(total - total // 4, total))
        random.Random(f"{seed} {task} {split}").shuffle(numbers)
        remaining[task] = numbers
    available = sum(len(numbers) for numbers in remaining.values())
    if available < count:
        message = f"is {count}; the tasks have only {available} variations for this split"
        raise SpecError.at(f"environment.{split}", message)
    scenarios: list[Scenario] = []
    while len(scenarios) < count:
        for task in [task for task in remaining if remaining[task]][: count - len(scenarios)]:
            variation = remaining[task].pop()
            input = {"task": task, "variation": variation, "simplifications": _for_task(task, simplifications)}
            scenarios.append(Scenario(f"{task}-{variation}", input, split, task, TASKS[task][1]))
    return scenarios


def _for_task(task: str, simplifications: str) -> str:
    """Return the simplifications for a task; for electrical tasks, `easy` excludes noElectricalAction."""
    electrical = "power-component" in task or "conductivity" in task
    if electrical and simplifications == "easy":
        return "teleportAction,selfWateringFlowerPots,openContainers,openDoors"
    return simplifications


def _teleports(simplifications: str) -> bool:
    return simplifications == "easy" or "teleportAction" in simplifications
