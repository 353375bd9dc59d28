"""A limit of the reasoning of the embedded engine: the tokens that it adds, and what is trained on."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from components.algorithms.policy_gradient.returns import turn_lengths
from components.errors import SpecError
from components.inference.protocol import ResponseForm
from components.inference.transformers import batch
from components.inference.transformers.sampling import ReasoningLimit
from components.models.weights import load_model
from components.trajectories.chat import ChatFormat
from components.trajectories.recorder import Recorder
from components.trajectories.schema import Scenario, Trajectory
from tests.inference.exact import TOLERANCE, ask, logits
from tests.inference.test_engine import chat
from tests.inference.test_forms import needs_llguidance
from tests.trajectories.templates import OPENED, REASONING
from tests.trajectories.trl_templates import published

LIMIT = 12


@pytest.fixture
def engine_with(make_engine, base_dir, tmp_path):
    """Make an engine whose model has another chat template."""

    def make(template: str):
        folder = shutil.copytree(base_dir, tmp_path / "model")
        for file in folder.glob("chat_template*"):
            file.unlink()
        (folder / "chat_template.jinja").write_text(template)
        return make_engine(folder), load_model(folder)

    return make


def draw_in_turn(monkeypatch, tokens: list[int], passes: int) -> None:
    """Make the engine draw these tokens in order; the draws of `passes` passes from `LIMIT` on are dropped."""
    drawn = [*tokens[:LIMIT], *[tokens[0]] * passes, *tokens[LIMIT:]]

    def draw(logits_BV, samplings, uniforms):
        token = drawn.pop(0)
        return [token], torch.log_softmax(logits_BV, -1)[:, token].tolist()

    monkeypatch.setattr(batch, "draw", draw)


@pytest.mark.parametrize(("template", "start"), [(REASONING, "<think>"), (OPENED, "")], ids=["written", "opened"])
def test_unfinished_reasoning_is_ended_by_tokens_that_are_not_trained_on(engine_with, monkeypatch, template, start):
    engine, model = engine_with(template)
    text = f"{start}one two three four"[:LIMIT]
    added = engine.format.encode("\n</think>\n\n")
    tokens = [*engine.format.encode(f"{text}five"), engine.format.end_id]
    draw_in_turn(monkeypatch, tokens, len(added))
    (answer,) = chat(engine, ask("Hi", max_tokens=99, max_thinking_tokens=LIMIT))
    assert (answer.message["reasoning"], answer.message["content"]) == (text.removeprefix(start), "five")
    assert answer.token_ids == [*tokens[:LIMIT], *added, *tokens[LIMIT:]]
    sampled = [True] * LIMIT + [False] * len(added) + [True] * (len(tokens) - LIMIT)
    assert [not math.isnan(logprob) for logprob in answer.logprobs] == sampled
    assert answer.reasoning_tokens == LIMIT + len(added) - 2  # the line breaks belong to the answer

    expected = torch.log_softmax(logits(model, answer), -1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    kept = torch.tensor(sampled)
    torch.testing.assert_close(torch.tensor(answer.logprobs)[kept], expected[kept], atol=TOLERANCE, rtol=0)

    recorder = Recorder("main")
    history = recorder.record([{"role": "user", "content": "Hi"}], answer)
    assert history.sampled_mask() == [False] * len(answer.prompt_token_ids) + sampled
    trajectory = Trajectory("s/0", Scenario("s", {}, "train"), 0, [history])
    assert turn_lengths(trajectory) == [len(tokens)]


@pytest.mark.parametrize("text", ["<think>one</think>five and more", "five and many more words"])
def test_a_response_that_does_not_reason_at_the_limit_is_left_alone(engine_with, monkeypatch, text):
    engine, _ = engine_with(REASONING)
    tokens = [*engine.format.encode(text), engine.format.end_id]
    draw_in_turn(monkeypatch, tokens, 0)
    (answer,) = chat(engine, ask("Hi", max_tokens=99, max_thinking_tokens=LIMIT if "</think>" not in text else 20))
    assert answer.token_ids == tokens
    assert math.isfinite(sum(answer.logprobs))


ENDS = {
    "gptoss": ("<|channel|>analysis<|message|>one", "<|end|>"),  # a call or the answer may follow
    "glm4moe": ("\n<think>one", "</think>\n"),
    "gemma4_v5": ("<|channel>thought\none", "\n<channel|>"),
    "gemma4": ("<|channel>thought\none", "\n<channel|>"),
    "qwen3": ("<think>\none", "\n</think>\n\n"),
    "qwen3_5_think": ("one", "\n</think>\n\n"),
    "nemotron_3_nano": ("one", "\n</think>\n"),
    "lfm2_2_5": ("<think>one", "</think>"),
}
"""Unfinished reasoning and its end, by published template. `gemma4` drops the reasoning of plain answers."""


def test_reasoning_is_ended_as_the_template_ends_it(subtests):
    for name, (text, end) in ENDS.items():
        with subtests.test(template=name):
            chat = ChatFormat(published(name))
            limit, sampled = ReasoningLimit(chat, 1), chat.encode(text)
            added = list(iter(partial(limit.next_token, sampled), None))
            assert chat.tokenizer.decode(added) == end


def test_a_template_without_reasoning_is_refused(engine):
    with pytest.raises(SpecError, match=r"agent\.max_thinking_tokens: 12: the chat template of .* has no reasoning"):
        chat(engine, ask("Hi", max_thinking_tokens=LIMIT))


@needs_llguidance
def test_a_form_is_refused_where_the_prompt_begins_the_reasoning(engine_with):
    engine, _ = engine_with(OPENED)
    request = replace(ask("Hi"), form=ResponseForm(json_schema='{"type": "integer"}'))
    with pytest.raises(SpecError, match="response_format: the prompt begins the reasoning of this model"):
        chat(engine, request)
