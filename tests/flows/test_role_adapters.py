"""An adapter for each role of the agent in a run: what it trains, exports and refuses."""

from __future__ import annotations

import io
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy.policy import Policy
from components.errors import SpecError
from components.models.distribution import Cut
from components.models.weights import prepare
from components.trajectories.store import read_trajectories
from flows import chat
from flows.execution.executor import Execution
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.recipes.run import Run
from flows.stages.base import Context
from flows.stages.execute import repeat_stage, run_stage
from flows.terminal.console import Console
from tests.flows.pretend import spec_of
from tests.flows.test_online_rl import DATA
from tests.flows.test_overlap import plainly
from tests.flows.test_own_agent import ask
from tests.flows.test_partial import TALK
from tests.flows.test_recipes import CONTINUAL, ROLES, TICTACTOE
from tests.refusals import wrong_problems

LORA = {"rank": 4, "alpha": 8, "roles": ["planner", "worker"]}
SPEC: dict[str, Any] = {
    **TALK,
    "flow": {**ROLES["flow"], "order": ["worker", "planner", "all"]},
    "rounds": 3,
    "warmup": None,
    "model": {**DATA["model"], "lora": LORA, "max_length": 1024},
    "agent": {"roles": {"planner": "Plan.", "worker": "Act.", "worker_turns": 1}, "max_turns": 4, "max_tokens": 8},
    "collect": {"scenarios": 2, "group_size": 2},
    "algorithm": {"name": "grpo", "baseline": "none", "scale": "none", "learning_rate": 1e-2},
    "evaluate": {"scenarios": 2, "temperature": 1.0},
    "filter": {"_target_": "components.filters.everything.Everything"},
    "deploy": {"mode": "export", "formats": ["adapter"]},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Iterator[Execution]:
    """Run the flow."""
    folder = tmp_path_factory.mktemp("roles")
    spec = spec_of(folder, **SPEC)
    execution = Execution(spec, Context.at(folder), Console(io.StringIO()), None, folder / "log")
    try:
        Run(spec, plainly(execution.stage)).execute()
        yield execution
    finally:
        execution.context.warm.close()
        execution.close()


@pytest.mark.timeout(900)
def test_each_phase_changes_the_adapters_of_its_roles_only(played):
    artifacts = [played.done[f"train[{number}]"].artifact for number in (1, 2, 3)]
    saved = [
        {role: (one.path / "adapters" / role / "adapter_model.safetensors").read_bytes() for role in LORA["roles"]}
        for one in artifacts
    ]
    worker, planner, both = saved
    assert worker["planner"] == _untrained(played, "planner")
    assert worker["worker"] != _untrained(played, "worker")
    assert (planner["worker"], planner["planner"] != worker["planner"]) == (worker["worker"], True)
    assert both["planner"] != planner["planner"]
    assert both["worker"] != planner["worker"]


def _untrained(execution: Execution, role: str) -> bytes:
    """Return the bytes of the adapter of a role that no training has changed."""
    policy = Policy(_base(execution), execution.spec.model, execution.spec.seed)
    folder = Path(execution.spec.root) / "untrained"
    policy.save(folder)
    return (folder / role / "adapter_model.safetensors").read_bytes()


def _base(execution: Execution):
    return prepare(execution.spec.model, execution.context.cache)


def test_stored_log_probabilities_are_those_of_the_adapter_of_the_role(played):
    execution = played
    policy = Policy(_base(execution), execution.spec.model, 0)
    policy.load(policy.folder(execution.done["train[2]"].artifact.path))
    collected = execution.done["collect[3]"].artifact.path / "trajectories.parquet"
    episodes = list(read_trajectories(collected))
    assert {history.agent for episode in episodes for history in episode.histories} == set(LORA["roles"])
    for episode in episodes:
        for history in episode.histories:
            targets = [index for index, sampled in enumerate(history.sampled_mask()) if sampled]
            (packed,) = pack([TokenSequence(history.token_ids, targets, role=history.agent)], 4096, by_role=True)
            with torch.no_grad():
                logprob_S, _ = policy.logprobs(packed, Cut.of(episode))
            stored_S = torch.tensor([history.logprobs[target] for target in targets])
            torch.testing.assert_close(logprob_S, stored_S, atol=1e-4, rtol=0)
    lines = (execution.done["train[3]"].artifact.path / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    assert log[0]["kl_sampler"] < 1e-6


def test_stages_repeat_their_bytes(played):
    for label in ("collect[3]", "train[3]"):
        stored, recomputed = repeat_stage(played.done[label].request, played.context)
        assert stored.digest == recomputed.digest, label


def test_the_export_has_a_folder_for_each_role(played):
    done = played.done
    export, policy = done["deploy"].artifact, done["train[3]"].artifact
    for role in LORA["roles"]:
        exported = load_file(export.path / "adapter" / role / "adapter_model.safetensors")
        trained = load_file(policy.path / "adapters" / role / "adapter_model.safetensors")
        assert all(torch.equal(exported[name], tensor) for name, tensor in trained.items())
        assert export.metrics[f"adapter/{role}/prompts"] >= 1
        assert "one for each of the roles planner, worker" in (export.path / "adapter" / role / "README.md").read_text()


def test_a_chat_is_refused(played, capsys):
    execution = played
    key = execution.done["train[3]"].artifact.key
    assert chat.main([key[:16], f"root={execution.spec.root}"]) == 2
    assert "the policy has an adapter for each of the roles planner, worker" in capsys.readouterr().err


RUN = ["+experiment=smoke", "agent=planner_worker", "deploy.formats=[adapter]", "model.lora.roles=[planner,worker]"]


def test_the_roles_are_in_stage_keys_of_trainings_only():
    shared = compose(["+experiment=smoke", "agent=planner_worker"])
    of_one, of_roles = (spec.resolve_dtypes(spec.model, "train").key_part() for spec in (shared, compose(RUN)))
    assert "roles" not in of_one["lora"]
    assert of_roles["lora"]["roles"] == ["planner", "worker"]
    assert compose(RUN).model.base() == shared.model.base()


ONE_ADAPTER = [
    (["agent=default"], "model.lora.roles", r"planner, worker: one agent plays \(agent.roles=null\)"),
    (["model.lora.roles=[planner,worker,critic]"], "model.lora.roles", "agent.roles has planner and worker"),
    (["model.lora.roles=[planner]"], "model.lora.roles", "at least 2"),
    (["model.lora.roles=[planner,Planner]"], "model.lora.roles", "each role once"),
    (["model.lora.roles=[planner,'../worker']"], "model.lora.roles", "'../worker' is none"),
    (["inference=vllm"], "inference.name", "vllm: has one adapter at a time"),
    (["algorithm=ppo"], "algorithm.name", "ppo: trains one adapter"),
    (["algorithm=dpo", "filter=everything"], "algorithm.name", "dpo: trains one adapter"),
    (["+ewc={}"], "ewc", "adapters of roles that are not trained"),
    (["collect=reflection"], "collect.reflection", "reflects as none of the roles"),
    (["deploy.formats=[merged,adapter]"], "deploy.formats", "merged: holds one model, and the adapters cannot be"),
    (["deploy.mode=serve"], "deploy.mode", "serve: serves one merged model"),
    (["deploy=local"], "deploy.target", "local: deploys one merged model"),
    (["reward_model=bradley_terry"], "reward_model", "starts from the one adapter"),
    (["model.quantization=nf4"], "model.quantization", "nf4: quantizes a base with one adapter"),
    (["compute=fsdp"], "compute.places.fsdp.strategy", "fsdp: shards a model with one adapter"),
    (["certify=true"], "model.lora.roles", "planner, worker: a certificate checks an engine with one"),
]


def test_what_reads_one_adapter_is_refused():
    assert wrong_problems(ONE_ADAPTER, lambda lines: compose([*RUN, *lines])) == []
    with pytest.raises(SpecError, match="planner, worker: a certificate checks an engine with one adapter"):
        Requests(compose(RUN)).certify()


def two_agents(scenario, base_url, api_key, model, *, second: str = "worker"):
    """Ask as two agents."""
    for name in ("planner", second):
        try:
            ask(base_url, api_key, f"{model}:{name}", [{"role": "user", "content": scenario.id}])
        except urllib.error.HTTPError as error:
            error.close()
            raise
    return 0.0


def test_agents_of_a_program_have_the_adapters_of_their_names(played, tmp_path):
    def evaluated(second):
        function = {"_target_": "tests.flows.test_role_adapters.two_agents", "second": second}
        agent = {"function": function, "max_turns": 2, "max_tokens": 8}
        spec = spec_of(tmp_path, **{**SPEC, "agent": agent, "evaluate": {"scenarios": 1, "temperature": 1.0}})
        artifact, _ = run_stage(Requests(spec).evaluate(played.done["train[3]"].artifact), played.context)
        return artifact

    (episode, *_) = read_trajectories(evaluated("worker").path / "trajectories.parquet")
    planner, worker = episode.histories
    assert (planner.agent, worker.agent) == ("planner", "worker")
    assert planner.token_ids[: -len(planner.logprobs)] == worker.token_ids[: -len(worker.logprobs)]
    assert planner.token_ids != worker.token_ids
    with pytest.raises(SpecError, match=r"model.lora.roles: planner, worker: the agent 'critic' has no adapter"):
        evaluated("critic")


BY_ENVIRONMENT: dict[str, Any] = {
    **CONTINUAL,
    **{name: SPEC[name] for name in ("algorithm", "filter", "deploy", "collect")},
    "rounds": 2,
    "replay": None,
    "ewc": None,
    "model": {**SPEC["model"], "lora": {**LORA, "roles": ["tictactoe", "guess"]}},
    "agent": {"format": "chat", "by_environment": True, "max_turns": 2, "max_tokens": 4},
    "evaluate": {"scenarios": 4},
}


@pytest.mark.timeout(900)
def test_an_adapter_for_each_environment_is_frozen_after_its_rounds_so_nothing_is_forgotten(tmp_path):
    reward = {"_target_": "components.rewards.rules.length.Length", "alpha": 0.1, "target": 0}
    warmup = {"demonstrations": 4, "algorithm": {"name": "sft", "epochs": 1}, "filter": SPEC["filter"]}
    spec = spec_of(tmp_path, **BY_ENVIRONMENT, reward=reward, warmup=warmup)
    execution = Execution(spec, Context.at(tmp_path), Console(io.StringIO()), None, tmp_path / "log")
    try:
        run = Run(spec, plainly(execution.stage))
        run.execute()
    finally:
        execution.context.warm.close()
        execution.close()

    def adapters(label: str) -> list[bytes]:
        folder = execution.done[label].artifact.path / "adapters"
        return [(folder / name / "adapter_model.safetensors").read_bytes() for name in ("tictactoe", "guess")]

    warm, first, second = adapters("train[sft]"), adapters("train[1]"), adapters("train[2]")
    assert (first[0] != warm[0], first[1] == warm[1]) == (True, True)
    assert (second[0] == first[0], second[1] != first[1]) == (True, True)
    after, final = (execution.done[f"evaluate[{name}]"].artifact.path for name in ("tictactoe", "final"))
    first_games, last_games = (
        [
            [history.token_ids for history in episode.histories]
            for episode in read_trajectories(folder / "trajectories.parquet")
            if episode.scenario.type.startswith("tictactoe/")
        ]
        for folder in (after, final)
    )
    assert first_games == last_games != []
    assert run.outcome.reported["forgetting"] == 0


def test_an_adapter_for_each_environment_needs_a_mixture_its_names_and_no_replay(tmp_path):
    one = {**BY_ENVIRONMENT["model"], "lora": LORA}
    cases = [
        ({**BY_ENVIRONMENT, "environment": TICTACTOE}, "agent.by_environment", "true: names the agent"),
        ({**BY_ENVIRONMENT, "model": one}, "model.lora.roles", r"planner, worker: .* expected \[tictactoe, guess\]"),
        ({**BY_ENVIRONMENT, "replay": {"share": 0.5}}, "replay", "freezes the adapters"),
    ]
    assert wrong_problems(cases, lambda data: plain_run(tmp_path, **data)) == []


def plain_run(folder: Path, **changes: Any) -> None:
    """Validate a spec, and execute its recipe up to its first stage."""
    Run(spec_of(folder, **changes), lambda *call: pytest.fail("a stage ran")).execute()
