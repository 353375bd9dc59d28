"""A new stage is its module and its line in a recipe: a copy of the repository gets both, and everything else knows
the stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scratch_copy import Checkout

ROOT = Path(__file__).parents[2]

MODULE = '''
"""Tally stage: counts the successful episodes of an evaluation."""

from components.trajectories.store import read_trajectories
from flows.stages.base import Stage, StageSpec, with_progress


class TallyStage(StageSpec):
    weight: float = 1.0


def tally(spec, inputs, draft, context):
    """Write `tally.txt`."""
    episodes = list(read_trajectories(inputs["episodes"].path / "trajectories.parquet"))
    total = sum(spec.weight for episode in with_progress(episodes, len(episodes), context.progress) if episode.success)
    (draft.path / "tally.txt").write_text(str(total))
    return {"episodes": float(len(episodes)), "weighted": total}


STAGE = Stage(
    "tally",
    1,
    TallyStage,
    "count",
    1,
    tally,
    files={"tally.txt": "weighted number of successes"},
    inputs={"episodes": "evaluation"},
    order=75,
    unit="episodes counted",
    size=lambda request: 2,
)
'''
BEFORE = "    policy, _ = run.warm_up(run.begin())\n"
LINE = """\
    from flows.stages.tally import TallyStage

    inputs = {"episodes": run.outcome.evaluations["start"]}
    run.call("tally", policy.step, run.requests.request("tally", TallyStage(weight=2.0), inputs))
"""

USE = """
import contextlib, io, json, sys, time
from pathlib import Path
import docs.artifacts
from components.errors import SpecError
from flows.execution.executor import Execution
from flows.experiment.compose import compose
from flows.history.lineage_graph import Lineage
from flows.history.records import Records, RunRecord, recording
from flows.planning.plan import plan
from flows.recipes.run import Run
from flows.reporting.lineage import show
from flows.stages.base import Context
from flows.terminal.console import Console

root = Path(sys.argv[1])
line = ["+experiment=smoke", f"root={root}", "rounds=0", "warmup=none", "deploy.mode=none", "evaluate.scenarios=2"]
try:
    compose([*line, "+compute.stages.taly=process"])
except SpecError as error:
    mistake = str(error)
spec = compose([*line, "+compute.stages.tally=process", "+compute.prices.tally=1"])
shown, units, text = [], [], io.StringIO()

@contextlib.contextmanager
def watcher(label, unit):
    units.append((label, unit))
    yield lambda done, total, values=None: shown.append((label, done, total))

planned = plan(spec)
(root / "logs").mkdir(parents=True)
with recording(root, RunRecord("abcdef01", spec.name, spec.seed, time.time())) as record:
    execution = Execution(spec, Context.at(root), Console(text), None, root / "logs" / "log", record)
    execution.watchers.append(watcher)
    Run(spec, execution.artifact).execute()
    execution.close()
    execution.context.warm.close()
run = Records(root).get("latest")
stage = run.stage("tally")
again = plan(spec)
lineage = Lineage(root)
print(json.dumps({
    "mistake": mistake,
    "planned": [[one.label, one.status, one.where, one.inputs] for one in planned.stages],
    "again": [[one.label, one.status, one.key] for one in again.stages],
    "recorded": [stage.label, stage.kind, stage.status, stage.version, stage.key],
    "units": units,
    "shown": [one for one in shown if one[0] == "tally"][-1],
    "console": text.getvalue(),
    "lineage": show(lineage, run.stage("evaluate[start]").key),
    "facts": lineage.facts(lineage.back(stage.key)[0]),
    "table": docs.artifacts.table(),
}))
"""


@pytest.fixture
def copy(tmp_path):
    """Copy of the repository with the stage `tally`."""
    checkout = Checkout(tmp_path / "copy")
    checkout.add({"flows/stages/tally.py": MODULE})
    recipe = checkout.folder / "flows" / "recipes" / "online_rl.py"
    text = recipe.read_text()
    assert text.count(BEFORE) == 1
    recipe.write_text(text.replace(BEFORE, BEFORE + LINE))
    return checkout


def test_a_new_stage_is_a_module_and_a_line_of_a_recipe(copy, tmp_path):
    known = copy.run(USE, str(tmp_path / "runs"))
    assert "compute.stages.taly: no such key in compute.stages; expected one of certify, import" in known["mistake"]
    assert "Did you mean 'compute.stages.tally'?" in known["mistake"]
    assert known["planned"] == [
        ["evaluate[start]", "run", "local", {}],
        ["tally", "run", "process", {"episodes": "evaluate[start]"}],
    ]
    assert known["recorded"][:4] == ["tally", "count", "ran", 1]
    assert known["again"][1] == ["tally", "cached", known["recorded"][4]]
    assert ["tally", "episodes counted"] in known["units"]
    assert known["shown"] == ["tally", 2, 2]
    assert "tally ran in" in known["console"]
    assert "episodes 2" in known["console"].partition("tally ran in")[2]
    assert "tally " + known["recorded"][4][:12] in known["lineage"].partition("made from it")[2]
    assert known["facts"]["version of tally"] == "1"
    assert "| tally | `episodes`: evaluation | count | `tally.txt`: weighted number of successes |" in known["table"]
