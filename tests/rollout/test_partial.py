"""Partial rollouts: an episode that is paused and continued is the one that would have been played in one go, if the
policy is the same; the versions of its tokens; and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from components.environments.protocol import Step
from components.errors import SpecError
from components.inference.protocol import ChatCompletion, Increment, Sampling
from components.rollout.agent import AgentLoop
from components.rollout.collector import EpisodeListener, play_episodes
from components.rollout.players.partial import PartialPlayer, PartialSpec
from components.rollout.request import EpisodeRequest
from components.rollout.spec import EpisodeLimits
from components.trajectories.groups import begun
from components.trajectories.schema import Scenario
from components.trajectories.versions import PAUSED, POLICIES, VERSIONS, off_policy_tokens, token_policies


class Talker:
    """An engine whose response depends on the seed and the number of messages, as that of a policy would; its tokens
    are the characters."""

    def __init__(self, policy="one"):
        self.policy = policy
        self.asked = []
        self.recalled = []

    async def chat(self, request):
        self.asked.append(request)
        prompt = [ord(letter) for message in request.messages for letter in message["content"]]
        text = f"turn {len(request.messages)} of seed {request.seed}."
        tokens = [ord(letter) for letter in text]
        message = {"role": "assistant", "content": text}
        return ChatCompletion(message, "stop", prompt, tokens, [-0.5] * len(tokens), request.policy)

    def recall(self, request, message, tokens):
        self.recalled.append((message["content"], tokens))


class Counting:
    """An environment that ends after `ends` steps, and rewards each with its number."""

    def __init__(self, ends=5, offset=0):
        self.ends = ends
        self.offset = offset
        self.resets = []

    def tools(self):
        return []

    def reset(self, scenario):
        self.resets.append(scenario.id)
        self.count = 0
        return [{"role": "user", "content": f"Count for {scenario.id}."}]

    def step(self, action):
        self.count += 1
        done = self.count == self.ends
        said = [{"role": "user", "content": f"{self.count + self.offset}"}]
        return Step([] if done else said, float(self.count), done, {"success": done, "count": self.count})

    def close(self): ...


REQUEST = EpisodeRequest(scenario=Scenario("s1", {}, "train"), sample=0, seed=7, sampling=Sampling(), max_turns=8)


def play(spec, engine, request=REQUEST, environment=None):
    player = PartialPlayer(AgentLoop(), spec, engine.recall)
    (trajectory,) = asyncio.run(player.play(engine, environment or Counting(), request))
    return trajectory


def continued(trajectory):
    paused = begun(trajectory, 1)
    return replace(REQUEST, scenario=paused.scenario, paused=paused)


def test_parts_by_one_policy_are_the_episode_in_one_go():
    whole = play(PartialSpec(turns=8), Talker())
    first = play(PartialSpec(turns=2), Talker())
    assert (first.metrics["turns"], first.metrics[PAUSED], first.outcome["count"]) == (2.0, 1.0, 2)
    second = play(PartialSpec(turns=2), Talker(), continued(first))
    assert (second.metrics["turns"], second.metrics[PAUSED]) == (4.0, 2.0)
    third = play(PartialSpec(turns=2), Talker(), replace(continued(first), paused=second))
    assert PAUSED not in third.metrics
    assert third.success
    assert third.step_rewards == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert VERSIONS not in third.sampling
    assert (third.id, third.group) == ("s1@round-1/0", "s1@round-1")
    assert replace(third, id=whole.id, scenario=whole.scenario) == whole


def test_each_token_has_its_version_and_its_log_probability():
    """The environment sees its own scenario; recorded turns are not sampled again, and their tokens are recalled."""
    first = play(PartialSpec(turns=2), Talker("one"))
    engine, environment = Talker("two"), Counting()
    second = play(PartialSpec(turns=8), engine, continued(first), environment)
    assert environment.resets == ["s1"]
    assert [len(request.messages) for request in engine.asked] == [5, 7, 9]
    assert [request.policy for request in engine.asked] == ["two"] * 3
    assert [content for content, _ in engine.recalled] == [
        first.histories[0].messages[place].content for place in (1, 3)
    ]
    spans = [message.span for message in first.histories[0].messages if message.span]
    assert [tokens for _, tokens in engine.recalled] == [first.histories[0].token_ids[:end] for _, end in spans]
    assert second.policy == "one"
    assert second.metrics[POLICIES] == 2.0
    (history,) = second.histories
    (policies,) = token_policies(second)
    turns = [message for message in history.messages if message.role == "assistant"]
    by_turn = [set(policies[slice(*message.span)]) for message in turns]
    assert by_turn == [{"one"}, {"one"}, {"two"}, {"two"}, {"two"}]
    assert [policy != "" for policy in policies] == history.sampled_mask()
    one, two = (sum(policy == name for policy in policies) for name in ("one", "two"))
    assert second.sampling[VERSIONS] == [["one", one], ["two", two]]
    assert off_policy_tokens([second], "two") == pytest.approx(one / (one + two))


def test_an_episode_is_paused_after_the_message_that_reaches_the_tokens():
    sampled = play(PartialSpec(turns=1), Talker()).metrics["sampled_tokens"]
    assert play(PartialSpec(tokens=int(sampled)), Talker()).metrics["turns"] == 1.0
    longer = play(PartialSpec(tokens=int(sampled) + 1), Talker())
    assert (longer.metrics["turns"], longer.metrics[PAUSED]) == (2.0, 1.0)
    again = play(PartialSpec(tokens=int(sampled)), Talker(), continued(longer))
    assert again.metrics["turns"] == 3.0  # the tokens of the first part do not count


def test_the_limit_of_messages_counts_those_of_all_parts():
    first = play(PartialSpec(turns=2), Talker(), environment=Counting(ends=20))
    second = play(PartialSpec(turns=20), Talker(), continued(first), Counting(ends=20))
    assert second.metrics["turns"] == 8.0
    assert PAUSED not in second.metrics


def test_an_environment_that_does_not_repeat_itself_is_named():
    first = play(PartialSpec(turns=2), Talker())
    with pytest.raises(SpecError, match=r"Counting gave other observations .* s1@round-1/0 .*partial=null"):
        play(PartialSpec(turns=2), Talker(), continued(first), Counting(offset=1))


class Streamer(Talker):
    """A `Talker` that reports its tokens, and waits before the last one of the scenario `slow` until `go` is set."""

    def __init__(self, policy="one"):
        super().__init__(policy)
        self.go = asyncio.Event()

    async def chat(self, request):
        whole = await super().chat(request)
        begun = request.start.token_ids if request.start else []
        kept = request.start.logprobs if request.start else []
        for token in whole.token_ids[len(begun) : -1]:
            await asyncio.sleep(0)
            request.listener(Increment("", [token], [-0.5], whole.prompt_token_ids, request.policy))
        if "slow" in request.messages[0]["content"]:
            await self.go.wait()
        logprobs = [*kept, *whole.logprobs[len(begun) :]]
        return replace(whole, token_ids=[*begun, *whole.token_ids[len(begun) :]], logprobs=logprobs)


def collected(engine, requests, finished=(), **limits):
    """The episodes of a collection that leaves one group in progress."""
    spec = PartialSpec(**{"groups": 1, "rounds": 2, **limits})
    heard = {}
    listener = EpisodeListener()
    listener.end = lambda trajectory, seconds: heard.update({trajectory.id: trajectory})
    player = PartialPlayer(AgentLoop(), spec, engine.recall)
    finished = {trajectory.id: trajectory for trajectory in finished}
    ids = play_episodes(
        engine, lambda: Counting(ends=2), requests, EpisodeLimits(), player=player, finished=finished, listener=listener
    )
    return [(heard | finished)[name] for name in ids]


def requests_of(*names):
    return [
        replace(REQUEST, scenario=Scenario(name, {}, "train"), sample=sample) for name in names for sample in (0, 1)
    ]


def test_a_collection_ends_without_its_slowest_group_and_the_next_policy_completes_the_message():
    """Each token of the message keeps its version and its log-probability."""
    *ended, slow, other = collected(Streamer("one"), requests_of("a", "b", "slow"))
    assert [PAUSED in one.metrics for one in (*ended, slow, other)] == [False] * 4 + [True] * 2
    message = slow.histories[0].messages[-1]
    assert (message.finish_reason, slow.metrics["turns"], slow.metrics[PAUSED]) == (PAUSED, 0.0, 1.0)
    engine = Streamer("two")
    engine.go.set()
    carried = [continued(one) for one in (slow, other)]
    carried = [replace(one, sample=one.paused.sample) for one in carried]
    whole = {one.id: one for one in collected(engine, [*carried, *requests_of("c")])}["slow@round-1/0"]
    tokens, first = whole.histories[0].token_ids, slow.histories[0].token_ids
    assert tokens[: len(first)] == first
    assert whole.histories[0].messages[1].content == f"turn 1 of seed {REQUEST.seed * 1009}."
    (policies,) = token_policies(whole)
    begin, end = whole.histories[0].messages[1].span
    count = len(policies[begin:end])
    assert policies[begin:end] == ["one"] * (count - 1) + ["two"]
    assert (PAUSED in whole.metrics, whole.metrics[POLICIES], whole.policy) == (False, 2.0, "one")


def test_a_collection_waits_for_the_groups_for_which_it_is_the_last():
    first = collected(Streamer("one"), requests_of("a", "slow"))
    carried = [replace(continued(one), sample=one.sample) for one in first if PAUSED in one.metrics]
    engine, order = Streamer("two"), []

    class Watched(Counting):
        def step(self, action):
            order.append(self.resets[-1])
            if [name for name in order if name != "slow"] == ["b"] * 4:
                engine.go.set()  # all others have ended
            return super().step(action)

    player = PartialPlayer(AgentLoop(), PartialSpec(groups=2, rounds=2), engine.recall)
    names = play_episodes(
        engine, lambda: Watched(ends=2), [*carried, *requests_of("b")], EpisodeLimits(timeout=20), player=player
    )
    assert names == ["slow@round-1/0", "slow@round-1/1", "b/0", "b/1"]
    assert order[:4] == ["b"] * 4
    assert len(order) == 8


def test_a_collection_that_was_killed_after_its_last_needed_group_pauses_at_once():
    first = collected(Streamer("one"), requests_of("a", "slow"))
    again = collected(Streamer("one"), requests_of("a", "slow"), finished=first[:3])
    assert again[:3] == first[:3]
    assert (again[3].metrics["turns"], again[3].metrics[PAUSED]) == (0.0, 1.0)
    later = Streamer("two")
    later.go.set()
    carried = [replace(continued(one), sample=one.sample) for one in again[2:]]
    for trajectory in collected(later, [*carried, *requests_of("b")])[:2]:
        assert trajectory.success
        assert trajectory.policy == ("one" if trajectory.sample == 0 else "two")


def test_a_part_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="null, as are tokens and groups, so no episode is paused"):
        PartialSpec()
