"""Collections of a loop as stages: `gather`, `evaluate`, and groups of trajectories of one's own.

The key of a collection is that of the stages `collect` and `evaluate`: the policy, the sampling settings, the content
of the scenarios, the source of the rollout function, the number of episodes of each scenario, the seed, and for
`gather` its number among those of the same policy. Equal calls in the same order are therefore cached, and an
interrupted one continues with the episodes that had not ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.artifacts.keys import json_digest
from components.errors import AgentError, SpecError
from components.evaluation.spec import EvaluateSpec
from components.rollout.collect_spec import CollectSpec
from components.specs import Target, validate
from components.trajectories import schema
from components.trajectories.groups import separate
from components.trajectories.schema import Scenario
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.loop.art_trajectories import transcript_of
from flows.loop.groups import Call, GatheredGroups, RolloutGroup, Transcript, digest_of, group
from flows.loop.policy import EPISODE, EpisodeEndpoint, LoopPolicy, with_program
from flows.loop.source import function_source
from flows.stages.base import Request

if TYPE_CHECKING:
    from components.trajectories.chat import ChatFormat

logger = logging.getLogger(__name__)


@dataclass
class Planned:
    """Calls of a rollout that one stage plays, as `components.rollout.program.RolloutProgram`."""

    model: LoopPolicy
    members: dict[str, RolloutGroup]
    """Calls by the id of their scenario, in the order of the program."""
    scenarios: Sequence[Scenario]
    max_failures: float | None
    digest: str
    own_reward: Callable[[RolloutGroup], Any] | None = None
    """Function of the program that scores each group; None: the reward of the stage `judge` does."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._collector: asyncio.AbstractEventLoop | None = None

    def _spec(self, **changes: Any) -> ExperimentSpec:
        first = next(iter(self.members.values()))[0]
        return with_program(self.model.spec, self.digest, first.name, first.source, **changes)

    async def play(self, scenario: Scenario, sample: int, base_url: str, api_key: str) -> Any:
        """Play a member in the event loop of the program, on behalf of the collector's."""
        call, self._collector = self.members[scenario.id][sample], asyncio.get_running_loop()
        future = asyncio.run_coroutine_threadsafe(self._play(call, base_url, api_key), self._loop)
        return await asyncio.wrap_future(future)

    async def _play(self, call: Call, base_url: str, api_key: str) -> Any:
        EPISODE.set(EpisodeEndpoint(base_url, api_key))
        try:
            return outcome_of(await call.coroutine)
        except SystemExit as error:  # would end the event loop of the program
            raise AgentError(f"{call.name} called sys.exit({error.code!r})") from error

    async def score(self, group: Sequence[schema.Trajectory]) -> list[Any]:
        """Return the rewards of a group by `own_reward`, called in the event loop of the program, or in a thread."""
        function, members = (
            self.own_reward,
            RolloutGroup(replace(episode, reward=episode.outcome.get("reward")) for episode in group),
        )
        assert function is not None
        self._collector = asyncio.get_running_loop()

        async def scored() -> Any:
            result = await asyncio.to_thread(function, members)
            return await result if inspect.isawaitable(result) else result

        returned = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(scored(), self._loop))
        return [getattr(member, "reward", member) for member in (members if returned is None else returned)]

    def wake(self) -> None:
        """Wake the collector's event loop, which waits for the rollouts, so that its thread sees an interrupt."""
        if self._collector is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._collector.call_soon_threadsafe(lambda: None)

    async def gather(self, number: int, after_each: Target | None) -> GatheredGroups:
        """Collect the episodes and judge them. number: of the collection among those of the model, from 0."""
        model = self.model
        changes: dict[str, Any] = {"scenarios": len(self.members)}
        changes["group_size"] = len(next(iter(self.members.values())))
        if self.max_failures is not None:
            changes["max_failures"] = self.max_failures
        collect = validate(CollectSpec, {**model.spec.collect.model_dump(), **changes}, path="collect")
        requests = Requests(self._spec(collect=collect, reward=after_each or model.spec.reward))
        step, before = model.step + 1, number - model.first_gathered
        name = f"{step}.{before}" if before else f"{step}"

        def work() -> GatheredGroups:
            request = requests.collect(model.checkpoint, number + 1)
            collected = model.run.stage(f"collect[{name}]", step, request)
            scores = model.run.stage(f"judge[{name}]", step, requests.judge(collected, model.checkpoint))
            return _read(collected, scores, list(self.members))

        return await self._closing(work)

    async def evaluate(self, name: str | None, temperature: float) -> Artifact:
        """Evaluate the policy on the scenarios."""
        model, samples = self.model, len(next(iter(self.members.values())))
        changes = {"temperature": temperature, "samples": samples, "scenarios": len(self.members)}
        evaluate = validate(EvaluateSpec, {**model.spec.evaluate.model_dump(), **changes}, path="evaluate")
        request = Requests(self._spec(evaluate=evaluate)).evaluate(model.checkpoint)
        return await self._closing(lambda: model.run.evaluate(name, model.step, request))

    async def _closing(self, work: Any) -> Any:
        try:
            return await self.model.run.do(work, self)
        finally:
            for call in (call for calls in self.members.values() for call in calls):
                if inspect.getcoroutinestate(call.coroutine) == inspect.CORO_CREATED:  # others are cancelled
                    call.coroutine.close()


