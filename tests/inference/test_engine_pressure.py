"""Tests of the embedded engine under pressure: few slots, cancelled callers, closed loops, failing passes."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random

import pytest
import torch

from components.errors import EngineError
from components.inference.protocol import BASE_POLICY, ChatRequest, Sampling
from tests.inference.exact import ask, assert_exact, go_on

PREFIXES = ["", "You serve a shop. ", "You serve a shop. Be brief. ", "You serve a shop. Be brief. Find the order. "]


def openings(count: int, rng: random.Random) -> list[ChatRequest]:
    """Conversations that share prefixes at several depths."""
    sampling = Sampling(max_tokens=6)
    return [
        ChatRequest(
            [
                {"role": "system", "content": rng.choice(PREFIXES)},
                {"role": "user", "content": rng.choice("abc") * rng.randrange(1, 30)},
            ],
            sampling=sampling,
            seed=index,
        )
        for index in range(count)
    ]


async def talk(engine, request: ChatRequest, turns: int, pause=lambda: 0.0) -> list:
    answers = []
    for turn in range(turns):
        answers.append(await engine.chat(request))
        if (seconds := pause()) >= 0:
            await asyncio.sleep(seconds)
        request = go_on(request, answers[-1], f"And {turn}?", seed=turn)
    return answers


def whole(answers) -> None:
    """Each turn continues the exact tokens of the one before."""
    for before, after in itertools.pairwise(answers):
        stream = before.prompt_token_ids + before.token_ids
        assert after.prompt_token_ids[: len(stream)] == stream


@pytest.mark.parametrize(("slots", "seed"), [(1, 0), (2, 1), (3, 0), (64, 1)])
def test_more_conversations_than_slots(make_engine, reference, slots, seed):
    engine = make_engine(slots=slots)
    assert engine.slots == slots

    async def all_of_them():
        return await asyncio.gather(*(talk(engine, r, 3) for r in openings(9, random.Random(seed))))

    for answers in asyncio.run(all_of_them()):
        whole(answers)
        for answer in answers:
            assert_exact(reference, answer)


def test_slots_are_bounded_by_memory(make_engine):
    """Two layers of two heads of 16 numbers, keys and values, float32, 512 tokens: 262,144 bytes a slot."""
    assert make_engine(cache_bytes=5 * 262_144 + 1).slots == 5
    assert make_engine(cache_bytes=1).slots == 1


def test_requests_that_come_and_go_at_any_time(make_engine, reference):
    """Requests arrive while a pass runs in its thread, and some callers go away in the middle."""
    engine = make_engine(slots=3)
    rng = random.Random(4)

    async def caller(index: int, request: ChatRequest):
        await asyncio.sleep(rng.random() * 0.05)
        conversation = talk(engine, request, 3, pause=lambda: rng.random() * 0.004)
        if index % 3:
            return await conversation
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(conversation, 0.001 + rng.random() * 0.01)
        return []

    async def all_of_them():
        callers = [caller(index, request) for index, request in enumerate(openings(30, rng))]
        return await asyncio.wait_for(asyncio.gather(*callers), 600)

    finished = [answers for answers in asyncio.run(all_of_them()) if answers]
    assert len(finished) == 20
    for answers in finished:
        whole(answers)
        for answer in answers:
            assert_exact(reference, answer)


def test_a_request_that_arrives_during_a_pass_is_not_lost(engine):
    """The pass rewrites its own lists while callers add to theirs."""
    admit = engine.batch.admit

    def admit_slowly(waiting):
        batch = admit(waiting)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)  # callers run in between
        return batch

    async def two_callers():
        nonlocal loop
        loop = asyncio.get_running_loop()
        engine.batch.admit = admit_slowly
        first = asyncio.create_task(engine.chat(ask("a", max_tokens=3)))
        await asyncio.sleep(0.005)
        return await asyncio.wait_for(asyncio.gather(first, engine.chat(ask("b", max_tokens=3))), 600)

    loop: asyncio.AbstractEventLoop | None = None
    assert len(asyncio.run(two_callers())) == 2


def test_a_caller_that_went_away_frees_its_slot(make_engine, reference, adapter_dir):
    engine = make_engine(slots=1)

    async def cancel_both():
        active = asyncio.create_task(engine.chat(ask("a" * 50, max_tokens=200)))
        waiting = asyncio.create_task(engine.chat(ask("b" * 50)))
        await asyncio.sleep(0.02)
        active.cancel()
        waiting.cancel()
        await asyncio.gather(active, waiting, return_exceptions=True)
        assert active.cancelled()
        assert waiting.cancelled()
        return await asyncio.wait_for(engine.chat(ask("a" * 60, max_tokens=4)), 600)

    assert_exact(reference, asyncio.run(cancel_both()))
    engine.load_policy("v1", str(adapter_dir))


def test_one_loop_after_another(engine, reference):
    opening = ask("Hello")
    first = asyncio.run(engine.chat(opening))
    second = asyncio.run(engine.chat(go_on(opening, first, "And?")))
    whole([first, second])
    assert_exact(reference, second)


def test_a_loop_that_ends_in_the_middle_of_an_answer(engine, reference, adapter_dir):
    """As by Ctrl-C: the loop's end cancels everything, and the pass under way must not touch what comes after."""

    async def give_up():
        for index in range(5):
            task = asyncio.create_task(engine.chat(ask("abc" * 60, max_tokens=300, seed=index)))
        await asyncio.sleep(0.03)
        return task

    for _ in range(3):
        task = asyncio.run(give_up())
        assert task.cancelled()
        assert_exact(reference, asyncio.run(engine.chat(ask("abc" * 60, max_tokens=4))))
    engine.load_policy("v1", str(adapter_dir))
    engine.load_policy(BASE_POLICY, None)
    assert_exact(reference, asyncio.run(engine.chat(ask("abc" * 60, max_tokens=4))))


