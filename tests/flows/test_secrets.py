"""Secrets planted in many places of a configuration: a command refuses each before anything is written, and what it
writes and says does not hold it. Secrets that come from the environment are used, and are nowhere afterwards."""

from __future__ import annotations

import gzip
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from flows import chat, plan, run, serve
from flows.explain import calibrate
from tests.flows.processes import ROOT, python, stage_line
from tests.rewards.judge_replies import refused
from tests.rewards.judge_server import judge_server

pytestmark = pytest.mark.security

WORLD = "tests.redaction.planted.World"
S = "Zq81kd02mfP7"
"""What all planted secrets have in them, so that one search finds any of them."""


@dataclass(frozen=True)
class Plant:
    """A secret in one place."""

    overrides: tuple[str, ...] = ()
    settings: object = None
    """Of the environment, in the experiment's own file."""
    top: dict | None = None
    """More of the experiment's file."""
    command: Callable[[list[str]], object] = run.main


def settings(value: object) -> Plant:
    return Plant(settings=value)


def override(*lines: str, command: Callable[[list[str]], object] = run.main) -> Plant:
    return Plant(lines, command=command)


PLANTS = {
    # In the experiment's file
    "file: key by name": settings({"api_key": S}),
    "file: form in prose": settings({"note": f"call it with ghp_{S}{S}aa, please"}),
    "file: nested header": settings({"client": {"extra_headers": {"Authorization": f"{S}"}}}),
    "file: header pairs": settings({"headers": [["X-Api-Key", S]]}),
    "file: list element": settings(["a", "b", f"sk-proj-{S}{S}"]),
    "file: option of a command": settings({"command": ["python", "server.py", "--api-key", S]}),
    "file: option with =": settings({"command": ["python", "server.py", f"--token={S}"]}),
    "file: env block": settings({"mcp": {"env": {"WANDB_KEY": S}}}),
    "file: env entries": settings({"mcp": {"env": [{"name": "HF_TOKEN", "value": S}]}}),
    "file: OPENAI_KEY": settings({"OPENAI_KEY": S}),
    "file: dsn": settings({"dsn": f"host=h user=u {S}"}),
    "file: pat": settings({"pat": S}),
    "file: password in a list below its key": settings({"password": [{"x": [S]}]}),
    "file: token in a URL": settings({"url": f"https://{S}@git.example.com/a"}),
    "file: password with a slash": settings({"url": f"redis://u:{S[:4]}/{S}@h:6379"}),
    "file: query": settings({"url": f"https://h.example.com/mcp?token={S}"}),
    "file: presigned": settings({"url": f"https://b.example.com/x?X-Amz-Expires=9&X-Amz-Signature={S}"}),
    "file: connection string": settings({"a": f"AccountName=x;AccountKey={S}==;EndpointSuffix=y"}),
    "file: SQL Server": settings({"a": f"Server=h;Uid=sa;Pwd={S};"}),
    "file: private key": settings({"a": f"-----BEGIN PRIVATE KEY-----\n{S}\n-----END PRIVATE KEY-----"}),
    "file: JWT": settings({"a": f"eyJhbGciOi.eyJ{S}.{S}"}),
    "file: name of a key": settings({f"ghp_{S}{S}": 1}),
    "file: sweeper's params": Plant(top={"hydra": {"sweeper": {"params": {"agent.api_key": f"{S},b"}}}}),
    "file: SkyPilot's envs": Plant(top={"compute": {"places": {"p": {"name": "sky", "envs": {"WANDB_API_KEY": S}}}}}),
    "file: SkyPilot's setup": Plant(top={"compute": {"places": {"p": {"name": "sky", "setup": f"HF_TOKEN={S} x"}}}}),
    "file: deployment's presigned source": Plant(
        top={"deploy": {"target": {"name": "together", "source": f"https://h/x?X-Amz-Signature={S}", "hardware": "h"}}}
    ),
    # On the command line
    "override: key": override(f"+environment.settings.api_key={S}"),
    "override: in braces": override(f"+environment.settings={{client: {{hf_token: {S}}}}}"),
    "override: quoted in braces": override(f"+environment.settings={{a: '{{\"api_key\": \"{S}\"}}'}}"),
    "override: that cannot be parsed": override(f"+environment.settings={{api_key: {S}"),
    "override: name of a key": override(f"+environment.ghp_{S}{S}=1"),
    "override: MLflow": override(f"tracking.uri=postgresql://u:{S}@h/db"),
    "override: store": override(f"store=s3://{S}:{S}@bucket/x"),
    "override: name of MLflow's experiment": override(f"tracking.experiment=hf_{S}{S}"),
    "override: key_variable": override("judge_model@reward.model=served", f"reward.model.key_variable={S}AbC1"),
    "override: judge's headers": override(f"+reward.model.extra={{extra_headers: {{Authorization: Bearer {S}}}}}"),
    "override: remote engine": override("inference=remote", f"inference.url=https://h/v1?key={S}"),
    "override: vLLM's options": override("inference=vllm", f"inference.arguments={{hf-token: {S}}}"),
    "override: hydra.job.env_set": override(f"+hydra.job.env_set.HF_TOKEN={S}"),
    "override: hydra.run.dir": override(f"hydra.run.dir=/tmp/hf_{S}{S}"),
    "override: interpolation": override("tracking.experiment=${oc.env:PLANTED_TOKEN}"),
    "override: value of a variable": override(f"tracking.experiment=x-{S}9f"),
    "override: group option": override(f"judge_model@reward.model=sk-{S}{S}"),
    "sweep: values": override("-m", f"+environment.settings.token={S},{S}b"),
    "sweep: in braces": override("-m", f"+environment.settings={{token: {S}}},{{token: b}}"),
    "sweep: choice": override("-m", f"tracking.experiment=choice(a,hf_{S}{S})"),
    "fork": override("--fork", f"hf_{S}{S}@1"),
    "--cfg job": override("--cfg", "job", f"+environment.settings.api_key={S}"),
    "--cfg job, of a file": Plant(("--cfg", "job"), {"api_key": S}),
    "--cfg all": override("--cfg", "all", f"+hydra.job.env_set.HF_TOKEN={S}"),
    "--info": Plant(("--info", "config"), {"api_key": S}),
    # Other commands
    "plan": override(f"+environment.settings.api_key={S}", command=plan.main),
    "calibrate": override(f"+environment.settings.api_key={S}", command=calibrate.main),
    "serve: override": override(f"+environment.settings={{api_key: {S}}}", command=serve.main),
    "serve: file": Plant(settings={"api_key": S}, command=serve.main),
    "serve: tag": override("--tag", f"hf_{S}{S}", command=serve.main),
    "chat: URL": Plant(command=lambda _: chat.main([f"https://{S}@h.example.com/v1"])),
}  # fmt: skip


