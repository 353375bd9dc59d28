"""Programs for ART's client train by the stages of a loop: with objects of its protocol, and with the client itself."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from openai.types.chat.chat_completion import Choice

from components.errors import EngineError, SpecError
from components.inference.protocol import ChatCompletion, ChatRequest
from components.trajectories.store import read_trajectories
from flows.history.records import Records
from flows.loop.art import ArtBackend
from flows.loop.served_policy import ServedPolicy

CLIENT = Path(os.environ.get("HARNESSES", "")) / "art"
ROOT = Path(__file__).resolve().parents[2]
GREETING = {"role": "user", "content": "Hi"}


def art_model(name: str = "agent", **changes):
    return SimpleNamespace(
        name=name, project="demo", base_model="tiny", trainable=True, _internal_config=None, **changes
    )


def art_trajectory(parts, reward: float, histories=(), **metrics):
    return SimpleNamespace(
        messages_and_choices=parts, additional_histories=list(histories), tools=None, reward=reward, metrics=metrics
    )


async def served(backend, model):
    """Register a model as ART's client does; return a client of it."""
    await backend.register(model)
    url, key = await backend._prepare_backend_for_training(model, None)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


async def asked(client, model, messages=(GREETING,), **settings) -> Choice:
    answer = await client.chat.completions.create(model=model.name, messages=messages, max_tokens=6, **settings)
    return answer.choices[0]


async def played(client, model, rewards=(0.0, 1.0)):
    """Return a group of conversations of two turns; the last one has a history besides."""
    group = []
    for reward in rewards:
        first = await asked(client, model)
        again = [GREETING, {"role": "assistant", "content": first.message.content}, GREETING]
        second = await asked(client, model, again)
        group.append(art_trajectory([GREETING, first, GREETING, second], reward, success=reward > 0))
    other = SimpleNamespace(messages_and_choices=[GREETING, copy.deepcopy(await asked(client, model))])
    group[-1].additional_histories.append(other)
    return group


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    root, seen = tmp_path_factory.mktemp("art"), SimpleNamespace()

    async def program():
        model = art_model()
        async with ArtBackend(root) as backend, await served(backend, model) as client:
            group = await played(client, model)
            text = Choice.model_validate_json(group[0].messages_and_choices[1].model_dump_json())
            group[0].messages_and_choices[1] = text  # stored by the program
            seen.group, seen.result = group, await backend.train(model, [group], learning_rate=1e-2)
            seen.equal = await backend.train(model, [await played(client, model, (1.0, 1.0))])
            seen.sft = [
                metrics
                async for metrics in backend._train_sft(
                    model, group, SimpleNamespace(learning_rate=1e-3, batch_size=2), {}
                )
            ]
            seen.stale = await refusal(client.chat.completions.create(model="agent@1", messages=[GREETING]))
            seen.current = await refusal(client.chat.completions.create(model="agent@3", messages=[GREETING]))
        async with ArtBackend(root) as backend:
            await backend._experimental_fork_checkpoint(art_model("fork"), "agent", not_after_step=1)
            for name in ("agent", "fork"):
                await backend.register(art_model(name))
            seen.steps = [await backend._get_step(art_model(name)) for name in ("agent", "fork")]
            await backend._delete_checkpoint_files(model, [])
            seen.left = [
                bool(await refusal(backend._experimental_pull_model_checkpoint(m, step=n)))
                for m, n in ((model, 1), (model, 3), (art_model("fork"), "latest"))
            ]
            seen.copy = await backend._experimental_pull_model_checkpoint(model, local_path=str(root / "copy"))
            async with await served(backend, model) as client:
                seen.resumed = await backend.train(model, [await played(client, model)])

    asyncio.run(program())
    return root, seen


async def refusal(awaitable) -> str:
    try:
        await awaitable
    except (SpecError, EngineError, openai.APIStatusError) as error:
        return str(error).replace("\n", " ")
    return ""


