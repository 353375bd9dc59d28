"""A program for ART's client, which trains by `flows.loop.art`: `art_program.py ROOT STEPS`, from the repository."""

import asyncio
import json
import sys
from pathlib import Path

import art

from flows.loop.art import ArtBackend

WORDS = ("a", "b")


async def rollout(model: art.TrainableModel, word: str) -> art.Trajectory:
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[{"role": "user", "content": word}])
    for _ in range(2):
        answer = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=8
        )
        trajectory.messages_and_choices += [answer.choices[0], {"role": "user", "content": "again"}]
    trajectory.reward = len(set(answer.choices[0].message.content or "")) / 8
    return trajectory


async def main(root: str, steps: int) -> None:
    async with ArtBackend(root) as backend:
        model = art.TrainableModel(
            name="agent-001", project="demo", base_model="tiny", base_path=f"{root}/.art", report_metrics=[]
        )
        await model.register(backend)
        print("begins", await model.get_step(), flush=True)
        for _ in range(await model.get_step(), steps):
            groups = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, word) for _ in range(3)) for word in WORDS
            )
            result = await backend.train(model, groups, learning_rate=1e-2)
            await model.log(groups, metrics=result.metrics, step=result.step, split="train")
            print("trained", json.dumps([result.step, result.metrics, result.checkpoint_path]), flush=True)
        await model.train_sft(
            [trajectory for group in groups for trajectory in group], art.TrainSFTConfig(batch_size=2)
        )
        await model.delete_checkpoints("train/reward")
        kept = json.loads((Path(root) / "art/demo/agent-001.json").read_text())
        print("kept", json.dumps([await model.get_step(), sorted(map(int, kept))]))


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
