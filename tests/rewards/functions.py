"""Reward functions as users of TRL and HelloAgents write them."""

from __future__ import annotations

import asyncio
import re


def accuracy_reward(completions, **columns):
    """Reward function in the form of HelloAgents."""
    rewards = []
    for completion, truth in zip(completions, columns["ground_truth"], strict=True):
        numbers = re.findall(r"-?\d+", completion)
        rewards.append(1.0 if numbers and numbers[-1] == str(truth) else 0.0)
    return rewards


def format_reward_func(completions, **kwargs):
    """Reward function in the form of TRL's documentation, for conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", content) else 0.0 for content in contents]


def reward_len(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


async def slow_reward(prompts, completions, answer):
    await asyncio.sleep(0.01)
    return [
        float(len(prompt) + len(completion) + number)
        for prompt, completion, number in zip(prompts, completions, answer, strict=True)
    ]


def math_only(completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]


def logging_reward(completions, answer, log_extra=None, log_metric=None, **kwargs):
    if log_extra:
        log_extra("extracted", ["a", "b"][: len(completions)])
        log_extra("length", [len(completion) for completion in completions])
    if log_metric:
        log_metric("mean_answer", sum(answer) / len(answer))
    return [1.0] * len(completions)


def scaled(completions, scale, offset: float = 0.0):
    return [scale * len(completion) + offset for completion in completions]


def with_state(completions, trainer_state, **kwargs):
    return [float(trainer_state.global_step)] * len(completions)


def with_state_if_any(completions, trainer_state=None):
    return [0.0 if trainer_state is None else 1.0 for _ in completions]


class Callable:
    def __init__(self, bonus: float = 0.0):
        self.bonus = bonus

    def __call__(self, completions, **kwargs):
        return [self.bonus for _ in completions]


def potential(trajectory):
    """Return the number of finished turns before each turn."""
    return [
        float(turn)
        for turn in range(len([message for message in trajectory.histories[0].messages if message.role == "assistant"]))
    ]


class Broken:
    def __init__(self):
        raise KeyError("no data")

    def __call__(self, trajectory):
        return 1.0
