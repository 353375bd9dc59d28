"""Text of `--help`: experiments and config groups, each with the first comment of its file.

This module reads the config folders and imports the standard library only, so that help prints without delay.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

CONF = Path(__file__).resolve().parents[2] / "conf"

USAGE = """\
Espalier trains, evaluates and deploys LLM agents. An experiment is declared in conf/ and run by one command.

  python -m flows.run +experiment=NAME [group=option] [key=value]     run; repeated: resume, with cached stages reused
  python -m flows.run -m +experiment=NAME key=value,value             sweep: one run for each value
  python -m flows.run +experiment=NAME --cfg job                      print the composed config, run nothing
"""
OPTIONS = """\
Options
  -m, --multirun       sweep: run every combination of the given values (docs/guides/sweeps.md)
  --cfg job            print the composed, validated config; with --resolve, replace interpolations by their values
  --config-dir DIR     folder with your own config groups, laid out like conf/
  --hydra-help         Hydra's own options: sweepers, launchers, shell completion
"""


def text(folders: Sequence[Path] = (CONF,)) -> str:
    """Return the whole help text. Groups that exist in several folders list the options of all of them."""
    width = shutil.get_terminal_size((120, 24)).columns
    groups = {group: dict(_options(folders, group)) for group in _groups(folders)}
    experiments, tasks = groups.pop("experiment", {}), groups.pop("task", {})
    lines = [
        USAGE,
        "Experiments (+experiment=NAME)",
        *_table({f"  {name}": about for name, about in experiments.items()}, width),
        "",
        "Tasks of an experiment (+task=NAME): environment, model and sizes",
        *_table({f"  {name}": about for name, about in tasks.items()}, width),
        "",
    ]
    defaults = _defaults(folders)
    lines.append("Groups (group=option; * is the default)")
    for group, options in groups.items():
        lines.append(f"  {group}")
        marked = {f"{'*' if defaults.get(group) == name else ' '} {name}": about for name, about in options.items()}
        lines += _table(marked, width)
    lines += [
        "",
        "Keys (key=value): --cfg job prints all keys with their values. The files in conf/ explain them.",
        "",
    ]
    return "\n".join(lines) + "\n" + OPTIONS


def experiments(folder: Path | str | None = None) -> list[str]:
    """Return the names of all experiments. folder: additional folder of user-defined config groups."""
    folders = [Path(folder), CONF] if folder else [CONF]
    return sorted({name for name, _ in _options(folders, "experiment")})


def _groups(folders: Sequence[Path]) -> list[str]:
    names = {
        path.name for folder in folders for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    }
    order = list(_defaults(folders))
    return sorted(names - {"hydra"}, key=lambda name: (order.index(name) if name in order else len(order), name))


def _options(folders: Sequence[Path], group: str) -> Iterator[tuple[str, str]]:
    files = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    for name in sorted(files):
        yield name, describe(files[name])


@dataclass(frozen=True)
class ExperimentSummary:
    """Opening comment of an experiment's file."""

    description: str
    """First sentence."""
    takes: str
    """Duration and machine, such as `about 3 minutes on a CPU core with 1 GB of memory`; empty if not stated."""


def experiment_summaries(folders: Sequence[Path] = (CONF,)) -> dict[str, ExperimentSummary]:
    """Return the summaries of all experiments by name."""
    files = {path.stem: path for folder in reversed(folders) for path in (folder / "experiment").glob("*.yaml")}
    return {
        name: ExperimentSummary(
            describe(path), f" {_opening_comment(path)}".partition(" Takes ")[2].partition(". ")[0].rstrip(".")
        )
        for name, path in sorted(files.items())
    }


def describe(path: Path) -> str:
    """Return the first sentence of a config file's opening comment, without directives and commands."""
    return _opening_comment(path).partition(". ")[0].rstrip(".")


def _opening_comment(path: Path) -> str:
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = line.removeprefix("#").strip()
        if not line.startswith("#"):
            break
        if comment and not comment.startswith(("@package", "python ")):
            words.append(comment)
    return " ".join(words)


def _defaults(folders: Sequence[Path]) -> dict[str, str]:
    """Return group -> option for each line of the primary config's defaults list."""
    path = next(
        (folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()), CONF / "config.yaml"
    )
    options = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        group, colon, option = line.removeprefix("  - ").partition(": ")
        if line.startswith("  - ") and colon and not group.startswith("override "):
            options[group] = option.strip()
    return options


def _table(rows: dict[str, str], width: int) -> Iterator[str]:
    for name, about in rows.items():
        indent = " " * 23
        yield from textwrap.wrap(
            f"    {name:18} {about}", max(width, 60), subsequent_indent=indent, drop_whitespace=True
        )
