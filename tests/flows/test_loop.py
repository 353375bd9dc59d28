"""A loop of one's own in Python: its calls are stages, resumed, tracked and compared like those of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import linecache
import math
import sys
import types

import numpy as np
import pytest

from components.errors import JudgeError, SpecError, TooManyFailures
from components.trajectories.chat import ChatFormat
from flows import loop
from flows.history.records import Records
from flows.loop.source import source_of
from flows.reporting.comparison import compare
from tests.http_server import HttpServer

SCENARIOS = [{"id": f"s{number}", "question": f"What is {number}?"} for number in range(2)]
AGENT = ("agent.max_tokens=8",)
SYSTEM = "Answer in one word."


class Played:
    """Rollouts that were really played, and one that fails on demand."""

    ids: list[str] = []
    fails = 0
    """Number of the rollout that fails, from 1; 0: none."""


async def rollout(model, scenario):
    client = model.openai_client()
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": scenario["question"]}]
    answer = await client.chat.completions.create(model=model.inference_name, messages=messages)
    Played.ids.append(scenario["id"])
    if Played.fails == len(Played.ids):
        raise KeyError("order")
    text = answer.choices[0].message.content or ""
    return {"success": len(text) > 4, "reward": len(set(text)) / 8}


def model_at(root, seed: int = 0, more: tuple[str, ...] = ()) -> loop.TrainableModel:
    return loop.TrainableModel("answers", base="tiny", root=root, seed=seed, overrides=[*AGENT, *more])


async def program(root, seed: int = 0, rounds: int = 1):
    Played.ids = []
    async with model_at(root, seed) as model:
        await model.evaluate(rollout, SCENARIOS)
        for _ in range(rounds):
            groups = await loop.gather(loop.group(rollout(model, one) for _ in range(3)) for one in SCENARIOS)
            await model.train(groups, learning_rate=1e-2)
        evaluation = await model.evaluate(rollout, SCENARIOS)
    return model, groups, evaluation


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    root = tmp_path_factory.mktemp("loop")
    first = asyncio.run(program(root))
    count = len(Played.ids)
    again = asyncio.run(program(root))
    return root, first, count, again, len(Played.ids)


def test_calls_of_a_rollout_are_captured_with_their_tokens(played):
    _, (model, groups, _), count, _, _ = played
    assert count == 2 + 6 + 2
    assert [[one.group for one in group] for group in groups] == [["s0"] * 3, ["s1"] * 3]
    for group in groups:
        for episode in group:
            (history,) = episode.histories
            assert [message.content for message in history.messages][:2] == [SYSTEM, episode.scenario.input["question"]]
            start, end = history.messages[-1].span
            assert all(math.isfinite(logprob) for logprob in history.logprobs[start:end])
            assert episode.reward == episode.outcome["reward"]
    assert model.checkpoint.metrics["grad_norm"] > 0


def test_a_program_that_is_started_again_takes_its_stages_from_the_cache(played):
    _, (model, groups, evaluation), _, (other, again, evaluated), count = played
    assert count == 0
    assert (other.checkpoint.digest, evaluated.artifact.key) == (model.checkpoint.digest, evaluation.artifact.key)
    assert [group.rewards for group in groups] == [group.rewards for group in again]


def test_a_loop_is_a_run_among_the_others(played):
    root, *_ = played
    runs = Records(root).all()
    assert [(run.name, run.status) for run in runs] == [("answers", "FINISHED")] * 2
    labels = ["evaluate[start]", "collect[1]", "judge[1]", "filter[1]", "train[1]", "evaluate[1]", "evaluate[final]"]
    assert [stage.label for stage in runs[0].stages] == labels
    assert {stage.status for stage in runs[0].stages} == {"cached"}
    assert runs[0].result["rounds"] == 1
    comparison = compare(root, [run.id for run in runs])
    assert [set(run.evaluations) for run in comparison.runs] == [{"start", "final"}] * 2
    assert comparison.against[0].difference["difference"] == 0


def test_finished_episodes_of_a_failed_collection_are_kept(tmp_path):
    async def collected():
        async with model_at(tmp_path, more=("collect.concurrency=1",)) as model:
            for fails in (2, 0):
                Played.ids, Played.fails = [], fails
                try:
                    await loop.gather([loop.group([rollout(model, one)]) for one in SCENARIOS], max_failures=0)
                except TooManyFailures as error:
                    assert "KeyError: 'order'" in str(error)  # noqa: PT017
                    failed = Played.ids[1]
            return failed

    failed = asyncio.run(collected())
    assert Played.ids == [failed]


def test_each_collection_samples_anew_and_old_groups_train_again(tmp_path, capsys):
    async def trained():
        async with model_at(tmp_path / "runs (1), old") as model:
            collections = []
            for _ in range(2):
                collections.append(await loop.gather([loop.group(rollout(model, SCENARIOS[0]) for _ in range(3))]))
                await model.train(collections[-1], learning_rate=1e-9)
            await model.train(collections[0], learning_rate=1e-3)
            await model.evaluate(rollout, SCENARIOS)
        return collections

    first, second = asyncio.run(trained())
    texts = [[episode.histories[-1].messages[-1].content for episode in group[0]] for group in (first, second)]
    assert set(texts[0]).isdisjoint(texts[1])
    (run,) = Records(tmp_path / "runs (1), old").all()
    assert run.result["rounds"] == 3
    assert "after GRPO" in capsys.readouterr().err


class Waiting:
    episodes = 0


async def waits(model, scenario):
    Waiting.episodes += 1
    await asyncio.sleep(3600)


def test_a_cancelled_collection_ends_with_its_rollouts(tmp_path):
    async def cancelled():
        async with model_at(tmp_path) as model:
            gathering = asyncio.ensure_future(loop.gather([loop.group(waits(model, one) for one in SCENARIOS)]))
            while Waiting.episodes < 2:
                await asyncio.sleep(0.05)
            gathering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await gathering

    asyncio.run(cancelled())


SOURCE = """
LIMIT = {limit}

