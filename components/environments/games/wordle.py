"""Guess a word of five letters: the environment marks the letters of each guess.

Marks: `+` right letter and position, `?` elsewhere in the word, `-` no further occurrence in the word. A letter that is
guessed twice is marked at most as often as the word contains it. The words of the two splits are different. The
outcome's `progress` is the share of the initially hidden positions that some guess had right.
"""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from typing import Any

from components.environments.seeded import ALL, Count, Difficulties, GeneratedGame
from components.environments.tools import InvalidAction, acts
from components.specs.registered import registered
from components.trajectories.schema import Scenario

LEVELS = {1: (8, 3), 2: (7, 2), 3: (6, 1), 4: (6, 0), 5: (5, 0)}
"""Allowed guesses and initially shown letters, by difficulty."""
HELDOUT = 5
"""One word in `HELDOUT` is held out."""

WORDS = """
about above acorn actor adult after again agent agree alarm album alert alley allow alone angle angry ankle apart apple
apron arena argue armor arrow aside asset attic audio avoid awake award bacon badge baker basic basin beach beard beast
begin being below bench berry birth black blade blame blank blast blaze blend bless blind block blond blood bloom board
boast bonus boost booth bored bough bowel brain brake brand brass brave bread break breed brick bride brief bring broad
broom brown brush build bunch burst cabin cable camel canal candy canoe cargo carry catch cause cedar chain chair chalk
charm chart chase cheap check cheek cheer chess chest chief child chill choir chord chunk cider cigar civil claim clash
class clean clear clerk click cliff climb clock close cloth cloud clown coach coast cobra cocoa color comet comic coral
couch cough count court cover crack craft crane crash crawl cream crest crime crisp cross crowd crown crude cruel crumb
crust curve cycle daily dairy dance death decay delay delta dense depth devil diary dirty ditch dizzy donor doubt dough
dozen draft drain drama dream dress drift drill drink drive drown dusty eager eagle early earth easel eight elbow elder
empty enemy enjoy enter equal error essay event every exact exist extra fable faint fairy faith false fancy favor feast
fence ferry fever fiber field fifty fight final flame flash fleet flesh float flock flood floor flour fluid flute focus
force forge forty found frame fresh front frost fruit funny gauge ghost giant glass globe glory glove grace grade grain
grand grant grape graph grasp grass grave great green greet grief grill grind group grove guard guess guest guide habit
handy happy harsh haste haven hazel heart heavy hedge hello hinge hobby honey honor horse hotel house human humor hurry
ideal image index inner input ivory jelly jewel joint joker judge juice kayak knife knock label labor large laser later
laugh layer learn lemon level lever light lilac limit linen liver lobby local logic loose lorry lower loyal lucky lunar
lunch magic major mango maple march marsh match mayor medal melon mercy merry metal meter midst minor model moist money
month moral motor mount mouse mouth movie music nasty naval nerve never night noble noise north novel nurse ocean offer
olive onion opera orbit order organ other otter outer owner paint panel panic paper party pasta patch pause peace peach
pearl pedal penny perch petal phone photo piano piece pilot pinch pitch pizza place plain plane plant plate plaza plead
pluck point polar porch pouch pound power press price pride prime print prize proof proud pulse pupil puppy purse queen
query quest quick quiet quilt quite quota quote radar radio rally ranch range rapid ratio razor ready relax reply rider
ridge rifle right rigid rinse risky river roast robin robot rocky rough round route royal rural salad salon salty sandy
sauce scale scarf scene scent scoop score scout scrap screw sense serve seven shade shake shame shape share shark sharp
sheep sheet shelf shell shift shine shirt shock shore short shout shrub siege sight silly skate skill skirt skull slate
sleep slice slide slope small smart smell smile smoke snack snail snake sneak solar solid solve sonic sorry sound south
space spade spare spark speak spear speed spell spend spice spicy spine spoon sport spray squad stack staff stage stain
stair stamp stand start state steak steal steam steel steep stick sting stock stone stool storm story stove straw strip
study stuff style sugar sunny super surge swamp swarm sweat sweep sweet swift swing sword syrup table taste teach tempo
tenth thank theme thick thief thing think third thorn three throw thumb tidal tiger tight title toast today tooth topic
torch total touch tough towel tower trace track trade trail train treat trend trial tribe trick troop trout truck trunk
trust truth tulip tutor twice twist uncle under union upper upset urban usual valid value vapor vault venue verse video
vigor villa vinyl virus visit vital vivid vocal voice voter wagon waist waste watch water weary weave wedge whale wheat
wheel where while white whole widow width winch windy witch woman world worry worth wound wreck wrist yacht yearn yeast
yield young youth zebra
"""