def test_choices_become_the_histories_that_the_engine_sampled(loop):
    root, seen = loop
    run = Records(root).all()[-1]
    stored = list(read_trajectories(root / "artifacts" / run.stage("collect[1]").key / "trajectories.parquet"))
    assert [(episode.outcome["reward"], episode.success) for episode in stored] == [(0.0, False), (1.0, True)]
    for episode, trajectory in zip(stored, seen.group, strict=True):
        parts = trajectory.messages_and_choices
        samples = [part.model_extra["sample"] for part in parts if not isinstance(part, dict)]
        samples += [
            history.messages_and_choices[-1].model_extra["sample"] for history in trajectory.additional_histories
        ]
        spans = [
            (history.token_ids[start:end], history.logprobs[start:end], history.token_ids[:start])
            for history in episode.histories
            for start, end in (message.span for message in history.messages if message.span)
        ]
        assert spans == [(one["token_ids"], one["logprobs"], one["prompt_token_ids"]) for one in samples]
    assert [len(episode.histories) for episode in stored] == [1, 2]


def test_a_step_trains_on_the_policy_that_sampled(loop):
    _, seen = loop
    metrics = seen.result.metrics
    assert (seen.result.step, metrics["data/step_num_groups_trainable"]) == (1, 1.0)
    assert metrics["loss/grad_norm"] > 0
    assert metrics["train/sampler_gap"] < 1e-5
    assert "train/off_policy" not in metrics
    assert (Path(seen.result.checkpoint_path) / "adapter_config.json").is_file()


def test_a_step_without_a_signal_counts_and_keeps_the_policy(loop):
    _, seen = loop
    assert (seen.equal.step, seen.equal.checkpoint_path) == (2, seen.result.checkpoint_path)
    assert seen.equal.metrics["data/step_num_groups_trainable"] == 0
    assert math.isfinite(seen.sft[0]["loss/train"])


def test_a_program_that_is_started_again_continues_at_its_step(loop):
    _, seen = loop
    assert seen.steps == [3, 1]
    assert seen.resumed.step == 4
    assert "train/off_policy" not in seen.resumed.metrics
    assert "asked for step 1, but the server has step 3 only" in seen.stale
    assert seen.current == ""


def test_deleted_checkpoints_are_those_that_nobody_needs(loop):
    _, seen = loop
    assert seen.left == [True, False, False]
    assert (Path(seen.copy) / "adapter_config.json").is_file()


def test_what_has_no_equivalent_is_refused_by_name(tmp_path):
    async def refusals():
        model, odd = art_model(), art_model("odd")
        odd._internal_config = {"engine_args": {"enforce_eager": True}, "init_args": {"max_seq_length": 512}}
        async with ArtBackend(tmp_path) as backend, await served(backend, model) as client:
            train = backend.train
            unregistered = await refusal(train(odd, []))
            greedy, plain = await asked(client, model, temperature=0), await asked(client, model)
            streamed = Choice(index=0, finish_reason="stop", message=plain.message)
            written = {"role": "assistant", "content": "yes"}

            async def trained(*answers, **settings) -> str:
                group = [art_trajectory([GREETING, answer], float(n)) for n, answer in enumerate(answers)]
                return await refusal(train(model, [group], **settings))

            return {
                "unregistered": unregistered,
                "engine_args": await refusal(backend.register(odd)),
                "server_args": await refusal(
                    backend._prepare_backend_for_training(model, {"server_args": {"tool_call_parser": "hermes"}})
                ),
                "kimi_k2_tau": await trained(plain, plain, kimi_k2_tau=0.1),
                "unknown": await trained(plain, plain, config=None),
                "loss_fn": await trained(plain, plain, loss_fn="dro"),
                "level": await trained(plain, plain, importance_sampling_level="average"),
                "greedy": await trained(greedy, plain),
                "streamed": await trained(streamed, plain),
                "written": await trained(written, plain),
                "fork": await refusal(backend._experimental_fork_checkpoint(model, "nobody")),
                "s3": await refusal(backend._experimental_pull_model_checkpoint(model, s3_bucket="b")),
                "name": await refusal(backend.register(art_model("../x"))),
                "step": str(await backend._get_step(model)),
                "messages": await trained(written, written, allow_training_without_logprobs=True),
            }

    expected = {
        "unregistered": "odd: is not registered",
        "engine_args": "_internal_config(engine_args.enforce_eager): True: has no equivalent",
        "server_args": "_openai_client_config(tool_call_parser): 'hermes'",
        "kimi_k2_tau": "backend.train(kimi_k2_tau): 0.1: has no equivalent",
        "unknown": "backend.train(config): None",
        "loss_fn": "backend.train(loss_fn): 'dro': expected one of cispo, ppo",
        "level": "'average': expected one of token, sequence",
        "greedy": "trajectory_groups.0.0: sampled with temperature = 0, but training computes probabilities with "
        "collect.temperature = 1",
        "streamed": "a choice has no tokens of the policy, such as one of a stream",
        "written": "has assistant messages, but no choice to train on",
        "fork": "nobody: no checkpoint to begin with; its steps are none",
        "s3": "pull_model_checkpoint(s3_bucket): 'b'",
        "name": "'../x': expected letters",
        "step": "0",
        "messages": "",
    }
    texts = asyncio.run(refusals())
    assert {name: text for name, text in texts.items() if expected[name] not in text} == {}
    assert texts["messages"] == ""


