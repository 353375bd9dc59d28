"""Tests of recording with a real engine: exactly the sampled tokens, with any chat template."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from components.environments.worlds.shop import Shop
from components.inference.protocol import ChatCompletion, Sampling
from components.inference.transformers.engine import TransformersEngine
from components.rollout.collector import demonstrate
from components.rollout.formats import Presentation
from components.trajectories.chat import ChatFormat
from components.trajectories.convert import to_openai
from components.trajectories.recorder import Recorder
from components.trajectories.schema import Scenario
from tests.rollout.worlds import Echo, collect, play
from tests.trajectories.templates import FORGETFUL, HERMES, OPENED, REASONING

TURNS = 5


class Interview(Echo):
    """An environment of five turns."""

    def step(self, action):
        step = super().step(action)
        step.done = len(self.said) == TURNS
        step.observation = [] if step.done else [{"role": "user", "content": f"Question {len(self.said)}"}]
        return step


def words(chat: ChatFormat, texts: list[str]) -> list[list[int]]:
    return [[*chat.encode(text), chat.end_id] for text in texts]


def episode(engine, environment, scenario: Scenario):
    return asyncio.run(
        play(engine, environment, scenario, sample=0, sampling=Sampling(max_tokens=200), max_turns=9, seed=1)
    )


def recorded(trajectory) -> list[list[int]]:
    """Return the tokens of every sampled message, in order."""
    return [
        history.token_ids[slice(*message.span)]
        for history in trajectory.histories
        for message in history.messages
        if message.span is not None
    ]


def assert_sound(trajectory) -> None:
    for history in trajectory.histories:
        assert len(history.token_ids) == len(history.logprobs)
        sampled = [not math.isnan(logprob) for logprob in history.logprobs]
        assert sampled == history.sampled_mask()
        assert all(message.role == "assistant" for message in history.messages if message.span)
        assert history.token_ids  # each history holds an answer


@pytest.fixture(scope="module")
def chat(base_dir):
    from components.models.weights import load_tokenizer

    return ChatFormat(load_tokenizer(base_dir))


TEXTS = [f"<think>reason {n}</think>Answer {n}" for n in range(TURNS)]


@pytest.mark.parametrize(
    ("template", "histories"),
    [(None, 1), (HERMES, 1), (REASONING, TURNS), (FORGETFUL, 4), (OPENED, 1)],
    ids=["chatml", "hermes", "reasoning", "forgetful", "opened"],
)
def test_histories_begin_where_the_template_rewrites_the_past(scripted, chat, template, histories):
    answers = words(chat, TEXTS)
    engine, script = scripted(template)
    script += itertools.chain(*answers)
    trajectory = episode(engine, Interview(), Scenario("s", {"number": 1}, "train"))
    assert trajectory.failure is None
    assert len(trajectory.histories) == histories
    assert_sound(trajectory)
    assert recorded(trajectory) == answers  # all that was sampled, as it was sampled, once
    # Each history begins with what the template says at that point.
    for history in trajectory.histories:
        turn = next(index for index, message in enumerate(history.messages) if message.span)
        start = history.messages[turn].span[0]
        messages = [to_openai(message) for message in history.messages[:turn]]
        assert history.token_ids[:start] == engine.format.prompt_ids(messages, trajectory.tools)
    # Read to its end, the last one is the whole conversation.
    spoken = [message for message in trajectory.histories[-1].messages if message.role == "assistant"]
    assert [f"<think>{m.reasoning}</think>{m.content}" if m.reasoning else m.content for m in spoken] == TEXTS


@pytest.mark.parametrize("template", [None, HERMES, REASONING, FORGETFUL], ids=["chatml", "hermes", "reasoning", "old"])
def test_a_demonstration_is_laid_out_as_a_rollout_of_the_same_words(scripted, template):
    """Demonstrations have the same tokens as rollouts, so that SFT trains on the states that the policy reaches."""
    shop = Shop(train=40, heldout=4)
    engine, script = scripted(template)
    for kind in ("refund", "address"):
        scenario = next(scenario for scenario in shop.scenarios("train") if scenario.type == kind)
        (shown,) = demonstrate(lambda: Shop(train=40, heldout=4), [scenario], Presentation())
        messages = [to_openai(message) for message in shown.histories[0].messages]
        streams = engine.format.streams(messages, shown.tools)
        answers = [stream.token_ids[slice(*span)] for stream in streams for span in stream.spans]
        script += itertools.chain(*answers)
        trajectory = episode(engine, shop, scenario)
        assert trajectory.success
        assert recorded(trajectory) == answers
        assert len(trajectory.histories) == len(streams)
        for history, stream in zip(trajectory.histories, streams, strict=True):
            assert history.token_ids == stream.token_ids
            assert [m.span for m in history.messages if m.span] == stream.spans


def test_answers_cut_short_go_on(base_dir):
    """A truncated response has no end-of-turn token; the template adds one, which is not trained on."""
    engine = TransformersEngine(base_dir, max_length=1024, device="cpu")
    trajectories = collect(
        engine,
        Interview,
        [Scenario("s", {"number": 1}, "train")],
        group_size=4,
        sampling=Sampling(max_tokens=3),
        max_turns=9,
    )
    end = engine.format.end_id
    for trajectory in trajectories:
        assert_sound(trajectory)
        (history,) = trajectory.histories
        for message in history.messages:
            if message.span:
                tokens = history.token_ids[slice(*message.span)]
                assert (message.finish_reason == "length") == (end not in tokens)
                last = message is history.messages[-1]
                if message.finish_reason == "length" and not last:
                    assert history.token_ids[message.span[1]] == end
                    assert not history.sampled_mask()[message.span[1]]


def test_two_runs_of_a_real_engine_are_equal(base_dir):
    def run(concurrency):
        engine = TransformersEngine(base_dir, max_length=1024, device="cpu", slots=5)
        jobs = [Scenario(f"s{n}", {"number": n}, "train") for n in range(3)]
        return collect(engine, Interview, jobs, sampling=Sampling(max_tokens=6), max_turns=9, concurrency=concurrency)

    first, second, narrow = run(6), run(6), run(2)
    assert repr(first) == repr(second)
    assert [recorded(t) for t in first] == [recorded(t) for t in narrow]


def completion(prompt: list[int], answer: list[int], text: str) -> ChatCompletion:
    return ChatCompletion({"role": "assistant", "content": text}, "stop", prompt, answer, [-1.0] * len(answer), "base")


def test_a_prompt_that_does_not_extend_the_tokens_begins_a_history():
    recorder = Recorder("helper")
    messages = [{"role": "user", "content": "a"}]
    recorder.record(messages, completion([1, 2], [3], "x"))
    messages += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]
    recorder.record(messages, completion([1, 2, 3, 4], [5], "y"))
    messages += [{"role": "assistant", "content": "y"}, {"role": "user", "content": "c"}]
    recorder.record(messages, completion([1, 2, 9], [6], "z"))
    recorder.close([*messages, {"role": "assistant", "content": "z"}, {"role": "user", "content": "end"}])
    first, second = recorder.histories
    assert (first.agent, first.token_ids, first.sampled_mask()) == ("helper", [1, 2, 3, 4, 5], [0, 0, 1, 0, 1])
    assert (second.token_ids, second.sampled_mask()) == ([1, 2, 9, 6], [0, 0, 0, 1])
    assert [message.content for message in second.messages] == ["a", "x", "b", "y", "c", "z", "end"]
    assert [message.span for message in second.messages] == [None, None, None, None, None, (3, 4), None]


def test_an_episode_without_an_answer_has_its_words():
    recorder = Recorder()
    recorder.close([{"role": "user", "content": "a"}])
    (history,) = recorder.histories
    assert (history.token_ids, [message.content for message in history.messages]) == ([], ["a"])
