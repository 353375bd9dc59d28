"""Folder of the runs on the command line: every command accepts `root=DIR`."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from flows.experiment.spec import ExperimentSpec
from flows.terminal.arguments import DEFAULT_ROOT, RootParser, root_folder
from tests.flows.test_online_rl import DATA

FLOWS = Path(DEFAULT_ROOT).parent / "flows"
GROUPS = {path.parent.name: import_module(f"flows.{path.parent.name}.__main__") for path in FLOWS.glob("*/__main__.py")}
SUBCOMMANDS = {name: getattr(module, name.upper()) for name, module in GROUPS.items()}
"""Commands with subcommands, by name."""
COMMANDS = sorted(
    ".".join(path.relative_to(FLOWS.parent).with_suffix("").parts)
    for path in FLOWS.rglob("*.py")
    if path.name != "__main__.py" and '__name__ == "__main__"' in path.read_text()
) + [f"flows.{name} {subcommand}" for name, group in SUBCOMMANDS.items() for subcommand in group.table]
WITHOUT_RUNS = {
    "flows.agent_tools.supervisor",
    "flows.bisection.step",
    "flows.environment scenarios",
    "flows.verify",
}
"""Commands that neither read nor write below a root; some are started by other commands only."""
ARGUMENTS = {
    "flows.runs annotate": ["latest"],
    "flows.bundle": ["latest"],
    "flows.explain attribute": ["latest"],
    "flows.chat": ["latest"],
    "flows.runs clean": [],
    "flows.compare": ["latest", "other"],
    "flows.runs deployments": ["--stop", "shop"],
    "flows.runs export": ["latest", "--form", "thumbs", "--out", "out"],
    "flows.runs lineage": ["latest"],
    "flows.runs list": [],
    "flows.runs note": ["latest", "text"],
    "flows.explain rejudge": ["latest", "reward=outcome"],
    "flows.runs revise": ["latest", "--out", "out.jsonl"],
    "flows.stage": ["collect", "--watch"],
    "flows.runs tag": ["latest", "baseline"],
}
"""Commands that look something up below the root, with their arguments."""


def ended(command: str, arguments: list[str], monkeypatch, capsys) -> tuple[object, str]:
    """Run a command; return its exit code and its standard error."""
    module, *subcommand = command.split()
    monkeypatch.setattr(sys, "argv", [module, *subcommand, *arguments])
    group = SUBCOMMANDS.get(module.removeprefix("flows."))
    try:
        code = group.main() if group else import_module(module).main()
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


def test_all_commands_are_known():
    assert len(COMMANDS) > 12
    assert set(ARGUMENTS) < set(COMMANDS)


def test_an_option_of_that_name_is_refused_with_what_to_write(monkeypatch, capsys):
    for place, command in enumerate(command for command in COMMANDS if command not in WITHOUT_RUNS):
        option = ["--root=/some/where"] if place % 2 else ["--root", "/some/where"]
        code, said = ended(command, [*ARGUMENTS.get(command, []), *option], monkeypatch, capsys)
        assert (code, "--root is not an option; use root=/some/where" in said) == (2, True), command
        if command != "flows.run":  # which lists all problems in one form
            assert f"usage: python -m {command}" in said


def test_the_folder_stands_anywhere_among_the_arguments(tmp_path, monkeypatch, capsys):
    root = [f"root={tmp_path}/there"]
    for command, arguments in ARGUMENTS.items():
        for line in (root + arguments, arguments + root):
            code, said = ended(command, line, monkeypatch, capsys)
            assert (code, f"{tmp_path}/there" in said) == (2, True), line


def test_an_interrupted_subcommand_ends_with_130(tmp_path, monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.runs.clean.main", interrupted)
    assert SUBCOMMANDS["runs"].main(["clean", f"root={tmp_path}"]) == 130


def test_the_folder_may_precede_the_subcommand(tmp_path, capsys):
    assert SUBCOMMANDS["runs"].main([f"root={tmp_path}/there", "tag", "latest", "baseline"]) == 2
    assert f"{tmp_path}/there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("runs", ["taag", "latest"], "python -m flows.runs: no subcommand 'taag'; did you mean tag?"),
        ("runs", ["quickstart"], "no subcommand 'quickstart'; expected one of list, tag, note, lineage"),
        ("explain", [], "python -m flows.explain: a subcommand is missing; expected one of attribute, bisect"),
        ("explain", ["--json"], "a subcommand is missing"),
    ],
)
def test_a_missing_or_unknown_subcommand_is_refused(command, arguments, message, capsys):
    assert SUBCOMMANDS[command].main(arguments) == 2
    assert message in capsys.readouterr().err


def parse(*arguments: str):
    parser = RootParser(prog="python -m flows.some")
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--json", action="store_true")
    return parser.parse_intermixed_args(arguments)


def test_a_folder_means_the_same_to_hydra_and_to_the_other_commands():
    for folder in ("/a/b c", "a=b", "~/a", "."):
        spec = ExperimentSpec.model_validate({**DATA, "root": folder})
        assert parse("one", "--json", f"root={folder}", "two").root == Path(spec.root) == root_folder(folder)


def test_the_last_one_counts_and_the_others_are_no_arguments():
    options = parse("root=/a", "one", "root=/b", "--json")
    assert (options.root, options.runs, options.json) == (Path("/b"), ["one"], True)
    assert parse("one").root == DEFAULT_ROOT


def test_what_is_no_folder_is_refused(capsys):
    for folder, words in {
        "": "expected a folder, not an empty string",
        "s3://bucket": "expected a local folder",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            parse(f"root={folder}")
        assert f"root: {folder!r}: {words}" in capsys.readouterr().err


def test_the_usage_names_it(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    stdout = capsys.readouterr().out
    assert re.search(r"usage: python -m flows\.some .*\[root=DIR\]\n", stdout)
    assert stdout.count("[root=DIR]") == 1
    assert f"root=DIR: folder of the runs (default: {DEFAULT_ROOT})" in " ".join(stdout.split())
