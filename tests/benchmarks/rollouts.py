"""What the collector costs while thousands of episodes wait for an engine, beside what its peers cost.

    python tests/benchmarks/rollouts.py [--json] [--at 1 64 512 2048] [--repeat 3]
        [--art PYTHON] [--verifiers PYTHON] [--no-overlap]

An OpenAI-compatible endpoint in a process of its own (`stub`, on uvloop) answers every request half a second after it
came. Episodes of four turns, with a system message and a task of 300 tokens, answers of 30 and observations of 40,
are played through it, so many at once; one at a time, four are played one after the other. `ours` is `run_episodes`
with `inference=remote`, token ids and log-probabilities included; `art` is the gather of openpipe-art with the client
that its models hand out; `verifiers` is `generate` of a MultiTurnEnv of verifiers 0.1, which plays in the calling
process (0.4 starts a program for each episode). Every measurement has a fresh process and plays a few episodes before
it begins.

    wall_over_ideal         wall-clock time over turns times latency
    cpu_ms_per_call         CPU time of the calling process, all threads, per request
    cpu_ratio_vs_PEER       its CPU time per request over ours, in turn in the same run
    kb_per_episode          most resident memory while they play, beyond what was there before, per episode at once
    overlap_speedup         rounds per hour with collect.overlap over those without (`overlap`)

Medians of the repetitions. CPU time hardly depends on what else the machine does; wall-clock time does.

The peers pin what we pin otherwise: each has an environment of its own, whose Python is named, and a peer without one
is left out.

    python -m venv DIR && DIR/bin/pip install "openpipe-art>=0.5,<0.6" "openai<3"
    python -m venv DIR && DIR/bin/pip install verifiers==0.1.14 "openai<3"
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
AT = (1, 64, 512, 2048)
ALONE = 4
"""Episodes that are played one after the other, where one is played at a time."""
TURNS, LATENCY = 4, 0.5
PROMPT, ANSWER, OBSERVATION = 300, 30, 40
"""Tokens."""
PEERS = ("art", "verifiers")
OPENING = [
    {"role": "system", "content": "You look things up, one after the other, and then say what you found. " * 14},
    {"role": "user", "content": "Find out which of the parcels went where, and why the fourth came back. " * 3},
]
SEEN = "The shelf holds three parcels: one is for the north, one for the coast, one has no label at all. " * 2


def main() -> None:
    options = arguments()
    if options.form:
        print(json.dumps(measure(options.form, options.url, options.at[0])))
        return
    sys.path.insert(0, str(CODE))
    from tests.benchmarks.apart import say

    found: dict[str, Any] = {}
    pythons = {"ours": sys.executable} | {name: getattr(options, name) for name in PEERS if getattr(options, name)}
    for name in PEERS:
        if name not in pythons:
            say(f"{name} is left out: --{name} PYTHON names the interpreter of an environment that has it.")
    with endpoint() as url:
        for count in options.at:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
            for _ in range(options.repeat):
                for name, python in pythons.items():
                    runs[name].append(one_run(python, name, url, count))
                    say(f"{count} at once, {name}: {runs[name][-1]}")
            found[str(count)] = summary(runs)
    if options.overlap:
        from tests.benchmarks.overlap import overlap

        found["overlap_speedup"] = overlap()
    print(json.dumps(found) if options.json else json.dumps(found, indent=1))


def endpoint(latency: float = LATENCY) -> contextlib.AbstractContextManager[str]:
    from tests.benchmarks.apart import stub

    sizes = {"latency": latency, "turns": TURNS, "prompt": PROMPT, "answer": ANSWER, "observation": OBSERVATION}
    return stub(*(part for name, value in sizes.items() for part in (f"--{name}", value)))


def one_run(python: str, form: str, url: str, count: int) -> dict[str, float]:
    """In a process of its own."""
    from tests.benchmarks.apart import in_own_process

    found = in_own_process(python, __file__, form, url, "--at", count)
    return found | {"kb_per_episode": found.pop("peak") / 1000 / count}


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Of the runs of each form, at one width."""
    middle = {
        name: {key: statistics.median(one[key] for one in several) for key in several[0]}
        for name, several in runs.items()
    }
    ours = middle["ours"]
    ratios = {
        f"cpu_ratio_vs_{name}": round(middle[name]["cpu_ms_per_call"] / ours["cpu_ms_per_call"], 2)
        for name in PEERS
        if name in middle
    }
    return {
        "wall_over_ideal": round(ours["wall_over_ideal"], 3),
        "cpu_ms_per_call": round(ours["cpu_ms_per_call"], 3),
        **ratios,
        "kb_per_episode": round(ours["kb_per_episode"], 1),
    }


# --- one measurement --------------------------------------------------------------------------------------------------


def measure(form: str, url: str, count: int) -> dict[str, float]:
    """In this process: `count` episodes at once."""
    play = FORMS[form](url)
    episodes = max(count, ALONE)
    play(8, 8)
    gc.collect()
    print("begin", flush=True)
    sys.stdin.readline()
    wall, cpu = time.perf_counter(), time.process_time()
    play(episodes, count)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall_over_ideal": wall / (TURNS * LATENCY * episodes / count),
        "cpu_ms_per_call": 1000 * cpu / (TURNS * episodes),
    }


