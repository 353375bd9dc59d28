"""README and docs say nothing that is not so: links, commands, blocks, pictures, the table of keys.

`tests/test_readme.py` runs the blocks; here is what takes no time.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import json
import re
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from components.specs import names_below
from flows.experiment.compose import Composer, check
from flows.experiment.config_loader import CONF
from flows.experiment.spec import ExperimentSpec
from tests.docs.pages import PAGES, ROOT, anchors, blocks, commands, prose, words
from tests.test_configs import JUDGES, NEEDED, PACKAGES

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [(page, line) for page in PAGES for line in commands(page)]
RUNS = [
    pytest.param(words(line)[3:], id=f"{page.stem}: {line.partition(' -m flows.')[2].partition(' #')[0].strip()}")
    for page, line in COMMANDS
    if words(line)[1:3] in (["-m", "flows.run"], ["-m", "flows.plan"])
]
OPTIONS = {"-m", "--help", "--cfg", "job", "--package", "--fork"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def test_all_pages_are_looked_at():
    names = (
        "README CONTRIBUTING agents algorithms architecture cloud commands configuration deployment distributed "
        "environments files filters glossary judges own_algorithm prefect reliability rewards rollouts security sweeps "
        "trajectories troubleshooting vllm agentgym code games packages search service"
    )
    assert {page.stem for page in PAGES} == set(names.split())
    assert len(RUNS) > 15


@each_page
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@each_page
def test_every_page_is_linked_from_the_readme(page):
    """Or, where it lies in a folder, from the page that is named like the folder."""
    readme = PAGES[0]
    folder = page.parent.with_suffix(".md")
    above = folder if folder in PAGES else readme
    assert page == readme or f"]({page.relative_to(above.parent)})" in above.read_text()


@each_page
def test_every_path_and_name_exists(page):
    """In prose: `components/...`, `flows/...`, `conf/...` as files, dotted names as modules or what they hold."""
    named = set(re.findall(r"`((?:components|flows|conf|docs|tests)/[\w./]*)`", prose(page)))
    assert not [path for path in named if not (ROOT / path).exists()]
    for name in set(re.findall(r"`((?:components|flows)(?:\.\w+)+)`", prose(page))):
        module, _, last = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), last), name


@each_page
def test_every_key_exists(page):
    """`group.key` and `group=option` in prose."""
    groups, composed = every_option()
    for key in set(re.findall(rf"`((?:{'|'.join(groups)})(?:\.[a-z_]+)+)`", prose(page))):
        *parents, last = key.split(".")
        known = {name for one in composed for name in names_below(ExperimentSpec, one, parents)}
        assert last in known or last in ("yaml", "json", "jsonl", "mjs") or parents[-1] == "stages", key
    for option in set(re.findall(rf"`(\+?(?:experiment|{'|'.join(groups)})=\w+)`", prose(page))):
        package = PACKAGES.get(option.partition("=")[2])
        if option != "environment=stock" and (package is None or find_spec(package) is not None):
            composes(option)


@functools.cache  # for all pages
def every_option() -> tuple[list[str], list[Any]]:
    """The groups, and what is composed with each of their options."""
    composer = Composer()
    groups = [name for name in ExperimentSpec.model_fields if composer.is_group(name)]
    options = [f"{path.parent.name}={path.stem}" for group in groups for path in (CONF / group).glob("*.yaml")]
    lines = [[one, *NEEDED.get(one.partition("=")[2], [])] for one in options]
    lines += [["reward=ruler", f"judge_model@reward.model={one}", *needed] for one, needed in JUDGES.items()]
    return groups, [composer.point(composer.parse(line)[0])[0] for line in lines]


@functools.cache
def composes(option: str) -> None:
    check([option, *NEEDED.get(option.partition("=")[2], [])])


@pytest.mark.parametrize("arguments", RUNS)
def test_every_run_command_is_valid(arguments):
    """Options exist, and Hydra composes what the rest describes."""
    if "--config-dir" in arguments:
        return  # test_readme runs it
    for word in arguments:
        package = PACKAGES.get(word.removeprefix("environment="))
        if package is not None and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert {word for word in arguments if word.startswith("-")} <= OPTIONS
    lines = [word for word in arguments if "=" in word or word.startswith("~")]
    check(lines, multirun="-m" in arguments, named="--help" not in arguments)


def sketches() -> list[Any]:
    """Commands in text blocks: they need a run, a server or a package of the reader's."""
    text = [
        line for block in BLOCKS if block.language == "text" for line in block.text.replace("\\\n", " ").splitlines()
    ]
    found = [words(line) for line in text if line.startswith("python -m flows.")]
    return [line[3:] for line in found if line[2] in ("flows.run", "flows.plan", "flows.calibrate")]


