"""`python -m flows`, also installed as `espalier`: list of the commands.

    espalier run +experiment=quickstart          the same as python -m flows.run +experiment=quickstart

This file imports the standard library only, so that the list prints without delay.
"""

from __future__ import annotations

import ast
import difflib
import runpy
import sys
from pathlib import Path


def commands() -> dict[str, str]:
    """Return what each command does, by name: the first sentence of its module's docstring."""
    summaries = {}
    folder = Path(__file__).parent
    packages = {path.parent.name: path for path in folder.glob("*/__main__.py")}
    modules = {path.stem: path for path in folder.glob("*.py") if path.stem != "__main__"}
    for name, path in sorted((packages | modules).items()):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            first = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
            summaries[name] = first.partition("`: ")[2].partition(". ")[0].rstrip(".")
    return summaries


def main() -> None:
    """Run the command that the first argument names. Raises SystemExit if there is none."""
    known = commands()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("python -m flows.COMMAND, or espalier COMMAND; --help behind it shows its options\n")
        width = max(map(len, known))
        for command, summary in known.items():
            print(f"  {command:{width}}  {summary}")
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
        raise SystemExit(f"espalier: no command {name!r}; {advice}")
    sys.argv = sys.argv[1:]
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does: the user's packages
    runpy.run_module(f"flows.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
