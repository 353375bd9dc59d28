"""Policies with an adapter for each role of the episodes (`model.lora.roles`)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.algorithms.policy.packing import TokenSequence, pack
from components.algorithms.policy_gradient.spec import GRPOSpec
from components.algorithms.sft.spec import SFTSpec
from components.algorithms.train import policy_digest
from components.errors import ArtifactError, SpecError
from components.inference.engines.embedded import EmbeddedSpec
from components.inference.protocol import ChatRequest, Sampling
from components.models import trained_weights
from components.models.distribution import Cut
from components.models.spec import LoraSpec
from components.trajectories.recorder import Recorder
from components.trajectories.schema import History, Scenario, Trajectory
from tests.algorithms.builders import MODEL, make_policy, train

ROLES = ["plan", "planner", "train"]
"""Roles whose names contain each other, or are reserved by torch."""
TWO = MODEL.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0, roles=["planner", "worker"]), "max_length": 512})


def weights(policy, role: str) -> dict[str, torch.Tensor]:
    return policy.adapter.tensors(f"role_{role}")


def sequences(roles: list[str]) -> list[TokenSequence]:
    """Return two sequences of each role: a prompt that all share, and the same answers for each role."""
    answers = [[9, 40, 41], [9, 50, 51, 52]]
    return [
        TokenSequence([5, 6, 7, *answer], list(range(3, 3 + len(answer))), role=role)
        for role in roles
        for answer in answers
    ]


def alone(base_dir: Path, folder: Path, sequence: TokenSequence) -> torch.Tensor:
    """Return the log-probabilities of the targets under PEFT's own model of a saved adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_dir), folder)
    with torch.no_grad():
        logps_TV = model(input_ids=torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
    return torch.stack([logps_TV[target - 1, sequence.token_ids[target]] for target in sequence.targets])


def test_tokens_of_a_role_have_the_log_probabilities_of_its_adapter(base_dir, tmp_path):
    model = MODEL.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0, roles=ROLES)})
    policy = make_policy(base_dir, model=model)
    policy.save(tmp_path)
    given = sequences(ROLES)
    packs = pack(given, 64, by_role=policy.by_role)
    assert [packed.role for packed in packs] == ROLES
    for packed in packs:
        with torch.no_grad():
            logprob_S, _ = policy.logprobs(packed, Cut())
        expected = torch.cat([alone(base_dir, tmp_path / packed.role, given[member]) for member in packed.members])
        torch.testing.assert_close(logprob_S, expected, atol=1e-4, rtol=0)
    by_role = [weights(policy, role) for role in ROLES]
    assert not any(torch.equal(by_role[0][name], other[name]) for other in by_role[1:] for name in other)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tokens_of_a_role_have_a_gradient_in_its_adapter_only(base_dir, checkpointing):
    policy = make_policy(base_dir, model=TWO)
    policy.checkpoint_layers(checkpointing)
    (packed,) = pack(sequences(["worker"]), 64, by_role=True)
    logprob_S, _ = policy.logprobs(packed, Cut())
    with policy.as_reference():
        (other,) = pack(sequences(["planner"]), 64, by_role=True)
        policy.logprobs(other, Cut())
    logprob_S.sum().backward()
    roles = {role: [p.grad for name, p in policy.parameters.items() if f".role_{role}." in name] for role in ROLES[1:2]}
    worker = [p.grad for name, p in policy.parameters.items() if ".role_worker." in name]
    assert all(grad is None for grad in roles["planner"])
    assert all(grad is not None and grad.abs().sum() > 0 for grad in worker)
    policy.checkpoint_layers(False)


def test_a_role_without_an_adapter_is_refused(base_dir):
    policy = make_policy(base_dir, model=TWO)
    (packed,) = pack(sequences(["critic"]), 64, by_role=True)
    with pytest.raises(ArtifactError, match=r"model.lora.roles = \[planner, worker\]: .* role 'critic'"):
        policy.logprobs(packed, Cut())


def test_saved_adapters_are_loaded_again_and_have_one_digest(base_dir, tmp_path):
    policy = make_policy(base_dir, model=TWO)
    folder = policy.folder(tmp_path)
    policy.save(folder)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.safetensors")) == [
        "adapters/planner/adapter_model.safetensors",
        "adapters/worker/adapter_model.safetensors",
    ]
    other = make_policy(base_dir, seed=5, model=TWO)
    other.load(folder)
    other.save(tmp_path / "again" / "adapters")
    assert policy_digest(tmp_path) == policy_digest(tmp_path / "again")
    for role in ("planner", "worker"):
        assert all(torch.equal(a, weights(other, role)[name]) for name, a in weights(policy, role).items())
    swapped = tmp_path / "swapped" / "adapters"
    swapped.mkdir(parents=True)
    (swapped / "planner").symlink_to(folder / "worker")
    (swapped / "worker").symlink_to(folder / "planner")
    assert policy_digest(swapped.parent) != policy_digest(tmp_path)
    with pytest.raises(ArtifactError, match="adapter for each of the roles planner, worker"):
        trained_weights.merge(base_dir, folder, tmp_path / "merged")


