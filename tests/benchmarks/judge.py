"""What a judge that compares the trajectories of a group costs, beside what ART's costs.

    python tests/benchmarks/judge.py [--json] [--art PYTHON] [--at 32 200] [--repeat 3]
        [--groups 200] [--size 8] [--latency 0.1]

An OpenAI-compatible judge in a process of its own (`stub.py --judge`, on uvloop) answers every request a tenth of a
second after it came, with the score that stands in each trajectory's text. Groups of eight trajectories, which share
a system message and a task and then have four turns of about 300 tokens together, all different, are scored, so many
groups at once. `ours` is RULER through `judge`, with its store of answers; `art` is `ruler_score_group` of
openpipe-art, gathered. Every measurement has a fresh process and scores a few groups before it begins; that all scores
are what the judge said is checked.

    wall_over_ideal     wall-clock time over ceil(groups / at once) · latency
    cpu_ms_per_group    CPU time of the calling process, all threads, per group
    cpu_ratio_vs_art    its CPU time per group over ours, in turn in the same run
    peak_mb             most resident memory (10^6 bytes) while it judges, beyond what was there before with all
                        trajectories in memory
    stream_mb           the same for 500 and 5,000 groups that come from a stream and are let go of, at the fewest
                        at once

Medians of the repetitions, for each number at once; `wall_over_ideal`, `cpu_ratio_vs_art` and `peak_mb` at the top are
the worst of them. CPU time hardly depends on what else the machine does; wall-clock time does.

ART pins what we pin otherwise: it has an environment of its own, whose Python is named, and is left out without one.

    python -m venv DIR && DIR/bin/pip install "openpipe-art>=0.5,<0.6" "openai<3" litellm
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import gc
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
WARM_UP = 8
"""Groups."""
STREAMED = (500, 5000)
"""Groups."""
TURNS = 4
OPENING = (
    "You look parcels up, one after the other, and then say what you found. " * 6,
    "Find out which of the parcels went where, and why the fourth came back. " * 2,
)
SAID = "I look at shelf {shelf} of room {room}, since the list says that parcel {turn} was there on Monday. " * 2
SEEN = "Shelf {shelf} holds three parcels: one is for the north, one has no label. Nothing else is in room {room}. "

Talk = tuple[list[str], float]
"""What is said and seen in turn, and the score that the judge gives for it."""
Group = list[Talk]


def main() -> None:
    options = arguments()
    if options.form:
        print(json.dumps(measure(options)))
        return
    sys.path.insert(0, str(CODE))
    from tests.benchmarks.apart import in_own_process, say, stub

    def run(form: str, at: int, groups: int, *more: str) -> dict[str, float]:
        sizes = {"at": at, "groups": groups, "size": options.size, "latency": options.latency}
        given = [part for name, value in sizes.items() for part in (f"--{name}", value)]
        found = in_own_process(pythons[form], __file__, form, url, *given, *more)
        found["peak_mb"] = found.pop("peak") / 1e6
        say(f"{form}, {groups} groups{', streamed' if more else ''}, {at} at once: {found}")
        return found

    pythons = {"ours": sys.executable} | ({"art": options.art} if options.art else {})
    if not options.art:
        say("art is left out: --art PYTHON names the interpreter of an environment that has it.")
    runs: dict[int, dict[str, list[dict[str, float]]]] = {at: {form: [] for form in pythons} for at in options.at}
    with stub("--judge", "--latency", options.latency) as url:
        for at in options.at:
            for _ in range(options.repeat):
                for form in pythons:
                    runs[at][form].append(run(form, at, options.groups))
        streamed = {str(groups): run("ours", min(options.at), groups, "--stream")["peak_mb"] for groups in STREAMED}
    found = summary(runs) | {"stream_mb": {groups: round(peak, 1) for groups, peak in streamed.items()}}
    print(json.dumps(found) if options.json else json.dumps(found, indent=1))


def summary(runs: dict[int, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Of the runs of each form, by the number at once."""
    by_width = {str(at): _summary(forms) for at, forms in runs.items()}
    worst: dict[str, Any] = {}
    for name, of in (("wall_over_ideal", max), ("cpu_ratio_vs_art", min), ("peak_mb", max)):
        if values := [one[name] for one in by_width.values() if name in one]:
            worst[name] = of(values)
    return worst | {"at": by_width}


