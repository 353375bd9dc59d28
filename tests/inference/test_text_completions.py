"""Tests of `/v1/completions` with OpenAI's client against transformers' own model."""

from __future__ import annotations

import openai
import pytest
import torch

from components.inference.token_texts import TokenTexts
from components.inference.transformers import batch as batch_module
from tests.inference.scripted import served

TEXT = "The river Aare flows through Bern – née Bärn 🙂."


@pytest.fixture(scope="module")
def engine(base_dir):
    from components.inference.transformers.engine import TransformersEngine

    return TransformersEngine(base_dir, max_length=256, device="cpu")


@pytest.fixture(scope="module")
def client(engine):
    with served(engine, "tiny", decode=engine.tokenizer.decode) as client:
        yield client


def complete(client, prompt=TEXT, **options):
    return client.completions.create(model="tiny", prompt=prompt, **options)


def expected_logprobs(reference, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The (T - 1, V) log-probabilities of each next token."""
    with torch.inference_mode():
        return (reference(torch.tensor([ids])).logits[0, :-1].float() / temperature).log_softmax(-1)


def of_tokens(logps: torch.Tensor, ids: list[int]) -> list[float]:
    return [float(logps[place, token]) for place, token in enumerate(ids[1:])]


@pytest.mark.parametrize("most", [0, 1, 3])
def test_echo_returns_the_log_probabilities_of_the_prompt(client, engine, reference, most):
    """As lm-eval's `local-completions` asks: token ids, echo, logprobs=1, max_tokens=1, temperature=0."""
    ids = engine.tokenizer(TEXT).input_ids
    answer = complete(client, ids, max_tokens=most, temperature=0, logprobs=1, echo=True, seed=1234)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    sampled = len(logprobs.tokens) - len(ids)
    logps = expected_logprobs(reference, ids)
    assert sampled == most
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(of_tokens(logps, ids), abs=1e-4)
    for place in range(1, len(ids)):
        best = max(logprobs.top_logprobs[place].values())
        assert best == pytest.approx(float(logps[place - 1].max()), abs=1e-4)
        assert (logprobs.token_logprobs[place] == best) == (int(logps[place - 1].argmax()) == ids[place])
    assert choice.text.startswith(TEXT)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), most)


