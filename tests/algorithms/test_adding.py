"""A built-in algorithm is added by its package and its option alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from tests.docs.pages import ROOT, blocks

PAGE = ROOT / "docs" / "guides" / "own_algorithm.md"
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "docs", "images", "__pycache__", "*.egg-info", "node_modules")
CODE = """
import json, tempfile
from pathlib import Path

import components
from components.errors import SpecError
from components.models.weights import prepare
from components.specs import names_below
from flows.experiment.compose import compose
from flows.experiment.spec import ExperimentSpec
from flows.stages.train import TrainStage
from tests.algorithms.builders import MODEL, batch, train

spec = compose(["+experiment=smoke", "algorithm=reinforce", "algorithm.batch_size=9"])
try:
    compose(["+experiment=smoke", "algorithm=reinforce", "algorithm.name=reinforc"])
except SpecError as error:
    mistake = str(error)
folder = Path(tempfile.mkdtemp(dir="."))
(folder / "out").mkdir(), (folder / "scratch").mkdir()
logs = []
train(spec.algorithm, MODEL, prepare(MODEL, folder / "models"), batch(), out=folder / "out",
      scratch=folder / "scratch", seed=0, on_step=logs.append)
print(json.dumps({
    "code": components.__file__,
    "kind": f"{type(spec.algorithm).__module__}.{type(spec.algorithm).__name__}",
    "key": TrainStage(model=MODEL, algorithm=spec.algorithm).key_part()["algorithm"],
    "keys": names_below(ExperimentSpec, {"algorithm": {"name": "reinforce"}}, ["algorithm"]),
    "mistake": mistake,
    "steps": [log["step"] for log in logs],
    "saved": json.loads((folder / "out" / "trainer.json").read_text())["algorithm"],
}))
"""


def test_a_package_and_an_option_make_a_built_in_algorithm(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    package = copy / "components" / "algorithms" / "reinforce"
    package.mkdir()
    (package / "__init__.py").write_text('"""REINFORCE."""\n')
    files = {block.file: block.text for block in blocks(PAGE) if block.file}
    spec = files["stock/reinforce.py"].replace("stock.reinforce_trainer", "components.algorithms.reinforce.trainer")
    (package / "spec.py").write_text(spec)
    (package / "trainer.py").write_text(files["stock/reinforce_trainer.py"])
    (copy / "conf" / "algorithm" / "reinforce.yaml").write_text("# REINFORCE.\nname: reinforce\nbatch_size: 16\n")

    done = subprocess.run([sys.executable, "-c", CODE], cwd=copy, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["code"].startswith(str(copy))
    assert result["kind"] == "components.algorithms.reinforce.spec.Reinforce"
    assert (result["key"]["name"], result["key"]["batch_size"]) == ("reinforce", 9)
    assert "_target_" not in result["key"]
    assert {"batch_size", "learning_rate"} <= set(result["keys"])
    assert "algorithm.name: 'reinforc': expected one of" in result["mistake"]
    assert "Did you mean 'reinforce'?" in result["mistake"]
    assert result["steps"] == [1.0]
    assert result["saved"] == "reinforce"
