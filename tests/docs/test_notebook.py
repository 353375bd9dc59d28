"""The notebook of docs/guides/loop.md, executed with the tiny model."""

from __future__ import annotations

import json

from flows.history.records import Records
from tests.docs.pages import ROOT
from tests.docs.test_docs import script

NOTEBOOK = ROOT / "docs" / "guides" / "loop.ipynb"


def test_the_notebook_runs_and_a_second_run_is_cached(tmp_path, monkeypatch, capsys):
    for name, value in (("MODEL", "tiny"), ("ROOT", tmp_path), ("STEPS", "1")):
        monkeypatch.setenv(f"LOOP_{name}", str(value))
    for _ in range(2):
        variables = script("notebook").run(NOTEBOOK)
        assert variables["model"].step == 1
    assert capsys.readouterr().out.count("step 1: reward 0.") == 2
    second, first = Records(tmp_path).all()
    assert [stage.key for stage in first.stages] == [stage.key for stage in second.stages]
    assert {stage.status for stage in second.stages} == {"cached"}


def test_the_notebook_holds_no_output_of_a_machine():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