def test_adapters_of_other_roles_and_a_shared_adapter_are_refused(base_dir, start, tmp_path):
    policy = make_policy(base_dir, model=TWO)
    with pytest.raises(ArtifactError, match="no adapters of roles"):
        policy.load(start / "adapter")
    three = make_policy(base_dir, model=MODEL.model_copy(update={"lora": LoraSpec(rank=4, alpha=8.0, roles=ROLES)}))
    three.save(tmp_path)
    with pytest.raises(ArtifactError, match=r"adapters of \['plan', 'planner', 'train'\]"):
        policy.load(tmp_path)


class Host:
    def __init__(self, cache: Path):
        self.cache = cache


@pytest.fixture
def checkpoint(base_dir, tmp_path) -> Path:
    policy = make_policy(base_dir, model=TWO)
    policy.save(policy.folder(tmp_path / "start"))
    from components.algorithms.loop import checkpoint

    optimizer = torch.optim.AdamW(policy.parameters.values())
    checkpoint.save_state(
        tmp_path / "start",
        algorithm="none",
        step=0,
        optimizer=optimizer,
        names=list(policy.parameters),
        loss_scale={},
    )
    return tmp_path / "start"


def engines(checkpoint: Path, cache: Path):
    engine = EmbeddedSpec().build_roles(TWO, Host(cache), ["planner", "worker"])  # type: ignore[arg-type]
    engine.load_policy(policy_digest(checkpoint), str(trained_weights.folder_of(checkpoint)))
    return engine


def play(engine, scenario: int, sample: int) -> Trajectory:
    """Return an episode in which the planner and the worker read the same text, twice each."""
    recorder = Recorder()

    async def episode() -> None:
        for role in ("planner", "worker"):
            messages = [{"role": "user", "content": f"Task {scenario}"}]
            for turn in range(2):
                sampling = Sampling(temperature=0.8, max_tokens=6)
                seed = 100 * scenario + 10 * sample + turn
                request = ChatRequest(messages, [], engine.policy, sampling, seed, agent=role)
                completion = await engine.chat(request)
                recorder.record(messages, completion, role)
                messages = [*messages, completion.message, {"role": "user", "content": "Go on"}]

    asyncio.run(episode())
    return Trajectory(
        f"s{scenario}/{sample}",
        Scenario(f"s{scenario}", {}, "train"),
        sample,
        recorder.histories,
        policy=engine.policy,
        sampling={"temperature": 0.8},
        reward=float(sample),
    )


@pytest.fixture
def played(base_dir, checkpoint) -> list[Trajectory]:
    engine = engines(checkpoint, base_dir.parent)
    return [play(engine, scenario, sample) for scenario in range(2) for sample in range(2)]


def histories(episodes: list[Trajectory]) -> list[History]:
    return [history for episode in episodes for history in episode.histories]


def test_stored_and_recomputed_log_probabilities_are_equal(base_dir, checkpoint, played):
    policy = make_policy(base_dir, seed=3, model=TWO)
    policy.load(policy.folder(checkpoint))
    differ = []
    for history in histories(played):
        targets = [index for index, sampled in enumerate(history.sampled_mask()) if sampled]
        stored_S = torch.tensor([history.logprobs[target] for target in targets])
        for role in ("planner", "worker"):
            (packed,) = pack([TokenSequence(history.token_ids, targets, role=role)], 512, by_role=True)
            with torch.no_grad():
                logprob_S, _ = policy.logprobs(packed, Cut(temperature=0.8))
            if role == history.agent:
                torch.testing.assert_close(logprob_S, stored_S, atol=2e-5, rtol=0)
            else:
                differ.append(float((logprob_S - stored_S).abs().mean()))
    assert min(differ) > 0.05


def test_the_engine_refuses_agents_without_an_adapter(base_dir, checkpoint):
    engine = engines(checkpoint, base_dir.parent)
    with pytest.raises(SpecError, match=r"model.lora.roles: planner, worker: the agent 'main' has no adapter"):
        asyncio.run(engine.chat(ChatRequest([{"role": "user", "content": "Hi"}], policy=engine.policy)))


def saved(folder: Path, role: str) -> bytes:
    return (folder / "adapters" / role / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("algorithm", [GRPOSpec(learning_rate=1e-2, weight_decay=0.1), SFTSpec(epochs=2)])
def test_training_a_role_leaves_the_bytes_of_the_other_adapters(base_dir, checkpoint, played, tmp_path, algorithm):
    """Also after steps of all roles, whose moments would move the planner's adapter if it had gradients of zero."""
    options = {"scratch": tmp_path / "scratch", "seed": 0, "on_step": lambda _: None}
    train(algorithm, TWO, base_dir, played, start=checkpoint, out=_made(tmp_path / "all"), **options)
    assert saved(tmp_path / "all", "planner") != saved(checkpoint, "planner")
    workers = [replace(one, histories=[h for h in one.histories if h.agent == "worker"]) for one in played]
    options["scratch"] = tmp_path / "scratch2"
    train(algorithm, TWO, base_dir, workers, start=tmp_path / "all", out=_made(tmp_path / "workers"), **options)
    assert saved(tmp_path / "workers", "planner") == saved(tmp_path / "all", "planner")
    assert saved(tmp_path / "workers", "worker") != saved(tmp_path / "all", "worker")
    moments = [load_file(tmp_path / name / "optimizer.safetensors") for name in ("all", "workers")]
    planner = [name for name in moments[0] if ".role_planner." in name]
    assert planner
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in planner)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
