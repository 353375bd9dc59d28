"""Stages and checks with inference=vllm, on a small server that speaks vLLM's endpoints."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from components.trajectories.store import read_trajectories
from flows.experiment.compose import check
from flows.planning.notes import resolved_values
from flows.stages.base import Request
from flows.stages.execute import request_key, run_stage
from flows.stages.servers import with_server_urls
from tests.deployment.tiny import TINY
from tests.inference.fake import environment
from tests.refusals import wrong_refusals

MODEL = {**TINY.model_dump(exclude={"lora"}), "max_length": 4096}
SHOP = {"_target_": "components.environments.worlds.shop.Shop", "train": 8, "heldout": 4}
PART = {"model": MODEL, "environment": SHOP, "agent": {"max_turns": 2, "max_tokens": 32}}


@pytest.fixture
def inference(tmp_path):
    return {"name": "vllm", "python": environment(tmp_path / "vllm"), "start_timeout": 20, "retry_for": 10}


def test_stages_of_a_run_share_one_server(context, inference):
    collect = {**PART, "inference": inference, "collect": {"scenarios": 2, "group_size": 2, "concurrency": 2}}
    evaluate = {**PART, "inference": inference, "evaluate": {"scenarios": 2}}
    evaluate["reward"] = {"_target_": "components.rewards.rules.outcome.Outcome"}
    heard = []
    context = replace(context, on_wait=heard.append)
    artifact, _ = run_stage(Request("collect", collect), context)
    for trajectory in read_trajectories(artifact.path / "trajectories.parquet"):
        assert trajectory.failure is None
        assert trajectory.histories[0].token_ids
    elsewhere = with_server_urls(Request("evaluate", evaluate), context)
    [url] = elsewhere.spec["inference"]["urls"]
    assert request_key(elsewhere, context) == request_key(Request("evaluate", evaluate), context)
    other = replace(context, warm=type(context.warm)())  # of another process
    run_stage(elsewhere, other)
    other.warm.close()
    run_stage(Request("evaluate", {**evaluate, "evaluate": {"scenarios": 3}}), context)
    assert [text for text in heard if "vLLM is up" in text] == heard[1:]
    assert len(heard) == 2
    assert url in heard[0]
    context.warm.close()
    assert with_server_urls(Request("collect", {**PART, "inference": {"name": "embedded"}}), context).spec[
        "inference"
    ] == {"name": "embedded"}


COMMAND = ("+experiment=smoke", "inference=vllm")
MISTAKES = {
    ("inference.max_lora_rank=1",): "inference.max_lora_rank: 1: less than model.lora.rank=",
    ("inference.sleep=1", "collect.overlap=1"): "inference.sleep: 1",
    ("inference.sleep=true",): "inference.sleep",
    ("collect.overlap=4",): "inference.max_loras: 2: collect.overlap=4 samples with 4 policies at a time",
    ("collect.min_p=0.1", "collect.top_p=0.9"): "collect.min_p: 0.1: vLLM applies it before",
    (
        "inference.key_variable=MINE",
    ): "inference.key_variable: MINE: the server that the run starts itself has no API key",
    ("inference.quantization=fp8",): "inference.quantization: fp8: training needs the log-probabilities",
    ("+inference.arguments.kv-cache-dtype=fp8",): "inference.arguments.kv-cache-dtype: fp8: training needs",
    (
        "inference.speculative={method: ngram, rejection_sample_method: synthetic}",
    ): "rejection_sample_method: synthetic",
    ("inference.speculative={method: ngram}", "collect.min_p=0.1"): "collect.min_p: 0.1: vLLM ignores it",
    ("inference.prefix_caching=true", "inference.urls=[http://a/v1]"): "inference.prefix_caching: set, but",
    (
        "model.lora=null",
        "collect.overlap=1",
    ): "collect.overlap: 1: with model.lora=null a server has",
    ("model.lora=null", "inference.on_swap=finish"): "inference.on_swap: finish: with model.lora=null",
    ("model.lora=null", "inference.urls=[http://a/v1]"): "inference.urls: running servers, which would have other",
    ("model.lora=null", "collect.opponent=base"): "collect.opponent: base: with model.lora=null",
    ("model.lora=null", "compute=process", "compute.parallel=2"): "compute.parallel: 2: with model.lora=null",
    ("inference.urls=[there]",): "inference.urls",
    ("+inference.arguments.port=3",): "port is set by the run",
}


def test_what_a_vllm_server_cannot_do_is_said_before_the_run():
    cases = [(overrides, re.escape(words)) for overrides, words in MISTAKES.items()]
    assert wrong_refusals(cases, lambda overrides: check([*COMMAND, *overrides])) == []
    check(COMMAND)
    check([*COMMAND, "model.lora=null"])
    spec = check([*COMMAND, "inference.speculative={method: ngram}", "inference.sleep=2"])[0]
    notes = list(resolved_values(spec))
    assert {"inference.speculative", "inference.sleep=2"} <= {note.partition(":")[0] for note in notes}
    check([*COMMAND, "inference.quantization=fp8", "rounds=0"])
