"""Command-line parser for `root=DIR`, the folder of the runs, in the syntax of Hydra's overrides.

At module level this file imports light modules only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.artifacts.roots import check_root
from components.errors import ResourceError

CODE = Path(__file__).resolve().parents[2]
"""Folder of the packages and of conf/: a checkout, or the site-packages of an installation."""
DEFAULT_ROOT = (CODE if (CODE / "pyproject.toml").is_file() else Path.cwd()) / "runs"
KEY = "root="
_ROOT_USAGE = "[root=DIR]"


def add_trust(parser: argparse.ArgumentParser, condition: str = "") -> None:
    """Add the option `--trust` of a command that runs settings of a record (`flows.history.trust`). condition:
    beginning of its help, such as "with --run: "."""
    text = "run settings of the record that start programs, contact servers, read files or run code of packages"
    parser.add_argument("--trust", action="store_true", help=condition + text)


def add_store_trust(parser: argparse.ArgumentParser) -> None:
    """Add the option `--trust` of a command that only reads."""
    parser.add_argument("--trust", action="store_true", help="also read the store that the record names (store=URI)")


class RootParser(argparse.ArgumentParser):
    """Parser that accepts `root=DIR` anywhere before `--` and stores it as `options.root`, an absolute path.

    If `root=DIR` is repeated, the last one counts, as in Hydra. default: value if it is absent; None makes it required.
    """

    def __init__(self, *, default: Path | None = DEFAULT_ROOT, **options: Any):
        super().__init__(**options)
        self._default_root = default
        shown = f" (default: {default})" if default else ""
        self.add_argument_group("key=value", f"root=DIR: folder of the runs{shown}")

    def parse_known_args(  # type: ignore[override]  # its overloads repeat this for every namespace type
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        args = list(sys.argv[1:] if args is None else args)
        refuse_root_option(self, args)
        end = args.index("--") if "--" in args else len(args)
        roots = [arg for arg in args[:end] if arg.startswith(KEY)]
        others = [arg for arg in args[:end] if not arg.startswith(KEY)] + args[end:]
        namespace, extras = super().parse_known_args(others, namespace)
        if roots or not hasattr(namespace, "root"):
            namespace.root = self._folder(roots[-1].removeprefix(KEY)) if roots else self._default_root
            if namespace.root is None:
                self.error("root=DIR is required")
            try:
                check_root(namespace.root)
            except ResourceError as error:
                self.error(str(error))
        return namespace, extras

    def format_usage(self) -> str:
        usage = super().format_usage()
        return usage if _ROOT_USAGE in usage else f"{usage.rstrip()} {_ROOT_USAGE}\n"

    def format_help(self) -> str:
        return super().format_help().replace(super().format_usage().rstrip(), self.format_usage().rstrip(), 1)

    def _folder(self, text: str) -> Path:
        try:
            return root_folder(text)
        except ValueError as error:
            self.error(f"root: {text!r}: expected {error}")


def root_folder(text: str) -> Path:
    """Return the absolute path of a root. Raises ValueError; its message completes "expected ..."."""
    if text == "":
        raise ValueError("a folder, not an empty string (is a shell variable unset?)")
    if "://" in text:
        raise ValueError("a local folder; to share artifacts between machines, set store=URI")
    return Path(text).expanduser().absolute()


def refuse_root_option(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> None:
    """Exit with the parser's error if the root is given as `--root`. args: command line; None means `sys.argv`."""
    args = sys.argv[1:] if args is None else args
    for index, arg in enumerate(args):
        if arg == "--":
            return
        if arg == "--root" or arg.startswith("--root="):
            folder = arg.partition("=")[2] or next(iter(args[index + 1 : index + 2]), "DIR")
            parser.error(f"--root is not an option; use root={folder}")