def test_a_pass_is_given_up_when_nobody_waits(engine):
    """A long prefill ends at the next forward pass."""
    forward = engine.batch._forward
    passes = 0

    def slowly(*arguments, **options):
        nonlocal passes
        passes += 1
        logits = forward(*arguments, **options)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.02), loop).result(10)
        return logits

    async def give_up():
        nonlocal loop
        loop = asyncio.get_running_loop()
        engine.batch._forward = slowly
        for index in range(6):  # of unlike length: each is prefilled by a pass of its own
            asyncio.create_task(engine.chat(ask(f"{index}" * 4 * 3**index, max_tokens=50)))  # noqa: RUF006
        while not passes:
            await asyncio.sleep(0.001)

    loop: asyncio.AbstractEventLoop | None = None
    asyncio.run(give_up())
    assert passes < 4


def test_a_loop_that_was_closed_without_ceremony(engine, reference, caplog):
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.chat(ask("Hello")))
    old = engine._task
    assert not old.done()
    loop.close()

    async def ask_again():
        nonlocal old
        task = asyncio.create_task(engine.chat(ask("Hello again")))
        await asyncio.sleep(0)
        old = None
        gc.collect()  # the end of the old loop's task is nothing to this one
        return await task

    assert_exact(reference, asyncio.run(ask_again()))
    assert [record.message.partition("\n")[0] for record in caplog.records] == ["Task was destroyed but it is pending!"]


def test_two_loops_at_once_are_refused(engine):
    async def other_loop():
        task = asyncio.create_task(engine.chat(ask("Hello", max_tokens=60)))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="another event loop"):
            await asyncio.to_thread(lambda: asyncio.run(engine.chat(ask("Hello"))))
        return await task

    assert asyncio.run(other_loop())


def test_a_failing_pass_fails_its_requests_and_no_others(engine, reference, monkeypatch):
    async def ask_three():
        return await asyncio.gather(*(engine.chat(ask(text)) for text in "abc"), return_exceptions=True)

    def out_of_memory(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.batch, "_decode_logits", out_of_memory)
        errors = asyncio.run(ask_three())
    assert [type(error) for error in errors] == [EngineError] * 3
    assert str(errors[0]) == "RuntimeError: out of memory"
    for answer in asyncio.run(ask_three()):
        assert_exact(reference, answer)


def test_weights_that_are_not_finite_are_an_engine_error(engine):
    norm = engine.model.model.norm.weight
    with torch.no_grad():
        norm[0] = torch.nan
    with pytest.raises(EngineError, match="logits are not finite"):
        asyncio.run(engine.chat(ask("Hello")))


def test_runs_are_alike(make_engine):
    """With callers that answer at once, the order of requests, and with it every log-prob, is the same in every run."""

    def run():
        engine = make_engine(slots=4)

        async def all_of_them():
            return await asyncio.gather(*(talk(engine, r, 2, pause=lambda: -1) for r in openings(8, random.Random(2))))

        return asyncio.run(all_of_them()), engine.counters

    assert run() == run()
