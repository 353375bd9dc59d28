"""Base class of the tools of a domain: what both domains share.

An answer is a text: JSON of a record as it is after the call, a key, a number, or `Error: ...`. Tools check only what
the recorded answers show that they check. The policy of a domain asks for more, and following it is the agent's task.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar

from components.environments.tau_bench.database import EpisodeDatabase, Record
from components.environments.tools import InvalidAction, tool
from components.environments.worlds.calculator import evaluate

LONGEST_EXPRESSION = 2000
"""Maximum number of characters of an expression."""
TRANSFER = "transfer_to_human_agents"
"""Name of the tool that ends the conversation."""


class Toolset:
    """Tools of a domain, which act on the database of an episode."""

    tables: ClassVar[dict[str, tuple[str, ...]]]
    """Tables of the domain, each with the fields that every record must have."""
    nouns: ClassVar[dict[str, str]]
    """Word for a record of each table, in messages."""
    changing: ClassVar[tuple[str, ...]]
    """Names of the tools that change the database."""

    def __init__(self, database: EpisodeDatabase):
        self.database = database
        self.transferred = False
        """True after the transfer to a human agent, which ends the conversation."""

    def find(self, table: str, key: str) -> Record:
        """Return a record to read. Raises InvalidAction if there is none."""
        record = self.database.get(table, key)
        if record is None:
            raise InvalidAction(f"{self.nouns[table]} not found")
        return record

    def payment_method(self, user: str, method: str, message: str = "payment method not found") -> Record:
        """Return a payment method of a user. Raises InvalidAction with the message if the user has no such method."""
        methods: dict[str, Record] = self.find("users", user)["payment_methods"]
        if method not in methods:
            raise InvalidAction(message)
        return methods[method]

    @tool
    def calculate(
        self, expression: Annotated[str, "numbers, + - * /, parentheses and spaces, such as (120.5 - 99) * 2"]
    ) -> str:
        """Calculate the value of an arithmetic expression, rounded to two decimals."""
        try:
            value = round(float(evaluate(expression, LONGEST_EXPRESSION)), 2)
        except OverflowError:
            raise InvalidAction("the number is too large") from None
        return str(value if math.isfinite(value) else 0.0)

    @tool
    def think(self, thought: Annotated[str, "a thought about what to do next"]) -> str:
        """Write down a thought. It obtains no information and changes nothing."""
        return ""

    @tool
    def transfer_to_human_agents(self, summary: Annotated[str, "summary of the user's request"]) -> str:
        """Transfer the user to a human agent, with a summary of the request, which ends the conversation. Only if the
        user asks for it, or the request is outside what the policy and the tools allow."""
        self.transferred = True
        return "Transfer successful"


def answer(record: Any) -> str:
    """Return a record as the answer of a tool: JSON on one line."""
    return json.dumps(record)
