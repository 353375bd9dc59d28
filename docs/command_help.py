"""Help of every command, in docs/reference/command_help.md.

python -m docs.command_help     write the page

Lists of experiments and config groups, which the help of
`flows.run` prints too, are left out: docs/reference/configuration.md has them.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from docs.generated import Generated
from flows.__main__ import commands
from flows.terminal.help import OPTIONS, USAGE

ROOT = Path(__file__).parents[1]
COLUMNS = "100"


def help_text(command: str) -> str:
    """Return what `python -m flows.COMMAND --help` prints. command: name, with a subcommand such as `runs tag`."""
    if command == "run":
        return f"{USAGE}\n{OPTIONS}"
    line = [sys.executable, "-m", *f"flows.{command}".split(), "--help"]
    environment = {**os.environ, "COLUMNS": COLUMNS}
    printed = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return printed.replace(f"{ROOT}{os.sep}", "")


def subcommands(command: str) -> list[str]:
    """Return the lines that start the subcommands of a command, such as `runs tag`."""
    if not (ROOT / "flows" / command / "__main__.py").is_file():
        return []
    module = importlib.import_module(f"flows.{command}.__main__")
    return [f"{command} {name}" for name in getattr(module, command.upper()).table]


def content() -> str:
    """Return one section for each command and each subcommand."""
    names = [line for name in commands() for line in (name, *subcommands(name))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        texts = threads.map(help_text, names)
    return "\n".join(
        f"## flows.{name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in zip(names, texts, strict=True)
    )


PAGE = Generated("reference/command_help.md", "commands", content)

if __name__ == "__main__":
    PAGE.write()
