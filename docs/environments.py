"""Table of the environments, in docs/reference/environments.md.

python -m docs.environments     write the table

Tasks are the first comments of the files in conf/environment. The page of an environment is the one in
docs/reference/environments that names it in a table or a command.
"""

from __future__ import annotations

import re

from docs.generated import DOCS, Generated, table
from flows.experiment.config_loader import CONF
from flows.terminal.help import describe

OVERVIEW = "reference/environments.md"


def content() -> str:
    """Return the table."""
    paths = sorted((CONF / "environment").glob("*.yaml"))
    return table(
        ["`environment=`", "Task", "Page"], [[f"`{path.stem}`", describe(path), _page(path.stem)] for path in paths]
    )


def _page(name: str) -> str:
    """Return a link to the page of an environment; empty if it has none."""
    mention = re.compile(rf"^\| `(?:environment=)?{name}`|environment={name}\b", re.MULTILINE)
    for path in sorted((DOCS / "reference" / "environments").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if mention.search(text):
            title = text.partition("\n")[0].removeprefix("# ")
            return f"[{title}](environments/{path.name})"
    if f"environment={name}`" in (DOCS / OVERVIEW).read_text(encoding="utf-8"):
        return "below"
    return ""


PAGE = Generated(OVERVIEW, "environments", content)

if __name__ == "__main__":
    PAGE.write()
