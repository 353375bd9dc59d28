"""README and docs say nothing that is not so: links, commands, blocks, pictures, the table of keys.

`tests/test_readme.py` runs the blocks; here is what takes no time.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import io
import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.errors import SpecError
from components.specs import names_below
from flows.__main__ import commands as start_commands
from flows.experiment.compose import check
from flows.experiment.composer import Composer
from flows.experiment.config_loader import CONF
from flows.experiment.spec import ExperimentSpec
from tests.docs.pages import ALL_PAGES, PAGES, ROOT, anchors, blocks, commands, prose, words
from tests.test_configs import missing_requirement

BLOCKS = [block for page in ALL_PAGES for block in blocks(page)]
COMMANDS = [(page, line) for page in ALL_PAGES for line in commands(page)]
RUNS = {
    line.partition(" -m flows.")[2].partition(" #")[0].strip(): words(line)[3:]
    for _, line in COMMANDS
    if words(line)[1:3] in (["-m", "flows.run"], ["-m", "flows.plan"])
}
"""Arguments of the commands that start or plan a run, by their text."""
OPTIONS = {"-m", "--help", "--cfg", "job", "--package", "--fork", "--success", "--gain"}


SECTIONS = {
    "Start": ["index.md", "start/commands.md", "start/troubleshooting.md"],
    "Concepts": [
        f"concepts/{name}.md"
        for name in ("experiment", "stage", "artifact", "trajectories", "group", "policy_version", "place")
    ],
    "Guides": [
        f"guides/{name}.md"
        for name in (
            "prompts_from_files",
            "own_environment",
            "own_agent",
            "own_reward",
            "own_algorithm",
            "own_recipe",
            "judges",
            "human_feedback",
            "sweeps",
            "schedules",
            "agents_that_train",
            "scale",
            "cloud",
            "vllm",
            "deployment",
            "debugging",
        )
    ],
    "Reference": [f"reference/{name}.md" for name in ("configuration", "command_help", "stages", "algorithms")],
    "Coming from": [f"coming_from/{name}.md" for name in ("art", "trl", "verl", "verifiers", "helloagents")],
    "Results": ["results/index.md", "results/recipes.md"],
    "Glossary": ["glossary.md"],
    "Contributing": ["contributing.md"],
}
"""Pages that each section of the site has at least."""


def test_the_site_lists_every_page_once_in_its_sections():
    (nav,) = (value for key, value in yaml.safe_load((ROOT / "mkdocs.yml").read_text()).items() if key == "nav")
    sections = {name: leaves(part) for entry in nav for name, part in entry.items()}
    assert list(sections) == list(SECTIONS)
    for name, pages in SECTIONS.items():
        assert set(pages) <= set(sections[name]), name
    listed = sorted(page for pages in sections.values() for page in pages)
    outside = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    names = [page.relative_to(ROOT).as_posix() for page in PAGES]
    assert listed == sorted(outside.get(name, name.removeprefix("docs/")) for name in names)
    assert len(RUNS) > 15


def leaves(part: Any) -> list[str]:
    """Return the pages below a part of the navigation."""
    if isinstance(part, str):
        return [part]
    return [page for entry in part for value in entry.values() for page in leaves(value)]


def test_every_link_leads_somewhere():
    broken = []
    for page, link in each(r"\]\(([^)\s]+)\)"):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" not in link and not (
            target.exists() and target.is_relative_to(ROOT) and (not anchor or anchor in anchors(target))
        ):
            broken.append((page.name, link))
    assert broken == []


def each(pattern: str) -> list[tuple[Path, str]]:
    """Return what matches a pattern in the prose of the pages, with the page; once for each page."""
    return [(page, text) for page in ALL_PAGES for text in sorted(set(re.findall(pattern, prose(page))))]


def test_every_page_is_at_most_two_links_away_from_the_readme():
    near = [PAGES[0], *linked(PAGES[0])]
    assert set(PAGES) - set(near) - {target for page in near for target in linked(page)} == set()


def linked(page: Any) -> set[Any]:
    """Return the pages that a page links to."""
    files = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    return {(page.parent / file).resolve() for file in files if file.endswith(".md")} & set(PAGES)


def test_every_page_that_code_and_configuration_name_exists():
    """Comments, docstrings and messages: `docs/guides/cloud.md`."""
    files = [path for folder in ("components", "flows", "conf", "tests") for path in (ROOT / folder).rglob("*")]
    files += [ROOT / name for name in ("Makefile", "mkdocs.yml", "pyproject.toml", "SECURITY.md")]
    files += sorted((ROOT / "docs").glob("*.py"))
    named = {
        name
        for path in files
        if path.is_file() and path.suffix in (".py", ".yaml", ".yml", ".toml", ".md", ".j2", "")
        for name in re.findall(
            r"(?<![\w/])docs/[\w/]+\.(?:md|py|json)\b", path.read_text(encoding="utf-8", errors="replace")
        )
    }
    assert len(named) > 15
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_every_path_and_name_exists():
    """In prose: `components/...`, `flows/...`, `conf/...` as files, dotted names as modules or their members. Of a path
    with NAME or FAMILY in it, the folder exists."""
    paths = each(r"`((?:components|flows|conf|docs|tests)/[\w./]*)`")
    missing = [
        (page.name, path) for page, path in paths if not (ROOT / re.sub(r"[^/]*(NAME|FAMILY).*", "", path)).exists()
    ]
    missing += [(page.name, name) for page, name in each(r"`((?:components|flows)(?:\.\w+)+)`") if not is_name(name)]
    assert missing == []


def is_name(name: str) -> bool:
    """Return whether this is a module, or a member of one."""
    module, _, last = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), last)
    return True


def test_every_key_exists():
    """`group.key` and `group=option` in prose. `tests/test_configs.py` composes every option."""
    groups = [name for name in ExperimentSpec.model_fields if (CONF / name).is_dir()]
    data = [data for group in groups for data in every_option(group)]

    @functools.cache
    def known_below(parents: tuple[str, ...]) -> set[str]:
        """Return the valid keys below these, with any option."""
        return {name for options in data for name in names_below(ExperimentSpec, options, parents)}

    unknown = []
    for page, key in each(rf"`((?:{'|'.join(groups)})(?:\.[a-z_]+)+)`"):
        *parents, last = key.split(".")
        if last not in {*known_below(tuple(parents)), "yaml", "json", "jsonl", "mjs"} and parents[-1] != "stages":
            unknown.append((page.name, key))
    assert unknown == []
    options = {option for _, option in each(rf"`(\+?(?:experiment|{'|'.join(groups)})=\w+)`")}
    files = {option: CONF / f"{option.lstrip('+').replace('=', '/')}.yaml" for option in options}
    assert [option for option in sorted(files) if not files[option].exists()] == []


def every_option(group: str) -> Iterator[dict[str, Any]]:
    """Yield the configuration with each option of a group, composed only if its file needs others; of a reward also
    with each judge."""
    tree = Composer().tree
    defaults = tree.plain([])
    for path in (CONF / group).glob("*.yaml"):
        text = path.read_text()
        alone = "defaults:" not in text and "# @package" not in text
        yield {**defaults, group: yaml.safe_load(text)} if alone else tree.plain([f"{group}={path.stem}"])
    if group == "reward":
        for path in (CONF / "judge_model").glob("*.yaml"):
            ruler = yaml.safe_load((CONF / "reward" / "ruler.yaml").read_text())
            yield {**defaults, group: {**ruler, "model": yaml.safe_load(path.read_text())}}


def test_every_run_command_is_valid():
    """Options exist, and Hydra composes what the rest describes. test_readme runs the commands with `--config-dir`."""
    invalid = {}
    for command, arguments in RUNS.items():
        if "--config-dir" in arguments or any(
            missing_requirement(word.removeprefix("environment=")) for word in arguments
        ):
            continue
        assert {word for word in arguments if word.startswith("-")} <= OPTIONS, command
        lines = [word for word in arguments if "=" in word or word.startswith("~")]
        try:
            check(lines, multirun="-m" in arguments, named="--help" not in arguments)
        except SpecError as error:
            invalid[command] = str(error)
    assert invalid == {}


def sketches() -> list[Any]:
    """Commands in text blocks: they need a run, a server or a package of the reader's."""
    text = [
        line for block in BLOCKS if block.language == "text" for line in block.text.replace("\\\n", " ").splitlines()
    ]
    found = [words(line) for line in text if line.startswith("python -m flows.")]
    composing = ("flows.run", "flows.plan")
    return [line[3:] for line in found if line[2] in composing or line[2:4] == ["flows.explain", "calibrate"]]


