"""Tests of the embedded engine against transformers: responses and log-probabilities."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.errors import ArtifactError, ContextOverflow, EngineError, StalePolicy
from components.inference.conversations import key_of
from components.inference.growing_text import StopDetector
from components.inference.protocol import BASE_POLICY, ChatRequest, ResponseStart, Sampling
from components.inference.transformers import batch
from components.models.weights import load_model, load_tokenizer
from components.rollout.capture import Capture
from components.trajectories.chat import ChatFormat
from tests.deployment.tiny import write_adapter
from tests.inference.exact import ask, assert_exact, go_on, logits

TEXTS = ["Hello.", "Where is my order?", "Grüße aus Köln 🙂", "a" * 90, "Where is my order now?"]


def chat(engine, *requests):
    async def all_at_once():
        return await asyncio.gather(*(engine.chat(request) for request in requests))

    return asyncio.run(all_at_once())


def force(monkeypatch, *token_ids: int) -> None:
    """Make the engine sample these tokens in order."""
    left = list(token_ids)

    def draw(logits_BV, samplings, uniforms):
        token = left.pop(0)
        return [token] * len(samplings), torch.log_softmax(logits_BV, -1)[:, token].tolist()

    monkeypatch.setattr(batch, "draw", draw)


def test_greedy_answers_are_those_of_generate(engine, reference):
    answers = chat(engine, *(ask(text, temperature=0, max_tokens=24) for text in TEXTS))
    for answer in answers:
        prompt = torch.tensor([answer.prompt_token_ids])
        whole = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, eos_token_id=[0, 2]
        )
        assert answer.token_ids == whole[0, prompt.shape[1] :].tolist()
        assert_exact(reference, answer)


def test_no_logits_are_computed_for_prompts(engine):
    counts = []
    head = engine.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[:-1].numel()))
    answers = chat(engine, *(ask(text, max_tokens=3, temperature=0) for text in TEXTS))
    hook.remove()
    assert sum(counts) == sum(len(answer.token_ids) for answer in answers)


def test_logprobs_are_those_of_a_full_forward_pass(engine, reference):
    temperatures = [1.0, 0.5, 1.7, 0.9, 1.0]
    requests = [ask(t, temperature=h, seed=i) for i, (t, h) in enumerate(zip(TEXTS, temperatures, strict=True))]
    for answer, temperature in zip(chat(engine, *requests), temperatures, strict=True):
        assert_exact(reference, answer, temperature)


def test_a_batch_changes_nothing(make_engine):
    requests = [ask(text, seed=seed) for text in TEXTS for seed in (1, 2)]
    batched = chat(make_engine(), *requests)
    alone = [chat(make_engine(slots=1), request)[0] for request in requests]
    assert [answer.token_ids for answer in batched] == [answer.token_ids for answer in alone]


def test_a_response_is_completed_from_its_first_tokens(make_engine, base_dir, adapter_dir):
    """By the same policy it is the one that would have been sampled in one go; by another one, the rest is exact."""
    engine, requests = make_engine(), [ask(text, seed=5, max_tokens=24) for text in TEXTS]
    whole = chat(engine, *requests)
    heard = []
    starts = [
        replace(
            request,
            start=ResponseStart(answer.prompt_token_ids, answer.token_ids[:count], answer.logprobs[:count]),
            listener=heard.append,
        )
        for request, answer, count in zip(requests, whole, (1, 7, 20, 12, 3), strict=True)
    ]
    for completed, answer in zip(chat(make_engine(), *starts), whole, strict=True):
        assert replace(completed, logprobs=[]) == replace(answer, logprobs=[])
        assert completed.logprobs == pytest.approx(answer.logprobs, abs=1e-5)
    assert heard[0].token_ids == [whole[0].token_ids[1]]
    engine.load_policy("trained", str(adapter_dir))
    trained = pytest.importorskip("peft").PeftModel.from_pretrained(load_model(base_dir), adapter_dir)
    for request, answer in zip(starts, chat(engine, *(replace(one, policy="trained") for one in starts)), strict=True):
        count = len(request.start.token_ids)
        assert answer.logprobs[:count] == request.start.logprobs
        expected = torch.log_softmax(logits(trained, answer), -1)[range(len(answer.token_ids)), answer.token_ids]
        torch.testing.assert_close(torch.tensor(answer.logprobs[count:]), expected[count:], atol=1e-4, rtol=0)


def test_the_seed_decides(make_engine):
    first, again, other = chat(make_engine(), ask("Hi", seed=3), ask("Hi", seed=3), ask("Hi", seed=4))
    (later,) = chat(make_engine(), ask("Hi", seed=3))
    assert first.token_ids == again.token_ids == later.token_ids
    assert first.message == later.message
    assert other.token_ids != first.token_ids


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (1.0, 5), (0.7, 20), (0.01, 0), (1.0, 1000)])
def test_truncated_logprobs_are_renormalised(engine, reference, top_p, top_k):
    """The distribution written out: sort, keep k, of these the smallest set whose mass reaches p, and divide by it."""
    answers = chat(engine, *(ask("Hello", top_p=top_p, top_k=top_k, temperature=0.8, seed=seed) for seed in range(6)))
    for answer in answers:
        for row, token, logprob in zip(logits(reference, answer), answer.token_ids, answer.logprobs, strict=True):
            probabilities = torch.softmax(row.double() / 0.8, -1)
            order = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])
            support = order[: top_k or None]
            total = sum(probabilities[index] for index in support)
            mass, nucleus = 0.0, []
            for index in support:
                if mass >= top_p:
                    break
                nucleus.append(index)
                mass += float(probabilities[index] / total)
            assert token in nucleus
            expected = probabilities[token] / sum(probabilities[index] for index in nucleus)
            assert logprob == pytest.approx(float(expected.log()), abs=1e-4)


def test_a_second_turn_computes_only_what_is_new(engine, reference):
    opening = ask("Where is order K482?", max_tokens=20)
    (first,) = chat(engine, opening)
    before = dict(engine.counters)
    (second,) = chat(engine, go_on(opening, first, "Thanks."))
    held = len(first.prompt_token_ids) + len(first.token_ids) - 1  # the last token was drawn, not read
    last = 1  # the prompt's last token is computed with the first step of decoding
    assert (
        engine.counters["prefilled_tokens"] - before["prefilled_tokens"] == len(second.prompt_token_ids) - held - last
    )
    assert engine.counters["prompt_tokens"] - before["prompt_tokens"] == len(second.prompt_token_ids)
    assert_exact(reference, second)


def test_a_group_computes_its_prompt_once(engine, reference):
    answers = chat(engine, *(ask("Where is my order?", seed=seed) for seed in range(6)))
    assert engine.counters["prefilled_tokens"] == len(answers[0].prompt_token_ids) - 1
    for answer in answers:
        assert_exact(reference, answer)


def test_the_form_of_arguments_does_not_change_a_conversation():
    """Clients parse arguments and write them again: those in JavaScript without spaces, and 1.0 as 1."""

    def key(arguments):
        call = {"id": "a", "type": "function", "function": {"name": "wait", "arguments": arguments}}
        return key_of([{"role": "assistant", "content": "", "tool_calls": [call]}], [])

    forms = ['{"days": 1.0, "city": "Zürich"}', '{"days":1,"city":"Zürich"}', '{"city": "Z\\u00fcrich", "days": 1}']
    assert len(set(map(key, forms))) == 1
    others = ['{"days": true, "city": "Zürich"}', '{"days": "1", "city": "Zürich"}', "{}", "[", '"["', "[" * 100_000]
    assert len(set(map(key, [*forms[:1], *others]))) == 1 + len(others)


def test_a_turn_continues_the_tokens_that_were_sampled(engine, reference):
    """The tiny model writes bytes that are no text: read again, they would be other tokens."""
    opening = ask("Hello", max_tokens=8)
    (first,) = chat(engine, opening)
    written_again = engine.format.encode(first.message["content"])
    assert written_again != first.token_ids
    request = go_on(opening, first, "And?")
    (second,) = chat(engine, request)
    stream = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(stream)] == stream
    assert engine.format.prompt_ids(request.messages, []) != second.prompt_token_ids
    (third,) = chat(engine, go_on(request, second, "More?"))
    stream = second.prompt_token_ids + second.token_ids
    assert third.prompt_token_ids[: len(stream)] == stream
    assert_exact(reference, third)


def test_answers_that_read_the_same_keep_their_own_tokens(engine):
    """One byte that is no text reads as U+FFFD, whichever byte it is."""
    requests = [ask("Hello", max_tokens=1, seed=seed) for seed in range(40)]
    firsts = chat(engine, *requests)
    pairs = [(r, a) for r, a in zip(requests, firsts, strict=True) if a.message["content"] == "\ufffd"]
    assert len({answer.token_ids[0] for _, answer in pairs}) > 3
    seconds = chat(engine, *(go_on(request, answer, "And?") for request, answer in pairs))
    for (_, first), second in zip(pairs, seconds, strict=True):
        stream = first.prompt_token_ids + first.token_ids
        assert second.prompt_token_ids[: len(stream)] == stream


def test_episodes_over_http_continue_their_own_tokens(engine):
    """Their agents say the same, and no message that is handed back is the very object."""
    episodes = [Capture(engine, Sampling(max_tokens=1), seed, most_calls=2) for seed in range(40)]
    opening = [{"role": "user", "content": "Hello"}]

    async def all_at_once(conversations):
        return await asyncio.gather(
            *(one.chat(ChatRequest(said)) for one, said in zip(episodes, conversations, strict=True))
        )

    firsts = asyncio.run(all_at_once([opening] * len(episodes)))
    alike = [first_token.message["content"] == "\ufffd" for first_token in firsts]
    assert len({one.token_ids[0] for one, is_alike in zip(firsts, alike, strict=True) if is_alike}) > 3
    asyncio.run(
        all_at_once(
            [[*opening, dict(first_token.message), {"role": "user", "content": "And?"}] for first_token in firsts]
        )
    )
    assert [len(trajectory.histories) for trajectory in episodes] == [1] * len(episodes)


def test_a_message_that_was_copied_is_known_too(engine):
    """As a client over HTTP sends it: another object, optional fields filled with nothing."""
    opening = ask("Hello")
    (first,) = chat(engine, opening)
    copied = {**first.message, "refusal": None, "tool_calls": None}
    request = ChatRequest([*opening.messages, copied, {"role": "user", "content": "And?"}], sampling=opening.sampling)
    (second,) = chat(engine, request)
    stream = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(stream)] == stream


def test_a_changed_message_is_another_conversation(engine):
    opening = ask("Hello")
    (first,) = chat(engine, opening)
    changed = [*opening.messages, {"role": "assistant", "content": "No."}, {"role": "user", "content": "And?"}]
    (second,) = chat(engine, ChatRequest(changed, sampling=opening.sampling))
    assert second.prompt_token_ids == engine.format.prompt_ids(changed, [])
    named = [*opening.messages, {**first.message, "name": "Ann"}, {"role": "user", "content": "And?"}]
    (third,) = chat(engine, ChatRequest(named, sampling=opening.sampling))
    assert third.prompt_token_ids == engine.format.prompt_ids(named, [])


def test_a_stop_string_ends_the_answer_and_the_next_turn_continues_its_tokens(engine, monkeypatch):
    letters = engine.format.encode("one. two. three.")
    force(monkeypatch, *letters)
    opening = ask("Hi", max_tokens=99)
    (answer,) = chat(engine, replace(opening, stop=("never", " two.", "two. ")))
    assert (answer.message["content"], answer.finish_reason) == ("one.", "stop")
    assert answer.token_ids == engine.format.encode("one. two."), "nothing after the stop string is sampled"
    assert len(answer.logprobs) == len(answer.token_ids)
    following = [*opening.messages, answer.message, {"role": "user", "content": "And?"}]
    force(monkeypatch, engine.format.end_id)
    (second,) = chat(engine, ChatRequest(following, sampling=opening.sampling))
    stream = answer.prompt_token_ids + answer.token_ids
    assert second.prompt_token_ids[: len(stream)] == stream


def test_the_earliest_stop_string_ends_the_answer_and_calls_after_it_are_not_read(engine, monkeypatch):
    force(monkeypatch, *engine.format.encode('Wait. [find(order="K1")]'))
    (answer,) = chat(engine, replace(ask("Hi", max_tokens=99), stop=("[",)))
    assert (answer.message, answer.finish_reason) == ({"role": "assistant", "content": "Wait. "}, "stop")
    force(monkeypatch, *engine.format.encode("abc"))
    (limited,) = chat(engine, replace(ask("Hi", max_tokens=2), stop=("c",)))
    assert (limited.message["content"], limited.finish_reason) == ("ab", "length")


@given(data=st.data())
def test_the_detector_stops_at_the_first_token_that_completes_a_stop_string(base_dir, data):
    letters = st.sampled_from("abc. \n🙂ß")
    text = data.draw(st.text(letters, min_size=1, max_size=40))
    stop = data.draw(st.lists(st.text(letters, min_size=1, max_size=4), min_size=1, max_size=3))
    chat_format = ChatFormat(load_tokenizer(base_dir))
    tokens, decode = chat_format.encode(text), chat_format.tokenizer.decode
    detector = StopDetector(stop, decode)
    reached = next((count for count in range(1, len(tokens) + 1) if detector.reached(tokens[:count])), None)
    whole = (count for count in range(1, len(tokens) + 1) if any(string in decode(tokens[:count]) for string in stop))
    assert reached == next(whole, None)


def test_finish_reasons(engine, monkeypatch):
    end = engine.format.end_id
    letters = engine.format.encode("ok")
    force(monkeypatch, *letters, end)
    (stopped,) = chat(engine, ask("Hi"))
    assert (stopped.message["content"], stopped.finish_reason) == ("ok", "stop")
    assert stopped.token_ids == [*letters, end]
    force(monkeypatch, *letters)
    (cut,) = chat(engine, ask("Hi", max_tokens=2))
    assert (cut.message["content"], cut.finish_reason) == ("ok", "length")
    called = engine.format.encode('[find(order="K1")]')
    force(monkeypatch, *called, end)
    (call,) = chat(engine, ask("Hi", max_tokens=99))
    assert call.finish_reason == "tool_calls"
    assert call.message["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"order": "K1"}'}


def test_a_model_may_stop_with_another_token(base_dir, make_engine, tmp_path, monkeypatch):
    """Such a token ends the answer, is no part of what was said, and the conversation goes on behind it."""
    folder = shutil.copytree(base_dir, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    engine = make_engine(folder)
    called = engine.format.encode('[find(order="K1")]')
    force(monkeypatch, *called, 0, 2)
    opening = ask("Hi", max_tokens=99)
    (first,) = chat(engine, opening)
    assert first.finish_reason == "tool_calls"
    request = go_on(opening, first, "And?")
    (second,) = chat(engine, request)
    text = engine.tokenizer.decode(second.prompt_token_ids)
    assert text == engine.format.render(request.messages, [], generate=True).replace(
        '[find(order="K1")]', '[find(order="K1")]<|endoftext|>'
    )


def test_a_stale_policy_is_refused(engine):
    with pytest.raises(StalePolicy, match="asked for policy v2, but the engine holds base"):
        chat(engine, ask("Hi", policy="v2"))
    assert chat(engine, ask("Hi"))


def test_the_context_is_used_to_its_end_and_no_further(engine, make_engine, reference):
    length = len(engine.format.prompt_ids(ask("x" * 40).messages, []))
    (last,) = chat(make_engine(max_length=length + 1), ask("x" * 40, temperature=0))
    assert (len(last.token_ids), last.finish_reason) == (1, "length")
    assert_exact(reference, last)
    text = f"the prompt has {length} tokens; prompt and answer have at most {length}; raise model.max_length or"
    with pytest.raises(ContextOverflow, match=text):
        chat(make_engine(max_length=length), ask("x" * 40))
    with pytest.raises(ContextOverflow, match="prompt and answer have at most 4096; shorten the task"):
        chat(make_engine(max_length=10**6), ask("x" * 5000))


def test_padding_near_the_end_of_the_context(make_engine, reference):
    """Rows of unlike length are padded together beyond the end of the shorter ones' context."""
    engine = make_engine(max_length=260)
    opening = ask("x" * 190, max_tokens=4)
    (first,) = chat(engine, opening)
    answers = chat(engine, go_on(opening, first, "y"), ask("z" * 30, seed=1), ask("w" * 40, seed=2))
    for answer in answers:
        assert_exact(reference, answer)