Play = Callable[[int, int], None]
"""Plays so many episodes, so many at once."""


def ours(url: str) -> Play:
    sys.path.insert(0, str(CODE))
    from components.environments.protocol import Step
    from components.inference.engines.remote import RemoteEngine, RemoteSpec
    from components.inference.protocol import Sampling
    from components.rollout.request import episode_requests
    from components.rollout.spec import EpisodeLimits
    from components.trajectories.schema import Scenario
    from tests.rollout.worlds import run_episodes

    class Parcels:
        def scenarios(self, split: str) -> list[Any]:
            return []

        def tools(self) -> list[dict[str, Any]]:
            return []

        def reset(self, scenario: Any) -> list[dict[str, Any]]:
            self.turn = 0
            return [dict(one) for one in OPENING]

        def step(self, action: dict[str, Any]) -> Step:
            self.turn += 1
            done = self.turn == TURNS
            return Step([] if done else [{"role": "user", "content": SEEN}], 1.0, done, {"success": done})

        def close(self) -> None:
            pass

    engine = RemoteEngine(RemoteSpec(name="remote", url=url, model="policy"))
    atexit.register(engine.close)

    def play(episodes: int, at_once: int) -> None:
        found = run_episodes(
            engine,
            Parcels,
            episode_requests(
                [Scenario(f"s{index}", {}, "train") for index in range(episodes)],
                1,
                sampling=Sampling(max_tokens=64),
                max_turns=TURNS,
                seed=0,
            ),
            EpisodeLimits(concurrency=at_once, max_failures=0),
        )
        lengths = {len(one.histories[0].token_ids) for one in found}
        assert lengths == {PROMPT + TURNS * ANSWER + (TURNS - 1) * OBSERVATION}, lengths
        assert all(one.success and len(one.histories) == 1 for one in found)

    return play


def art(url: str) -> Play:
    import art  # type: ignore[import-not-found]

    model = art.TrainableModel(name="policy", project="benchmark", base_model="policy")
    model.inference_api_key, model.inference_base_url, model.inference_model_name = "none", url, "policy"

    async def episode(client: Any) -> Any:
        made = art.Trajectory(messages_and_choices=[dict(one) for one in OPENING], reward=0.0)
        for turn in range(TURNS):
            completion = await client.chat.completions.create(
                model="policy", messages=made.messages(), max_tokens=64, logprobs=True
            )
            made.messages_and_choices.append(completion.choices[0])
            made.reward += 1.0
            if turn + 1 < TURNS:
                made.messages_and_choices.append({"role": "user", "content": SEEN})
        return made

    async def gather(episodes: int, at_once: int) -> None:
        client = model.openai_client()
        for start in range(0, episodes, at_once):
            groups = [
                art.TrajectoryGroup(episode(client) for _ in range(min(8, at_once)))
                for _ in range(start, min(start + at_once, episodes), min(8, at_once))
            ]
            found = await art.gather_trajectory_groups(groups, max_exceptions=0)
            assert all(len(one.messages_and_choices) == 2 * TURNS + 1 for group in found for one in group)

    loop = asyncio.Runner()  # its client keeps connections of the loop on which it was used first
    return lambda episodes, at_once: loop.run(gather(episodes, at_once))


def verifiers(url: str) -> Play:
    import verifiers as vf  # type: ignore[import-not-found]
    from datasets import Dataset

    class Parcels(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
            return [vf.UserMessage(content=SEEN)]

    rows = Dataset.from_list([{"prompt": OPENING, "answer": ""}])
    rubric = vf.Rubric(funcs=[lambda completion, **_: 1.0])
    world = Parcels(max_turns=TURNS, dataset=rows, eval_dataset=rows, rubric=rubric)
    client = vf.ClientConfig(api_key_var="OPENAI_API_KEY", api_base_url=url)
    loop = asyncio.Runner()

    def play(episodes: int, at_once: int) -> None:
        inputs = [{"prompt": OPENING, "answer": "", "example_id": index} for index in range(episodes)]
        settings = {"max_tokens": 64, "logprobs": True}
        found = loop.run(
            world.generate(
                inputs, client=client, model="policy", sampling_args=settings, max_concurrent=at_once,
                independent_scoring=True, state_columns=["trajectory"],
            )
        )  # fmt: skip
        assert all(len(one["trajectory"]) == TURNS for one in found["outputs"])

    return play


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what an episode costs that waits for an engine.")
    parser.add_argument("--json", action="store_true", help="print the result on one line")
    parser.add_argument("--at", type=int, nargs="+", default=list(AT), metavar="N", help="episodes at once")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times, of which the median counts")
    parser.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, default=True, help="also measure collect.overlap: minutes"
    )
    for name in PEERS:
        parser.add_argument(f"--{name}", metavar="PYTHON", help=f"interpreter of an environment that has {name}")
    parser.add_argument("--form", choices=list(FORMS), help=argparse.SUPPRESS)  # one measurement, in this process
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


FORMS: dict[str, Callable[[str], Play]] = {"ours": ours, "art": art, "verifiers": verifiers}

if __name__ == "__main__":
    main()
