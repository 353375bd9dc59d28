"""`python -m flows.stage`: one stage from a serialised request."""

import json
import subprocess
import sys

import pytest

from flows.stages.base import Context, Request
from flows.stages.execute import run_stage

SHOP = {"_target_": "components.environments.shop.Shop", "train": 8, "heldout": 4}
REQUEST = Request(
    "collect",
    {
        "model": {"name": "tiny", "source": "random"},
        "environment": SHOP,
        "agent": {},
        "collect": {"scenarios": 2},
        "actor": "solver",
    },
)


def stage(tmp_path, text):
    file = tmp_path / "request.json"
    file.write_text(text)
    command = [sys.executable, "-m", "flows.stage", "--request", str(file), "--root", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_it_makes_what_the_flow_would_make(tmp_path):
    code, lines, errors = stage(tmp_path, json.dumps(REQUEST.to_json()))
    assert code == 0, errors
    assert lines[0] == {"progress": [2, 2, {}]}
    here, status = run_stage(REQUEST, Context.at(tmp_path))
    assert lines[-1] == {"key": here.key, "digest": here.digest, "status": "ran"}
    assert status == "cached"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no json", "is no JSON"),
        (json.dumps({"stage": "colect", "spec": {}}), "Did you mean 'collect'?"),
        (json.dumps({"stage": "judge", "spec": {"reward": {"_target_": "os.system"}}}), "outside the packages"),
    ],
)
def test_a_mistake_is_exit_code_2_and_a_line(tmp_path, text, words):
    code, lines, errors = stage(tmp_path, text)
    assert code == 2
    assert words in lines[-1]["error"]["message"]
    assert "Traceback" not in errors
