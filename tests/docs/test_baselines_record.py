"""Record and table of the tasks' baselines."""

from __future__ import annotations

import json

import pytest

from docs import baselines
from flows.history.records import RunRecord


def measure(success: float) -> dict:
    return {"success": success, "success_interval": [success - 0.05, success + 0.05]}


def result(*trained: float) -> dict:
    policies = {"random": measure(0.1), "solver": measure(1.0), "base": measure(0.0)}
    for seed, success in enumerate(trained):
        policies |= {f"run{seed}@0": measure(0.3), f"run{seed}": measure(success)}
    return {"scenarios": 512, "policies": policies}


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "RECORD", tmp_path / "baselines.json")
    return tmp_path / "baselines.json"


def row(experiment: str, *trained: float) -> dict:
    runs = {seed: f"run{seed}" for seed in range(len(trained))}
    return baselines.row_of(result(*trained), experiment, runs) | {"commit": "abc", "processor": "2 × CPU"}


def run(identifier: str, overrides: list[str], seed: int = 1, status: str = "FINISHED") -> RunRecord:
    return RunRecord(id=identifier, name="guess", seed=seed, started=0.0, status=status, overrides=overrides)


def test_the_table_has_means_over_the_seeds(stored):
    baselines.record(row("guess", 0.5, 0.7))
    # means 0.6 and 0.3; t = 12.706, standard error 0.1
    assert baselines.baselines_table().splitlines()[2] == (
        "| `guess` | 512 | 0.10 [0.05, 0.15] | 0.00 [-0.05, 0.05] | 0.30 | 0.60 [-0.67, 1.87] "
        "| +0.30 [-0.97, +1.57] | 1.00 [0.95, 1.05] |"
    )


def test_a_prompted_model_is_shown_with_its_scenarios(stored):
    prompted = {"model": "smollm2_135m", "scenarios": 64, "success": 0.25, "interval": [0.16, 0.37]}
    baselines.record(row("guess", 0.5) | {"prompted": prompted})
    text = baselines.baselines_table()
    assert "| 0.25 [0.16, 0.37] |" in text
    assert text.endswith("on the first scenarios: 64 of `guess`.\n")


def test_a_second_measurement_replaces_the_row_of_its_experiment(stored):
    for name, after in (("wordle", 0.4), ("guess", 0.5), ("wordle", 0.6)):
        baselines.record(row(name, after))
    rows = json.loads(stored.read_text())
    assert [(r["experiment"], r["trained"]["0"]["success"]) for r in rows] == [("guess", 0.5), ("wordle", 0.6)]


def test_the_run_is_the_latest_finished_one_of_its_seed_without_other_overrides():
    own = ["+experiment=guess", "seed=1", "root=/somewhere"]
    records = [
        run("failed", own, status="FAILED"),
        run("variant", [*own, "rounds=2"]),
        run("latest", own),
        run("earlier", own),
        run("other", ["+experiment=guess", "seed=2"], seed=2),
    ]
    assert baselines.recorded_run("guess", 1, records).id == "latest"
    with pytest.raises(SystemExit, match="no finished run of guess with seed 3"):
        baselines.recorded_run("guess", 3, records)


def test_the_page_shows_the_record():
    assert baselines.PAGE.current() == baselines.PAGE.stored(), "run `python -m docs.baselines`"
