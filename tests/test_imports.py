"""What may import what, and what an import may cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "prefect", "mlflow", "transformers", "litellm", "sky", "peft", "trl", "pandas", "matplotlib"}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """Top-level packages that are loaded after the code ran."""
    listing = python(
        f"{code}\nimport json, sys\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    )
    return set(json.loads(listing.splitlines()[-1]))


def test_imports_go_one_way():
    """The contracts stand in pyproject.toml: flows on components, components through protocols and specs."""
    output = python("from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))")
    assert "0 broken" in output


def test_sky_is_skypilot():
    """A Python package of ours named sky would shadow it when a command runs from the repository root."""
    assert "site-packages" in python("import sky; print(sky.__file__); sky.Task")
    assert not list((ROOT / "sky").rglob("*.py"))


def test_the_command_imports_nothing_before_it_knows_what_to_do():
    packages = loaded("import flows.run, flows.help")
    assert not packages & (HEAVY | {"hydra", "omegaconf", "pydantic"})


def test_checking_an_experiment_imports_nothing_heavy():
    assert "hydra" in (packages := loaded("from flows.config import compose; compose(['+experiment=quickstart'])"))
    assert not packages & HEAVY


def test_specs_import_nothing_heavy():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("components/*/spec.py")]
    assert len(modules) >= 7
    assert not loaded(f"import {', '.join(modules)}") & (HEAVY | {"hydra"})


def test_components_work_without_prefect_and_hydra():
    files = [path.relative_to(ROOT) for path in ROOT.glob("components/**/*.py") if path.name != "__main__.py"]
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    assert not loaded(f"import {', '.join(modules)}") & {"prefect", "hydra", "flows"}
