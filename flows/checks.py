"""What of an experiment only makes sense together: an algorithm and the episodes that it gets, an environment and the
splits that are asked of it.

Each check names in its signature the parts of `flows.spec.ExperimentSpec` that it looks at, and is asked where all of
them are valid by themselves. The checks build the environment, which is light by its protocol, and nothing else; no
model is loaded. Whether weights can be had is not known here: `components.models.weights.check_weights` looks for them
before the first stage.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.algorithms.spec import (
    DistillSpec,
    EWCSpec,
    GRPOSpec,
    PairSpec,
    PolicyGradientSpec,
    PPOSpec,
    ProcessRewardModelSpec,
    ReplaySpec,
)
from components.environments.protocol import Environment
from components.errors import ArtifactError, Problem, SpecError
from components.evaluation.spec import EvaluateSpec
from components.filters.everything import Everything
from components.filters.signal import Signal
from components.inference.spec import EmbeddedSpec, InferenceSpec, RemoteSpec
from components.models.spec import ModelSpec
from components.rollout.collector import choose_scenarios
from components.rollout.spec import AgentSpec, CollectSpec
from components.specs import Target
from components.trajectories.schema import Scenario
from components.trajectories.step_labels import CONTINUED
from flows.guards import GuardsSpec
from flows.stopping import EarlyStoppingSpec

if TYPE_CHECKING:
    from flows.spec import RewardModelPartSpec, WarmupSpec

TRAIN = "train"
"""Split from which episodes for training are collected."""


def problems(parts: Mapping[str, Any]) -> Iterator[Problem]:
    """All that does not go together in the valid parts of an experiment, by name."""
    for check in CHECKS:
        names = list(inspect.signature(check).parameters)
        if all(name in parts for name in names):
            yield from check(**{name: parts[name] for name in names})


def _algorithm(algorithm: Any, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    if rounds == 0:
        return
    if isinstance(algorithm, PairSpec) and collect.group_size == 1:
        yield Problem(
            "collect.group_size",
            f"1: {algorithm.name} compares two episodes of a scenario; expected at least 2, or kto",
        )
    if not isinstance(algorithm, PolicyGradientSpec):
        return
    if collect.group_size == 1 and _compares(algorithm):
        yield Problem(
            "collect.group_size",
            f"1: {algorithm.name} compares the episodes of a group with each other; expected at least 2, or another "
            "algorithm or algorithm.baseline",
        )
    if collect.scenarios % algorithm.minibatches:
        divisors = [n for n in range(1, collect.scenarios + 1) if collect.scenarios % n == 0]
        yield Problem(
            "algorithm.minibatches",
            f"{algorithm.minibatches} does not divide collect.scenarios={collect.scenarios}; "
            f"expected one of {', '.join(map(str, divisors))}",
        )
    if collect.temperature == 0:
        yield Problem(
            "collect.temperature",
            "0 samples nothing: greedy choices have no probability to learn from; expected more than 0",
        )
    if algorithm.overlong_buffer > algorithm.overlong:
        yield Problem(
            "algorithm.overlong_buffer",
            f"{algorithm.overlong_buffer} is more than algorithm.overlong={algorithm.overlong}, where it ends",
        )
    if isinstance(algorithm, PPOSpec) and algorithm.kl_target is not None and not algorithm.kl_coefficient:
        yield Problem(
            "algorithm.kl_target",
            f"{algorithm.kl_target:g} steers algorithm.kl_coefficient by a factor, and 0 stays 0; expected null, or an "
            "algorithm.kl_coefficient above 0",
        )


def _compares(algorithm: Any) -> bool:
    """Whether the episodes of a group are compared with each other."""
    grouped = isinstance(algorithm, GRPOSpec) and algorithm.baseline in ("group", "leave_one_out")
    return grouped or isinstance(algorithm, PairSpec)


def _agent(agent: AgentSpec, environment: Target, algorithm: Any, rounds: int) -> Iterator[Problem]:
    if agent.format != "native" and environment.arguments.get("format") == agent.format == "react":
        yield Problem(
            "agent.format",
            "react: the environment reads Thought and Action itself (environment.format=react); expected native, or "
            "environment.format=tool",
        )
    if agent.code is not None and agent.format != "code":
        yield Problem("agent.code", f"limits code that agent.format={agent.format} does not write; expected null")
    if agent.roles is not None:
        if agent.function is not None:
            yield Problem("agent.roles", "given, and agent.function plays as it likes; expected null")
        if agent.format in ("chat", "code"):
            yield Problem("agent.format", f"{agent.format}: a worker acts by calls of tools; expected native or react")
        if rounds and getattr(algorithm, "credit", "episode") == "turns":
            yield Problem(
                "algorithm.credit",
                "turns: those of planner and workers (agent.roles) do not stand in the order of time; expected episode",
            )
    if agent.function is None:
        return
    if agent.format != "native":
        yield Problem("agent.format", f"{agent.format}: is for the loop, and agent.function writes as it likes")
    if agent.max_observation != AgentSpec().max_observation:
        yield Problem(
            "agent.max_observation",
            f"{agent.max_observation}: cuts what the loop shows, and agent.function reads its environment itself; "
            f"expected {AgentSpec().max_observation}",
        )


def _ways(
    collect: CollectSpec, agent: AgentSpec, environment: Target, algorithm: Any, rounds: int
) -> Iterator[Problem]:
    """Other ways of playing than each episode once."""
    played = collect.opponent != "environment"
    ways = ("reflection", "continuations", "teacher")
    given = [*(name for name in ways if getattr(collect, name)), *["opponent"] * played]
    if collect.teacher is not None and rounds and isinstance(algorithm, PolicyGradientSpec):
        yield Problem(
            "collect.teacher",
            f"{algorithm.name} learns from what the policy itself sampled; expected null, or algorithm=sft, distill or "
            "a preference algorithm",
        )
    if collect.teacher is not None and collect.teacher.samples > collect.group_size:
        yield Problem(
            "collect.teacher.samples",
            f"{collect.teacher.samples} of {collect.group_size} episodes (collect.group_size); expected no more",
        )
    if played and "opponent" not in inspect.signature(environment.factory()).parameters:
        yield Problem(
            "collect.opponent",
            f"{collect.opponent}: {environment.target} takes no `opponent`; expected environment, or a game whose "
            "both sides can be played, such as environment=tictactoe",
        )
    if environment.arguments.get("opponent") == "agent":
        yield Problem(
            "environment.opponent",
            "agent leaves a side to be played, in evaluations too; expected another, and collect.opponent=policy or "
            "base for the rounds",
        )
    if agent.function is not None:
        for name in given:
            yield Problem(
                f"collect.{name}", "is a way of the agent loop, and agent.function plays as it likes; expected it unset"
            )
    for name in sorted({*given} - {"reflection", "teacher"}):
        if agent.format == "code":
            yield Problem(
                f"collect.{name}",
                "goes on from single actions, and a block of agent.format=code may be many; expected another format",
            )
    if agent.roles is not None:
        for name in sorted({*given} - {"reflection", "teacher"}):
            yield Problem(
                f"collect.{name}", "is played by one agent, and agent.roles are several; expected roles: null"
            )
    if len(given) > 1:
        yield Problem(f"collect.{given[1]}", f"does not go together with collect.{given[0]}; expected one of them")
    if collect.reflection and collect.reflection.demonstrate and rounds and isinstance(algorithm, PolicyGradientSpec):
        yield Problem(
            "collect.reflection.demonstrate",
            f"true: demonstrations are text, and {algorithm.name} learns from sampled tokens alone; expected false, or "
            "algorithm=sft, distill or a preference algorithm",
        )


def _weights(model: ModelSpec, inference: InferenceSpec, algorithm: Any, rounds: int) -> Iterator[Problem]:
    """What needs an adapter, where all weights are trained; and what a rounded base does not go with."""
    if model.quantization != "none":
        if model.lora is None:
            yield Problem(
                "model.quantization",
                f"{model.quantization}: weights in four bits cannot be trained; expected none, or a rank in model.lora",
            )
        if isinstance(inference, RemoteSpec):
            yield Problem(
                "model.quantization",
                f"{model.quantization}: the server of inference.url does not sample from the rounded weights that are "
                "trained on; expected none, or inference=embedded",
            )
    if model.lora is not None:
        return
    if isinstance(inference, RemoteSpec):
        yield Problem(
            "model.lora",
            "null: a server of inference.url is given adapters, not weights; expected a rank, or inference=embedded",
        )
    if rounds and isinstance(algorithm, PPOSpec) and algorithm.value == "model":
        yield Problem(
            "algorithm.value",
            "model: is an adapter beside the policy's, and with model.lora=null there is none; expected head",
        )


def _signal(filter: Target, algorithm: Any, collect: CollectSpec, rounds: int) -> Iterator[Problem]:
    if rounds and collect.group_size == 1 and not _compares(algorithm) and filter.factory() is Signal:
        yield Problem(
            "filter",
            "signal keeps groups whose rewards differ, and with collect.group_size=1 none do; expected "
            "filter=everything, or a collect.group_size of at least 2",
        )
    elif rounds and filter.factory() is Signal and (isinstance(algorithm, DistillSpec) or _limits(algorithm)):
        what = (
            "learns from no reward" if isinstance(algorithm, DistillSpec) else "has costs, in which groups differ too"
        )
        yield Problem(
            "filter",
            f"signal keeps groups whose rewards differ, and {algorithm.name} {what}; expected filter=everything",
        )
    if rounds and collect.refills and filter.factory() is Everything:
        yield Problem(
            "collect.refills",
            f"{collect.refills} replace scenarios that the filter leaves out, and filter=everything leaves out none; "
            "expected 0, or filter=signal",
        )


def _overlap(
    collect: CollectSpec, algorithm: Any, replay: ReplaySpec | None, reward_model: RewardModelPartSpec | None
) -> Iterator[Problem]:
    """What must not learn from a policy one version behind, or has not been told how."""
    if not collect.overlap:
        return
    if isinstance(algorithm, PolicyGradientSpec) and algorithm.correction == "none":
        yield Problem(
            "algorithm.correction",
            "none: with collect.overlap=1 a round is played by a policy one version behind the one in training, and "
            "where they differ the clip cuts what is learned; expected truncate or mask, or collect.overlap=0",
        )
    if replay is not None and replay.max_staleness == 0:
        yield Problem(
            "replay.max_staleness",
            "0: drops every round that collect.overlap=1 has played, which is one version old; expected at least 1",
        )
    if reward_model is not None and reward_model.every:
        yield Problem(
            "reward_model.every",
            f"{reward_model.every}: a round that collect.overlap=1 has judged during a training cannot be judged by "
            "the reward models that are trained after it; expected 0, or collect.overlap=0",
        )


def _limits(algorithm: Any) -> bool:
    return bool(getattr(algorithm, "costs", None))


def _held_out(
    evaluate: EvaluateSpec, early_stopping: EarlyStoppingSpec | None, guards: GuardsSpec
) -> Iterator[Problem]:
    if evaluate.every:
        return
    need = "evaluations in the rounds, and evaluate.every=0 makes none; expected evaluate.every=1 or more"
    if early_stopping is not None:
        yield Problem("early_stopping", f"needs {need}")
    if guards.reward_hacking == "stop":
        yield Problem("guards.reward_hacking", f"stop needs {need}")


def _inference(inference: InferenceSpec, rounds: int) -> Iterator[Problem]:
    if isinstance(inference, RemoteSpec) and not inference.tokens and rounds:
        yield Problem(
            "inference.tokens",
            f"false, and rounds={rounds} train on what is collected; expected true, or rounds=0",
        )


def _lengths(agent: AgentSpec, model: ModelSpec) -> Iterator[Problem]:
    if agent.max_tokens >= model.max_length:
        yield Problem(
            "agent.max_tokens",
            f"{agent.max_tokens} leaves no room for a prompt in model.max_length={model.max_length}; expected less",
        )


def _local_model(model: ModelSpec) -> Iterator[Problem]:
    if model.source != "hub" or Path(model.name).is_dir():
        return
    if model.name.startswith(("/", ".", "~")) or model.name.count("/") > 1:
        yield Problem(
            "model.name", f"there is no folder {model.name!r}; expected one, or a name on the Hugging Face hub"
        )


def _reward(reward: Target) -> Iterator[Problem]:
    thing = reward.factory()
    if inspect.isclass(thing) and not {"__call__", "score_group"} & set(dir(thing)):
        yield Problem("reward._target_", f"{reward.target} can score nothing; expected `__call__` or `score_group`")


def _refresh(reward_model: RewardModelPartSpec | None, rounds: int, guards: GuardsSpec) -> Iterator[Problem]:
    if reward_model is None:
        return
    every = reward_model.every
    if every >= max(rounds, 1):
        most = f"at most {rounds - 1}, or 0" if rounds > 1 else "0"
        yield Problem("reward_model.every", f"{every}: with rounds={rounds} no round comes after it; expected {most}")
    if not every and reward_model.keep != "all":
        yield Problem(
            "reward_model.keep",
            f"{reward_model.keep}: says what is trained on again after rounds, and every=0 trains once; expected all, "
            "or reward_model.every=1 or more",
        )
    if every == 1 and guards.reward_hacking == "stop":
        yield Problem(
            "guards.reward_hacking",
            "stop compares the training rewards of rounds that the same reward model judged, and reward_model.every=1 "
            "leaves no two of them; expected off or warn, or reward_model.every=2 or more",
        )


def _reward_model(
    reward_model: RewardModelPartSpec | None,
    collect: CollectSpec,
    inference: InferenceSpec,
    algorithm: Any,
    agent: AgentSpec,
) -> Iterator[Problem]:
    if reward_model is None:
        return
    trained = reward_model.algorithm
    if reward_model.continuations and not (CONTINUED in trained.heads and isinstance(trained, ProcessRewardModelSpec)):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations} label steps, and no head learns them; expected 0, or reward_model=process "
            f"with reward_model.algorithm.heads={{{CONTINUED}: 1.0}}",
        )
    if CONTINUED in trained.heads and not reward_model.continuations:
        yield Problem(
            "reward_model.algorithm.heads",
            f"{CONTINUED} learns the labels of continuations, and reward_model.continuations=0 makes none; expected 1 "
            "or more",
        )
    if reward_model.continuations and (agent.function is not None or agent.roles is not None):
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: go on from a step of the agent loop, and agent.function or agent.roles "
            "play in its place; expected 0",
        )
    if reward_model.continuations and agent.format == "code":
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: go on from single actions, and a block of agent.format=code may be many; "
            "expected 0, or another format",
        )
    if reward_model.continuations and collect.opponent != "environment":
        yield Problem(
            "reward_model.continuations",
            f"{reward_model.continuations}: go on against the environment's opponent; expected 0, or "
            "collect.opponent=environment",
        )
    by_turn = isinstance(trained, ProcessRewardModelSpec) and trained.loss == "mse"
    if isinstance(algorithm, DistillSpec):
        yield Problem("reward_model", "algorithm=distill learns from no reward; expected reward_model=none")
    if getattr(algorithm, "credit", "episode") == "turns" and not isinstance(trained, ProcessRewardModelSpec):
        yield Problem(
            "algorithm.credit",
            f"turns: reward_model.algorithm.name={trained.name} scores whole episodes; expected episode, or "
            "reward_model=process",
        )
    if not by_turn and reward_model.group_size == 1:
        yield Problem(
            "reward_model.group_size", "1: pairs are two episodes of a scenario; expected at least 2, or loss: mse"
        )
    if not by_turn and collect.temperature == 0:
        yield Problem("collect.temperature", "0 plays every episode of a scenario alike; expected more than 0")
    if isinstance(inference, RemoteSpec) and not inference.tokens:
        yield Problem("inference.tokens", "false, and reward_model reads the tokens of episodes; expected true")
    if reward_model.models == 1 and reward_model.combine != "mean":
        yield Problem(
            "reward_model.combine", f"{reward_model.combine}: says what several models give, and models=1 is one"
        )


def _filters(filter: Target, warmup: WarmupSpec | None) -> Iterator[Problem]:
    for path, target in [("filter", filter), *([("warmup.filter", warmup.filter)] if warmup else [])]:
        if "select" not in dir(target.factory()):
            yield Problem(f"{path}._target_", f"{target.target} is no filter; expected a class with a method `select`")


def _environment(
    environment: Target,
    evaluate: EvaluateSpec,
    collect: CollectSpec,
    rounds: int,
    warmup: WarmupSpec | None,
    reward_model: RewardModelPartSpec | None,
) -> Iterator[Problem]:
    thing = environment.factory()
    methods = [name for name in vars(Environment) if not name.startswith("_") and callable(getattr(Environment, name))]
    lacking = [name for name in methods if name not in dir(thing)]
    if lacking:
        what = f"{environment.target} is no environment; it lacks {', '.join(lacking)}"
        yield Problem("environment._target_", f"{what} (see components.environments.protocol)")
        return
    if warmup is not None and warmup.teacher is None and "solve" not in dir(thing):
        yield Problem(
            "warmup",
            f"{environment.target} has no method `solve` to take demonstrations from; write warmup=none, or "
            "warmup=teacher",
        )
    try:
        built = environment.build()
        try:
            train, heldout = (list(_result(built.scenarios(split))) for split in (TRAIN, evaluate.split))
        finally:
            _result(built.close())
    except Exception as error:  # noqa: BLE001  code of the user: whatever it raises is the answer
        yield Problem(
            "environment", f"{environment.target} cannot state its scenarios: {type(error).__name__}: {error}"
        )
        return
    if other := [one for one in (*train, *heldout) if not isinstance(one, Scenario)]:
        what = f"{environment.target} gives {other[0]!r:.80} ({type(other[0]).__name__}) for a scenario"
        yield Problem("environment", f"{what}; expected components.trajectories.schema.Scenario")
        return
    if not heldout:
        yield Problem(
            "evaluate.split", f"{environment.target} has no scenarios in split {evaluate.split!r} to evaluate on"
        )
    elif evaluate.scenarios is not None and evaluate.scenarios > len(heldout):
        most = f"expected at most the {len(heldout)} scenarios of split {evaluate.split!r}"
        yield Problem("evaluate.scenarios", f"{evaluate.scenarios}: {most}")
    if rounds == 0 and warmup is None and reward_model is None:
        return
    if not train:
        yield Problem("environment", f"{environment.target} has no scenarios in split {TRAIN!r} to train on")
        return
    if rounds and collect.scenarios > len(train):
        yield Problem(
            "collect.scenarios", f"{collect.scenarios}: one round can draw at most the {len(train)} of {TRAIN!r}"
        )
    elif rounds and collect.scenarios * (1 + collect.refills) > len(train):
        yield Problem(
            "collect.refills",
            f"{collect.refills}: a round may need {collect.scenarios} scenarios and as many for each refill, and split "
            f"{TRAIN!r} has {len(train)}; expected fewer",
        )
    if warmup is not None and warmup.demonstrations > len(train):
        yield Problem("warmup.demonstrations", f"{warmup.demonstrations}: split {TRAIN!r} has {len(train)} scenarios")
    if reward_model is not None and reward_model.scenarios > len(train):
        yield Problem("reward_model.scenarios", f"{reward_model.scenarios}: split {TRAIN!r} has {len(train)} scenarios")
    ids = [scenario.id for scenario in train]
    shared = set(ids) & {scenario.id for scenario in heldout}
    if evaluate.split == TRAIN:
        yield Problem("evaluate.split", f"{TRAIN!r} is trained on; expected a split that shares no scenario with it")
    elif shared:
        both = f"both {TRAIN!r} and {evaluate.split!r}"
        yield Problem("environment", f"{len(shared)} of its scenarios are in {both}, such as {min(shared)!r}")
    if len(set(ids)) < len(ids) or len({s.id for s in heldout}) < len(heldout):
        yield Problem("environment", f"{environment.target} gives the same id to several scenarios")


def _demonstrations(environment: Target, warmup: WarmupSpec | None, seed: int) -> Iterator[Problem]:
    """Whether the scenarios that the warmup draws have a solution, where an environment can say so."""
    if warmup is None or warmup.teacher is not None or "check_solutions" not in dir(environment.factory()):
        return
    try:
        built = environment.build()
        train = list(_result(built.scenarios(TRAIN)))
    except Exception:  # noqa: BLE001  `_environment` says so
        return
    try:
        if warmup.demonstrations <= len(train):
            built.check_solutions(choose_scenarios(train, warmup.demonstrations, 0, seed))
    except SpecError as error:
        yield from error.problems
    finally:
        _result(built.close())


def _result(value: Any) -> Any:
    """What a method of an environment gave; it may be plain or async."""
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _teachers(algorithm: Any, warmup: WarmupSpec | None, collect: CollectSpec) -> Iterator[Problem]:
    found = {"algorithm.teacher": algorithm.teacher} if isinstance(algorithm, DistillSpec) else {}
    playing = {"warmup.teacher": warmup.teacher if warmup else None, "collect.teacher": collect.teacher}
    for path, one in playing.items():
        if one is None:
            continue
        embedded = isinstance(one.inference, EmbeddedSpec)
        if path == "warmup.teacher" and one.samples > 1 and one.temperature == 0:
            yield Problem(
                f"{path}.samples",
                f"{one.samples}: {path}.temperature=0 plays each of them alike; expected 1, or a temperature above 0",
            )
        if embedded and one.model is None:
            yield Problem(f"{path}.model", "null, and inference.name=embedded plays on this machine: name one")
        elif one.model is not None and not embedded:
            yield Problem(f"{path}.model", "given, but a server plays; expected null, or inference.name=embedded")
        elif one.model is not None:
            found[f"{path}.model"] = one.model
    for path, teacher in found.items():
        try:
            teacher.adapter_dir()
        except ArtifactError as error:
            yield Problem(f"{path}.adapter", str(error).removeprefix("teacher.adapter: "))
        for problem in _local_model(teacher.model(max_length=16)):
            yield Problem(f"{path}.{problem.path.removeprefix('model.')}", problem.message)


def _costs(algorithm: Any) -> Iterator[Problem]:
    if isinstance(algorithm, PolicyGradientSpec) and algorithm.credit == "turns" and algorithm.reward_cap is not None:
        yield Problem(
            "algorithm.reward_cap",
            f"{algorithm.reward_cap:g} caps the judged reward, which credit=turns does not use; expected null",
        )


def _ewc(ewc: EWCSpec | None, warmup: WarmupSpec | None, fork: str | None, rounds: int) -> Iterator[Problem]:
    if ewc is not None and rounds and warmup is None and fork is None:
        yield Problem("ewc", "there is nothing to hold on to: expected a warmup, a fork, or null")


CHECKS: tuple[Callable[..., Iterator[Problem]], ...] = (
    _algorithm,
    _signal,
    _held_out,
    _inference,
    _agent,
    _ways,
    _weights,
    _lengths,
    _local_model,
    _reward,
    _reward_model,
    _refresh,
    _overlap,
    _filters,
    _environment,
    _demonstrations,
    _teachers,
    _costs,
    _ewc,
)
"""In the order in which their problems are shown."""
