"""Partial rollouts in a run: which collection continues which, what is trained on, and that keys and bytes repeat."""

from __future__ import annotations

import shutil

import pytest

from components.algorithms.train import policy_digest
from components.environments.protocol import Step
from components.errors import SpecError
from components.inference.protocol import BASE_POLICY
from components.trajectories.schema import Scenario
from components.trajectories.store import read_trajectories
from components.trajectories.versions import PAUSED, VERSIONS, token_policies, versions_of
from flows.execution.executor import Execution
from flows.execution.overlap import Concurrent
from flows.recipes.run import Run
from flows.stages.base import Context
from flows.stages.execute import run_stage
from tests.flows.pretend import planned, spec_of
from tests.flows.test_online_rl import DATA, Recorder
from tests.flows.test_overlap import plainly
from tests.flows.test_recipes import CURRICULUM, TICTACTOE
from tests.refusals import wrong_refusals

PARTIAL = {
    "rounds": 5,
    "warmup": None,
    "collect": {**DATA["collect"], "partial": {"turns": 2}},
    "agent": {"max_turns": 4, "max_tokens": 8},
    "algorithm": {"name": "grpo", "baseline": "none", "scale": "none"},
    "deploy": {"mode": "none"},
    "evaluate": {"scenarios": 2},
    "filter": {"_target_": "components.filters.everything.Everything"},
}


GROUPS = {"groups": 1, "rounds": 3}


def with_collect(**changes):
    return {**PARTIAL, "collect": {**PARTIAL["collect"], **changes}}


def test_paused_episodes_continue_in_the_first_round_that_begins_after_their_collection(tmp_path):
    for overlap, later in ((0, 1), (1, 1), (2, 2), (3, 3)):
        run = Recorder(tmp_path, **with_collect(overlap=overlap))
        continues = {number: run.requests[f"collect[{number}]"].inputs.get("paused") for number in range(1, 6)}
        assert continues == {
            number: run.keys[f"collect[{number - later}]"] if number > later else None for number in range(1, 6)
        }
        assert run.spec.collect.staleness(4) == overlap + later


def test_keys_without_it_are_the_same(tmp_path):
    """The key `partial` is in no stage key, that of the deployment included, unless it is set."""
    whole = Recorder(tmp_path, deploy={"mode": "export"})
    assert "partial" not in whole.requests["deploy"].spec["experiment"]["collect"]
    assert "paused" not in whole.requests["collect[2]"].inputs


REFUSED = [
    (with_collect(partial={"turns": 4}), "collect.partial.turns: 4: no episode has more than agent.max_turns=4"),
    (with_collect(reflection={}), "collect.reflection: needs whole episodes"),
    (
        {**with_collect(refills=1), "algorithm": {"name": "grpo"}, "filter": DATA["filter"]},
        "collect.refills: needs whole episodes",
    ),
    ({**PARTIAL, "agent": {**PARTIAL["agent"], "roles": {}}}, "agent.roles: collect.partial pauses"),
    ({**PARTIAL, "algorithm": {"name": "grpo", "correction": "none"}}, "algorithm.correction: none: with collect.par"),
    ({**with_collect(overlap=2), "replay": {"max_staleness": 3}}, "up to 4 versions old; expected at least 4"),
    (
        {**with_collect(overlap=2, partial=GROUPS), "replay": {"max_staleness": 5}},
        "replay.max_staleness: 5: drops episodes of this round: with collect.partial episodes continue on the policies "
        "of later rounds, and they are up to 6 versions old; expected at least 6",
    ),
    (
        with_collect(partial={"groups": 3, "rounds": 2}, scenarios=3),
        "collect.partial.groups: 3: a round of collect.scenarios=3 would end before its first group; expected less",
    ),
    (with_collect(partial={"groups": 1}), "collect.partial.rounds: null, but time decides how many rounds"),
    (with_collect(partial={"turns": 2, "rounds": 2}), "collect.partial.rounds: 2: bounds an episode that groups"),
    (with_collect(partial={**GROUPS, "tokens": 9}), "collect.partial.tokens: 9: groups=1 decides when"),
    (
        {**with_collect(partial=GROUPS), "agent": {**PARTIAL["agent"], "max_thinking_tokens": 4}},
        "agent.max_thinking_tokens: 4: the reasoning of a response that collect.partial.groups interrupts",
    ),
    (
        {**with_collect(partial=GROUPS), "inference": {"name": "remote", "model": "m", "url": "http://127.0.0.1:1/v1"}},
        "collect.partial.groups: 1: inference.name=remote cannot complete a response that was interrupted; expected "
        "null, or inference=embedded or vllm",
    ),
]


def test_what_needs_whole_episodes_is_refused(tmp_path):
    assert wrong_refusals(REFUSED, lambda change: spec_of(tmp_path, **change)) == []
    for change, _ in REFUSED:
        spec_of(tmp_path, **{**change, "collect": {**change["collect"], "partial": None}})


def test_a_recipe_that_chooses_the_environment_of_a_round_refuses_it(tmp_path):
    changes = {"flow": CURRICULUM, "environment": TICTACTOE}
    with pytest.raises(SpecError, match=r"collect.partial: set: flow=curriculum .* expected null"):
        Recorder(tmp_path, **{**PARTIAL, **changes})