def test_an_adapter_gives_what_peft_gives(engine, adapter_dir, reference, base_dir):
    import peft

    from components.models.weights import load_model

    (base,) = chat(engine, ask("Hello", seed=5))
    weights = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    engine.load_policy("v1", str(adapter_dir))
    adapted = peft.PeftModel.from_pretrained(load_model(base_dir), adapter_dir)
    answers = chat(engine, *(ask(text, seed=5, policy="v1") for text in ["Hello", *TEXTS]))
    assert answers[0].logprobs != base.logprobs
    for answer in answers:
        assert answer.policy == "v1"
        assert_exact(adapted, answer)
    engine.load_policy(BASE_POLICY, None)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in engine.model.named_parameters())
    (again,) = chat(engine, ask("Hello", seed=5))
    assert (again.token_ids, again.logprobs) == (base.token_ids, base.logprobs)


def test_one_adapter_replaces_another(engine, make_engine, adapter_dir, base_dir, tmp_path):
    other = write_adapter(base_dir, tmp_path / "other", seed=2)
    engine.load_policy("v1", str(adapter_dir))
    chat(engine, ask("Hello", policy="v1"))
    engine.load_policy("v2", str(other))
    fresh = make_engine()
    fresh.load_policy("v2", str(other))
    request = ask("Hello", policy="v2")
    assert chat(engine, request)[0] == chat(fresh, request)[0]