@registered("environment.wordle")
class Wordle(GeneratedGame):
    """seed: generator seed. train, heldout: scenarios of the two splits. difficulties: used in rotation. listed: accept
    only listed words as guesses; else any five letters.

    Scenario types: distinct, repeated (some letter occurs twice). Difficulty: see LEVELS.
    """

    saved = ("guesses",)

    name = "wordle"
    system = (
        "Find the word of five letters. After a guess each letter is marked: + in its place, ? elsewhere in the word, "
        "- not in it. Give the word alone."
    )

    def __init__(
        self,
        seed: int = 0,
        train: Count = 512,
        heldout: Count = 128,
        difficulties: Difficulties = ALL,
        listed: bool = False,
    ):
        super().__init__(seed, train, heldout, difficulties)
        self.listed = listed

    @staticmethod
    def task(rng: random.Random, difficulty: int, split: str) -> tuple[str, dict[str, Any]]:
        guesses, revealed = LEVELS[difficulty]
        word = rng.choice(_words_of(split))
        places = rng.sample(range(5), revealed)
        shown = "".join(letter if place in places else "_" for place, letter in enumerate(word))
        return "distinct" if len(set(word)) == 5 else "repeated", {"word": word, "shown": shown, "guesses": guesses}

    def begin(self, scenario: Scenario) -> str:
        self.guesses: list[str] = []
        return f"The word is {scenario.input['shown']}. You have {scenario.input['guesses']} guesses."

    def act(self, action: str) -> str:
        guess = action.lower()
        if not re.fullmatch(r"[a-z]{5}", guess):
            raise InvalidAction("a guess is a word of five letters, a to z")
        if self.listed and guess not in words():
            raise InvalidAction(f"no word {guess} in the list")
        self.guesses.append(guess)
        remaining = self.scenario.input["guesses"] - len(self.guesses)
        self.done = guess == self.scenario.input["word"] or remaining == 0
        result = marks(guess, self.scenario.input["word"])
        shown = " ".join(letter + mark for letter, mark in zip(guess, result, strict=True))
        return shown if self.done else f"{shown}, {remaining} guesses left"

    def legal_actions(self) -> list[str]:
        """Return the listed words, which are all legal guesses."""
        return list(words())

    def outcome(self, answer: str) -> dict[str, Any]:
        word, shown = self.scenario.input["word"], self.scenario.input["shown"]
        hidden = [place for place in range(5) if shown[place] == "_"]
        right = sum(any(guess[place] == word[place] for guess in self.guesses) for place in hidden)
        success = word in self.guesses
        return {"success": success, "progress": right / len(hidden), "guesses": len(self.guesses)}

    def solve(self, scenario: Scenario) -> list[dict[str, Any]]:
        """Keep the words that fit all marks, and guess the word that discriminates best between them.

        Guess only candidates if they fit in the remaining guesses; else any listed word.
        """
        word, shown = scenario.input["word"], scenario.input["shown"]
        candidates = tuple(
            candidate for candidate in words() if all(a in ("_", b) for a, b in zip(shown, candidate, strict=True))
        )
        guesses: list[str] = []
        while word not in guesses:
            sure = len(candidates) <= scenario.input["guesses"] - len(guesses)
            guesses.append(best(candidates, candidates if sure else words()))
            result = marks(guesses[-1], word)
            candidates = tuple(
                candidate
                for candidate in candidates
                if marks(guesses[-1], candidate) == result and candidate != guesses[-1]
            )
        return acts(guesses)


def marks(guess: str, word: str) -> str:
    """Return the marks of the letters of a guess."""
    elsewhere = Counter(expected for letter, expected in zip(guess, word, strict=True) if letter != expected)
    result = ""
    for letter, expected in zip(guess, word, strict=True):
        if letter == expected:
            result += "+"
        elif elsewhere[letter]:
            elsewhere[letter] -= 1
            result += "?"
        else:
            result += "-"
    return result


@functools.lru_cache(maxsize=1024)
def best(candidates: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    """Return the allowed guess whose marks leave the fewest candidates on average; ties go to a candidate."""

    def cost(guess: str) -> tuple[int, bool]:
        return sum(
            count**2 for count in Counter(marks(guess, word) for word in candidates).values()
        ), guess not in candidates

    return min(allowed, key=cost)


@functools.cache
def words() -> tuple[str, ...]:
    return tuple(WORDS.split())


@functools.lru_cache(maxsize=16)
def _words_of(split: str) -> list[str]:
    """Return the words of a split. The split does not depend on the seed."""
    shuffled = random.Random("wordle words").sample(words(), len(words()))
    return shuffled[::HELDOUT] if split == "heldout" else [w for n, w in enumerate(shuffled) if n % HELDOUT]
