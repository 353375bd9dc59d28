"""Wording of documentation, configuration and messages: the field's terms, and none of the phrases that once stood in
their place.

A phrase is listed with the term to use. The list covers README, docs, the comments in conf, and the messages of the
code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.docs.pages import PAGES, ROOT
from tests.source import MODULES, parsed

PHRASES = {
    r"made (anew|again)": "recomputed",
    r"(played|judged|asked|drawn|written|laid out|begun) anew": "repeated, again",
    r"to ask anew": "to request again",
    r"(demonstrations|episodes|stages|results) are found": "come from the cache",
    r"makes? sense together": "cross-field validation",
    r"is told": "receives, is reported to",
    r"(is|are|was|were) away": "unreachable",
    r"what (people|was|is|the agent|the policy) said?s?\b": "message, answer, feedback",
    r"what a model (wrote|writes|says)": "model-generated text",
    r"speaks? on": "continues",
    r"nobody listen\w*": "connection refused",
    r"the deed": "the action",
    r"again and again without harm": "idempotent",
    r"without harm": "idempotent",
    r"knows the way": "follows the procedure",
    r"acts again": "repeats an action",
    r"heard nothing": "timed out",
    r"asked once more": "requested again",
    r"whoever": "the party, the user who",
    r"(a|an) \w+ of (ours|yours)\b": "your own, Espalier's",
    r"those that are there": "existing",
    r"what stands": "the text, the value",
    r"(keeps|kept) out": "prevents",
    r"ways? out of": "escape",
    r"how far it is": "progress",
    r"(is|are) at work": "running",
    r"says? (so|which|why|whom)\b": "reports, names the reason",
    r"what was (judged|played|made|done) is kept": "finished results are cached",
    r"(is|are|was|were) let (end|go|run)": "finishes",
    r"goes on when": "resumes when",
    r"as it is there": "unchanged",
    r"gives? nothing": "has no effect",
    r"who is trusted": "trusted parties",
    r"takes? off the reward": "reduces the reward",
    r"hands? it back": "propagates",
    r"the other way round": "vice versa",
    r"tried again": "retried",
    r"(senseless|garbage(?! collection))": "invalid",
    r"no half-written|nothing half-written": "no partial",
}
"""Phrase (a regular expression, in any case) and the term to use in its place."""
ANY = re.compile("|".join(rf"\b(?:{phrase})" for phrase in PHRASES), re.IGNORECASE)

ERRORS = (
    "Error",
    "Problem",
    "Failed",
    "Failure",
    "Diverged",
    "InvalidAction",
    "Exceeded",
    "Triggered",
    "Unavailable",
    "Attempt",
    "Rejected",
)
"""Endings of the classes whose arguments are messages."""
REPORTS = ("warning", "error", "info", "line")
"""Methods that print a message."""


def test_pages_and_configuration_use_the_terms_of_the_field():
    files = [*PAGES, ROOT / "SECURITY.md", *sorted((ROOT / "conf").rglob("*.yaml"))]
    assert len(files) > 200
    assert wording(files, lambda path: enumerate(path.read_text(encoding="utf-8").splitlines(), 1)) == {}


def test_messages_use_the_terms_of_the_field():
    """Texts that a model reads are part of stage keys and stay as they are."""
    texts = {path: list(messages(path)) for path in MODULES}
    assert sum(map(len, texts.values())) > 200
    assert wording(texts, texts.__getitem__) == {}


def wording(files: Iterable[Path], lines: Callable[[Path], Iterable[tuple[int, str]]]) -> dict[str, list[str]]:
    """Return the phrases in the lines of each file that has any."""
    return {path.relative_to(ROOT).as_posix(): hits for path in files if (hits := phrases(lines(path)))}


def test_the_search_finds_a_phrase_across_the_parts_of_a_message(tmp_path):
    path = tmp_path / "module.py"
    path.write_text('def f(name):\n    raise ValueError(f"{name}: everything is made "\n        "anew")\n')
    assert phrases(messages(path)) == ["2: made anew: recomputed"]


def phrases(lines: Iterable[tuple[int, str]]) -> list[str]:
    """Return every phrase in the lines, with the number of the line and the term to use."""
    return sorted({f"{number}: {hit[0]}: {term(hit[0])}" for number, line in lines for hit in ANY.finditer(line)})


def term(text: str) -> str:
    """Return the term to use in place of a phrase."""
    return next(term for phrase, term in PHRASES.items() if re.match(phrase, text, re.IGNORECASE))


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the messages of a module with their lines: errors, problems, warnings and lines on the console."""
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Raise():
                pass
            case ast.Call(func=ast.Name(id=name)) if name.endswith(ERRORS):
                pass
            case ast.Call(func=ast.Attribute(attr=name)) if name in REPORTS or name.endswith(ERRORS):
                pass
            case ast.Assign(targets=[ast.Name(id="message" | "reason")]):
                pass
            case _:
                continue
        constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
        yield node.lineno, " ".join(" ".join(text for text in constants if isinstance(text, str)).split())
