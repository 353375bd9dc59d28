"""Simulated customers: one follows a script, one is played by a language model.

A script is JSON data: the customer's opening message and goal, the facts it discloses when asked, the offers it accepts
or rejects, the number of refusals it needs before it accepts one, and its temper, which sets its patience with useless
messages. `ScriptedCustomer` is a deterministic state machine over the agent's messages. `ServedCustomer` gets the same
script as a prompt, over OpenAI's chat completions. Both end the conversation with a message that contains `[END]`.
"""

from __future__ import annotations

import re
from typing import Any

from components.environments.language_model import ServedModel
from components.environments.protocol import Messages

STOP = "[END]"
"""Marker in the customer's last message."""
MAX_LENGTH = 4000
"""Maximum length of a message that a customer reads, in characters; the rest is ignored."""
MAX_NUMBERS, MAX_RULES = 15, 2
"""Maximum number of distinct numbers and of distinct rules in one message that a customer understands."""
PATIENCE = {"calm": 6, "brisk": 4, "cross": 3}
"""Number of useless messages after which a customer leaves, by temper."""
LOST = {
    "calm": "Sorry, I do not quite follow.",
    "brisk": "That does not help me.",
    "cross": "What is that supposed to mean?",
}
"""Reply to a message without a recognized purpose, by temper."""
MANNERS = {
    "calm": "You are friendly and patient.",
    "brisk": "You are short and want to be done quickly.",
    "cross": "You are annoyed, and say so.",
}
"""Instruction for a model that plays the customer, by temper."""
_ASKING = re.compile(
    r"\?|\b(please|tell|give|need|provide|share|let me know|may i|could you|can you|what|which)\b", re.IGNORECASE
)
_OFFER = re.compile(
    r"\b(shall i|should i|would you like me|do you want me|do you agree|go ahead|proceed|confirm|is (that|this) "
    r"(ok|okay|fine|right|correct))\b",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"\b(sorry|afraid|unfortunately|regret|cannot|can't|can not|could not|couldn't|unable|not able|no longer|"
    r"impossible|not (be )?(possible|allowed|permitted|eligible|available)|isn't|ineligible|may not|must not|won't|"
    r"will not|declin\w+|denied|against|forbid\w*)\b",
    re.IGNORECASE,
)
_RULE = re.compile(r"\b[AR]\d{1,2}\b")
_NUMBER = re.compile(r"\d+")
_FIRST = re.compile(
    r"\b(?:(yes|yeah|yep|sure|okay|ok|agreed|i agree|i confirm|go ahead|please do)|no|not|don't|wait|stop|never)\b",
    re.IGNORECASE,
)


def says(text: str, words: str) -> bool:
    """Return True if the text contains the words as whole words.

    45 is not contained in B4512, 45.20, 10:45 or lamp-45. Numbers may have thousands separators and zero cents.
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    before, after = r"(?<!\w)", r"(?!\w)"
    if words.isdigit():
        before, after = before + r"(?<!\d[.:])(?<!\w-)", after + r"(?!\.\d*[1-9]|[:-]\d)"
    return re.search(f"{before}{re.escape(words)}{after}", plain, re.IGNORECASE) is not None


def clear(text: str) -> bool:
    """Return True if a message does not list too many numbers or rules, as an agent that guesses would."""
    return len(set(_NUMBER.findall(text))) <= MAX_NUMBERS and len(set(_RULE.findall(text))) <= MAX_RULES


def agrees(reply: str) -> bool:
    """Return True if a customer's reply agrees: the first word for yes or no decides."""
    first = _FIRST.search(reply)
    return bool(first and first.group(1))


