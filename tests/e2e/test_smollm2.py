"""The quickstart's path with its real weights, in short form: every stage on SmolLM2, and the export served."""

import json
import math

import pytest

from flows.history.records import Records
from flows.stages.base import Context, Request
from flows.stages.execute import repeat_stage

SHORT = (
    "rounds=1",
    "warmup.demonstrations=4",
    "agent.max_turns=2",
    "collect.scenarios=2",
    "collect.group_size=2",
    "algorithm.minibatches=1",  # of several, the second one meets a policy that has moved
    "reward.repetition_cost=0.5",
    "reward.repetition_ngram=1",  # so short a warmup solves nothing; this gives each group something to compare
    "evaluate.scenarios=1",
    "deploy=serve",
    "deploy.prompts=1",
)


@pytest.mark.timeout(1800)  # the weights are converted once: about 30 s
def test_the_quickstart_in_short_form(tmp_path, command):
    code, out, errors = command("+experiment=quickstart", f"root={tmp_path}", *SHORT)
    assert code == 0, errors
    result = json.loads(out.splitlines()[-1])
    assert set(result["stages"].values()) == {"ran"}

    made = {}
    for file in tmp_path.glob("artifacts/**/manifest.json"):
        manifest = json.loads(file.read_text())
        made.setdefault(manifest["stage"], []).append(manifest["metrics"])
    [warmup, grpo] = sorted(made["train"], key=lambda metrics: "clip_fraction" in metrics)
    assert warmup["loss"] < 2.0  # demonstrations in the chat format: a base model says them at about 1.4 nats a token
    # The trainer gives the sampled tokens the log-probabilities that the engine gave them.
    assert 0 <= grpo["kl_sampler"] < 1e-8
    assert grpo["clip_fraction"] == 0
    assert math.isfinite(grpo["grad_norm"])
    assert grpo["computed_tokens"] < grpo["tokens"]
    [deploy] = made["deploy"]
    assert deploy["served/prompts"] == 1  # the served export answered as the policy, token for token

    stage = Records(tmp_path).get(result["run_id"]).stage("train[1]")
    before, again = repeat_stage(Request.from_json(stage.request), Context.at(tmp_path))
    assert before.digest == again.digest
