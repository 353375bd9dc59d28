"""The chat templates of the families of models: where they keep what came before, an episode is one history; where they
rewrite it, it is several; and in either, what is trained is what was sampled, once, after what the model really saw."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from components.algorithms.policy.reference_logprobs import ReferenceLogprobs
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.policy_gradient.training_data import Learning
from components.trajectories.convert import to_openai
from tests.trajectories.families import FAMILIES, QUESTIONS, Scripted, chat_format, episode, sampled

each_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def formats():
    return {name: chat_format(family) for name, family in FAMILIES.items()}


@each_family
def test_what_was_sampled_is_trained_once_with_its_logprobs(formats, name, tmp_path):
    """Continued as the embedded engine does, or rendered anew for each answer as a server does; in the tokens that the
    tokenizer would write, or others of the same text."""
    family, chat = FAMILIES[name], formats[name]
    for number, (whole, odd) in enumerate(product([False, True], repeat=2)):
        (folder := tmp_path / str(number)).mkdir()
        assert_trained_once(Scripted(chat, sampled(family, chat, odd=odd), whole=whole), folder)


def assert_trained_once(engine: Scripted, scratch: Path) -> None:
    trajectory = episode(engine)
    assert trajectory.failure is None
    assert trajectory.success, "a call or an answer was not understood"
    assert trajectory.metrics["turns"] == 2 * QUESTIONS == len(engine.said)
    found = [
        (history.token_ids[:start], history.token_ids[start:end], history.logprobs[start:end])
        for history in trajectory.histories
        for start, end in (message.span for message in history.messages if message.span)
    ]
    assert found == engine.said  # after what it really saw, as it was sampled, in order, none left out
    # And so it comes to the loss.
    learning = Learning(GRPOSpec(), ReferenceLogprobs(scratch))
    tokens = [token for _, answer, _ in engine.said for token in answer]
    logprobs = [logprob for _, _, given in engine.said for logprob in given]
    learning.advantages[trajectory.id] = [1.0] * len(tokens)
    packs = [planned.lay_out() for _, planned in learning.packs([trajectory])]
    trained = [pair for pack in packs for pair in zip(pack.token_S.tolist(), pack.logprob_S.tolist(), strict=True)]
    assert sorted(token for token, _ in trained) == sorted(tokens)
    assert sorted(logprob for _, logprob in trained) == pytest.approx(sorted(logprobs))


@each_family
def test_each_history_begins_with_what_the_template_says(formats, name):
    """And goes on only where the template keeps what was said: else the policy would learn after words that it never
    sees where it is used. A demonstration is laid out in the same way."""
    family, chat = FAMILIES[name], formats[name]
    trajectory = episode(Scripted(chat, sampled(family, chat)))
    assert (len(trajectory.histories) > 1) == bool(family.why)
    for history in trajectory.histories:
        answers = [turn for turn, message in enumerate(history.messages) if message.span]
        for turn in answers:
            start, _ = history.messages[turn].span
            said = [to_openai(message) for message in history.messages[:turn]]
            assert (
                chat.tokenizer.decode(history.token_ids[:start]).split()
                == chat.render(said, trajectory.tools, generate=True).split()
            )  # templates trim
    messages = [to_openai(message) for message in trajectory.histories[-1].messages]
    streams = chat.streams(messages, trajectory.tools)
    learned = [stream.token_ids[start:end] for stream in streams for start, end in stream.spans]
    assert len(learned) == 2 * QUESTIONS
    for tokens, message in zip(
        learned, [message for message in messages if message["role"] == "assistant"], strict=True
    ):
        found = chat.parse(tokens, 0, trajectory.tools)
        assert found["content"].split() == message["content"].split()
        assert [call["function"] for call in found.get("tool_calls", [])] == [
            call["function"] for call in message.get("tool_calls", [])
        ]


def test_the_day_does_not_show(formats):
    """Else the same stage would give other tokens tomorrow."""
    names = [name for name, family in FAMILIES.items() if "strftime_now" in family.template]
    assert names
    for name in names:
        text = formats[name].render([{"role": "user", "content": "a"}], [], generate=True)
        assert any(day in text for day in ("01 January 2025", "01 Jan 2025", "January 01, 2025", "2025-01-01")), name