def test_an_adapter_that_does_not_fit_changes_nothing(engine, base_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    bad = write_adapter(base_dir, tmp_path / "bad", seed=3)
    tensors = load_file(bad / "adapter_model.safetensors")
    save_file(
        {name.replace("layers.1.", "layers.7."): tensor for name, tensor in tensors.items()},
        bad / "adapter_model.safetensors",
    )
    (before,) = chat(engine, ask("Hello"))
    with pytest.raises(ArtifactError, match=r"layers\.7"):
        engine.load_policy("v1", str(bad))
    assert engine.policy == BASE_POLICY
    assert chat(engine, ask("Hello"))[0] == before


def test_no_policy_is_loaded_under_an_answer(engine, adapter_dir):
    async def load_meanwhile():
        task = asyncio.create_task(engine.chat(ask("Hello", max_tokens=30)))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="1 requests are in flight"):
            engine.load_policy("v1", str(adapter_dir))
        return await task

    answer = asyncio.run(load_meanwhile())
    assert answer.policy == BASE_POLICY
    engine.load_policy("v1", str(adapter_dir))
    assert engine.policy == "v1"


def test_arguments_that_are_no_json_are_an_engine_error(engine):
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{not json"}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    request = ChatRequest([*messages, {"role": "user", "content": "b"}])
    with pytest.raises(EngineError, match=r"tool find has arguments that are not a JSON object: '\{not json'"):
        chat(engine, request)


ALTERNATING = ["sliding_attention", "full_attention"]
CONFIGS = {
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "mistral": {"num_key_value_heads": 1, "sliding_window": 24},
    "gpt2": {},
    "olmo2": {"num_key_value_heads": 4},
    "bloom": {},
    "gemma": {"num_key_value_heads": 1, "head_dim": 32},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24}
    | {"attn_logit_softcapping": 0.02, "query_pre_attn_scalar": 1},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "layer_types": ALTERNATING},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24, "num_local_experts": 2}
    | {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "glm": {"num_key_value_heads": 2, "head_dim": 16},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0]},
    "llama4_text": {"num_key_value_heads": 2, "head_dim": 16, "attention_chunk_size": 24, "num_local_experts": 2}
    | {"intermediate_size_mlp": 64, "layer_types": ["chunked_attention", "full_attention"]},
}


