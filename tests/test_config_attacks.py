"""Configurations that try to name code outside the allowed packages."""

from __future__ import annotations

import sys
import textwrap

import pytest

from components.errors import SpecError
from components.specs import Target, validate
from flows.experiment.compose import compose

pytestmark = pytest.mark.security


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Create a user's package that imports dangerous modules."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine").mkdir()
    source = """
        import builtins, importlib, os, os as renamed, subprocess
        from os import system
        from subprocess import Popen, run
        import components.sandbox.bubblewrap as bubblewrap
        lazy = importlib.import_module
        def f(trajectory): return 1.0
        class World: pass
        shell = World.__init__
    """
    (tmp_path / "mine" / "__init__.py").write_text(textwrap.dedent(source))
    yield "mine"
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    "path",
    [
        "subprocess.run", "os.system", "posix.system", "builtins.exec", "builtins.eval", "runpy.run_path",
        "importlib.import_module", "pickle.loads", "code.interact", "pty.spawn", "ctypes.CDLL", "webbrowser.open",
        "mine.os.system", "mine.renamed.system", "mine.system", "mine.Popen", "mine.run", "mine.lazy", "mine.shell",
        "mine.subprocess.run", "mine.builtins.exec", "mine.bubblewrap.subprocess.run", "mine.f.__globals__",
        "mine.f.__globals__.os", "mine.f.__class__", "mine.World.__init__", "mine.World.__subclasses__",
        "mine.__loader__",
        "mine.__builtins__.exec", "mine.__class__", "components.sandbox.bubblewrap.subprocess.run",
        "components.sandbox.bubblewrap.os.system", "components.sandbox.bubblewrap.shutil.rmtree",
        "components.specs.component_path.importlib.import_module", "components.specs.target.inspect.getattr_static",
        "components.sandbox.bubblewrap.__builtins__", "components.__loader__", "components.sys.modules",
        "os;system", "mine.f()", "mine f", "mine/f", "../mine.f", "mine..f", ".f", "mine.", "", "mine.f\n",
    ],
)  # fmt: skip
@pytest.mark.parametrize("allow", [[], ["mine"], ["mine", "subprocess", "os", "builtins"]])
def test_a_target_reaches_nothing_outside_of_the_allowed_packages(package, path, allow):
    with pytest.raises(SpecError):
        validate(Target, {"_target_": path}, allow=allow)


def test_definition_of_an_allowed_package_is_accepted(package):
    assert validate(Target, {"_target_": "mine.f"}, allow=[package]).build()("episode") == 1.0


@pytest.mark.parametrize("package", ["subprocess", "os", "builtins", "importlib", "os.path", "runpy", "pickle", "sys"])
def test_modules_of_the_standard_library_cannot_be_allowed(package):
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=smoke", f"allow=[{package}]"])
    (problem,) = caught.value.problems
    assert problem.path.startswith("allow")
    assert "standard library" in problem.message


@pytest.mark.parametrize(
    ("yaml", "path"),
    [
        ("hydra:\n  callbacks:\n    x: {_target_: webbrowser.open, url: 'file:///'}\n", "hydra.callbacks.x._target_"),
        ("hydra:\n  callbacks:\n    x: {_target_: mine.f}\n", "hydra.callbacks.x._target_"),
        (
            "hydra:\n  callbacks:\n    x: {_target_: logging.config.fileConfig, fname: x}\n",
            "hydra.callbacks.x._target_",
        ),
        (
            "hydra:\n  callbacks:\n    x: {_target_: hydra.experimental.callbacks.LogJobReturnCallback, a: "
            "[{_target_: os.system}]}\n",
            "hydra.callbacks.x.a.0._target_",
        ),
        (
            "hydra:\n  job_logging:\n    handlers:\n      x: {'()': subprocess.check_output, args: [touch, x]}\n",
            "hydra.job_logging.handlers.x.()",
        ),
        (
            "hydra:\n  hydra_logging:\n    handlers:\n      x: {class: logging.config.fileConfig, fname: x}\n",
            "hydra.hydra_logging.handlers.x.class",
        ),
    ],
)
def test_an_experiment_makes_hydra_call_nothing_of_others(tmp_path, yaml, path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(f"# @package _global_\n{yaml}")
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=bad"], config_dir=tmp_path)
    assert path in [problem.path for problem in caught.value.problems]


def test_hydra_targets_are_accepted():
    compose(["+experiment=smoke", "hydra/job_logging=default", "hydra/hydra_logging=default"])
    callback = "+hydra.callbacks.x._target_=hydra.experimental.callbacks.LogJobReturnCallback"
    compose(["+experiment=smoke", callback])