class Talk:
    """A conversation of one to four turns, by the number of the scenario."""

    def __init__(self, train=4):
        self.train = train

    def scenarios(self, split):
        return [Scenario(f"{split}-{number}", {"turns": 1 + number % 4}, split) for number in range(self.train)]

    def tools(self):
        return []

    def reset(self, scenario):
        self.left = scenario.input["turns"]
        return [{"role": "user", "content": f"Tell me about {scenario.id}."}]

    def step(self, action):
        self.left -= 1
        done = self.left == 0
        said = [] if done else [{"role": "user", "content": f"{self.left} to go."}]
        return Step(said, 0.0, done, {"success": len(action["content"]) % 2 == 0})

    def close(self): ...


TALK = {
    "allow": ["tests"],
    "environment": {"_target_": "tests.flows.test_partial.Talk"},
    "reward": {"_target_": "components.rewards.rules.outcome.Outcome", "repetition_cost": 0.5, "repetition_ngram": 1},
}


@pytest.mark.timeout(900)
def test_a_run_repeats_its_bytes_and_trains_on_complete_groups_alone(tmp_path, screen):
    found = []
    for folder, beside in ((tmp_path / "after", None), (tmp_path / "beside", Concurrent)):
        spec = spec_of(folder, **{**with_collect(overlap=1, scenarios=2), **TALK, "rounds": 3})
        execution = Execution(spec, Context.at(folder), screen[0], None, folder / "log")
        try:
            outcome = Run(spec, plainly(execution.stage), beside(execution, plainly) if beside else None).execute()
        finally:
            execution.context.warm.close()
            execution.close()
        found.append({label: (done.artifact.key, done.artifact.digest) for label, done in execution.done.items()})
    assert found[0] == found[1]

    collections = {number: execution.done[f"collect[{number}]"].artifact for number in (1, 2, 3)}
    ended = {number: list(read_trajectories(one.path / "trajectories.parquet")) for number, one in collections.items()}
    paused = {number: list(read_trajectories(one.path / "paused.parquet")) for number, one in collections.items()}
    assert all(PAUSED not in one.metrics for episodes in ended.values() for one in episodes)
    for number in (1, 2):
        metrics = collections[number].metrics
        assert metrics["paused"] == sum(PAUSED in one.metrics for one in paused[number])
        assert collections[number + 1].metrics["continued"] == metrics["paused"]
        assert {one.group for one in paused[number]} <= {one.group for one in ended[number + 1]}
    assert sum(one.metrics["paused"] for one in collections.values()) > 0
    assert {one.group.partition("@")[2] for one in paused[2]} <= {"round-1", "round-2"}
    continued = [one for number in (2, 3) for one in ended[number] if "@" in one.id]
    before = {one.id: one for one in paused[1] + paused[2]}
    assert continued
    for one in continued:  # the recorded tokens are those that were sampled
        old = before[one.id].histories[0]
        assert one.histories[0].token_ids[: len(old.token_ids)] == old.token_ids
        assert len({policy for policy in token_policies(one)[0] if policy}) == len(versions_of(one))
    assert any(VERSIONS in one.sampling for one in continued)
    assert 0 < outcome.rounds[2]["train"].metrics["off_policy_tokens"] <= 1
    assert outcome.rounds[2]["train"].metrics["correction"] > 0

    cold = Context.at(tmp_path / "beside")  # a process without the engine that sampled the first parts
    shutil.rmtree(collections[3].path)
    again, status = run_stage(execution.done["collect[3]"].request, cold)
    cold.warm.close()
    assert (status, again.digest) == ("ran", collections[3].digest)


@pytest.mark.timeout(900)
def test_groups_that_a_collection_leaves_are_trained_on_within_the_bound_of_their_age(tmp_path, screen):
    """A second run takes everything from the cache, although time decided what was played."""
    changes = with_collect(overlap=1, scenarios=3, partial={"groups": 1, "rounds": 2})
    spec = spec_of(tmp_path, **{**changes, **TALK, "rounds": 4})
    done = []
    for _ in range(2):
        execution = Execution(spec, Context.at(tmp_path), screen[0], None, tmp_path / "log")
        try:
            Run(spec, plainly(execution.stage), Concurrent(execution, plainly)).execute()
        finally:
            execution.context.warm.close()
            execution.close()
        done.append(execution.done)
    assert {label for label, one in done[1].items() if one.status != "cached"} == set()
    versions = {BASE_POLICY: 0}
    versions |= {policy_digest(done[0][f"train[{number}]"].artifact.path): number for number in range(1, 5)}
    trained, left = {}, set()
    for number in range(1, 5):
        path = done[0][f"collect[{number}]"].artifact.path
        for one in read_trajectories(path / "trajectories.parquet"):
            trained.setdefault(one.group.partition("@")[0], []).append(one.id)
            ages = {number - 1 - versions[policy] for policy in token_policies(one)[0] if policy}
            assert ages <= set(range(spec.collect.staleness(4) + 1))
            assert {"@round-" in one.id} == {one.id.partition("/")[0] in left}
        before, left = left, {one.group for one in read_trajectories(path / "paused.parquet")}
        assert len(left) <= 1
        assert not left & before  # in its second round a group ends
    assert sum(map(len, trained.values())) == (4 * 3 - len(left)) * spec.collect.group_size


def test_the_plan_names_the_collection_that_continues(tmp_path):
    inputs = planned(tmp_path, **with_collect(overlap=2))["collect[4]"].inputs
    assert (inputs["paused"], inputs["policy"]) == ("collect[2]", "train[1]")