class ScriptedCustomer:
    """A customer that follows a script. topics: pattern by topic of the words that ask for it."""

    def __init__(self, script: dict[str, Any], topics: dict[str, str]):
        self.script = script
        self._topics = {name: re.compile(rf"\b({words})\b", re.IGNORECASE) for name, words in topics.items()}
        self.patience = PATIENCE[script["temper"]]
        self.refused = 0
        self.disclosed: list[str] = []
        """Topics whose facts the customer has disclosed."""
        self.answered: list[int] = []
        """Offers that were accepted or rejected, as indices into the script."""

    def answer(self, text: str, *, done: bool, missing: list[str]) -> str:
        """Return the customer's reply.

        done: True if everything that the customer wants is done. missing: questions that are not yet answered.
        """
        text, wishes = text[:MAX_LENGTH].replace("’", "'"), self.script["wishes"]
        if not clear(text):
            return self._impatient("That is too much at once.")
        asked = self._asked(text)
        fresh = [topic for topic in asked if topic not in self.disclosed]
        offers = [wish for wish in self._open() if all(says(text, term) for term in wishes[wish]["terms"])]
        if offers:
            rejected = next((wish for wish in offers if not wishes[wish]["yes"]), None)
            addressed = [rejected] if rejected is not None else offers
            self.answered += addressed
            reply = " ".join(dict.fromkeys(wishes[wish]["reply"] for wish in addressed))
            return f"{reply} {STOP}" if self._is_satisfied(done, missing) else reply
        refusal = bool(_REFUSAL.search(text))
        if refusal and _RULE.search(text) and not fresh:
            self.refused += 1
            if self.refused > self.script["refusals"] + (not self.script["refusals"]):
                return f"Then I give up. {STOP}"
            if not self._is_satisfied(done, missing):
                return self._reply_to_refusal()
        if self._is_satisfied(done, missing):
            return f"Thank you, that is all. {STOP}"
        if fresh:
            self.disclosed += fresh
            return " ".join(self.script["facts"][topic] for topic in fresh)
        if asked:
            return self._impatient("As I said: " + " ".join(self.script["facts"][topic] for topic in asked))
        if refusal:
            return self._impatient("Which of your rules says so?")
        if self._open() and _OFFER.search(text):
            return self._impatient("Not so fast. What exactly would you do? Name all numbers and dollars of it.")
        if done and missing:
            return self._impatient(missing[0])
        return self._impatient(f"{LOST[self.script['temper']]} {self.script['goal']}")

    def _impatient(self, words: str) -> str:
        """Return the reply to a useless message, which costs patience."""
        self.patience -= 1
        return words if self.patience > 0 else f"This leads nowhere. Goodbye. {STOP}"

    def save(self) -> list[Any]:
        return [self.patience, self.refused, list(self.disclosed), list(self.answered)]

    def restore(self, state: list[Any]) -> None:
        self.patience, self.refused, disclosed, answered = state
        self.disclosed, self.answered = list(disclosed), list(answered)

    def _open(self) -> list[int]:
        """Return the offers that the customer would answer now: up to the first open one that it rejects."""
        offers = []
        for number, wish in enumerate(self.script["wishes"]):
            if number not in self.answered:
                offers.append(number)
                if not wish["yes"]:
                    break
        return offers

    def _is_satisfied(self, done: bool, missing: list[str]) -> bool:
        refusals_left = self.script["refusals"] - self.refused
        unrejected = [wish for wish in self._open() if not self.script["wishes"][wish]["yes"]]
        return done and not missing and not unrejected and refusals_left <= 0

    def _reply_to_refusal(self) -> str:
        if self.refused < self.script["refusals"]:
            return str(self.script["insists"])
        if not self.script["refusals"]:
            return f"I do not think that is right. {self.script['goal']}"
        requests = [self.script["wishes"][wish]["words"] for wish in self._open()]
        return " ".join(["All right, then not.", *requests[:1]])

    def _asked(self, text: str) -> list[str]:
        """Return the topics that the text asks about and the customer has facts on."""
        sentences = [sentence for sentence in re.split(r"(?<=[.?!\n])\s+", text) if _ASKING.search(sentence)]
        return [
            name
            for name, words in self._topics.items()
            if name in self.script["facts"] and any(words.search(sentence) for sentence in sentences)
        ]


class ServedCustomer(ServedModel):
    """A customer played by a model served over OpenAI's chat completions."""

    role = "customer"
    key_path = "environment.user"

    @classmethod
    def or_else(cls) -> str:
        return ", or set environment.user=scripted"

    async def answer(self, script: dict[str, Any], talk: list[list[str]], text: str, seed: int) -> str:
        """Return the customer's reply to a text. talk: earlier pairs of an agent message and the customer's reply.

        Raises EnvironmentFailed if the server returns no reply, ResourceError if it rejects the model or its key.
        """
        messages: Messages = [
            {"role": "system", "content": prompt(script)},
            {"role": "assistant", "content": script["opening"]},
        ]
        for message, reply in [*talk, [text[:MAX_LENGTH], ""]]:
            messages.append({"role": "user", "content": message or "(silence)"})
            messages.append({"role": "assistant", "content": reply})
        return (await self.ask(messages[:-1], seed=seed, max_tokens=200))[:MAX_LENGTH]


def prompt(script: dict[str, Any]) -> str:
    """Return the prompt for a model that plays the script."""
    facts = [f"- {topic}: {text}" for topic, text in script["facts"].items()]
    offers = [
        f'- When you are offered what comes to ({", ".join(wish["terms"])}): say "{wish["reply"]}"'
        for wish in script["wishes"]
    ]
    refusals = script["refusals"]
    refusal_rule = (
        f"Your wish is against the company's rules. When you have been refused {refusals} time(s) with a rule named, "
        f'accept it; before that say: "{script["insists"]}"'
        if refusals
        else "Do not accept a refusal."
    )
    return "\n".join(
        [
            "You are a customer who writes to a company's service. Play only the customer; write one short message.",
            f"{MANNERS[script['temper']]} What you want: {script['goal']}",
            "What you know, and tell only when you are asked for it (invent nothing else):",
            *facts,
            *(
                ["Offers. Agree to nothing else; begin an agreement with Yes, a refusal with No:", *offers]
                * bool(offers)
            ),
            refusal_rule,
            f"When all you want has been done, told or finally refused, or it leads nowhere, say goodbye and write "
            f"{STOP} at the end of that message.",
        ]
    )
