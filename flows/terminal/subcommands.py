"""Commands with subcommands, such as `python -m flows.runs tag`.

A command is a package: `__main__.py` holds its table of subcommands, and each subcommand is a function of a module of
the package. Only the module of the chosen subcommand is imported.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.terminal.arguments import KEY
from flows.terminal.interrupt import EXIT_CODE


@dataclass(frozen=True)
class Subcommand:
    """Line of the table."""

    function: str
    """Function of the subcommand, as `package.module:function`: it takes arguments and returns an exit code."""
    summary: str


@dataclass(frozen=True)
class Subcommands:
    """Subcommands of a command by name."""

    command: str
    """Name of the command, such as `runs`."""
    table: Mapping[str, Subcommand]
    default: str | None = None
    """Subcommand without a name on the command line; None: a name is required."""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the subcommand that the first argument names; `root=DIR` may precede it. Return its exit code, 2 if there
        is no such subcommand, or 130 if it was interrupted."""
        arguments = list(sys.argv[1:] if argv is None else argv)
        if arguments[:1] in (["-h"], ["--help"]):
            print(self.help(), end="")
            return 0
        first = next((index for index, argument in enumerate(arguments) if not argument.startswith(KEY)), None)
        name = self.default if first is None or arguments[first].startswith("-") else arguments.pop(first)
        if name is None or name not in self.table:
            near = difflib.get_close_matches(name or "", self.table, n=1)
            advice = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(self.table)}"
            problem = "a subcommand is missing" if name is None else f"no subcommand {name!r}"
            print(f"{self._program}: {problem}; {advice}", file=sys.stderr)
            return 2
        module, _, function = self.table[name].function.partition(":")
        try:
            code: int = getattr(importlib.import_module(module), function)(arguments)
        except KeyboardInterrupt:
            return EXIT_CODE
        return code

    @property
    def _program(self) -> str:
        return f"python -m flows.{self.command}"

    def help(self) -> str:
        """Return the subcommands with a line each."""
        width = max(map(len, self.table))
        optional = f"; without SUBCOMMAND: {self.default}" if self.default else ""
        lines = [f"usage: {self._program} SUBCOMMAND …{optional}; --help behind it shows its options\n"]
        lines += [f"  {name:{width}}  {subcommand.summary}" for name, subcommand in self.table.items()]
        return "\n".join(lines) + "\n"
