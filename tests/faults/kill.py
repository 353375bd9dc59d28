"""Kills runs with SIGKILL at random moments, starts each again until it is done, and says what was lost.

    python -m tests.faults.kill [--times 30] [--seed 0] [--json]

The experiment is the smoke run with more to do in each stage. One run is not disturbed. The others are killed, each in
a few stages, which are dealt like cards, so that the kills spread over all stages and the start of the process: at a
moment drawn evenly from the time that the stage takes undisturbed, either the process of the flow alone, whose children
have to end by themselves, or the whole tree at once. A stage that ends before that moment passes the kill on to the
next one. When a run ends, it is compared with the undisturbed one, and a new one begins in an empty root, until there
were enough kills.

What has to hold, and is counted where it does not: what every stage left is the same, byte for byte, but for stages in
whose own episodes a kill fell, and what depends on them (the episodes that are played again are computed in other
batches, which rounds differently); as many episodes as declared; no stage made twice; no process left.
`runs_that_differ` counts the runs that differ after such a kill. `episodes_again` counts the episodes that had ended
and were played again all the same: they ended within a tenth of a second of a kill, before they were on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flows.history.records import Records
from tests.faults.world import NOTES

CODE = Path(__file__).resolve().parents[2]
EXPERIMENT = [
    "+experiment=smoke",
    "allow=[tests]",
    "environment._target_=tests.faults.world.NotedShop",
    "environment.train=64",
    "environment.heldout=24",
    "evaluate.scenarios=24",
    "evaluate.concurrency=2",
    "warmup.demonstrations=8",
    "warmup.algorithm.batch_size=2",
    "warmup.algorithm.epochs=2",
    "rounds=2",
    "collect.scenarios=8",
    "collect.group_size=4",
    "collect.concurrency=2",
    "agent.max_tokens=60",
    "algorithm.epochs=3",
    "algorithm.minibatches=2",
    "compute.save_every=0.5",
    "tracking.traces=2",
]
KILLS = 4
"""Of one run."""
FIRST = 10.0
"""Seconds of the start, before the flow begins, from which a moment is drawn."""
LIMIT = 600.0
"""Seconds that one try may take."""
GONE_WITHIN = 10.0
"""Seconds in which the children of a killed flow have to be gone."""


@dataclass
class Try:
    """A run of the experiment in one root, over all its tries."""

    root: Path
    overrides: list[str] = field(default_factory=list)
    tries: int = 0

    @property
    def notes(self) -> Path:
        return self.root.with_suffix(".notes")

    def start(self) -> subprocess.Popen:
        self.tries += 1
        environment = {**os.environ, NOTES: str(self.notes), "PYTHONPATH": str(CODE)}
        with open(self.root.with_suffix(".out"), "wb") as out, open(self.root.with_suffix(".err"), "ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "flows.run", *EXPERIMENT, *self.overrides, f"root={self.root}"],
                cwd=CODE,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
            )

    def log(self) -> str:
        """The log of the last try; empty before it has one."""
        logs = sorted(self.root.glob("logs/smoke-*.log"), key=lambda path: path.stat().st_mtime)
        logs = [path for path in logs if not path.name.endswith(".stages.log")]
        return logs[-1].read_text() if len(logs) >= self.tries else ""

    def result(self) -> dict[str, Any]:
        """The result line of the last try, which has ended well."""
        found: dict[str, Any] = json.loads(self.root.with_suffix(".out").read_text().splitlines()[-1])
        return found

    def made(self) -> Counter[str]:
        """How often each stage was made, over all tries that came to write it down."""
        return Counter(one.label for run in Records(self.root).all() for one in run.stages if one.status == "ran")

    def durations(self) -> dict[str, float]:
        """Seconds that each stage took, by the record of the last run."""
        return {one.label: one.seconds for one in Records(self.root).all()[0].stages}

    def digest(self, label: str) -> str:
        """Of what a stage left, by the record of the last run."""
        return Records(self.root).all()[0].stage(label).digest

    def ended(self) -> int:
        """Episodes of the policy that ended, over all tries."""
        return len(self.notes.read_text().splitlines()) if self.notes.exists() else 0


def at_work(log: str, labels: list[str]) -> str:
    """The stage that a run works on, by its log; `start` before the first one, `end` after the last one."""
    if "Beginning flow run" not in log:
        return "start"
    return next(iter(not_done(log, labels)), "end")


def not_done(log: str, labels: list[str]) -> list[str]:
    done = set(re.findall(r"flows\.execution\.executor: (\S+) (?:ran|cached) in", log))
    return [label for label in labels if label not in done]


def hit_by(log: str, labels: list[str], overlap: bool) -> set[str]:
    """The stages in which a kill now falls: the one at work, and with overlap the collecting beside a training."""
    stage = at_work(log, labels)
    number = re.fullmatch(r"train\[(\d+)\]", stage)
    beside = f"collect[{int(number[1]) + 1}]" if number and overlap else ""
    return {stage, *({beside} & set(not_done(log, labels)))}


class Cards:
    """The stages in a random order, again and again, so that each of them comes as often as any other."""

    def __init__(self, names: list[str], draw: random.Random) -> None:
        self.names, self.draw = names, draw
        self.left: list[str] = []

    def deal(self, count: int) -> list[str]:
        """The next `count`, in the order in which a run comes by them; no card twice."""
        hand: list[str] = []
        while len(hand) < min(count, len(self.names)):
            if not any(name not in hand for name in self.left):
                self.left += self.draw.sample(self.names, len(self.names))
            card = next(name for name in self.left if name not in hand)
            self.left.remove(card)
            hand.append(card)
        return sorted(hand, key=self.names.index)


def unexplained(different: list[str], hit: set[str]) -> list[str]:
    """Of the stages that left other bytes, those for which no kill accounts: one in the middle of their own episodes,
    in the collecting of an earlier stage, or, for the export, whose card shows the evaluations, in any."""
    found, collected, played = [], False, False
    for label in different:
        if label in hit and label.startswith(("collect[", "evaluate[")):
            collected |= label.startswith("collect[")
            played = True
        elif not collected and not (played and label == "deploy"):
            found.append(label)
    return found


def processes_of(root: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid() and any(str(root) in part for part in process.cmdline()):
                found.append(process)
    return found


def kill(process: subprocess.Popen, root: Path, how: str) -> list[str]:
    """Kills the flow, or the whole tree; returns the commands of the processes that are left after `GONE_WITHIN` s."""
    if how == "tree":
        for one in [*processes_of(root), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    else:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + GONE_WITHIN
    while (left := processes_of(root)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = []
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(one.cmdline()))
    return found


def wait_for_moment(
    process: subprocess.Popen, one: Try, card: str | None, durations: dict[str, float], draw: random.Random
) -> bool:
    """Waits for the moment of the next kill, in the stage on the card or, where that is done already, in the one that
    the run is at. False if the run ended before; with no card, it is let end."""
    order = [*durations, "end"]
    moment = None
    while process.poll() is None:
        now = at_work(one.log(), order[1:-1])
        if card and moment is None and order.index(now) >= order.index(card):
            moment = time.monotonic() + draw.uniform(0, durations.get(now, 0))
        if moment is not None and time.monotonic() >= moment:
            return True
        time.sleep(0.02)
    return False


def run(times: int, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    draw = random.Random(seed)
    undisturbed = Try(folder / "undisturbed", overrides)
    process = undisturbed.start()
    if process.wait(LIMIT):
        sys.exit(f"the undisturbed run failed:\n{undisturbed.root.with_suffix('.err').read_text()[-4000:]}")
    expected = undisturbed.result()
    labels = list(expected["stages"])
    episodes = undisturbed.ended()
    durations = {"start": FIRST, **undisturbed.durations()}
    say(f"undisturbed: {expected['seconds']:.0f} s, {len(labels)} stages, {episodes} episodes")
    kills: Counter[str] = Counter()
    hows: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    again = done = differ = 0
    cards = Cards(["start", *labels], draw)
    while sum(kills.values()) < times:
        one = Try(folder / f"killed-{done}", overrides)
        hand = cards.deal(min(KILLS, times - sum(kills.values())))
        hit = set()
        while True:
            process = one.start()
            if not wait_for_moment(process, one, hand[0] if hand else None, durations, draw):
                break
            hand = hand[1:]
            how = draw.choice(["flow", "tree"])
            stage = at_work(one.log(), labels)
            hit |= hit_by(one.log(), labels, "collect.overlap=1" in overrides)
            left = kill(process, one.root, how)
            kills[stage] += 1
            hows[how] += 1
            wrong["processes_left"] += len(left)
            still = f"; left: {left}" if left else ""
            say(f"kill {sum(kills.values())} of {times}: {how} in {stage}{still}")
        if process.returncode:
            sys.exit(f"a try failed with {process.returncode}:\n{one.root.with_suffix('.err').read_text()[-4000:]}")
        result = one.result()
        twice = sum(count - 1 for count in one.made().values() if count > 1)
        different = [label for label in labels if one.digest(label) != undisturbed.digest(label)]
        differ += bool(different)
        wrong["stages_that_differ"] += len(unexplained(different, hit))
        wrong["episodes_not_as_declared"] += result["episodes"] != expected["episodes"]
        wrong["stages_made_twice"] += twice
        again += one.ended() - episodes
        done += 1
        say(f"run {done} done after {one.tries} tries: {result['policy_digest']}")
        shutil.rmtree(one.root)
    return {
        "kills": sum(kills.values()),
        "kills_by_stage": {label: kills[label] for label in ["start", *labels, "end"] if kills[label]},
        "kills_of": dict(hows),
        "runs": done,
        "policy_digest": expected["policy_digest"],
        "episodes": episodes * done,
        "episodes_again": again,
        "runs_that_differ": differ,
        **{name: wrong[name] for name in ("stages_that_differ", "episodes_not_as_declared", "stages_made_twice")},
        "processes_left": wrong["processes_left"],
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kills runs at random moments and compares them with an undisturbed one."
    )
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="espalier-faults-") as folder:
        found = run(options.times, options.seed, Path(folder), overrides)
    if not options.json:
        print("kills by stage: " + ", ".join(f"{label} {count}" for label, count in found["kills_by_stage"].items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
