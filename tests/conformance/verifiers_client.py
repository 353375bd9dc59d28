"""Plays tasks of a served environment with verifiers' own rollouts; run by the interpreter that has the package.

    python verifiers_client.py ENVIRONMENT_URL MODEL_URL TASKS

The model is any server of OpenAI's chat completions. The output is a JSON list with the scenario, the rewards, the
metrics, the number of turns and the errors of each task.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "flows" / "interop" / "verifiers_plugin"))
os.environ.setdefault("NO_KEY", "none")

import verifiers.v1 as vf
from espalier_environment import load_environment


async def main(environment: str, model: str, count: int) -> None:
    env = load_environment(environment)
    tasks = list(itertools.islice(env.taskset, count))
    context = vf.ModelContext(model="scripted", client=vf.EvalClientConfig(base_url=model, api_key_var="NO_KEY"))
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for task in tasks for slot in env.slots(task)))
    reports = [
        {
            "scenario": episode.task.data.scenario,
            "rewards": {name: reward.value for trace in episode.traces for name, reward in trace.rewards.items()},
            "metrics": {name: value for trace in episode.traces for name, value in trace.metrics.items()},
            "turns": sum(trace.num_turns for trace in episode.traces),
            "errors": [
                f"{error.type}: {error.message}"
                for error in [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            ],
        }
        for episode in episodes
    ]
    print(json.dumps(reports))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