async def gather(
    groups: Iterable[Any], after_each: Any, max_failures: float | None, model: LoopPolicy | None = None
) -> GatheredGroups:
    """Return the played groups (`flows.loop.gather`). model: None takes that of the calls."""
    own = after_each if inspect.isfunction(after_each) else None
    if own is not None:
        names = {"name": own.__qualname__.rpartition(".")[2], "source": function_source(own)}
        after_each = Target.model_validate({"_target_": "components.rollout.program.ProgramReward", **names})
    if after_each is not None and not isinstance(after_each, Target):
        text = (
            f"{type(after_each).__name__}; expected a function of a group that returns its rewards, "
            "loop.ruler(judge), or another reward as components.specs.Target"
        )
        raise SpecError.at("loop.gather(after_each)", text)
    calls = planned(model, groups, max_failures)
    calls.own_reward = own
    number, calls.model.gathered = calls.model.gathered, calls.model.gathered + 1
    try:
        return await calls.gather(number, after_each)
    except BaseException:
        if calls.model.gathered == number + 1:  # the same call again continues this collection
            calls.model.gathered = number
        raise


def planned(
    model: LoopPolicy | None, groups: Iterable[Any], max_failures: float | None, *, heldout: bool = False
) -> Planned:
    """Return the calls of groups as one collection. model: None takes that of the calls. Raises SpecError for groups of
    different sizes or functions, and for calls without a model."""
    listed = [
        members if isinstance(members, RolloutGroup) else group(members)
        for members in groups_of("loop.gather", groups, "[loop.group(rollout(model, scenario) for _ in range(8))]")
    ]
    calls = [call for members in listed for call in members]
    if not calls:
        raise SpecError.at("loop.gather", "no groups; expected at least one")
    if not all(isinstance(call, Call) for call in calls):
        text = "a group of trajectories has been played already; pass it to model.train, or to loop.ruler_score"
        raise SpecError.at("loop.gather", text)
    if (used := begun(calls)) is not None:
        text = (
            f"a call of {used.name} occurs twice, or was gathered before; expected a new call, rollout(model, scenario)"
        )
        raise SpecError.at("loop.gather", text)
    try:
        models = {id(policy): policy for call in calls if (policy := model or call.model) is not None}
        if len(models) != 1:
            text = f"{len(models)} models among the arguments of {calls[0].name}; expected one TrainableModel"
            raise SpecError.at("loop.gather", f"{text}, as in rollout(model, scenario)")
        _check(listed)
        scenarios = _scenarios(listed, "heldout" if heldout else "train")
        content = [
            [scenario.id, [call.arguments for call in members]]
            for scenario, members in zip(scenarios, listed, strict=True)
        ]
        by_id = {scenario.id: members for scenario, members in zip(scenarios, listed, strict=True)}
        return Planned(next(iter(models.values())), by_id, scenarios, max_failures, json_digest(content))
    except SpecError:
        for call in calls:
            call.coroutine.close()
        raise


