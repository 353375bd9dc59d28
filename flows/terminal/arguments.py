"""The folder of the runs on a command line: `root=DIR` for every command, as Hydra's commands take it.

At module level this file imports the standard library only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFAULT_ROOT = Path(__file__).resolve().parents[2] / "runs"
KEY = "root="
_SHOWN = "[root=DIR]"


class RootParser(argparse.ArgumentParser):
    """A parser that takes `root=DIR` anywhere among the arguments before `--`, as `options.root`, an absolute path. The
    last one counts, as in Hydra's commands.

    default: its value where it is not given; None means that it has to be given.
    """

    def __init__(self, *, default: Path | None = DEFAULT_ROOT, **options: Any):
        super().__init__(**options)
        self._default_root = default
        shown = f" (default: {default})" if default else ""
        self.add_argument_group("key=value", f"root=DIR: folder of the runs{shown}")

    def parse_known_args(  # type: ignore[override]  # its overloads say the same of every namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        args = list(sys.argv[1:] if args is None else args)
        refuse_root_option(self, args)
        end = args.index("--") if "--" in args else len(args)
        given = [arg for arg in args[:end] if arg.startswith(KEY)]
        rest = [arg for arg in args[:end] if not arg.startswith(KEY)] + args[end:]
        namespace, extras = super().parse_known_args(rest, namespace)
        if given or not hasattr(namespace, "root"):
            namespace.root = self._folder(given[-1].removeprefix(KEY)) if given else self._default_root
            if namespace.root is None:
                self.error("root=DIR is required")
        return namespace, extras

    def format_usage(self) -> str:
        usage = super().format_usage()
        return usage if _SHOWN in usage else f"{usage.rstrip()} {_SHOWN}\n"

    def format_help(self) -> str:
        return super().format_help().replace(super().format_usage().rstrip(), self.format_usage().rstrip(), 1)

    def _folder(self, text: str) -> Path:
        try:
            return root_folder(text)
        except ValueError as error:
            self.error(f"root: {text!r}: expected {error}")


def root_folder(text: str) -> Path:
    """Return the absolute path of a root. Raises ValueError, whose message says what was expected."""
    if text == "":
        raise ValueError("a folder; an empty text is none, as an unset variable of the shell gives it")
    if "://" in text:
        raise ValueError("a local folder; artifacts are shared between machines with store=URI")
    return Path(text).expanduser().absolute()


def refuse_root_option(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> None:
    """End with the parser's error where the root is given as an option. args: None are those of this process."""
    args = sys.argv[1:] if args is None else args
    for index, arg in enumerate(args):
        if arg == "--":
            return
        if arg == "--root" or arg.startswith("--root="):
            folder = arg.partition("=")[2] or next(iter(args[index + 1 : index + 2]), "DIR")
            parser.error(f"--root is no option: write root={folder}")