def test_the_keys_of_every_sketched_command_exist():
    composer, invalid = Composer(), {}
    for arguments in sketches():
        assert any(word.startswith(("+experiment=", "flow=")) for word in arguments)
        options = [word for word in arguments if ("=" in word or re.match(r"~\w", word)) and word != "+experiment=NAME"]
        overrides, broken = composer.parse(options)
        if problems := broken + composer.point(overrides)[1]:
            invalid[" ".join(arguments)] = problems
    assert invalid == {}


def test_every_deployment_is_valid():
    from flows import serve

    lines = [words(line)[3:] for _, line in COMMANDS if words(line)[1:3] == ["-m", "flows.serve"]]
    assert len(lines) > 3
    for arguments in lines:
        asked = serve.parser().parse_intermixed_args(arguments)
        assert serve.check_options(asked) == []
        check(serve.requested_deployments(asked)[0].lines)


def test_every_other_command_exists():
    """What stands in shell blocks is a command of ours, of the virtual environment, or of make."""
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for _, line in COMMANDS:
        match words(line):
            case ["make", target]:
                assert target in targets, line
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, line
            case ["gpu-environment/bin/python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, line
            case [".", ".venv/bin/activate"] | ["mlflow", "ui", *_] | ["export", _]:
                pass
            case ["pip", "wheel", *_] | ["gpu-environment/bin/pip", "install", *_]:  # packages for a machine offline
                pass
            case _:
                pytest.fail(f"not a known command: {line}")


def test_the_mlflow_command_is_the_one_that_runs_print():
    from components.tracking.provenance import command_path
    from components.tracking.store import ui_command

    printed = ui_command("sqlite:///").replace(command_path("mlflow"), "mlflow")
    assert [line for _, line in COMMANDS if line.startswith(printed)]


def test_every_block_says_what_it_is():
    """python and yaml are read here and run in test_readme, javascript in test_agents, html in test_production, sh is
    checked above; py is code for other libraries; console and text are output."""
    for block in BLOCKS:
        if block.language in ("python", "py"):
            compile(block.text, str(block), "exec")
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict), block
        elif block.language == "json":
            assert isinstance(json.loads(block.text), dict), block
        else:
            assert block.language in ("sh", "console", "text", "javascript", "html"), block


