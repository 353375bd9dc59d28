"""Run the cells of a notebook as Jupyter does, without Jupyter: `python docs/notebook.py docs/guides/loop.ipynb`."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import sys
import types
from pathlib import Path
from typing import Any


def run(path: Path) -> dict[str, Any]:
    """Run the code cells of a notebook in order, in a module `__main__`, and return its variables. A cell may await."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    module = types.ModuleType("__main__")

    async def run_cells() -> None:
        for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
            text, name = "".join(cell["source"]), f"<{path.name}, cell {number}>"
            linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # as IPython does
            code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, module.__dict__)
            if inspect.isawaitable(result):
                await result

    asyncio.run(run_cells())
    return module.__dict__


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    run(Path(sys.argv[1]))
