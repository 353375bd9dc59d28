"""Rows of each form, as people have them."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def openai(number: int) -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's format with a call."""
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": f'{{"city": "town {number}"}}'},
    }
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"Weather in town {number}?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": f"{number} degrees"},
        {"role": "assistant", "content": f"It has {number} degrees."},
    ]


def sharegpt(number: int) -> list[dict[str, Any]]:
    """Return a conversation in ShareGPT's format."""
    return [
        {"from": "human", "value": f"What is {number} and {number}?"},
        {"from": "gpt", "value": f"It is {2 * number}."},
    ]


def agenttraj(number: int) -> list[dict[str, Any]]:
    """Return a conversation of AgentTraj, whose first answer is not trained on."""
    return [
        {"from": "human", "loss": None, "value": "You act in a shop."},
        {"from": "gpt", "loss": False, "value": "OK"},
        {"from": "human", "loss": None, "value": f"Buy item {number}."},
        {"from": "gpt", "loss": True, "value": f"Action: buy[{number}]"},
    ]


FORMS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": openai(n), "tools": [WEATHER]} for n in range(4)],
    "sharegpt": [{"conversations": sharegpt(n)} for n in range(4)],
    "agenttraj": [{"item_id": f"shop_{n}", "conversations": agenttraj(n)} for n in range(4)],
    "prompt_completion": [{"prompt": f"Say {n}.", "completion": f"The number is {n}."} for n in range(4)],
    "ground_truth": [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)],
    "preference": [{"prompt": f"Say {n}.", "chosen": f"{n}, please.", "rejected": "I refuse."} for n in range(4)],
    "ranking": [{"prompt": f"Say {n}.", "responses": [f"{n}, please.", f"{n}", "I refuse."]} for n in range(4)],
    "thumbs": [{"prompt": f"Say {n}.", "completion": f"Number {n}.", "label": n % 2 == 0} for n in range(4)],
    "steps": [
        {
            "task_id": f"task_{n}",
            "task_type": "web_browsing",
            "instruction": f"Buy item {n}.",
            "steps": [
                {
                    "thought": "I search first.",
                    "action": "search",
                    "action_input": {"query": f"item {n}"},
                    "observation": f"[B0{n}] item {n}",
                    "reward": 0.25,
                },
                {
                    "thought": "",
                    "action": "buy",
                    "action_input": {"query": f"B0{n}"},
                    "observation": "",
                    "reward": 0.75,
                },
            ],
            "final_reward": 1.0,
            "metadata": {"env": "webshop", "num_steps": 2},
        }
        for n in range(4)
    ],
    "step_labels": [
        {"prompt": f"Count to {n}.", "completions": [f"First {n}", f"then {n}"], "labels": [True, n == 1]}
        for n in range(4)
    ],
}
"""Four rows of each form, by its name."""
