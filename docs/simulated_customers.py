"""Simulated customers of the shop for a measurement: they talk with a served policy, and judge it. They are no people.

    python -m docs.simulated_customers http://127.0.0.1:8000/v1 [--customers 200] [--seed 1] [--corrected 0.5]

The program is the application between the customers and the policy: it knows a URL, asks with OpenAI's client, and
executes the calls of the policy in its own database of orders (`components.environments.worlds.shop`). A seed gives
other customers; the quickstart trains and evaluates with those of seed 0. After the conversation

    the customer        scores it: 1 if the right order was handled rightly and the answer states the result, else 0
    a colleague         corrects a share of the bad ones (`--corrected`): the first answer that left the procedure

Both know the truth, which people do not always.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
from openai import OpenAI

from components.environments.worlds.shop import Shop
from components.trajectories.schema import Scenario

TURNS = 5
"""Answers after which a customer leaves: `agent.max_turns` of the quickstart."""
SAMPLING = {"max_tokens": 24, "temperature": 0.7}
"""Sampling in the rounds of the quickstart."""


@dataclass
class Conversation:
    """Conversation of a customer with the policy."""

    id: str = ""
    answers: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Ids and messages of the policy."""
    success: bool = False


def main(arguments: list[str] | None = None) -> None:
    """Let the customers talk and give feedback; print the share of content ones."""
    parser = argparse.ArgumentParser(prog="python -m docs.simulated_customers", description="Simulated customers.")
    parser.add_argument("url", metavar="URL", help="base URL of the server, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="shop", help="name of the served model (default: %(default)s)")
    parser.add_argument("--customers", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="seed of the customers (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=32, help="customers at the same time (default: %(default)s)")
    parser.add_argument("--corrected", type=float, default=0.5, help="share of bad conversations that are corrected")
    options = parser.parse_args(arguments)
    scenarios = Shop(options.seed, train=options.customers, heldout=0).scenarios("train")
    client = OpenAI(base_url=options.url, api_key="none", timeout=600)
    corrected = Random(options.seed)

    def serve(scenario: Scenario) -> Conversation:
        return talk(client, options.model, scenario)

    done = corrections = 0
    with ThreadPoolExecutor(options.at_once) as pool, httpx.Client(base_url=options.url, timeout=60) as feedback:
        for scenario, conversation in zip(scenarios, pool.map(serve, scenarios), strict=True):
            bodies = [{"conversation": conversation.id, "score": float(conversation.success)}]
            if not conversation.success and corrected.random() < options.corrected:
                bodies += correction(scenario, conversation)
            for body in bodies:
                feedback.post("/feedback", json=body).raise_for_status()
            done, corrections = done + conversation.success, corrections + len(bodies) - 1
    sys.stdout.write(f"{options.customers} customers, {done} content, {corrections} corrections\n")


def talk(client: OpenAI, model: str, scenario: Scenario) -> Conversation:
    """Return the conversation of a customer, whose calls are executed here."""
    shop, conversation = Shop(train=0, heldout=0), Conversation()
    messages = shop.reset(scenario)
    for _ in range(TURNS):
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=messages, tools=shop.tools(), **SAMPLING
        )
        response, conversation.id = raw.parse(), raw.headers["x-conversation-id"]
        message = response.choices[0].message.model_dump(exclude_none=True)
        conversation.answers.append((response.id, message))
        step = shop.step(message)
        messages += [message, *step.observation]
        conversation.success = step.info["success"]
        if shop.done:
            break
    return conversation


def correction(scenario: Scenario, conversation: Conversation) -> list[dict[str, Any]]:
    """Return the correction of the first answer that left the procedure; empty if the last one only said it badly."""
    for (answer, message), right in zip(conversation.answers, Shop().solve(scenario), strict=False):
        if calls(message) != calls(right):
            return [{"answer": answer, "correction": {"text": right["content"], "calls": calls(right)}}]
    return []


def calls(message: dict[str, Any]) -> list[dict[str, str]]:
    """Return the calls of a message: name and arguments."""
    return [
        {name: call["function"][name] for name in ("name", "arguments")} for call in message.get("tool_calls") or []
    ]


if __name__ == "__main__":
    main()