def _check(groups: Sequence[RolloutGroup]) -> None:
    sizes = Counter(map(len, groups))
    if len(sizes) > 1:
        text = " and ".join(f"{count} of {size}" for size, count in sorted(sizes.items()))
        raise SpecError.at("loop.gather", f"groups of different sizes ({text}); expected the same number in each")
    functions = {(call.name, call.source) for members in groups for call in members}
    if len(functions) > 1:
        names = ", ".join(sorted({name for name, _ in functions}))
        raise SpecError.at(
            "loop.gather",
            f"{len(functions)} rollout functions ({names}), or one with different variables around it; expected one. "
            "Pass what differs as an argument, or gather each by itself",
        )


def _scenarios(groups: Sequence[RolloutGroup], split: str) -> list[Scenario]:
    """Return the scenario of each group, with unique ids: a repeated one gets its number."""
    counts: Counter[str] = Counter()
    scenarios = []
    for members in groups:
        scenario = members[0].scenario(split)
        counts[scenario.id] += 1
        if counts[scenario.id] > 1:
            scenario = replace(scenario, id=f"{scenario.id}#{counts[scenario.id]}")
        scenarios.append(scenario)
    return scenarios


def groups_of(where: str, groups: Any, expected: str) -> Iterator[Iterable[Any]]:
    """Yield the groups of an argument. Raises SpecError for what is not a group."""
    for members in groups if isinstance(groups, Iterable) else [groups]:
        if isinstance(members, str) or not isinstance(members, Iterable):
            if inspect.iscoroutine(members):
                members.close()
            raise SpecError.at(where, f"{type(members).__name__} where a group was expected; expected {expected}")
        yield members


def begun(calls: Sequence[Call]) -> Call | None:
    """Return a call that was played before, or that occurs twice; None if there is none."""
    counts = Counter(id(call.coroutine) for call in calls)
    for call in calls:
        if counts[id(call.coroutine)] > 1 or inspect.getcoroutinestate(call.coroutine) != inspect.CORO_CREATED:
            return call
    return None


def outcome_of(returned: Any) -> Any:
    """Return what a rollout returned as what a custom agent returns. A success without a reward is the reward."""
    if isinstance(returned, dict):
        returned = {name: _plain(value) for name, value in returned.items()}
    returned = _plain(returned)
    if isinstance(returned, bool):
        return {"success": returned, "reward": float(returned)}
    if isinstance(returned, Transcript):
        return returned.episode()
    if hasattr(returned, "messages_and_choices"):  # of ART
        return transcript_of(returned).episode()
    if isinstance(returned, dict) and isinstance(returned.get("success"), Real):
        return {"reward": float(returned["success"]), **returned}
    return returned


def _plain(value: Any) -> Any:
    """Return a number of NumPy or torch as one of Python."""
    return value.item() if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0 else value


def _read(collected: Artifact, scores: Artifact, order: Sequence[str]) -> GatheredGroups:
    """Return the episodes with their rewards, in the order of the program's groups."""
    from components.trajectories.store import load_scored

    groups: dict[str, RolloutGroup] = {name: RolloutGroup() for name in order}
    for episode in load_scored(collected.path / "trajectories.parquet", scores.path / "scores.parquet", None):
        groups[episode.group].append(episode)
    policy = collected.inputs.get("policy", "")
    return GatheredGroups(list(groups.values()), collected, scores, policy)


def own_groups(groups: Iterable[Iterable[Any]]) -> list[RolloutGroup]:
    """Return groups of trajectories of one's own, each in a group of its own with unique ids. Raises SpecError without
    trajectories, or without rewards."""
    result: list[RolloutGroup] = []
    for number, members in enumerate(groups_of("model.train", groups, "a list of groups")):
        episodes = []
        for sample, member in enumerate(members):
            if isinstance(member, Call):
                raise SpecError.at("model.train", "a group that was not played; await loop.gather(...) first")
            scenario = Scenario(f"own-{number}", {}, "train")
            episode = member.episode(scenario, sample) if isinstance(member, Transcript) else member
            if not isinstance(episode, schema.Trajectory):
                kind = type(episode).__name__
                raise SpecError.at(
                    "model.train", f"{kind} in a group; expected trajectories of gather, or loop.Transcript"
                )
            episodes.append(separate(replace(episode, sample=sample), f"@{number}"))
        if episodes:
            result.append(RolloutGroup(episodes))
    if not result:
        raise SpecError.at("model.train", "no trajectories; expected the groups of loop.gather, or of loop.Transcript")
    if all(episode.reward is None for members in result for episode in members):
        raise SpecError.at("model.train", "no trajectory has a reward; set trajectory.reward, or use loop.ruler_score")
    return result