def written(folder: Path, plant: Plant) -> list[str]:
    """Writes the experiment's file; returns the arguments that choose it."""
    experiment = folder / "conf" / "experiment"
    experiment.mkdir(parents=True)
    data = {
        "defaults": ["/experiment/smoke"],
        "allow": ["tests"],
        "environment": {"_target_": WORLD, "settings": plant.settings},
        "root": str(folder / "runs"),
        **(plant.top or {}),
    }
    (experiment / "planted.yaml").write_text("# @package _global_\n" + yaml.safe_dump(data))
    return ["--config-dir", str(folder / "conf"), "+experiment=planted"]


def found_in(folder: Path, secrets: list[bytes]) -> Iterator[str]:
    """Files below a folder that hold a secret, by any of its spellings; compressed ones are read, too."""
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder)).encode()
        if path.is_file() and not path.is_symlink():
            for content in (name, *contents(path)):
                if any(secret in content for secret in secrets):
                    yield str(path.relative_to(folder))
                    break


def contents(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    yield data
    if data[:4] == b"PAR1":
        import pyarrow.parquet

        yield repr(pyarrow.parquet.read_table(path).to_pylist()).encode()
        yield repr(pyarrow.parquet.read_metadata(path).metadata).encode()
    elif data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory, and runs that are noticed: nothing here should get as far as one."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("it was started")

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PLANTED_TOKEN", f"{S}9f")
    monkeypatch.setattr("flows.session.run", started)
    monkeypatch.setattr("flows.explain.calibrate.calibrate", started)
    monkeypatch.setattr("flows.runs.ui.start", started)
    monkeypatch.setattr("flows.plan.plan", started)
    monkeypatch.setattr("flows.chat._talk", started, raising=False)
    return tmp_path


def refused_command(command: Callable[[list[str]], object], arguments: list[str], folder: Path, capfd) -> str:
    """Runs a command that is refused, and returns what it says: no secret, and nothing was written."""
    code: object = 0
    try:
        code = command(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    assert code == 2, arguments
    assert S not in out + err
    assert S[4:] not in out + err
    shutil.rmtree(folder / "conf")
    assert not list(folder.rglob("*.*")), "nothing is written"
    assert "environment variable" in err or "nothing reads one here" in err
    return err


QUICK = [name for name in PLANTS if name.startswith(("sweep", "--", "plan", "calibrate", "serve", "chat", "fork"))]


def check_plants(names: list[str], folder: Path, capfd) -> None:
    for number, name in enumerate(names):
        (own := folder / str(number)).mkdir()
        plant = PLANTS[name]
        said = refused_command(plant.command, [*written(own, plant), *plant.overrides], own, capfd)
        assert "holds" in said, name


def test_each_command_refuses_a_secret_before_anything_is_written(elsewhere, capfd):
    check_plants(QUICK, elsewhere, capfd)


@pytest.mark.slow
def test_each_planted_secret_is_refused_alone(elsewhere, capfd):
    check_plants([name for name in PLANTS if name not in QUICK], elsewhere, capfd)


def test_all_secrets_of_a_file_are_named_together(elsewhere, capfd):
    plants = {f"p{i}": one.settings for i, one in enumerate(PLANTS.values()) if one.settings and not one.overrides}
    said = refused_command(run.main, written(elsewhere, settings(plants)), elsewhere, capfd)
    missing = [name for name in plants if f"environment.settings.{name}" not in said]
    assert len(plants) > 20
    assert not missing


def test_all_secrets_of_overrides_are_named_together(elsewhere, capfd):
    lines = [one.overrides for name, one in PLANTS.items() if name.startswith("override") and one.command is run.main]
    lines = [line for line in lines if "oc.env" not in line[0]]
    arguments = [*written(elsewhere, Plant()), *(part for line in lines for part in line)]
    said = refused_command(run.main, arguments, elsewhere, capfd)
    keys = {line[-1].partition("=")[0].lstrip("+").partition(".ghp_")[0].partition("@")[0] for line in lines}
    assert len(lines) > 12
    assert not [key for key in keys if key not in said]


def test_a_request_with_a_secret_is_refused(tmp_path):
    spec = {"environment": {"_target_": WORLD, "settings": {"client": {"api_key": S}}}, "split": "train"}
    line = stage_line(tmp_path, {"stage": "collect", "spec": spec, "allow": ["tests"]})
    done = python(*line[:-1], f"root={tmp_path}/runs")
    assert done.returncode == 2
    assert "collect.environment.settings.client.api_key" in done.stdout
    assert S not in done.stdout + done.stderr
    assert not list(found_in(tmp_path / "runs", [S.encode()]))


LEGITIMATE = {
    "PLANTED_WORLD": f"{S}world",
    "PLANTED_EXTRA": f"{S}extra",
    "JUDGE_KEY": f"{S}judge",
    "HF_TOKEN": f"hf_{S}{S}hub",
    "OPENAI_API_KEY": f"sk-{S}{S}openai",
}
"""What a run is given by the environment; its configuration names the first three."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_secrets_of_the_environment_are_used_and_are_nowhere_afterwards(tmp_path):
    """A whole run with a judge that wants a key, an environment that logs its own and says it in an error, and MLflow
    at an address that a variable holds."""
    folder = tmp_path / "all"
    folder.mkdir()
    note = tmp_path / "seen.txt"
    given = {"client": {"api_key": "env:PLANTED_WORLD"}, "note": str(note)}
    arguments = [*written(folder, settings(given)), "evaluate.max_failures=0.5"]
    uri = f"sqlite:///{folder}/mlflow.db"
    angry = refused(500, f"no luck with Bearer {LEGITIMATE['JUDGE_KEY']}")
    with judge_server([angry], key=LEGITIMATE["JUDGE_KEY"]) as server:
        line = ["-m", "flows.run", *arguments, "tracking.uri=env:PLANTED_MLFLOW", "reward=ruler"]
        line += [f"reward.model.url={server.url}", "reward.model.model=judge", "reward.model.key_variable=JUDGE_KEY"]
        line += ["+reward.model.extra={user: env:PLANTED_EXTRA}"]
        environment = {**os.environ, **LEGITIMATE, "PLANTED_MLFLOW": uri, "OMP_NUM_THREADS": "1"}
        done = python(*line, env=environment, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert note.read_text() == LEGITIMATE["PLANTED_WORLD"], "it reached the environment"
    assert server.requests[-1].body["user"] == LEGITIMATE["PLANTED_EXTRA"], "it reached the judge"
    assert S not in done.stdout
    assert S not in done.stderr
    spellings = [spelling for text in (S, S[4:]) for spelling in (text.encode(), text.encode("utf-16-le"))]
    assert not list(found_in(folder, spellings))
    for name in ("outputs", "multirun", ".hydra"):
        assert not list(found_in(ROOT / name, spellings))
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert {".json", ".db", ".parquet", ".log", ".html", ".md", ".yaml"} <= kinds, "files of all kinds were searched"
    record = next((folder / "runs" / "records").glob("*.json")).read_text()
    assert "env:PLANTED_WORLD" in record
    parquet = [text for path in folder.rglob("*.parquet") for text in contents(path)]
    assert any(b"the service refuses ***" in text for text in parquet), "the error of the episode is there, masked"
    logs = "".join(path.read_text() for path in folder.rglob("*.log"))
    assert "signing in with ***" in logs
