"""What `--help` prints: experiments and config groups, each with the first comment of its file.

It reads the config folders and imports nothing but the standard library, so the answer comes at once.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

CONF = Path(__file__).resolve().parents[2] / "conf"

USAGE = """\
Espalier trains, evaluates and deploys LLM agents: an experiment is declared in conf/, one command runs it.

  python -m flows.run +experiment=NAME [group=option] [key=value]     run; again: goes on, or answers from what is done
  python -m flows.run -m +experiment=NAME key=value,value             sweep: one run for each value
  python -m flows.run +experiment=NAME --cfg job                      show the composed config, run nothing
"""
OPTIONS = """\
Options
  -m, --multirun       a sweep: run every combination of the given values (docs/sweeps.md)
  --cfg job            print the composed config, checked as for a run; with --resolve, without references
  --config-dir DIR     a folder with config groups of your own, laid out like conf/
  --hydra-help         options of Hydra: sweepers, launchers, completion of the shell
"""


def text(folders: Sequence[Path] = (CONF,)) -> str:
    """The whole help; of groups that are in several folders, the options of all."""
    width = shutil.get_terminal_size((120, 24)).columns
    groups = {group: dict(_options(folders, group)) for group in _groups(folders)}
    experiments = groups.pop("experiment", {})
    lines = [
        USAGE,
        "Experiments (+experiment=NAME)",
        *_table({f"  {name}": about for name, about in experiments.items()}, width),
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
        "Keys (key=value): all of them, with their values, by --cfg job. The files in conf/ say what they mean.",
        "",
    ]
    return "\n".join(lines) + "\n" + OPTIONS


def experiments(folder: Path | str | None = None) -> list[str]:
    """Names of all experiments; folder: of config groups of your own."""
    folders = [Path(folder), CONF] if folder else [CONF]
    return sorted({name for name, _ in _options(folders, "experiment")})


def _groups(folders: Sequence[Path]) -> list[str]:
    names = {
        path.name for folder in folders for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")
    }
    first = list(_defaults(folders))
    return sorted(names - {"hydra"}, key=lambda name: (first.index(name) if name in first else len(first), name))


def _options(folders: Sequence[Path], group: str) -> Iterator[tuple[str, str]]:
    files = {path.stem: path for folder in reversed(folders) for path in (folder / group).glob("*.yaml")}
    for name in sorted(files):
        yield name, describe(files[name])


def describe(path: Path) -> str:
    """The first sentence of a config file's opening comment, directives and commands left out."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        comment = line.removeprefix("#").strip()
        if not line.startswith("#"):
            break
        if comment and not comment.startswith(("@package", "python ")):
            words.append(comment)
    return " ".join(words).partition(". ")[0].rstrip(".")


def _defaults(folders: Sequence[Path]) -> dict[str, str]:
    """Group and option of each line of the primary config's defaults list."""
    path = next(
        (folder / "config.yaml" for folder in folders if (folder / "config.yaml").is_file()), CONF / "config.yaml"
    )
    chosen = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        group, colon, option = line.removeprefix("  - ").partition(": ")
        if line.startswith("  - ") and colon and not group.startswith("override "):
            chosen[group] = option.strip()
    return chosen


def _table(rows: dict[str, str], width: int) -> Iterator[str]:
    for name, about in rows.items():
        indent = " " * 23
        yield from textwrap.wrap(
            f"    {name:18} {about}", max(width, 60), subsequent_indent=indent, drop_whitespace=True
        )