def random_model(family: str, base_dir: Path, tmp_path: Path) -> Path:
    """Write a model of another architecture with random weights, and return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(shutil.copytree(base_dir, tmp_path / family))
    (folder / "model.safetensors").unlink()
    config = AutoConfig.for_model(
        family,
        vocab_size=259,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **CONFIGS[family],
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", CONFIGS)
def test_other_families_are_exact_too(family, base_dir, make_engine, tmp_path):
    """Biases, norms on queries and keys, other head sizes, no shared heads, windows and chunks shorter than the
    conversation, capped scores, sinks, partial rotary angles, layers without positions, biases by distance."""
    from components.models.weights import load_model

    folder = random_model(family, base_dir, tmp_path)
    engine, model = make_engine(folder), load_model(folder)
    openings = [ask(text, seed=index) for index, text in enumerate(TEXTS)]
    firsts = chat(engine, *openings)
    seconds = chat(engine, *(go_on(o, f, "And?", seed=9) for o, f in zip(openings, firsts, strict=True)))
    for answer in [*firsts, *seconds]:
        assert_exact(model, answer)


def test_sampling_is_part_of_the_request(engine):
    """Rows of one batch may be sampled in different ways."""
    request = ask("Hello")
    greedy = ChatRequest(request.messages, sampling=Sampling(temperature=0, max_tokens=12), seed=1)
    alone = chat(engine, greedy)[0]
    mixed = chat(engine, greedy, ask("Hello", top_k=3), ask("Hello", temperature=2.0, seed=1))[0]
    assert alone.token_ids == mixed.token_ids
