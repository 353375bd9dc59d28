"""Code blocks of README and docs, run exactly as written.

The files of the README are written into a home folder of their own, its command is run by a shell, and everything else
(the server and its client, a stage alone, reading trajectories) works on what that run left.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flows.experiment.compose import compose
from flows.history.records import Records
from flows.planning.plan import plan
from tests.docs.pages import PAGES, ROOT, SKILL, Block, blocks, commands, words

README = PAGES[0]
COMMANDS = ROOT / "docs" / "start" / "commands.md"
pytestmark = pytest.mark.timeout(1800)

SCRIPTS = {
    page.relative_to(ROOT).as_posix(): [
        block for block in blocks(page, "python") if not block.file and "127.0.0.1" not in block.text
    ]
    for page in PAGES
}
"""Blocks to run in a folder that contains `runs/`, in order, by page."""


@dataclass
class Home:
    """Environment in which the README is followed."""

    folder: Path
    result: dict
    """Last line that the run printed on stdout."""
    errors: str

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        return shell(self.folder, command)


def environment(folder: Path) -> dict[str, str]:
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW", "PYTHONPATH"))
    }
    return variables | {
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}",  # `. .venv/bin/activate`
    }


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a line in the checkout, with the virtual environment activated."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment(folder), capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr
    return done


def execute(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    folder = tmp_path_factory.mktemp("home")
    for block in blocks(README):
        if block.file:
            path = folder / "mine" / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
    (command,) = [line for line in commands(README) if "--config-dir ~/mine/conf" in line]
    done = shell(folder, f"{command} root={folder}/runs")
    return Home(folder, json.loads(done.stdout.splitlines()[-1]), done.stderr)


def test_the_users_environment_reward_and_experiment_train(home):
    stages = home.result["stages"]
    assert set(stages.values()) == {"ran"}
    assert "train[2]" in stages
    assert "deploy" in stages
    assert home.result["episodes"] == 16 + 3 * 32 + 2 * 16
    assert "collect[sft] ran" in home.errors
    assert "no learning signal" not in home.errors
    assert (Path(home.result["export"]) / "model.safetensors").is_file()


def test_the_demonstrations_succeed_and_the_reward_is_the_users(home):
    from components.artifacts import MANIFEST, read_artifact

    artifacts = [read_artifact(path.parent) for path in (home.folder / "runs" / "artifacts").glob(f"*/{MANIFEST}")]
    shown = next(
        artifact for artifact in artifacts if artifact.kind == "trajectories" and artifact.metrics["turns"] == 2
    )
    assert shown.metrics["success"] == 1
    scores = next(
        artifact
        for artifact in artifacts
        if artifact.kind == "scores" and artifact.inputs == {"trajectories": shown.key}
    )
    assert scores.metrics["reward"] == pytest.approx(1 - 0.02)


def test_options_of_the_command_line_replace_the_blocks_of_the_users_experiment(home, monkeypatch):
    """Plan a run without the warmup and with another reward than those of the documented experiments."""
    (command,) = [line for line in commands(README) if "--config-dir ~/mine/conf" in line]
    monkeypatch.syspath_prepend(home.folder / "mine")
    [experiment] = [word for word in words(command) if word.startswith("+experiment=")]
    chosen = ["reward=returned", "warmup=none", "rounds=1", "deploy=none", f"root={home.folder}/chosen"]
    spec = compose([experiment, *chosen], config_dir=str(home.folder / "mine" / "conf"))
    assert not [stage.label for stage in plan(spec).stages if "sft" in stage.label]
    assert spec.reward.target == "components.rewards.rules.returned.Returned"
    assert spec.warmup is None
    assert spec.environment.target == "stock.environment.Stock"


@pytest.mark.parametrize("page", [page for page, scripts in SCRIPTS.items() if scripts])
def test_the_blocks_of_the_page_run(home, monkeypatch, request, page):
    monkeypatch.chdir(home.folder)
    if any("sandbox" in block.text for block in SCRIPTS[page]):
        request.getfixturevalue("sandbox_here")
    for block in SCRIPTS[page]:
        execute(block)


def test_the_commands_of_the_skill_run(home):
    for line in commands(SKILL):
        root = "" if "flows.advise" in line else f" root={home.folder}/runs"
        done = home.shell(f"{line.replace('--out ', f'--out {home.folder}/')}{root}")
        if "flows.run " in line:
            assert set(json.loads(done.stdout.splitlines()[-1])["stages"].values()) == {"cached"}
    assert (home.folder / "episodes" / "train.jsonl").is_file()


def test_a_stage_runs_alone(home, monkeypatch):
    """Run the request of docs/architecture.md with the command given below it."""
    monkeypatch.chdir(home.folder)
    execute(SCRIPTS["docs/architecture.md"][0])
    (command,) = [line for line in commands(ROOT / "docs" / "architecture.md") if "--request" in line]
    assert command in commands(COMMANDS)
    done = home.shell(f"cd {home.folder} && PYTHONPATH={ROOT} {command}")
    assert json.loads(done.stdout.splitlines()[-1])["status"] in ("ran", "cached")


def test_run_is_compared_and_its_lineage_shown(home):
    records = Records(home.folder / "runs")
    run = records.get("stock")
    records.write(replace(run, id="0" * 32, name="other"))  # a second run
    (compare,) = [line for line in commands(COMMANDS) if "flows.compare RUN OTHER" in line]
    done = home.shell(compare.partition("#")[0].replace("RUN OTHER", f"stock other root={home.folder}/runs"))
    assert "B after GRPO against A after GRPO" in done.stdout
    assert Path(done.stdout.splitlines()[-1].removeprefix("page: ")).is_file()
    for line in [line for line in commands(COMMANDS) if "flows.runs lineage" in line]:
        done = home.shell(f"{line.partition('#')[0]} root={home.folder}/runs")
        assert "stock.reward.brief word_cost=0.02" in done.stdout


def test_the_export_is_served_and_the_client_gets_an_answer(home, capsys):
    (command,) = [line for line in commands(COMMANDS) if "components.inference.server MODEL --name" in line]
    (client,) = [block for block in blocks(COMMANDS, "python") if "127.0.0.1" in block.text]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    arguments = command.replace("MODEL", home.result["export"]).replace("8000", port).split()
    server = subprocess.Popen(arguments, cwd=ROOT, env=environment(home.folder), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 600
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, server.stderr and server.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        execute(replace(client, text=client.text.replace("8000", port)))
        assert capsys.readouterr().out.rstrip().endswith("]")  # the token ids
    finally:
        server.terminate()
        server.communicate(timeout=600)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True
