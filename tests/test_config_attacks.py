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


OUTSIDE = [
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
]  # fmt: skip
"""Paths of code outside of the allowed packages, and texts that are no path."""


def test_a_target_reaches_nothing_outside_of_the_allowed_packages(package):
    allowed = ([], [package], [package, "subprocess", "os", "builtins"])
    assert [(path, allow) for path in OUTSIDE for allow in allowed if is_accepted(path, allow)] == []


def is_accepted(path: str, allow: list[str]) -> bool:
    try:
        validate(Target, {"_target_": path}, allow=allow)
    except SpecError:
        return False
    return True


def test_definition_of_an_allowed_package_is_accepted(package):
    assert validate(Target, {"_target_": "mine.f"}, allow=[package]).build()("episode") == 1.0


MODULES = ("subprocess", "os", "builtins", "importlib", "os.path", "runpy", "pickle", "sys")


def test_modules_of_the_standard_library_cannot_be_allowed():
    for module in MODULES:
        with pytest.raises(SpecError) as caught:
            compose(["+experiment=smoke", f"allow=[{module}]"])
        (problem,) = caught.value.problems
        assert problem.path.startswith("allow"), module
        assert "standard library" in problem.message


HYDRA = """# @package _global_
hydra:
  callbacks:
    browser: {_target_: webbrowser.open, url: 'file:///'}
    user: {_target_: mine.f}
    logging: {_target_: logging.config.fileConfig, fname: x}
    nested: {_target_: hydra.experimental.callbacks.LogJobReturnCallback, a: [{_target_: os.system}]}
  job_logging:
    handlers:
      x: {'()': subprocess.check_output, args: [touch, x]}
  hydra_logging:
    handlers:
      x: {class: logging.config.fileConfig, fname: x}
"""
CALLED = {
    "hydra.callbacks.browser._target_",
    "hydra.callbacks.user._target_",
    "hydra.callbacks.logging._target_",
    "hydra.callbacks.nested.a.0._target_",
    "hydra.job_logging.handlers.x.()",
    "hydra.hydra_logging.handlers.x.class",
}


def test_an_experiment_makes_hydra_call_nothing_of_others(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "bad.yaml").write_text(HYDRA)
    with pytest.raises(SpecError) as caught:
        compose(["+experiment=bad"], config_dir=tmp_path)
    assert {problem.path for problem in caught.value.problems} == CALLED


def test_hydra_targets_are_accepted():
    compose(["+experiment=smoke", "hydra/job_logging=default", "hydra/hydra_logging=default"])
    callback = "+hydra.callbacks.x._target_=hydra.experimental.callbacks.LogJobReturnCallback"
    compose(["+experiment=smoke", callback])
