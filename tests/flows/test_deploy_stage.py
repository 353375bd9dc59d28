"""The deploy stage with all formats: real exports, each loaded back and compared with the policy."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from components.deployment.spec import DeploySpec
from components.models.spec import ModelSpec
from components.rollout.spec import AgentSpec
from components.trajectories.schema import History, Message, Scenario, Trajectory
from flows.stages import deploy
from flows.stages.base import Context
from tests.deployment.small import write_llama
from tests.deployment.tiny import write_adapter
from tests.flows.pretend import write_evaluation


@pytest.fixture
def made(tmp_path):
    """Model, checkpoint and evaluation: the arguments of the stage."""
    base = write_llama(tmp_path / "base")
    policy, evaluation = tmp_path / "policy", tmp_path / "evaluation"
    write_adapter(base, policy / "adapter", seed=1)
    evaluation.mkdir()
    messages = [Message("user", "where is my order"), Message("assistant", "there")]
    success = {"success": True}
    episodes = [
        Trajectory(f"s{n}", Scenario(f"s{n}", {}, "heldout"), 0, [History(messages)], reward=1.0, outcome=success)
        for n in range(3)
    ]
    write_evaluation(evaluation, episodes)
    model = ModelSpec(name=str(base), max_length=512)
    inputs = {
        "policy": SimpleNamespace(path=policy, digest="p" * 64),
        "evaluation_final": SimpleNamespace(path=evaluation, digest="e" * 64),
    }

    def run(**options):
        spec = deploy.DeployStage(
            name="shop",
            model=model,
            agent=AgentSpec(max_tokens=8),
            deploy=DeploySpec(prompts=2, **options),
            step=1,
            experiment={"seed": 0},
        )
        out, scratch = tmp_path / "out", tmp_path / "scratch"
        out.mkdir()
        scratch.mkdir()
        context = Context.at(tmp_path / "root", scratch=scratch, key="k" * 64)
        return deploy.deploy(spec, inputs, SimpleNamespace(path=out), context), out

    return run


def test_every_format_answers_like_the_policy_and_has_its_card(made):
    metrics, out = made(formats=["gguf", "adapter", "merged"])
    assert {path.name for path in out.iterdir()} == {"merged", "adapter", "gguf", "answers.json"}
    for form in ("merged", "adapter", "gguf"):
        assert metrics[f"{form}/prompts"] == 2
        assert "# shop" in (out / form / "README.md").read_text()
    assert metrics["merged/max_logprob_difference"] < 1e-4
    assert "llama-server --model shop-" in (out / "gguf" / "README.md").read_text()
    assert "AutoPeftModelForCausalLM" in (out / "adapter" / "README.md").read_text()
    assert [one["messages"][0]["role"] for one in json.loads((out / "answers.json").read_text())] == ["user"] * 2


def test_a_gguf_alone_leaves_no_merged_model_behind(made):
    _, out = made(formats=["gguf"], gguf="f32")
    assert {path.name for path in out.iterdir()} == {"gguf", "answers.json"}
    assert {path.name for path in (out / "gguf").iterdir()} == {"README.md", "shop-f32.gguf"}
