"""Rules of imports between packages, and import costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parent.parent
HEAVY = {
    "torch",
    "prefect",
    "mlflow",
    "transformers",
    "litellm",
    "sky",
    "peft",
    "trl",
    "pandas",
    "numpy",
    "pyarrow",
    "matplotlib",
}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """Return the top-level packages that are loaded after the code ran."""
    listing = python(
        f"{code}\nimport json, sys\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    )
    return set(json.loads(listing.splitlines()[-1]))


def test_imports_go_one_way():
    """The contracts are in pyproject.toml: flows → components; inside components through schema, protocols, specs."""
    output = python("from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert "0 broken" in output


def test_no_modules_import_each_other_in_a_cycle():
    """Imports inside functions count; imports under TYPE_CHECKING do not."""
    graph = nx.DiGraph()
    imports = grimp.build_graph("components", "flows", exclude_type_checking_imports=True, cache_dir=None)
    graph.add_edges_from(
        (module, other) for module in imports.modules for other in imports.find_modules_directly_imported_by(module)
    )
    graph.remove_edges_from(nx.selfloop_edges(graph))  # flows.run imports itself under its name for Hydra's launchers
    assert graph.number_of_edges() > 2000
    assert [sorted(cycle) for cycle in nx.strongly_connected_components(graph) if len(cycle) > 1] == []


def test_only_commands_and_the_session_are_at_the_top_of_flows():
    """Each top-level module is a command, `python -m flows.NAME`, except `session`."""
    modules = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__", "session"}
    assert {
        name for name in modules if '__name__ == "__main__"' not in (ROOT / f"flows/{name}.py").read_text()
    } == set()


def test_sky_is_skypilot():
    """A Python package of ours named sky would shadow it when a command runs from the repository root."""
    assert "site-packages" in python("import sky; print(sky.__file__); sky.Task")
    assert not list((ROOT / "sky").rglob("*.py"))


def test_the_command_imports_nothing_before_it_knows_what_to_do():
    packages = loaded("import flows.run, flows.terminal.help")
    assert not packages & (HEAVY | {"hydra", "omegaconf", "pydantic"})


def test_checking_an_experiment_imports_nothing_heavy():
    assert "hydra" in (
        packages := loaded("from flows.experiment.compose import compose; compose(['+experiment=quickstart'])")
    )
    assert not packages & HEAVY


def test_specs_import_nothing_heavy():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("components/*/spec.py")]
    assert len(modules) >= 7
    assert not loaded(f"import {', '.join(modules)}") & (HEAVY | {"hydra"})


def test_components_work_without_prefect_and_hydra():
    files = [path.relative_to(ROOT) for path in ROOT.glob("components/**/*.py") if path.name != "__main__.py"]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    assert not loaded(f"import {', '.join(modules)}") & {"prefect", "hydra", "flows"}