@pytest.mark.parametrize("arguments", sketches(), ids=" ".join)
def test_the_keys_of_every_sketched_command_exist(arguments):
    assert any(word.startswith("+experiment=") for word in arguments)
    composer = Composer()
    options = [word for word in arguments if ("=" in word or word.startswith("~")) and word != "+experiment=NAME"]
    overrides, broken = composer.parse(options)
    assert not broken + composer.point(overrides)[1]


def test_every_deployment_is_valid():
    from flows import serve

    lines = [words(line)[3:] for _, line in COMMANDS if words(line)[1:3] == ["-m", "flows.serve"]]
    assert len(lines) > 3
    for arguments in lines:
        asked = serve.parser().parse_intermixed_args(arguments)
        assert serve.check_options(asked) == []
        check([f"+experiment={serve.experiment_names(asked)[0]}", *serve.requested_deployments(asked)[0].overrides])


def test_every_other_command_exists():
    """What stands in shell blocks is a command of ours, of the virtual environment, or of make."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for _, line in COMMANDS:
        match words(line):
            case ["make", target]:
                assert target in targets, line
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, line
            case [".", ".venv/bin/activate"] | ["mlflow", "ui", *_]:
                pass
            case _:
                pytest.fail(f"not a known command: {line}")


def test_the_mlflow_command_is_the_one_that_runs_print():
    from components.tracking.provenance import command_path
    from components.tracking.store import ui_command

    printed = ui_command("sqlite:///").replace(command_path("mlflow"), "mlflow")
    assert [line for _, line in COMMANDS if line.startswith(printed)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_says_what_it_is(block):
    """python and yaml are read here and run in test_readme, javascript in test_agents, sh is checked above; console
    and text are output."""
    if block.language == "python":
        compile(block.text, str(block), "exec")
    elif block.language == "yaml":
        assert isinstance(yaml.safe_load(block.text), dict)
    else:
        assert block.language in ("sh", "console", "text", "javascript")


def test_the_mistakes_in_the_documentation_are_answered_so():
    """The console block of docs/troubleshooting.md."""
    from components.errors import SpecError

    (block,) = blocks(ROOT / "docs" / "troubleshooting.md", "console")
    command, _, answer = block.text.partition("\n")
    with pytest.raises(SpecError) as caught:
        check(words(command.removeprefix("$ "))[3:])
    assert str(caught.value) == answer.rstrip("\n")


def test_the_readme_is_short():
    assert len(PAGES[0].read_text().splitlines()) <= 200


def test_user_code_in_the_readme_is_short():
    files = [block for block in blocks(PAGES[0]) if block.file]
    assert [block.file for block in files] == [
        "stock/environment.py",
        "stock/reward.py",
        "conf/experiment/stock.yaml",
    ]
    for block in files:
        lines = [line for line in block.text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        assert len(lines) < 30, block.file


def test_the_readme_names_what_continuous_integration_calls():
    assert any(line.startswith("make test ") for line in commands(PAGES[0]))
    assert "make check" in PAGES[0].read_text()


def test_pictures_are_small_and_shown():
    images = sorted((ROOT / "docs" / "images").iterdir())
    assert [path.name for path in images] == ["mlflow.png", "prefect.png", "report.png"]
    for path in images:
        assert path.stat().st_size < 200_000
        assert f"docs/images/{path.name}" in PAGES[0].read_text()


def script(name: str):
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_keys_is_current():
    reference = script("reference")
    assert reference.page() == reference.PAGE.read_text(encoding="utf-8"), "run `python -m docs.reference`"


def test_the_table_of_stages_lists_each_stage_with_its_kind():
    from flows.stages import STAGES

    rows = re.findall(
        r"^\| (\w+) \| [^|]+ \| ([\w ]+) \| [^|]+ \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE
    )
    listed = {name: kind.replace(" ", "_") for name, kind in rows if name != "Stage"}
    assert listed == {stage.name: stage.kind for stage in STAGES.values()}


def test_the_table_of_kills_is_what_was_recorded():
    faults = script("faults")
    assert faults.page() == faults.PAGE.read_text(encoding="utf-8"), "run `python -m docs.faults`"


@pytest.mark.parametrize("name", ["speed", "rollouts", "played", "defaults"])
def test_tables_are_what_was_measured(name):
    table = script(name).TABLE
    assert table.made() == table.written(), f"run `python -m docs.{name}`"


def test_results_are_kept_and_one_that_was_not_measured_takes_no_place(tmp_path, monkeypatch):
    played, recorded = script("played"), sys.modules["docs.recorded"]
    monkeypatch.setattr(recorded, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "environments.md").write_text("before <!-- played --> old <!-- /played --> after")
    one = {"train": 1000, "heldout": 64, "chance": {"won": 1, "tried": 20}, "steps_per_s": 12.4}
    gone = {"not_measured": "not installed"}
    for results in ({"maze": {**one, "plays": "labyrinth 2.0"}, "gym": gone}, {"maze": gone, "shop": one}):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"noise\n{json.dumps(results)}\n"))
        played.TABLE.main(["add"])
    assert (tmp_path / "environments.md").read_text() == (
        "before <!-- played -->\n"
        "| `environment=` | Played by | Scenarios, train and held out | Solver succeeds | Chance succeeds "
        "| Steps per second |\n"
        "|---|---|---|---|---|---|\n"
        "| `maze` | labyrinth 2.0 | 1,000, 64 | none | 1 of 20 | 12 |\n"
        "| `shop` | Espalier | 1,000, 64 | none | 1 of 20 | 12 |\n"
        "\nNot measured: `gym` (not installed).\n"
        "<!-- /played --> after"
    )


def test_the_table_of_chat_templates_is_what_they_do():
    templates = script("templates")
    assert templates.page() == templates.PAGE.read_text(encoding="utf-8"), "run `python -m docs.templates`"


def test_the_tables_of_gradients_are_current():
    gradients = script("gradients")
    assert gradients.page() == gradients.PAGE.read_text(encoding="utf-8"), "run `python -m docs.gradients`"


def test_the_table_of_results_is_what_was_recorded():
    results = script("results")
    assert results.page() == results.README.read_text(encoding="utf-8"), "run `python -m docs.results`"


def test_the_results_of_the_quickstart_are_three_seeds_of_one_commit():
    recorded = script("results").recorded()
    assert [result["seed"] for result in recorded] == [0, 1, 2]
    assert len({result["commit"] for result in recorded}) == 1


def test_a_result_takes_the_place_of_those_of_other_commits(tmp_path, monkeypatch):
    results = script("results")
    monkeypatch.setattr(results, "RECORD", tmp_path / "quickstart.jsonl")
    for commit, seed in (("a", 0), ("a", 1), ("a", 1), ("b", 2)):
        monkeypatch.setattr(results, "commit", lambda commit=commit: commit)
        results.add({"seed": seed, "success": 0.5, "export": "/home/me/runs"})
    (only,) = results.recorded()
    assert (only["seed"], only["commit"], only["success"]) == (2, "b", 0.5)
    assert "export" not in only
    assert only["processor"].split(" × ")[0].isdigit()
