"""The customers that a desk talks to: one that follows a script, and one that a language model plays.

A script is JSON data: what the customer opens with and wants, what it knows (told only when asked for), which offers
it takes or refuses, how many refusals it needs before it believes one, and its temper, which is how much useless talk
it stands. `ScriptedCustomer` is a small state machine over the agent's words: equal words, equal answers. A
`ServedCustomer` gets the same script as a prompt and is asked over OpenAI's chat completions. Both end the
conversation with a message that holds `[END]`.
"""

from __future__ import annotations

import re
from typing import Any

from components.environments.language_model import ServedModel
from components.environments.protocol import Messages

STOP = "[END]"
"""In the customer's last message."""
HEARD = 4000
"""Characters of what the agent says at once that a customer takes in."""
NUMBERS, RULES = 15, 2
"""Different numbers and rules in one message that a customer takes in."""
PATIENCE = {"calm": 6, "brisk": 4, "cross": 3}
"""Useless messages that a customer stands, by temper."""
LOST = {
    "calm": "Sorry, I do not quite follow.",
    "brisk": "That does not help me.",
    "cross": "What is that supposed to mean?",
}
MANNERS = {
    "calm": "You are friendly and patient.",
    "brisk": "You are short and want to be done quickly.",
    "cross": "You are annoyed, and say so.",
}
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
    """As whole words: order B4512 does not say 45, nor do 45.20, 10:45 and lamp-45. Numbers may be written with commas
    and cents of zero."""
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    before, after = r"(?<!\w)", r"(?!\w)"
    if words.isdigit():
        before, after = before + r"(?<!\d[.:])(?<!\w-)", after + r"(?!\.\d*[1-9]|[:-]\d)"
    return re.search(f"{before}{re.escape(words)}{after}", plain, re.IGNORECASE) is not None


def clear(text: str) -> bool:
    """Whether somebody can take that in: not every number or rule that there is, to have named the right one."""
    return len(set(_NUMBER.findall(text))) <= NUMBERS and len(set(_RULE.findall(text))) <= RULES


def agrees(reply: str) -> bool:
    """Whether a customer's answer is a yes: the first word of the two kinds decides."""
    first = _FIRST.search(reply)
    return bool(first and first.group(1))


class ScriptedCustomer:
    """topics: what may be asked for, each with a pattern of the words that ask for it."""

    def __init__(self, script: dict[str, Any], topics: dict[str, str]):
        self.script = script
        self._topics = {name: re.compile(rf"\b({words})\b", re.IGNORECASE) for name, words in topics.items()}
        self.patience = PATIENCE[script["temper"]]
        self.refused = 0
        self.told: list[str] = []
        self.answered: list[int] = []
        """Offers that were taken or refused, by their place in the script."""

    def answer(self, text: str, *, done: bool, missing: list[str]) -> str:
        """What the customer says to that. done: everything that it wanted done has been. missing: the questions that
        it still wants answered."""
        text, wishes = text[:HEARD].replace("’", "'"), self.script["wishes"]
        if not clear(text):
            return self._impatient("That is too much at once.")
        asked = self._asked(text)
        fresh = [topic for topic in asked if topic not in self.told]
        offers = [wish for wish in self._open() if all(says(text, term) for term in wishes[wish]["terms"])]
        if offers:
            first_no = next((wish for wish in offers if not wishes[wish]["yes"]), None)
            taken = [first_no] if first_no is not None else offers
            self.answered += taken
            reply = " ".join(dict.fromkeys(wishes[wish]["reply"] for wish in taken))
            return f"{reply} {STOP}" if self._content(done, missing) else reply
        refusal = bool(_REFUSAL.search(text))
        if refusal and _RULE.search(text) and not fresh:
            self.refused += 1
            if self.refused > self.script["refusals"] + (not self.script["refusals"]):
                return f"Then I give up. {STOP}"
            if not self._content(done, missing):
                return self._to_a_refusal()
        if self._content(done, missing):
            return f"Thank you, that is all. {STOP}"
        if fresh:
            self.told += fresh
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
        """Its answer to something useless."""
        self.patience -= 1
        return words if self.patience > 0 else f"This leads nowhere. Goodbye. {STOP}"

    def save(self) -> list[Any]:
        return [self.patience, self.refused, list(self.told), list(self.answered)]

    def restore(self, state: list[Any]) -> None:
        self.patience, self.refused, told, answered = state
        self.told, self.answered = list(told), list(answered)

    def _open(self) -> list[int]:
        """Offers that it would answer now: those behind one that it refuses wait for that."""
        found = []
        for number, wish in enumerate(self.script["wishes"]):
            if number not in self.answered:
                found.append(number)
                if not wish["yes"]:
                    break
        return found

    def _content(self, done: bool, missing: list[str]) -> bool:
        refusals_left = self.script["refusals"] - self.refused
        unheard = [one for one in self._open() if not self.script["wishes"][one]["yes"]]
        return done and not missing and not unheard and refusals_left <= 0

    def _to_a_refusal(self) -> str:
        if self.refused < self.script["refusals"]:
            return str(self.script["insists"])
        if not self.script["refusals"]:
            return f"I do not think that is right. {self.script['goal']}"
        rest = [self.script["wishes"][wish]["words"] for wish in self._open()]
        return " ".join(["All right, then not.", *rest[:1]])

    def _asked(self, text: str) -> list[str]:
        """Topics that it knows something about and is asked for."""
        sentences = [one for one in re.split(r"(?<=[.?!\n])\s+", text) if _ASKING.search(one)]
        return [
            name
            for name, words in self._topics.items()
            if name in self.script["facts"] and any(words.search(one) for one in sentences)
        ]


class ServedCustomer(ServedModel):
    """A customer played by a model behind a URL that speaks OpenAI's chat completions."""

    role = "customer"
    key_path = "environment.user"

    @classmethod
    def or_else(cls) -> str:
        return ", or write environment.user=scripted"

    async def answer(self, script: dict[str, Any], talk: list[list[str]], text: str, seed: int) -> str:
        """What the customer says to a text, after `talk`: pairs of what the agent said and it answered. Raises
        EnvironmentFailed where the server gives no answer, ResourceError where it would give none to anybody."""
        messages: Messages = [
            {"role": "system", "content": prompt(script)},
            {"role": "assistant", "content": script["opening"]},
        ]
        for said, answered in [*talk, [text[:HEARD], ""]]:
            messages.append({"role": "user", "content": said or "(silence)"})
            messages.append({"role": "assistant", "content": answered})
        return (await self.ask(messages[:-1], seed=seed, max_tokens=200))[:HEARD]


def prompt(script: dict[str, Any]) -> str:
    """The script, told to a model that is to play it."""
    facts = [f"- {topic}: {text}" for topic, text in script["facts"].items()]
    offers = [
        f'- When you are offered what comes to ({", ".join(wish["terms"])}): say "{wish["reply"]}"'
        for wish in script["wishes"]
    ]
    refusals = script["refusals"]
    told = (
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
            told,
            f"When all you want has been done, told or finally refused, or it leads nowhere, say goodbye and write "
            f"{STOP} at the end of that message.",
        ]
    )
