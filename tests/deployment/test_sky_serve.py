"""Service file of SkyServe: parsed by SkyPilot, and equal to sky/serve.yaml."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from components.deployment import sky_serve

GOLDEN = Path(__file__).parents[2] / "sky" / "serve.yaml"
SHOP = ["s3://BUCKET/shop-agent", "--name", "shop-agent", "--engine", "vllm", "--accelerators", "L4:1"]


def test_the_service_of_the_golden_file(capsys, monkeypatch):
    monkeypatch.setattr(sky_serve, "check", lambda task: None)
    assert sky_serve.main(SHOP) == 0
    head = "# " + " ".join(["python -m components.deployment.sky_serve", *SHOP])
    assert f"{head}\n{capsys.readouterr().out}" == GOLDEN.read_text()


def test_our_own_server_on_cpus_from_the_hub():
    task = sky_serve.service("a/b", "shop", engine="transformers", accelerators=None, replicas=2, max_length=64)
    assert task["service"]["replicas"] == 2
    assert "accelerators" not in task["resources"]
    assert "hf download a/b --local-dir ~/model" in task["run"]
    assert "components.inference.server ~/model --name shop" in task["run"]
    assert "TOKEN" not in str(task)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/home/me/model", "--name", "x"], "MODEL: '/home/me/model': expected a bucket"),
        (["a/b", "--name", "My Shop"], "--name: 'My Shop': expected lower-case"),
        (["a/b", "--name", "x", "--replicas", "0"], "--replicas: 0: expected 1 or more"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert sky_serve.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_skypilot_reads_it(capsys):
    assert sky_serve.main(SHOP) == 0
    assert sky_serve.main([*SHOP[:-1], "L4:many"]) == 2
    assert "SkyPilot rejects the service" in capsys.readouterr().err


@pytest.mark.security
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_replicas_need_a_key_that_is_never_written(engine, tmp_path):
    """Replicas listen on all addresses. The command of the service fails at once without the key."""
    task = sky_serve.service("a/b", "shop", engine=engine, accelerators=None, replicas=1, max_length=64)
    assert task["secrets"] == {"ESPALIER_SERVER_KEY": None}
    assert task["service"]["readiness_probe"]["path"] == "/health"
    assert "--host 0.0.0.0" in task["run"]
    if engine == "vllm":  # its server takes the key from this variable, and an empty one for none
        python = tmp_path / "vllm" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\necho key $VLLM_API_KEY\n")
        python.chmod(0o755)
        for key, output in (("", ""), ("k3y", "key k3y\n")):
            environment = {"HOME": str(tmp_path), "ESPALIER_SERVER_KEY": key}
            ended = subprocess.run(["bash", "-c", task["run"]], env=environment, capture_output=True, text=True)
            assert (ended.stdout, ended.returncode == 0) == (output, bool(key))
