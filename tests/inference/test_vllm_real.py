"""A real vLLM server against the embedded engine, on the same weights: `make test-vllm`.

VLLM_PYTHON names the Python of vLLM's environment; VLLM_URL, if set, a server that runs already (of SmolLM2, float32,
as `components.inference.vllm.server.options` start it). Says what it measured on standard output.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from components.inference.engines.vllm import VllmSpec
from components.inference.protocol import ChatRequest, ResponseForm, Sampling
from components.inference.vllm.engine import VllmEngine
from components.inference.vllm.server import VllmServer
from components.models.spec import ModelSpec
from tests.deployment.tiny import write_adapter
from tests.inference.test_forms import FORECAST, PING, SCHEMA
from tests.inference.test_server import WEATHER

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]

MODEL = ModelSpec(name="smollm2-135m-instruct", source="package", max_length=1024)
RANK = 16
ASKED = ["Name a colour.", "What is 2 + 3?", "Write one sentence about the sea.", "How is the weather in Bern?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model, and an adapter on it."""
    from components.models.weights import prepare

    root = tmp_path_factory.mktemp("vllm")
    base_dir = prepare(MODEL, Path(os.environ["VLLM_MODELS"]) if "VLLM_MODELS" in os.environ else root / "models")
    return base_dir, write_adapter(base_dir, root / "adapter", seed=3, rank=RANK)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Address of the server, and the server where it is ours."""
    if url := os.environ.get("VLLM_URL"):
        yield url, None
        return
    spec = VllmSpec(python=os.environ.get("VLLM_PYTHON"), max_lora_rank=RANK, start_timeout=3000)
    began = time.monotonic()
    logs = tmp_path_factory.mktemp("logs")
    running = VllmServer(spec, MODEL, folder[0], logs / "vllm.log", logs / "compiled")
    running.wait()
    print(f"\nserver up after {time.monotonic() - began:.0f} s")
    yield running.url, running
    running.close()


@pytest.fixture(scope="module")
def vllm(server, folder):
    engine = VllmEngine(VllmSpec(), folder[0], max_length=MODEL.max_length, dtype=MODEL.dtype, urls=[server[0]])
    engine.check()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def embedded(folder):
    from components.inference.transformers.engine import TransformersEngine

    engine = TransformersEngine(folder[0], max_length=MODEL.max_length, slots=16)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def trainer(folder, tmp_path_factory):
    """The model with the adapter, as transformers runs it."""
    from components.models import trained_weights
    from components.models.weights import load_model

    merged = tmp_path_factory.mktemp("merged")
    trained_weights.merge(*folder, merged)
    return load_model(merged)


def ask(engine, requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.chat(one) for one in requests))

    return asyncio.run(all_of_them())


def requests(policy, sampling, samples=1):
    tools = [[], [], [], [WEATHER]]
    asked = zip(ASKED, tools, strict=True)
    return [
        ChatRequest([{"role": "user", "content": text}], offered, policy, sampling, seed)
        for text, offered in asked
        for seed in range(samples)
    ]


def hold(engine, version, adapter):
    began = time.monotonic()
    engine.load_policy(version, None if version == "base" else str(adapter))
    return time.monotonic() - began


@pytest.mark.parametrize("version", ["base", "v1"])
def test_greedy_answers_are_those_of_the_embedded_engine(vllm, embedded, folder, version):
    seconds = hold(vllm, version, folder[1])
    hold(embedded, version, folder[1])
    asked = requests(version, Sampling(0, max_tokens=24))
    theirs, ours = ask(vllm, asked), ask(embedded, asked)
    further = [
        replace(one, messages=[*one.messages, found.message, {"role": "user", "content": "And why?"}])
        for one, found in zip(asked, ours, strict=True)
    ]
    theirs, ours = theirs + ask(vllm, further), ours + ask(embedded, further)
    for one, other in zip(theirs, ours, strict=True):
        assert one.message == other.message
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
    pairs = [pair for a, b in zip(theirs, ours, strict=True) for pair in zip(a.logprobs, b.logprobs, strict=True)]
    widest = max(abs(a - b) for a, b in pairs)
    print(f"\n{version}: {len(pairs)} greedy tokens alike, log-probs within {widest:.1e}; loaded in {seconds:.2f} s")
    assert widest < 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, max_tokens=24),
        Sampling(0.7, max_tokens=24),
        Sampling(0.7, top_p=0.9, max_tokens=24),
        Sampling(1.0, top_k=20, max_tokens=24),
        Sampling(1.0, min_p=0.1, max_tokens=24),
    ],
    ids=["plain", "temperature", "top_p", "top_k", "min_p"],
)
def test_log_probs_are_those_that_training_reckons_with(vllm, trainer, folder, sampling):
    """The gap between sampler and trainer, which importance correction sees."""
    import torch

    from components.inference.transformers.sampling import truncate
    from components.models.distribution import Cut

    hold(vllm, "v1", folder[1])
    gaps, edges = [], []
    for found in ask(vllm, requests("v1", sampling, samples=3)):
        ids = torch.tensor([found.prompt_token_ids + found.token_ids])
        with torch.no_grad():
            logits = trainer(input_ids=ids).logits[0, len(found.prompt_token_ids) - 1 : -1]
        logps = torch.log_softmax(logits.float() / sampling.temperature, -1)
        cut = Cut(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        kept = logps if cut.whole else torch.stack([truncate(row, cut) for row in logps])
        wanted = kept.gather(-1, torch.tensor(found.token_ids)[:, None])[:, 0]
        gaps.append(wanted - torch.tensor(found.logprobs))
        mass = logps.exp().sort(descending=True).values.cumsum(-1)
        edges.append(((mass - sampling.top_p).abs() < 1e-4).any(-1) & (sampling.top_p < 1))
    gap, edge = torch.cat(gaps), torch.cat(edges)
    ratio = gap.exp().mean().item()
    print(f"\n{len(gap)} tokens: |gap| mean {gap.abs().mean():.1e}, max {gap.abs().max():.1e}; mean ratio {ratio:.6f}")
    # Where the mass of the likeliest tokens is top_p but for 1e-4, rounding decides whether one more is kept.
    print(f"{edge.sum()} of them at the edge of what top_p keeps")
    assert gap[~edge].abs().max() < 1e-3
    assert edge.float().mean() < 0.1
    assert gap[edge].abs().sum() < 0.1


def test_the_same_seed_gives_the_same_answer_and_a_new_adapter_arrives_within_a_second(vllm, folder):
    hold(vllm, "v1", folder[1])
    asked = requests("v1", Sampling(0.7, max_tokens=16))
    assert [one.token_ids for one in ask(vllm, asked)] == [one.token_ids for one in ask(vllm, asked)]
    times = [hold(vllm, f"again{number}", folder[1]) for number in range(5)]
    print(f"\nadapters delivered and read back in {', '.join(f'{one:.2f}' for one in times)} s")
    assert sorted(times)[2] < 1.0


FORMS = [
    ResponseForm(json_schema=json.dumps(SCHEMA), calls=()),
    ResponseForm(calls=("forecast", "ping")),
    ResponseForm(calls=("forecast",)),
    ResponseForm(strict=True),
    ResponseForm(json_schema='{"type": "integer"}', strict=True),
]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_forms_are_enforced_with_the_log_probs_of_the_masked_distribution(vllm, embedded, trainer, folder, temperature):
    """The mask of the embedded engine, applied to transformers' logits, gives the log-probability of every token."""
    import torch

    hold(vllm, "v1", folder[1])
    hold(embedded, "v1", folder[1])
    sampling = Sampling(temperature, max_tokens=60)
    talk = [{"role": "user", "content": "Will it rain in Bern in the next 3 days? Answer as asked."}]
    seeds = range(1 if sampling.temperature == 0 else 2)
    asked = [
        ChatRequest(talk, [] if form.without_calls else [FORECAST, PING], "v1", sampling, seed, form=form)
        for form in FORMS
        for seed in seeds
    ]
    answers = ask(vllm, asked)
    gaps, excluded, ended = [], 0, 0
    for request, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([answer.prompt_token_ids + answer.token_ids])
        with torch.no_grad():
            logits_TV = trainer(input_ids=ids).logits[0, len(answer.prompt_token_ids) - 1 : -1].float()
        matcher = asyncio.run(vllm._forms.form(request)).matcher
        for token, logprob, logits_V in zip(answer.token_ids, answer.logprobs, logits_TV, strict=True):
            allowed_V = torch.from_numpy(matcher.allowed())
            assert allowed_V[token]
            excluded += int((~allowed_V).sum() > len(allowed_V) // 2)
            masked_V = logits_V.masked_fill(~allowed_V, -math.inf) / (sampling.temperature or 1.0)
            gaps.append(abs(float(masked_V.log_softmax(-1)[token]) - logprob))
            if token in vllm.stop_ids:
                ended += 1
                break
            matcher.append(token)
        assert answer.altered
    print(
        f"\n{len(answers)} answers, {ended} complete, {len(gaps)} tokens, {excluded} of them with most tokens excluded"
    )
    print(f"log-probs within {max(gaps):.1e} of the masked distribution")
    assert max(gaps) < 1e-3
    if sampling.temperature == 0:
        theirs = ask(embedded, asked[1:4])  # without a schema, whose whitespace is free there
        assert [answer.message for answer in answers[1:4]] == [answer.message for answer in theirs]


def test_the_most_likely_tokens_are_those_of_the_embedded_engine(vllm, embedded, folder):
    for engine in (vllm, embedded):
        hold(engine, "base", folder[1])
    asked = [replace(one, alternatives=5) for one in requests("base", Sampling(1.0, top_k=40, max_tokens=16))]
    asked += [replace(one, sampling=Sampling(0, max_tokens=16)) for one in asked]
    answers, increments = ask(vllm, asked), []
    [streamed] = ask(vllm, [replace(asked[-1], listener=increments.append)])
    assert [likely for one in increments for likely in one.likeliest] == streamed.likeliest[: len(increments)]
    widest, positions = 0.0, 0
    for one, other in zip(answers, ask(embedded, asked), strict=True):
        alike = next((i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b), None)
        known = list(zip(one.likeliest, other.likeliest, strict=False))
        for mine, theirs in known if alike is None else known[: alike + 1]:
            assert len(mine) == len(theirs) == 5
            positions += 1
            widest = max(widest, *(abs(a[1] - b[1]) for a, b in zip(mine, theirs, strict=True)))
    print(f"\n5 most likely tokens at {positions} tokens, within {widest:.1e}")
    assert widest < 1e-3


def test_a_stream_has_the_tokens_of_the_response(vllm, folder):
    hold(vllm, "v1", folder[1])
    tools = [FORECAST, PING]
    for form, offered in ((ResponseForm(), []), (FORMS[1], tools), (FORMS[3], tools)):
        [base] = requests("v1", Sampling(0.7, max_tokens=48))[2:3]
        asked = replace(base, form=form, tools=offered)
        increments: list = []
        times: list = []

        def listen(increment, increments=increments, times=times) -> None:
            increments.append(increment)
            times.append(time.monotonic())

        began = time.monotonic()
        [answer] = ask(vllm, [replace(asked, listener=listen)])
        seconds = time.monotonic() - began
        tokens = [token for increment in increments for token in increment.token_ids]
        logprobs = [value for increment in increments for value in increment.logprobs]
        assert tokens == answer.token_ids[: len(tokens)]
        assert logprobs == answer.logprobs[: len(tokens)]
        assert len(answer.token_ids) - 4 <= len(tokens) < len(answer.token_ids)
        assert (answer.message["content"] or "").startswith("".join(increment.text for increment in increments))
        [whole] = ask(vllm, [asked])
        assert whole.token_ids == answer.token_ids
        print(
            f"\n{len(tokens)} of {len(answer.token_ids)} tokens in {len(increments)} increments; first after "
            f"{times[0] - began:.2f} s of {seconds:.2f} s"
        )


def test_a_server_that_is_killed_comes_back_with_its_adapter(server, vllm, folder):
    if server[1] is None:
        pytest.skip("the server is not ours")
    hold(vllm, "v1", folder[1])
    [asked] = requests("v1", Sampling(0, max_tokens=8))[:1]
    before = ask(vllm, [asked])
    os.kill(server[1].pid, 9)
    vllm._clients[0]._patience = replace(vllm._clients[0]._patience, retry_for=3000)
    assert ask(vllm, [asked])[0].token_ids == before[0].token_ids
    assert server[1].starts == 2
