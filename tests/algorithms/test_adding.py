"""A built-in algorithm is added by its package and its option alone."""

from __future__ import annotations

from tests.docs.pages import ROOT, blocks
from tests.scratch_copy import Checkout

PAGE = ROOT / "docs" / "guides" / "own_algorithm.md"
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
    checkout = Checkout(tmp_path / "copy")
    package = "components/algorithms/reinforce"
    files = {block.file: block.text for block in blocks(PAGE) if block.file}
    spec = files["stock/reinforce.py"].replace("stock.reinforce_trainer", "components.algorithms.reinforce.trainer")
    checkout.add(
        {
            f"{package}/__init__.py": "",
            f"{package}/spec.py": spec,
            f"{package}/trainer.py": files["stock/reinforce_trainer.py"],
            "conf/algorithm/reinforce.yaml": "# REINFORCE.\nname: reinforce\nbatch_size: 16\n",
        }
    )
    result = checkout.run(CODE)
    assert result["code"].startswith(str(checkout.folder))
    assert result["kind"] == "components.algorithms.reinforce.spec.Reinforce"
    assert (result["key"]["name"], result["key"]["batch_size"]) == ("reinforce", 9)
    assert "_target_" not in result["key"]
    assert {"batch_size", "learning_rate"} <= set(result["keys"])
    assert "algorithm.name: 'reinforc': expected one of" in result["mistake"]
    assert "Did you mean 'reinforce'?" in result["mistake"]
    assert result["steps"] == [1.0]
    assert result["saved"] == "reinforce"