def helper():
    return LIMIT

async def rollout(model, scenario):
    return helper(){more}

def main():
    return {steps}
"""


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({"steps": 20}, True),  # the rest of a script
        ({"more": "  # a remark"}, True),
        ({"more": " + 1"}, False),
        ({"limit": 4}, False),  # a constant that a helper reads
    ],
)
def test_the_source_of_a_script_counts_as_far_as_the_rollout_names_it(changes, equal):
    def digest(name: str, **changes) -> str:
        text = SOURCE.format(**{"limit": 3, "more": "", "steps": 10, **changes})
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module = types.ModuleType("__main__")
        exec(compile(text, name, "exec"), module.__dict__)
        return source_of(module.rollout.__code__, module.__dict__, {})

    assert (digest("<first>") == digest("<second>", **changes)) is equal


def test_a_function_without_a_source_file_counts_by_its_instructions():
    def digest(suffix: str) -> str:
        module = types.ModuleType("__main__")
        text = f"async def rollout(model, x):\n    return [(lambda: y{suffix}) for y in x]"
        exec(compile(text, "<string>", "exec"), module.__dict__)
        return source_of(module.rollout.__code__, module.__dict__, {})

    assert digest("") == digest("")
    assert digest("") != digest(" + 1")


async def unused(model, scenario, tool=None):
    return 1.0


class Scored:
    groups = 0


async def half_of_the_turns(group):
    Scored.groups += 1
    await asyncio.sleep(0)
    return [len(episode.histories[0].messages) / 2 for episode in group]


def doubled(group):
    for episode in group:
        episode.reward *= 2


def too_few(group):
    return [1.0]


async def numpy_result(model, scenario):
    await rollout(model, scenario)
    return {"success": np.bool_(True), "reward": np.float32(0.5)}


async def leaves(model, scenario):
    await rollout(model, scenario)
    sys.exit(3)


def test_a_function_of_ones_own_scores_each_group_as_a_stage(tmp_path, caplog):
    async def gathered():
        async with model_at(tmp_path) as model:
            rewards = {}
            for score in (half_of_the_turns, doubled, too_few):
                model.gathered = 0  # the same episodes
                groups = [loop.group(numpy_result(model, one) for _ in range(2)) for one in SCENARIOS]
                try:
                    rewards[score.__name__] = [group.rewards for group in await loop.gather(groups, after_each=score)]
                except JudgeError as error:
                    rewards[score.__name__] = str(error)

            async def plain(model, scenario):
                await rollout(model, scenario)
                return 1.0

            await model.evaluate(plain, SCENARIOS)
            with pytest.raises(TooManyFailures, match=r"leaves called sys.exit\(3\)"):
                await loop.gather([loop.group([leaves(model, SCENARIOS[0])])], max_failures=0)
            return rewards

    Scored.groups = 0
    rewards, again = (asyncio.run(gathered()) for _ in range(2))
    assert rewards["half_of_the_turns"] == [[1.5, 1.5]] * 2
    assert rewards["doubled"] == [[1.0, 1.0]] * 2
    assert "too_few returned 1 rewards for 2 trajectories" in rewards["too_few"]
    assert again == rewards
    assert Scored.groups == 2  # the second program takes them from the cache
    assert "plain returns `success` for no episode" in caplog.text


async def _misused(root):
    model = model_at(root)
    started = rollout(model, SCENARIOS[0])
    started.close()
    task = asyncio.ensure_future(asyncio.sleep(0))

    async def fails(work) -> str:
        try:
            value = work()
            await value if asyncio.iscoroutine(value) else value
        except SpecError as error:
            return str(error).replace("\n", " ")
        raise AssertionError("expected SpecError")

    await task
    group = loop.group
    return {
        "closed": await fails(lambda: group([started])),
        "task": await fails(lambda: group([task])),
        "empty": await fails(lambda: group([])),
        "object": await fails(lambda: group([unused(model, SCENARIOS[0], tool=object())])),
        "no model": await fails(lambda: loop.gather([group([unused(None, SCENARIOS[0])])])),
        "sizes": await fails(
            lambda: loop.gather(group(unused(model, one) for _ in range(n)) for n, one in enumerate(SCENARIOS, 1))
        ),
        "two functions": await fails(
            lambda: loop.gather([group([unused(model, 1)]), group([rollout(model, SCENARIOS[0])])])
        ),
        "a group for groups": await fails(lambda: loop.gather(group([unused(model, 1)]))),
        "coroutines for groups": await fails(lambda: loop.gather([unused(model, 1)])),
        "twice": await fails(lambda: loop.gather([group([call, call]) for call in [unused(model, 1)]])),
        "max_failures": await fails(lambda: loop.gather([group([unused(model, 1)])], max_failures=-1)),
        "after_each": await fails(lambda: loop.gather([group([unused(model, 1)])], after_each="openai/o3")),
        "partial": await fails(lambda: model_at(root, more=("collect.partial={turns: 2}",))),
        "rounds": await fails(lambda: model_at(root, more=("rounds=3",))),
        "one text": await fails(lambda: loop.TrainableModel("answers", root=root, overrides="agent.max_tokens=8")),
        "outside": await fails(lambda: model.api_key),
        "algorithm": await fails(lambda: model.train([[loop.Transcript(reward=1.0)]], algorithm="grpoo")),
        "setting": await fails(lambda: model.train([[loop.Transcript(reward=1.0)]], learning_rat=1)),
        "one member": await fails(lambda: model.train([[loop.Transcript(reward=1.0)]])),
        "no reward": await fails(lambda: model.train([[loop.Transcript()]])),
        "not played": await fails(lambda: model.train([group([unused(model, 1)])])),
        "samples": await fails(lambda: model.evaluate(unused, SCENARIOS, samples=2)),
    }


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_mistake_is_refused_with_its_remedy(tmp_path):
    refusals = asyncio.run(_misused(tmp_path))
    expected = {
        "closed": "rollout: the coroutine has ended; expected one that was neither awaited nor made a task",
        "task": "Task: expected coroutines, loop.group(rollout(model, scenario) for _ in range(8)), or trajectories",
        "empty": "loop.group: no members; expected at least one",
        "object": "unused(tool): object: its content cannot be part of the key",
        "no model": "0 models among the arguments of unused; expected one TrainableModel",
        "sizes": "groups of different sizes (1 of 1 and 1 of 2); expected the same number in each",
        "two functions": "2 rollout functions (rollout, unused)",
        "a group for groups": "loop.gather: Call where a group was expected; expected [loop.group(",
        "coroutines for groups": "loop.gather: coroutine where a group was expected",
        "twice": "a call of unused occurs twice, or was gathered before; expected a new call",
        "max_failures": "collect.max_failures: -1: expected at least 0",
        "after_each": "loop.gather(after_each): str; expected a function of a group",
        "partial": "collect.partial: has no effect in a loop",
        "rounds": "rounds=3: rounds has no effect in a loop",
        "one text": "'agent.max_tokens=8': a text; expected a list, overrides=['agent.max_tokens=8']",
        "outside": "model.api_key: exists within a rollout that gather or evaluate plays",
        "algorithm": "Did you mean 'algorithm=grpo'?",
        "setting": "Did you mean 'algorithm.learning_rate'?",
        "one member": "collect.group_size: 1",
        "no reward": "no trajectory has a reward; set trajectory.reward, or use loop.ruler_score",
        "not played": "a group that was not played; await loop.gather(...) first",
        "samples": "evaluate.temperature=0",
    }
    assert {name: text for name, text in refusals.items() if expected[name] not in text} == {}


def test_a_rollout_that_calls_nothing_is_a_failed_episode(tmp_path):
    async def collected():
        async with model_at(tmp_path, more=("collect.concurrency=1",)) as model:
            await loop.gather([loop.group([unused(model, one)]) for one in SCENARIOS])

    with pytest.raises(TooManyFailures, match="made no call of the policy"):
        asyncio.run(collected())


def talk(answer: str, reward: float | None = None) -> loop.Transcript:
    return loop.Transcript([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}], reward)


def test_messages_alone_are_tokenized_once_with_a_warning(tmp_path, caplog):
    async def trained():
        async with model_at(tmp_path) as model:
            group = loop.group([talk("yes", 1.0), talk("no, never", 0.0)])
            checkpoint = await model.train([group], learning_rate=1e-3)
        return model, checkpoint

    model, checkpoint = asyncio.run(trained())
    assert "2 of 2 trajectories have messages only and are tokenized" in caplog.text
    assert checkpoint.metrics["grad_norm"] > 0
    (run,) = Records(tmp_path).all()
    folder = model.context.store.find(run.stage("collect[1]").key).path
    from components.models.weights import load_tokenizer, prepare
    from components.trajectories.store import read_trajectories

    chat = ChatFormat(load_tokenizer(prepare(model.spec.model, model.context.cache)))
    for episode, answer in zip(read_trajectories(folder / "trajectories.parquet"), ("yes", "no, never"), strict=True):
        (history,) = episode.histories
        start, end = history.messages[-1].span
        assert chat.tokenizer.decode(history.token_ids[start:end], skip_special_tokens=True) == answer
        assert all(map(math.isnan, history.logprobs))


class Judge(HttpServer):
    """Judge that scores the first episode 1 and the others 0, for each request."""

    def answer(self, method, path, body, headers):
        if path == "/v1/models":
            return 200, {"data": [{"id": "critic"}]}
        request = json.loads(body)
        names = request["response_format"]["json_schema"]["schema"]["properties"]["scores"]["required"]
        scores = {name: {"score": float(number == 0), "explanation": "."} for number, name in enumerate(names)}
        message = {"role": "assistant", "content": json.dumps({"scores": scores})}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("form", ["url", "data"])
def test_ruler_score_judges_trajectories_and_keeps_their_reward(form, asynchronous):
    group = loop.group([talk("yes", 0.25), talk("no"), talk("never", 0.75)])
    with Judge() as server:
        url = f"{server.url}/v1"
        judge = url if form == "url" else {"name": "served", "url": url, "model": "critic"}
        scored = asyncio.run(loop.ruler_score_async(group, judge)) if asynchronous else loop.ruler_score(group, judge)
    assert sorted(scored.rewards) == [0.0, 0.0, 1.0]
    assert [one.metrics.get("independent_reward") for one in scored] == [0.25, None, 0.75]
    assert group.rewards == [0.25, None, 0.75]


def test_a_judge_that_cannot_be_used_is_refused_at_once():
    for judge, text in (
        ({"name": "served", "modell": "critic", "url": "http://127.0.0.1:1/v1"}, "Did you mean 'judge.model'?"),
        ("o3", "judge.model: 'o3'"),
        (3, "int: expected a name of LiteLLM"),
        ({"name": "policy"}, "computes with a loaded model"),
    ):
        with pytest.raises(SpecError) as refusal:
            loop.ruler_score([talk("yes"), talk("no")], judge)
        assert text in str(refusal.value)