def test_prompts_in_one_batch_are_scored_as_alone_and_in_small_passes(client, engine, reference, monkeypatch):
    texts = [TEXT, "a", TEXT[:20], TEXT + TEXT, "The river"]
    monkeypatch.setattr(batch_module, "SCORED_LOGITS", 30 * engine.model.config.vocab_size)
    answer = complete(client, texts, max_tokens=1, temperature=0, logprobs=0, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    for text, choice in zip(texts, answer.choices, strict=True):
        ids = engine.tokenizer(text).input_ids
        wanted = of_tokens(expected_logprobs(reference, ids), ids)
        assert choice.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
        assert choice.text.startswith(text)
    assert answer.usage.prompt_tokens == sum(len(engine.tokenizer(text).input_ids) for text in texts)


def test_a_scored_prompt_does_not_use_the_cache_and_leaves_it_right(client, engine, reference):
    before = complete(client, TEXT, max_tokens=8, temperature=0).choices[0].text
    scored = complete(client, TEXT, max_tokens=8, temperature=0, logprobs=0, echo=True).choices[0]
    assert scored.text == TEXT + before
    assert complete(client, TEXT, max_tokens=8, temperature=0).choices[0].text == before


def test_sampled_log_probabilities_are_of_the_sampling_distribution(client, engine, reference):
    prompt = engine.tokenizer("Once upon").input_ids
    options = {"max_tokens": 12, "temperature": 0.5, "logprobs": 20, "seed": 3, "top_p": 0.9}
    answer = complete(client, prompt, **options, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    sampled = choice.token_ids
    logps = expected_logprobs(reference, prompt + sampled, temperature=0.5)[len(prompt) - 1 :]
    for place, (token, top) in enumerate(zip(sampled, choice.logprobs.top_logprobs, strict=True)):
        ordered, index = logps[place].exp().sort(descending=True)
        inside = index[: int((ordered.cumsum(0) - ordered < 0.9).sum())]
        wanted = logps[place][inside].log_softmax(-1)
        assert token in inside
        mine = float(wanted[(inside == token).nonzero()[0, 0]])
        assert choice.logprobs.token_logprobs[place] == pytest.approx(mine, abs=1e-3)
        assert max(top.values()) == pytest.approx(float(wanted.max()), abs=1e-3)
    assert choice.prompt_token_ids == prompt


def test_offsets_are_the_places_of_the_tokens_in_the_text(client, engine):
    ids = engine.tokenizer(TEXT).input_ids
    choice = complete(client, TEXT, max_tokens=5, logprobs=0, echo=True, temperature=0).choices[0]
    logprobs = choice.logprobs
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\ufffd" not in token:
            assert choice.text[offset : offset + len(token)] == token
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset[len(ids)] == len(TEXT)
    alone = complete(client, TEXT, max_tokens=5, logprobs=0, temperature=0).choices[0]
    assert alone.logprobs.text_offset == logprobs.text_offset[len(ids) :], "offsets count the prompt"


def test_n_and_seed(client):
    drawn = complete(client, ["x", "y"], n=3, max_tokens=10, seed=7)
    texts = [choice.text for choice in drawn.choices]
    assert len(set(texts)) == 6
    assert drawn.usage.prompt_tokens == 2, "a prompt counts as one for all its completions"
    assert [choice.text for choice in complete(client, ["x", "y"], n=3, max_tokens=10, seed=7).choices] == texts
    assert complete(client, "x", max_tokens=10, seed=8).choices[0].text == texts[1]
    assert complete(client, "x", max_tokens=10).choices[0].text != complete(client, "x", max_tokens=10).choices[0].text


def test_stop_strings_end_the_text(client):
    plain = complete(client, "x", max_tokens=40, seed=1).choices[0].text
    stop = next(c for c in plain[5:] if c.isascii() and c not in plain[:5])
    choice = complete(client, "x", max_tokens=40, seed=1, stop=[stop]).choices[0]
    assert choice.text == plain[: plain.index(stop)]
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("echo", "logprobs", "stop"),
    [
        (False, None, None),
        (True, 2, None),
        (False, 0, ["\ufffd"]),
        (True, None, ["\ufffd"]),
        (False, 2, ["e", "\n", "ab"]),
    ],
)
def test_streams_add_up_to_the_completions_without_streaming(client, engine, echo, logprobs, stop):
    """Text, tokens, log-probabilities and offsets of several completions at once, in many parts."""
    prompts = [TEXT, "y", engine.tokenizer("Aare").input_ids]
    prompts = [prompt if isinstance(prompt, list) else engine.tokenizer(prompt).input_ids for prompt in prompts]
    options = {"n": 2, "max_tokens": 40, "seed": 1, "logprobs": logprobs, "echo": echo, "stop": stop}
    options["extra_body"] = {"return_token_ids": True}
    plain = complete(client, prompts, **options)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(complete(client, prompts, **options, **streamed))
    most = 0
    for whole in plain.choices:
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == whole.index]
        most = max(most, len(parts))
        assert "".join(part.text for part in parts) == whole.text
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]
        assert parts[0].prompt_token_ids == whole.prompt_token_ids
        assert [token for part in parts for token in getattr(part, "token_ids", [])] == whole.token_ids
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            values = [value for part in parts if part.logprobs for value in getattr(part.logprobs, name)]
            assert values == (getattr(whole.logprobs, name) if logprobs is not None else [])
    assert most > (20 if stop is None else 3)
    assert chunks[-1].usage == plain.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_evaluated_text_can_be_streamed(client):
    options = {"max_tokens": 0, "echo": True, "logprobs": 1}
    whole = complete(client, TEXT, **options).choices[0]
    parts = [chunk.choices[0] for chunk in complete(client, TEXT, **options, stream=True)]
    assert "".join(part.text for part in parts) == whole.text == TEXT
    assert parts[0].logprobs.token_logprobs == whole.logprobs.token_logprobs
    assert parts[-1].finish_reason == "length"


def test_a_refusal_names_its_parameter(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, extra_body={"prompt_logprobs": 1})
    assert caught.value.param == "prompt_logprobs"


def test_prompts_that_do_not_fit_are_refused(client, engine):
    full = [65] * engine.max_length
    with pytest.raises(openai.BadRequestError, match="the prompt has 256 tokens"):
        complete(client, full)
    assert complete(client, full, max_tokens=0, echo=True, logprobs=0).usage.prompt_tokens == 256
    with pytest.raises(openai.BadRequestError, match="token 9999"):
        complete(client, [9999])


def test_texts_of_tokens_complete_characters_and_keep_leading_spaces():
    pieces = {1: "▁ein", 2: "▁Haus", 3: "s"}

    def decode(ids):  # like SentencePiece, whose decoder drops the first space
        return "".join(pieces[token] for token in ids).replace("▁", " ").removeprefix(" ")

    texts = TokenTexts(decode)
    seen = []
    for token in (1, 2, 3):
        seen.append((texts.length, texts.text_of(token)))
        texts.append(token)
    assert seen == [(0, "ein"), (3, " Haus"), (8, "s")]
