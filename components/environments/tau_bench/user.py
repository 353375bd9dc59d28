"""Simulated users: a language model that plays an instruction, or a script for tests.

Both end the conversation with a message that contains `###STOP###`, as in the recorded conversations. The scripted user
states its instruction at once, agrees to everything, and stops when the task is done or its patience is at its end.
"""

from __future__ import annotations

import hashlib

from pydantic import Field

from components.environments.language_model import ServedModel
from components.environments.protocol import Messages

STOP = "###STOP###"
"""Marker in the user's last message."""
MAX_LENGTH = 8000
"""Maximum length of a message that the user reads, in characters; the rest is ignored."""
PATIENCE = 12
"""Number of messages after which the scripted user leaves."""
GREETING = "Hello. How can I help you today?"
"""First message of the agent's side, which only the model that plays the user reads."""


def scripted_opening(instruction: str) -> str:
    """Return the first message of the scripted user."""
    return f"Hello. This is my situation, in the words of my notes: {instruction}"


def scripted_reply(replies: int, satisfied: bool) -> str:
    """Return the next message of the scripted user. replies: number of its replies so far."""
    if satisfied:
        return f"Thank you, that is all. {STOP}"
    return f"I have to go. {STOP}" if replies + 1 >= PATIENCE else "Yes, please go ahead."


class SimulatedUser(ServedModel):
    """A user played by a model served over OpenAI's chat completions."""

    role = "simulated user"
    key_path = "environment.user"

    temperature: float = Field(0.0, ge=0, le=2)
    """Sampling temperature. The published evaluation uses 1."""
    max_tokens: int = Field(400, ge=1, le=4096)
    """Maximum length of a message of the user, in tokens."""

    @classmethod
    def or_else(cls) -> str:
        return ", or set environment.user=scripted"

    async def say(self, instruction: str, talk: list[list[str]], scenario: str) -> str:
        """Return the user's next message.

        talk: pairs of an agent message and the user's reply; the last reply is empty. scenario: id of the scenario,
        from which the seed of the request follows.
        Raises EnvironmentFailed if the server returns no reply, ResourceError if it rejects the model or its key.
        """
        messages: Messages = [{"role": "system", "content": prompt(instruction)}]
        for text, reply in talk:
            messages.append({"role": "user", "content": text[:MAX_LENGTH] or "(silence)"})
            messages.append({"role": "assistant", "content": reply})
        seed = int(hashlib.sha256(f"{scenario} {len(talk)}".encode()).hexdigest()[:7], 16)
        reply = await self.ask(messages[:-1], seed=seed, max_tokens=self.max_tokens, temperature=self.temperature)
        return reply[:MAX_LENGTH]


def prompt(instruction: str) -> str:
    """Return the prompt for a model that plays the user."""
    return "\n".join(
        [
            "You play a customer who writes to an agent of a company's service. Your messages are the customer's.",
            "",
            f"The customer: {instruction}",
            "",
            "- Write one short message at a time, in your own words, as this customer would.",
            "- Say at first only what you want. Give a detail when the agent needs it or asks for it.",
            "- Know nothing besides the description. If you are asked for something else, say that you do not know.",
            "- Keep to what the customer wants, also if the agent suggests something else.",
            "- Confirm what the agent proposes if it agrees with the description, and correct it if not.",
            f"- When all you want is done or finally refused, or you are being transferred, write {STOP} and nothing "
            "else.",
        ]
    )