@pytest.mark.skipif(
    not CLIENT.is_dir(), reason="HARNESSES names no folder with ART's client; run `make test-harnesses`"
)
def test_arts_own_client_trains_and_resumes_after_a_kill(tmp_path):
    path = f"{ROOT}:{CLIENT.absolute()}"
    environment = {**os.environ, "PYTHONPATH": path, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [sys.executable, str(Path(__file__).with_name("art_program.py")), str(tmp_path)]
    options: dict = {"env": environment, "cwd": ROOT, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, "99"], stderr=subprocess.DEVNULL, **options) as killed:
        begun = [next(killed.stdout) for _ in range(2)]
        killed.kill()
    ended = subprocess.run([*command, "4"], stderr=subprocess.PIPE, check=False, **options)
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = [line.partition(" ")[::2] for line in [*begun, *ended.stdout.splitlines()]]
    first, again = (json.loads(text) for name, text in printed if name == "begins")
    trained = [json.loads(text) for name, text in printed if name == "trained"]
    assert first == 0
    assert again in (1, 2)  # the kill may come after the next step
    assert [step for step, *_ in trained] == [1, *range(again + 1, 5)]
    for _, metrics, _folder in trained:
        assert "train/off_policy" not in metrics
        assert metrics["loss/grad_norm"] > 0
    lines = (tmp_path / ".art/demo/models/agent-001/history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert {"train/reward", "loss/train"} <= {name for row in history for name in row}
    step, kept = json.loads(printed[-1][1])
    assert step == 5  # after SFT
    assert step in kept
    assert len(kept) <= 2


class Versioned:
    """Engine that answers with its policy when it is let."""

    def __init__(self, policy: str):
        self.policy, self.begun, self.let = policy, asyncio.Event(), asyncio.Event()

    async def chat(self, request: ChatRequest) -> ChatCompletion:
        assert request.policy == self.policy
        self.begun.set()
        await self.let.wait()
        return ChatCompletion({"role": "assistant", "content": ""}, "stop", [1], [2], [-1.0], self.policy)

    def release(self) -> None:
        pass


def test_a_training_waits_for_running_calls_and_lets_new_ones_wait():
    async def program():
        served, old, new = ServedPolicy(), Versioned("a"), Versioned("b")
        new.let.set()
        served.use(old, 0)
        first = asyncio.create_task(served.chat(ChatRequest([])))
        await old.begun.wait()
        order = []

        async def train():
            async with served.replaced():
                order.append("train")
                served.use(new, 1)

        training = asyncio.create_task(train())
        await asyncio.sleep(0.05)
        second = asyncio.create_task(served.chat(ChatRequest([])))
        await asyncio.sleep(0.05)
        assert not order
        assert not new.begun.is_set()
        old.let.set()
        answers = [(await first).policy, (await second).policy]
        await training
        return answers

    assert asyncio.run(program()) == ["a", "b"]