def artifacts_of(
    model: LoopPolicy, groups: GatheredGroups | list[RolloutGroup], number: int, *, exact: bool
) -> tuple[Artifact, Artifact]:
    """Return the trajectories and the scores that a training reads. exact: the algorithm needs token ids, so
    conversations of messages only are tokenized. Called in the thread of the stages."""
    written = [episode for members in groups for episode in members if exact and _without_tokens(episode)]
    if isinstance(groups, GatheredGroups) and not written:
        return groups.trajectories, groups.scores
    episodes = [episode for members in groups for episode in members]
    if written:
        logger.warning(
            "%d of %d trajectories have messages only and are tokenized by the chat template of %s: their tokens may "
            "differ from those that were sampled, and the ratio to the policy that sampled them is taken as 1. Send "
            "the calls through model.openai_client() to train on the exact tokens",
            *(len(written), len(episodes), model.spec.model.name),
        )
        chat = _chat(model)
        episodes = [_tokenized(episode, chat) if _without_tokens(episode) else episode for episode in episodes]
    return _store(model, episodes, number)


def _without_tokens(episode: schema.Trajectory) -> bool:
    histories = [h for h in episode.histories if any(message.role == "assistant" for message in h.messages)]
    return episode.failure is None and bool(histories) and not any(history.token_ids for history in histories)


def _chat(model: LoopPolicy) -> ChatFormat:
    from components.models.weights import load_tokenizer, prepare
    from components.trajectories.chat import ChatFormat

    return ChatFormat(load_tokenizer(prepare(model.spec.model, model.context.cache)))


def _tokenized(episode: schema.Trajectory, chat: ChatFormat) -> schema.Trajectory:
    """Return the episode with the tokens that a rollout with its messages would have, of unknown log-probability."""
    from components.trajectories.convert import to_openai

    histories = []
    for history in episode.histories:
        answers = iter([message for message in history.messages if message.role == "assistant"])
        for stream in chat.streams([to_openai(message) for message in history.messages], episode.tools, final=True):
            sampled = [replace(next(answers), span=span, finish_reason="stop") for span in stream.spans]
            ids = list(stream.token_ids)
            histories.append(schema.History(sampled, ids, [float("nan")] * len(ids), history.agent))
    return replace(episode, histories=histories)


def _store(model: LoopPolicy, episodes: list[schema.Trajectory], number: int) -> tuple[Artifact, Artifact]:
    """Store trajectories of one's own as the stages `collect` and `judge`; their key is their content."""
    from components.trajectories.store import write_trajectories
    from flows.stages.episodes import figures, write_times
    from flows.stages.execute import make_stage

    def write(spec: Any, inputs: Any, draft: Any, context: Any) -> dict[str, float]:
        outcomes = [{**episode.outcome, "reward": episode.reward} for episode in episodes]
        stored = [replace(episode, outcome=outcome) for episode, outcome in zip(episodes, outcomes, strict=True)]
        write_trajectories(draft.path / "trajectories.parquet", stored)
        write_times(draft.path / "times.json", {})
        return figures(stored)

    requests = Requests(with_program(model.spec, digest_of([episodes]), "trajectories"))
    request: Request = requests.collect(None, 1)
    make_stage(request, model.context, write)
    name = f"{number}.own" if f"collect[{number}]" in model.run.execution().done else f"{number}"
    collected = model.run.stage(f"collect[{name}]", number, request)
    return collected, model.run.stage(f"judge[{name}]", number, requests.judge(collected))