def test_the_mistakes_in_the_documentation_are_answered_so():
    """The console block of docs/start/troubleshooting.md."""
    (block,) = blocks(ROOT / "docs" / "start" / "troubleshooting.md", "console")
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


def test_the_table_of_artifacts_is_what_the_stages_declare():
    artifacts = script("artifacts")
    assert artifacts.page() == artifacts.PAGE.read_text(encoding="utf-8"), "run `python -m docs.artifacts`"


def test_the_table_of_kills_is_what_was_recorded():
    faults = script("faults")
    assert faults.page() == faults.PAGE.read_text(encoding="utf-8"), "run `python -m docs.faults`"


@pytest.mark.parametrize(
    "name", ["speed", "rollouts", "generation", "overlap", "staleness", "played", "sandboxes", "defaults"]
)
def test_tables_are_what_was_measured(name):
    tables = script(name).TABLE, getattr(script(name), "TAIL", script(name).TABLE)
    assert all(table.made() == table.written() for table in tables), f"run `python -m docs.{name}`"


def test_the_page_of_gpu_measurements_is_what_was_recorded():
    page = script("gpu").PAGE
    assert page.current() == page.stored(), "run `python -m docs.gpu`"


def test_results_are_kept_and_one_that_was_not_measured_takes_no_place(tmp_path, monkeypatch):
    played, recorded = script("played"), sys.modules["docs.recorded"]
    monkeypatch.setattr(recorded, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "environments.md").write_text("before <!-- played --> old <!-- /played --> after")
    one = {"train": 1000, "heldout": 64, "chance": {"won": 1, "tried": 20}, "steps_per_s": 12.4}
    gone = {"not_measured": "not installed"}
    for results in ({"maze": {**one, "plays": "labyrinth 2.0"}, "gym": gone}, {"maze": gone, "shop": one}):
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"noise\n{json.dumps(results)}\n"))
        played.TABLE.main(["add"])
    assert (tmp_path / "reference" / "environments.md").read_text() == (
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


def test_the_tables_of_results_are_what_was_recorded():
    results = script("results")
    for page in results.PAGES:
        assert results.with_table(page) == page.read_text(encoding="utf-8"), "run `python -m docs.results`"


@pytest.mark.parametrize("name", ["command_help", "stages", "environments", "recipes"])
def test_generated_pages_are_current(name):
    page = script(name).PAGE
    assert page.current() == page.stored(), f"run `python -m docs.{name}`"


def test_the_help_of_every_command_is_documented():
    page = (ROOT / "docs" / "reference" / "command_help.md").read_text()
    assert list(dict.fromkeys(re.findall(r"^## flows\.(\w+)", page, re.MULTILINE))) == list(start_commands())


def test_the_tables_of_algorithms_are_current():
    for part in script("algorithms").PAGES:
        assert part.current() == part.stored(), "run `python -m docs.algorithms`"


def test_every_algorithm_has_a_formula_and_all_but_sft_a_paper():
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `([^`|]+)` \| (.*) \|$", script("algorithms").overview(), re.MULTILINE)
    assert {name for name, _, _ in rows} == {path.stem for path in (CONF / "algorithm").glob("*.yaml")}
    assert all("=" in formula for _, formula, _ in rows)
    assert [name for name, _, paper in rows if "arxiv.org/abs/" not in paper] == ["sft"]


FOREIGN = [block for block in BLOCKS if block.language == "py"]


@pytest.mark.parametrize("block", FOREIGN, ids=str)
def test_names_of_other_libraries_exist(block):
    """Where the library is installed. The pages compare code of other libraries with ours."""
    tree = ast.parse(block.text)
    modules = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    installed = {name for name in modules if find_spec(name)}
    if not installed:
        pytest.skip(f"{', '.join(sorted(modules)) or 'nothing'} is not installed")
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in (alias.name for alias in names if alias.name.partition(".")[0] in installed):
                    importlib.import_module(name)
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] in installed:
                loaded = importlib.import_module(module)
                assert [alias.name for alias in names if not hasattr(loaded, alias.name)] == []
                for call in ast.walk(tree):
                    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                        continue
                    if call.func.id in [alias.name for alias in names]:
                        keys = [keyword.arg for keyword in call.keywords if keyword.arg]
                        inspect.signature(getattr(loaded, call.func.id)).bind_partial(**dict.fromkeys(keys))


def test_every_page_about_another_library_shows_code_side_by_side():
    pages = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
    assert len(pages) == 5
    for page in pages:
        text = page.read_text()
        assert text.startswith("# Coming from ")
        assert '<div class="grid" markdown>' in text


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
