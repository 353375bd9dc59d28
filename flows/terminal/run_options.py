"""Options of `python -m flows.run`: the supported options of Hydra, and `--fork`. Invalid options raise SpecError."""

from __future__ import annotations

import argparse
from typing import NoReturn

from components.errors import Problem, SpecError
from components.redaction import mask_text
from components.specs import nearest
from flows.terminal.arguments import refuse_root_option
from flows.terminal.overrides import mask_override

CFG_VALUES = ("job", "hydra", "all")
"""Parts of the composed config that --cfg prints."""
ABOUT = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Topics that --info prints."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        option, colon, reason = mask_text(message).removeprefix("argument ").partition(": ")
        raise SpecError([Problem(option, reason) if colon else Problem("options", message)])


def parse_options(argv: list[str], command: str) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return the options, which include the overrides, and the parser, which Hydra's help prints. Raises SpecError."""
    parser = _parser(command)
    refuse_root_option(parser, argv)
    options, unknown = parser.parse_known_intermixed_args(argv)
    invalid = [word for word in unknown if word.startswith("-")] or unknown  # the other words are values of these
    problems = [_unknown(word, parser) for word in invalid]
    for name, value, expected in (("--cfg", options.cfg, CFG_VALUES), ("--info", options.info, ABOUT)):
        if value is not None and value not in expected:
            near = nearest(value, expected)
            text = f"{value!r}: expected one of {', '.join(expected)}"
            problems.append(Problem(name, text, f"{name} {near}" if near else None))
    modes = [options.run, options.multirun, options.cfg is not None, options.info is not None, options.shell_completion]
    if sum(modes) > 1:
        text = "--run, --multirun, --cfg, --info and --shell-completion exclude each other; expected at most one"
        problems.append(Problem("options", text))
    for name, value in (("--resolve", options.resolve), ("--package", options.package)):
        if value and options.cfg is None:
            problems.append(Problem(name, "requires --cfg; expected --cfg job", f"--cfg job {name}"))
    if problems:
        raise SpecError(problems)
    return options, parser


def _parser(command: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=command, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME, group=option, key=value")
    parser.add_argument("--help", "-h", action="store_true", help="list experiments and config groups")
    parser.add_argument("--multirun", "-m", action="store_true", help="sweep: every combination of the given values")
    parser.add_argument("--run", "-r", action="store_true", help="run (the default)")
    parser.add_argument("--cfg", "-c", metavar="job", help=f"print the composed config: {', '.join(CFG_VALUES)}")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: replace interpolations by their values")
    parser.add_argument("--package", "-p", help="with --cfg: print this part only")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="folder with your own config groups")
    parser.add_argument("--fork", metavar="RUN@STEP", help="start from the policy of another run; same as fork=")
    parser.add_argument(
        "--info", "-i", nargs="?", const="all", metavar="all", help=f"print Hydra's state: {', '.join(ABOUT)}"
    )
    parser.add_argument("--hydra-help", action="store_true", help="print Hydra's own help")
    parser.add_argument("--shell-completion", "-sc", action="store_true", help="install or uninstall shell completion")
    return parser


def _unknown(word: str, parser: argparse.ArgumentParser) -> Problem:
    name, equals, _ = word.partition("=")
    actions = [action for action in parser._actions if action.nargs != 0 or not equals]
    near = nearest(name, [option for action in actions for option in action.option_strings if option.startswith("--")])
    if equals and near is None:
        near = mask_override(word.lstrip("-"))
    return Problem(mask_text(name), "unknown option", near)
