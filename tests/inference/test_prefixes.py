"""Prefixes that active sequences share: what is read once, and that the engine's responses stay the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.inference.protocol import ChatRequest, Sampling
from components.inference.transformers import prefixes
from components.inference.transformers.batch import Batch
from components.inference.transformers.prefixes import partition, shared_prefix
from components.models.weights import load_model
from tests.inference.exact import ask, assert_exact, go_on
from tests.inference.test_engine import CONFIGS, TEXTS, chat, random_model

SYSTEM = {"role": "system", "content": "You serve the customers of a small shop. " * 3}


@pytest.fixture
def sharing_engine(make_engine, monkeypatch):
    """Makes engines that share any prefix, with the partitions of their decoding steps."""
    steps = []
    original = Batch._shared

    def record(self):
        steps.append(original(self))
        return steps[-1]

    monkeypatch.setattr(Batch, "_shared", record)
    monkeypatch.setattr(prefixes, "RUN_TOKENS", 20)  # several runs also in small batches

    def make(*args, least: float = 1, **options):
        engine = make_engine(*args, **options)
        engine.batch.shared_tokens = least
        return engine

    make.steps = steps
    return make


def asked(text: str, **options) -> ChatRequest:
    request = ask(text, **options)
    return ChatRequest([SYSTEM, *request.messages], request.tools, request.policy, request.sampling, request.seed)


def group(count: int, texts=TEXTS, **options) -> list[ChatRequest]:
    return [asked(text, seed=seed, **options) for text in texts for seed in range(count)]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([0, 3, 1000]),
)
def test_every_token_is_read_once_for_its_row(sequences, least, run_tokens):
    original, prefixes.RUN_TOKENS = prefixes.RUN_TOKENS, run_tokens
    try:
        sharing = partition(sequences, least)
    finally:
        prefixes.RUN_TOKENS = original
    if sharing is None:
        return
    seen = [[0] * (len(sequence) + 1) for sequence in sequences]
    for segment in sharing.segments:
        assert segment.stop > segment.start
        for row in segment.rows:
            assert shared_prefix(sequences[row], sequences[segment.rows[0]]) >= segment.stop
            for token in range(segment.start, segment.stop):
                seen[row][token] += 1
    rows = [row for run in sharing.runs for row in range(run.first, run.last)]
    assert rows == list(range(len(sequences)))
    for run in sharing.runs:
        for row in range(run.first, run.last):
            assert run.start <= sharing.private[row]
            assert run.stop >= len(seen[row])
            for token in range(sharing.private[row], len(seen[row])):
                seen[row][token] += 1
    assert all(count == 1 for row in seen for count in row)


def test_what_all_share_and_what_groups_share():
    system, first, second = list(range(300)), list(range(300, 500)), list(range(600, 800))
    rows = [[*system, *own, 900 + index] for index, own in enumerate([first, second] * 20)]
    sharing = partition(rows)
    even, odd = tuple(range(0, 40, 2)), tuple(range(1, 40, 2))
    assert [(one.rows, one.start, one.stop) for one in sharing.segments] == [
        (tuple(range(40)), 0, 300),
        (even, 300, 500),
        (odd, 300, 500),
    ]
    assert set(sharing.private) == {500}
    assert [(run.first, run.last, run.start, run.stop) for run in sharing.runs] == [(0, 40, 500, 502)]
    stranger = [[7] * 400]
    runs = partition(rows[:20] + stranger + rows[20:]).runs
    assert [(run.first, run.last, run.start) for run in runs] == [(0, 20, 500), (20, 21, 0), (21, 41, 500)]


def test_small_batches_are_read_as_before():
    assert partition([[1] * 249 + [row] for row in range(60)]) is None
    assert partition([[1] * 250 + [row] for row in range(64)]) is not None
    assert partition([[row] * 250 for row in range(64)], 1) is None


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}])
def test_the_tokens_are_the_same(make_engine, sharing_engine, sampling):
    requests = group(4, max_tokens=24, **sampling)
    apart = chat(make_engine(), *requests)
    together = chat(sharing_engine(), *requests)
    assert [one.token_ids for one in together] == [one.token_ids for one in apart]
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=2e-5, rtol=0)
    shared = [step for step in sharing_engine.steps if step is not None]
    assert max(len(step.segments) for step in shared) > 5, "all rows, and each group"
    assert max(step.grown for step in shared) >= 5


def test_rows_join_and_leave(sharing_engine, reference):
    """Rows of unlike length start at different times, in fewer slots than requests, with and without the prefix."""
    engine = sharing_engine(slots=6)

    async def waves():
        async def later(passes, request):
            for _ in range(passes):
                await asyncio.sleep(0.003)
            return await engine.chat(request)

        requests = [asked(TEXTS[index % 5], seed=index, max_tokens=3 + 5 * (index % 4)) for index in range(12)]
        requests += [ask("Another conversation", seed=index, max_tokens=9) for index in range(3)]
        return await asyncio.gather(*(later(index % 5, request) for index, request in enumerate(requests)))

    answers = asyncio.run(waves())
    for answer in answers:
        assert_exact(reference, answer)
    sizes = {len(step.private) for step in sharing_engine.steps if step is not None}
    assert len(sizes) > 2
    assert any(step is not None and len(step.runs) > 1 for step in sharing_engine.steps)


def test_further_turns_continue_cached_prefixes(sharing_engine, reference):
    engine = sharing_engine()
    openings = group(3, max_tokens=8)
    firsts = chat(engine, *openings)
    seconds = chat(engine, *(go_on(*pair, "And?") for pair in zip(openings, firsts, strict=True)))
    for answer in seconds:
        assert_exact(reference, answer)


def test_an_adapter_is_exact_too(sharing_engine, adapter_dir, base_dir):
    import peft

    engine = sharing_engine()
    chat(engine, *group(2))
    engine.load_policy("v1", str(adapter_dir))
    adapted = peft.PeftModel.from_pretrained(load_model(base_dir), adapter_dir)
    for answer in chat(engine, *(replace(request, policy="v1") for request in group(2))):
        assert_exact(adapted, answer)


LAYERS = dict.fromkeys(CONFIGS, 2) | {"gemma3_text": 1, "llama4_text": 1}
"""Layers of each family that read shared prefixes once: those without a window, capped scores, sinks and biases."""
del LAYERS["bloom"], LAYERS["mistral"], LAYERS["gemma2"], LAYERS["gpt_oss"]


@pytest.mark.parametrize("family", LAYERS)
def test_other_families_are_exact_too(family, base_dir, sharing_engine, tmp_path):
    """The shared path is used by each, which a mask that a model changes would prevent."""
    from components.models import shared_attention

    folder = random_model(family, base_dir, tmp_path)
    calls, original = [], shared_attention.attend
    try:
        shared_attention.attend = lambda *given: calls.append(1) or original(*given)
        answers = chat(sharing_engine(folder), *group(3, TEXTS[:3]))
    finally:
        shared_attention.attend = original
    assert len(calls) == LAYERS[family] * len([step for step in sharing_engine.steps if step is not None]) > 0
    plain = load_model(folder)
    for answer in answers:
        assert_exact(plain, answer)


def test_a_row_without_finite_logits_fails_alone(sharing_engine, reference):
    """A token with damaged weights in the private part of a row."""
    engine = sharing_engine()
    token = engine.format.encode("~")[0]
    with torch.no_grad():
        engine.model.get_input_embeddings().weight[token] = torch.nan
        if engine.model.get_output_embeddings().weight[token].isnan().any():  # tied: would make all logits NaN
            engine.model.lm_head.weight = torch.nn.Parameter(reference.lm_head.weight.detach().clone())

    async def all_at_once():
        texts = ["Hello.", "~", "Where?", "Who?"]
        return await asyncio.gather(*(engine.chat(asked(text)) for text in texts), return_exceptions=True)

    good, bad, *others = asyncio.run(all_at_once())
    assert "not finite" in str(bad)
    for answer in (good, *others):
        assert_exact(reference, answer)


def test_other_precisions_are_read_row_by_row(make_engine):
    engine = make_engine(dtype="bfloat16")
    assert engine.batch.shared_tokens == float("inf")
    assert chat(engine, ChatRequest([SYSTEM], sampling=Sampling(max_tokens=2)))
