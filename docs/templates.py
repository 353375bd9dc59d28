"""Table of chat templates in docs/concepts/trajectories.md from what the templates do.

    python -m docs.templates

The families are those of tests/trajectories/families.py; for each, an episode of three questions is played, with a call
of a tool and an answer to each. `tests/docs` fails while the table is not what this writes.
"""

from __future__ import annotations

from pathlib import Path

from components.errors import ResourceError
from components.trajectories.convert import to_openai
from tests.trajectories.families import FAMILIES, QUESTIONS, Family, Scripted, chat_format, episode, sampled

PAGE = Path(__file__).parent / "concepts" / "trajectories.md"
BEGIN, END = "<!-- templates -->", "<!-- /templates -->"
HEAD = f"| Template | Tools and calls | Histories of {2 * QUESTIONS} answers | Why | Demonstrations |"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page with its table recomputed."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    return "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *map(_row, FAMILIES.values())]) + "\n"


def _row(family: Family) -> str:
    chat = chat_format(family)
    trajectory = episode(Scripted(chat, sampled(family, chat)))
    histories = [history for history in trajectory.histories if any(message.span for message in history.messages)]
    assert trajectory.success
    try:
        chat.streams([to_openai(message) for message in histories[-1].messages], trajectory.tools)
        shown = "learned"
    except ResourceError:
        shown = "refused: a rendered answer does not begin with the generation prompt"
    tools = "the template's" if chat.native_tools else "in the system message"
    if not chat.system_role:
        tools = "in the user's first words"
    return f"| {family.models} | {tools} | {len(histories)} | {family.why} | {shown} |"


if __name__ == "__main__":
    main()
