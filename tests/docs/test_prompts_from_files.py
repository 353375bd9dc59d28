"""The files and commands of docs/guides/prompts_from_files.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.errors import SpecError
from flows.experiment.compose import compose
from tests.docs.pages import ROOT, blocks, words
from tests.test_readme import execute

PAGE = ROOT / "docs" / "guides" / "prompts_from_files.md"
pytestmark = pytest.mark.timeout(1800)


def overrides(command: str) -> list[str]:
    """Return the arguments of a command."""
    return words(command.replace("\\\n", " "))[3:]


def commands() -> list[str]:
    """Return the commands of the page, each with its continued lines."""
    text = "".join(block.text for block in blocks(PAGE, "text")).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.startswith("python -m flows.run")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Write the file of the page into a folder of its own, with two files of GSM8K's form beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (block,) = blocks(PAGE, "python")
    execute(block)
    rows = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    for name, part in (("train", rows[:400]), ("test", rows[400:])):
        renamed = [{"question": row["question"], "answer": row["solution"]} for row in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    return tmp_path


def test_the_first_run_runs(folder, command):
    code, out, errors = command(*overrides(commands()[0]), f"root={folder}/runs")
    assert code == 0, errors
    result = json.loads(out.splitlines()[-1])
    assert set(result["stages"].values()) == {"ran"}
    assert "judge[sft] ran in" in errors
    assert "reward 1 " in errors.partition("judge[sft]")[2].partition("\n")[0]


def test_the_files_of_gsm8k_compose(folder):
    line = [word for word in overrides(commands()[1]) if word != "+experiment=NAME"]
    spec = compose([word if word != "reward=math" else "reward=numeric" for word in line])
    dataset = spec.environment.build()
    assert [len(dataset.scenarios(split)) for split in ("train", "heldout")] == [400, 100]
    assert [word.partition("=")[0] for word in overrides(commands()[2]) if "dataset" in word] == [
        "environment",
        "environment.dataset",
    ]


def test_the_errors_of_the_page(folder):
    line = overrides(commands()[1])[1:]
    line[line.index("environment.prompt=question")] = "environment.prompt=questoin"
    with pytest.raises(SpecError) as caught:
        compose([word for word in line if word != "reward=math"])
    stated = str(caught.value).replace(f"{folder}/", "").replace("500 rows", "N rows").replace("499 rows", "M rows")
    documented = PAGE.read_text().replace("7,473 rows", "N rows").replace("7,472 rows", "M rows")
    message = stated.partition("environment.prompt: ")[2].partition("\n")[0].replace("test.jsonl", "train.jsonl")
    assert message in documented
