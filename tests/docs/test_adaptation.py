"""docs/guides/adaptation.md: its commands with the tiny model."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from components.data.form_resolution import first_examples, resolve_form
from components.data.spec import DataSpec
from tests.docs.pages import ROOT, blocks, commands

PAGE = ROOT / "docs" / "guides" / "adaptation.md"


def write_rows(folder: Path) -> list[Path]:
    """Write the files that the page shows."""
    paths = [folder / "ada.jsonl", folder / "returns.jsonl"]
    for path, block in zip(paths, blocks(PAGE, "text"), strict=True):
        path.write_text(block.text)
    return paths


def test_each_row_of_the_page_can_be_imported(tmp_path):
    for path, form, rows in zip(write_rows(tmp_path), ("thumbs", "messages"), (4, 2), strict=True):
        spec = DataSpec(path=str(path))
        assert resolve_form(spec) == form
        assert len(first_examples(spec.model_copy(update={"form": form}))) == rows


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_forks_of_one_policy_adapt_to_a_person_a_domain_and_new_tools(tmp_path):
    write_rows(tmp_path)
    general, *adapted, compared = commands(PAGE)
    assert len(adapted) == 3
    first = tiny(general, tmp_path)
    for command in adapted:
        fork = tiny(command, tmp_path)
        assert fork["policy_digest"] != first["policy_digest"]
        assert "train[sft]" not in fork["stages"]
    policies = tiny(compared, tmp_path, "--json")["policies"]
    assert len(policies) == 4


def tiny(command: str, root: Path, *more: str) -> dict:
    """Run a command of the page with the tiny model and its files below `root`. Return its result line."""
    command = command.replace("data.path=", f"data.path={root}/").replace("rounds=12", "rounds=2")
    words = [*shlex.split(command)[1:], "size=tiny", f"root={root}/runs", *more]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
