"""What the agents of this folder share: the task on standard input, two tools, and the outcome on standard output."""

import json
import os
import sys

URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
MODEL = "policy"
STREAM = "--stream" in sys.argv
RESPONSES = "--responses" in sys.argv
SYSTEM = "You compute with tools. Answer with the number alone."
CALLED: list[str] = []
"""Names of the tools that were called, in order."""


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: the first number
        b: the second number
    """
    CALLED.append("multiply")
    return a * b


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number
        b: the second number
    """
    CALLED.append("add")
    return a + b


TOOLS = {"multiply": multiply, "add": add}


def question() -> str:
    """Return the question of the task on standard input."""
    return json.load(sys.stdin)["question"]


def finish(answer: str) -> None:
    """Print the outcome."""
    print("\n" + json.dumps({"answer": answer.strip(), "called": CALLED}))  # smolagents prints before it
