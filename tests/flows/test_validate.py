"""Likelihood of held-out rows and answers to them, compared with a plain model on one row at a time."""

from __future__ import annotations

import json

import pytest
import torch

from components.algorithms.likelihood import EpisodeLikelihood, summary
from components.algorithms.sft.trainer import examples
from components.models.weights import load_tokenizer, prepare
from components.trajectories.chat import ChatFormat
from components.trajectories.store import read_trajectories
from flows.recipes.stage_calls import HELDOUT_PROMPTS
from flows.stages.base import Context
from flows.stages.execute import run_stage
from flows.stages.sample import SampleStage, read_answers
from flows.stages.validate import ValidateStage, summary_text
from tests.algorithms.builders import plain_logprobs
from tests.data import rows as samples
from tests.flows.declarations import check_artifact
from tests.flows.test_import import requests, write


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    context = Context.at(tmp_path_factory.mktemp("root"))
    yield context
    context.warm.close()


def validated(made, data, policy, context):
    stage = ValidateStage(model=made.spec.model, pack_tokens=made.spec.algorithm.pack_size)
    return run_stage(made.request("validate", stage, {"data": data, "policy": policy}), context)[0]


def test_the_likelihoods_are_those_of_a_plain_model(context, tmp_path):
    from transformers import AutoModelForCausalLM

    made = requests(context.cache.parent, write(tmp_path / "a.jsonl", samples.FORMS["preference"]), heldout=0.5)
    data, _ = run_stage(made.import_data(), context)
    artifact = validated(made, data, None, context)
    assert check_artifact(artifact.path) == "validate"
    measured = [json.loads(line) for line in (artifact.path / "likelihoods.jsonl").read_text().splitlines()]
    episodes = {episode.id: episode for episode in read_trajectories(data.path / "heldout" / "trajectories.parquet")}
    assert {row["id"] for row in measured} == set(episodes)
    assert len(measured) == 2 * data.metrics["heldout"] > 0
    base_dir = prepare(made.spec.model, context.cache)
    model = AutoModelForCausalLM.from_pretrained(base_dir)
    chat = ChatFormat(load_tokenizer(base_dir))
    for row in measured:
        (example,) = examples(chat, [episodes[row["id"]]], 400)
        with torch.no_grad():
            logprobs = plain_logprobs(model, example["input_ids"], 1.0)
        expected = sum(float(logprobs[target - 1]) for target in example["targets"])
        assert row["logprob"] == pytest.approx(expected, rel=1e-4)
        assert row["tokens"] == len(example["targets"])
    accepted = [row for row in measured if row["accepted"]]
    assert len(accepted) == data.metrics["heldout"]
    loss = -sum(row["logprob"] for row in accepted) / sum(row["tokens"] for row in accepted)
    assert artifact.metrics["loss"] == pytest.approx(loss)


def test_the_likelihoods_are_those_of_the_policy(context, tmp_path):
    made = requests(context.cache.parent, write(tmp_path / "a.jsonl", samples.FORMS["thumbs"]), heldout=0.5)
    data, _ = run_stage(made.import_data(), context)
    fed = dict.fromkeys(("trajectories", "scores", "selection"), data)
    checkpoint, _ = run_stage(made.train(fed, 1, start=None, reference=None), context)
    base, trained = (validated(made, data, policy, context) for policy in (None, checkpoint))
    assert base.metrics["loss"] != trained.metrics["loss"]
    assert base.metrics["rows"] == trained.metrics["rows"]


def test_the_sampled_answers_are_those_of_greedy_decoding_with_a_plain_model(context, tmp_path):
    from transformers import AutoModelForCausalLM

    made = requests(context.cache.parent, write(tmp_path / "a.jsonl", samples.FORMS["preference"]), heldout=0.5)
    data, _ = run_stage(made.import_data(), context)
    stage = SampleStage(model=made.spec.model.base(), max_tokens=made.spec.agent.max_tokens, prompts=HELDOUT_PROMPTS)
    artifact, _ = run_stage(made.request("sample", stage, {"data": data}), context)
    assert check_artifact(artifact.path) == "sample"
    answers = read_answers(artifact.path)
    assert len(answers) == artifact.metrics["answers"] == data.metrics["heldout"] > 0
    base_dir = prepare(made.spec.model, context.cache)
    model, chat = AutoModelForCausalLM.from_pretrained(base_dir), ChatFormat(load_tokenizer(base_dir))
    chosen = {row["prompt"]: row["chosen"] for row in samples.FORMS["preference"]}
    for row in answers:
        assert row["reference"]["content"] == chosen[row["messages"][-1]["content"]]
        ids = torch.tensor([chat.prompt_ids(row["messages"], row["tools"])])
        limit = made.spec.agent.max_tokens
        made_of = model.generate(ids, max_new_tokens=limit, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        assert row["answer"]["content"] == chat.tokenizer.decode(made_of, skip_special_tokens=True)


def test_the_accuracy_compares_the_best_with_the_worst_answer_per_token():
    def likelihood(group: str, reward: float, tokens: int, logprob: float) -> EpisodeLikelihood:
        return EpisodeLikelihood(f"{group}{reward}", group, reward, reward == 1.0, tokens, logprob)

    metrics = summary(
        [
            likelihood("a", 1.0, 4, -4.0),  # -1 per token against -2
            likelihood("a", 0.5, 1, -0.1),  # neither the best nor the worst
            likelihood("a", 0.0, 1, -2.0),
            likelihood("b", 1.0, 2, -6.0),  # -3 per token against -1
            likelihood("b", 0.0, 2, -2.0),
            likelihood("c", 1.0, 5, -1.0),  # without another answer
        ]
    )
    assert metrics == {"rows": 6, "tokens": 11, "pairs": 2, "loss": 1.0, "accuracy": 0.5}
    assert summary_text(metrics) == "held-out rows 6  loss 1  accuracy 0.5"
    assert "accuracy" not in summary([likelihood("c", 1.0, 5, -1.0)])
    assert "loss" not in summary([likelihood("c", 0.0, 5, -1.0)])