def _summary(forms: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    middle = {
        form: {key: statistics.median(one[key] for one in several) for key in several[0]}
        for form, several in forms.items()
    }
    found = {
        "wall_over_ideal": round(middle["ours"]["wall_over_ideal"], 3),
        "cpu_ms_per_group": round(middle["ours"]["cpu_ms_per_group"], 3),
        "peak_mb": round(middle["ours"]["peak_mb"], 1),
    }
    if "art" in middle:
        found["cpu_ratio_vs_art"] = round(middle["art"]["cpu_ms_per_group"] / middle["ours"]["cpu_ms_per_group"], 2)
        found |= {f"art_{name}": round(value, 3) for name, value in middle["art"].items()}
    return found


# --- one measurement --------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, float]:
    """In this process."""
    (at,) = options.at
    prepare, score = FORMS[options.form](options.url)
    score(prepare(talks(range(WARM_UP), options.size)), at)
    made: Iterable[Any] = prepare(talks(range(WARM_UP, WARM_UP + options.groups), options.size))
    if not options.stream:
        made = list(made)
    gc.collect()
    print("begin", flush=True)
    sys.stdin.readline()
    wall, cpu = time.perf_counter(), time.process_time()
    scored = score(made, at)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    assert scored == options.groups * options.size, scored
    return {
        "wall_over_ideal": wall / (math.ceil(options.groups / at) * options.latency),
        "cpu_ms_per_group": 1000 * cpu / options.groups,
    }


def talks(groups: range, size: int) -> Iterator[Group]:
    """Groups of conversations, all different."""
    for group in groups:
        yield [talk(group, sample) for sample in range(size)]


def talk(group: int, sample: int) -> Talk:
    score = (37 * group + 11 * sample) % 101 / 100
    parts: list[str] = []
    for turn in range(TURNS):
        where = {"shelf": 10 * group + sample, "room": sample + turn, "turn": turn}
        parts += [SAID.format(**where), SEEN.format(**where)]
    return [*parts[:-2], f"The fourth came back for its label; quality {score:.2f} of the search. {parts[-2]}"], score


Form = tuple[Callable[[Iterator[Group]], Iterable[Any]], Callable[[Iterable[Any], int], int]]
"""Groups in the form's own data, and what scores them, so many at once: how many trajectories got the score that the
judge gave."""


def ours(url: str) -> Form:
    sys.path.insert(0, str(CODE))
    from components.models.spec import ModelSpec
    from components.rewards.judge import judge
    from components.rewards.judges.ruler import Ruler
    from components.rewards.llm.models.served import ServedJudge
    from components.rewards.protocol import RewardResources
    from components.trajectories.schema import History, Message, Scenario, Trajectory

    folder = tempfile.TemporaryDirectory()
    reward = Ruler(ServedJudge(url=url, model="judge"))
    reward.use(RewardResources(Path(folder.name), ModelSpec(name="none"), answers=Path(folder.name)))
    atexit.register(lambda: (reward.close(), folder.cleanup()))
    numbers = itertools.count()

    def prepare(groups: Iterator[Group]) -> Iterator[Any]:
        for number, group in zip(numbers, groups, strict=False):
            scenario = Scenario(f"s{number}", {}, "train")
            for sample, (parts, score) in enumerate(group):
                said = [Message(one["role"], one["content"]) for one in messages(parts)]
                yield Trajectory(f"s{number}/{sample}/{score}", scenario, sample, [History(said)])

    def score(trajectories: Iterable[Any], at_once: int) -> int:
        found = judge(reward, trajectories, concurrency=at_once)
        return sum(one.reward == float(one.trajectory_id.rpartition("/")[2]) for one in found)

    return prepare, score


def art(url: str) -> Form:
    import art  # type: ignore[import-not-found]
    from art.rewards import ruler_score_group  # type: ignore[import-not-found]

    def prepare(groups: Iterator[Group]) -> Iterator[Any]:
        for group in groups:
            yield art.TrajectoryGroup(
                art.Trajectory(messages_and_choices=messages(parts), reward=0.0, metrics={"told": score})
                for parts, score in group
            )

    async def gather(groups: Iterable[Any], at_once: int) -> int:
        turns = asyncio.Semaphore(at_once)

        async def one(group: Any) -> int:
            async with turns:
                found = await ruler_score_group(
                    group, "openai/judge", extra_litellm_params={"api_base": url, "api_key": "none"}
                )
            return sum(each.reward == each.metrics["told"] for each in found)

        return sum(await asyncio.gather(*(one(group) for group in groups)))

    loop = asyncio.Runner()  # its client keeps connections of the loop on which it was used first
    return prepare, lambda groups, at_once: loop.run(gather(groups, at_once))


def messages(parts: list[str]) -> list[dict[str, Any]]:
    system, task = OPENING
    said = [{"role": ("assistant", "user")[index % 2], "content": part} for index, part in enumerate(parts)]
    return [{"role": "system", "content": system}, {"role": "user", "content": task}, *said]


# --- arguments --------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what judging groups costs.")
    parser.add_argument("--json", action="store_true", help="print the result on one line")
    parser.add_argument("--art", metavar="PYTHON", help="interpreter of an environment that has openpipe-art")
    parser.add_argument("--at", type=int, nargs="+", default=[32, 200], metavar="N", help="groups at once")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times, of which the median counts")
    parser.add_argument("--groups", type=int, default=200, metavar="N")
    parser.add_argument("--size", type=int, default=8, metavar="N", help="trajectories of a group")
    parser.add_argument("--latency", type=float, default=0.1, metavar="S", help="seconds until the judge answers")
    parser.add_argument("--form", choices=list(FORMS), help=argparse.SUPPRESS)  # one measurement, in this process
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--stream", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


FORMS: dict[str, Callable[[str], Form]] = {"ours": ours, "art": art}

if __name__ == "__main__":
    main()
