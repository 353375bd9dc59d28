"""`python -m flows.chat RUN|RUN@STEP|KEY|URL`: talks to a trained or a deployed policy, in its environment, with tools.

You are the user: what you write goes to the policy, the tools that it calls are carried out in the environment, and
both are shown. `/scenario` lets it solve a task of the environment while you watch. Of a run, the environment and the
agent's limits are the run's own; at a URL there is none, unless `--environment RUN` lends one.

An empty line is nothing; `/reset` begins anew, `/quit`, Ctrl-D and Ctrl-C at the prompt leave; Ctrl-C during an answer
stops that answer. Reads lines from any standard input.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, ResourceError
from flows.terminal.arguments import RootParser
from flows.terminal.console import printable

if TYPE_CHECKING:
    from components.environments.protocol import Environment, Messages
    from components.inference.protocol import Engine, Sampling
    from components.rollout.agent import Episode
    from components.rollout.spec import AgentSpec
    from components.trajectories.schema import Scenario
    from flows.stages.base import Context
    from flows.stages.evaluate import EvaluateStage

HELP = """\
/scenario [ID]   watch it solve a task: the one of this id, or the next
/reset           begin anew
/help            this
/quit            leave"""
PATIENCE = 5.0
"""Seconds for which a server that fails is asked again: a person waits."""
WIDTH = 2000
"""Most characters of one message of the environment that are shown."""


@dataclass
class World:
    """Where the policy acts."""

    environment: Environment
    scenarios: Sequence[Scenario]
    agent: AgentSpec


class Chat:
    """One conversation after the other with the policy that an engine holds."""

    def __init__(self, engine: Engine, sampling: Sampling, world: World | None, runner: asyncio.Runner):
        self._engine = engine
        self._sampling = sampling
        self._world = world
        self._runner = runner
        self._next = 0
        """Place of the next scenario."""
        self._episode: Episode | None = None

    def loop(self) -> None:
        """Until the person leaves."""
        asking = sys.stdin.isatty()
        while True:
            try:
                said = input("you> ") if asking else input()
            except (EOFError, KeyboardInterrupt):
                if asking:
                    print()
                return
            if said.strip() in ("/quit", "/exit"):
                return
            try:
                self._take(said.strip())
            except KeyboardInterrupt:
                print("(stopped)")
                self._episode = None
            except EspalierError as error:
                print(f"error: {error}")
                self._episode = None

    def _take(self, said: str) -> None:
        command, _, rest = said.partition(" ")
        if not said:
            return
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self._episode = None
            print("(a new conversation)")
        elif command == "/scenario":
            self._runner.run(self._watch(rest.strip()))
        elif command.startswith("/"):
            print(f"there is no {command}; there is:\n{HELP}")
        else:
            self._runner.run(self._talk(said))

    async def _talk(self, said: str) -> None:
        """The person's words, and what the policy does until it has an answer."""
        if self._episode is None:
            self._episode = await self._begin()
        episode, most = self._episode, self._world.agent.max_turns if self._world else 1
        episode.talk.messages.append({"role": "user", "content": said})
        for _ in range(most):
            action = await episode.decide()
            if action is None:  # it cannot be read, and the policy is told
                _show(episode.talk.messages[-2:])
                continue
            _show(episode.talk.messages[-1:])
            if not action.get("tool_calls"):
                return
            if episode.done:
                print("(no tool can be called: the episode is over; /reset begins anew)")
                return
            before = len(episode.talk.messages)
            step = await episode.step(action)
            episode.see(step)
            _show(episode.talk.messages[before:])
            if step.done:
                print(f"(the episode is over: {_said(episode.outcome)}; /reset begins anew)")
                return
        if self._world is not None:
            print(f"(no answer within {most} turns: agent.max_turns)")

    async def _begin(self) -> Episode:
        """With the environment's own opening, less the user's words: those are the person's."""
        from components.rollout.agent import Episode
        from components.rollout.formats import OneAction, make

        if self._world is None:
            episode = Episode(self._engine, _Nowhere(), self._sampling, 0)
            episode.open([], [])
            return episode
        if not isinstance(make(self._world.agent.format, None), OneAction):
            raise ResourceError(
                f"agent.format={self._world.agent.format} acts by programs and holds no conversation: watch it with "
                "/scenario"
            )
        scenario = self._scenario("")
        episode = self._new()
        first, tools = await episode.start(scenario)
        users = [message["content"] for message in first if message["role"] == "user"]
        episode.open([message for message in first if message["role"] != "user"], tools)
        hint = f"; its user would say: {printable(users[0])}" if users else ""
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        print(f"(scenario {scenario.id}, tools: {names}{hint})")
        return episode

    async def _watch(self, named: str) -> None:
        """A scenario, played as in an evaluation."""
        if self._world is None:
            print("there is no environment here: give one with --environment RUN")
            return
        scenario = self._scenario(named)
        episode = self._new()
        print(f"(scenario {scenario.id})")
        async with episode.within(None):
            await episode.begin(scenario)
            _show(episode.talk.messages)
            while not episode.done and episode.talk.turns < self._world.agent.max_turns:
                before = len(episode.talk.messages)
                await episode.turn()
                _show(episode.talk.messages[before:])
        if episode.failure is not None:
            print(f"(failed, {episode.failure.boundary}: {episode.failure.message})")
        elif episode.done:
            print(f"(the episode is over: {_said(episode.outcome)})")
        else:
            print(f"(no end within {self._world.agent.max_turns} turns: agent.max_turns)")
        self._episode = None  # the environment serves one episode at a time

    def _new(self) -> Episode:
        from components.rollout.agent import Episode

        assert self._world is not None
        agent = self._world.agent
        shown: dict[str, Any] = {"format": agent.format, "limits": agent.limits()}
        return Episode(
            self._engine, self._world.environment, self._sampling, 0, **shown, max_observation=agent.max_observation
        )

    def _scenario(self, named: str) -> Scenario:
        """The one of this id, or the next. Raises ResourceError where there is none."""
        assert self._world is not None
        if not named:
            found = self._world.scenarios[self._next % len(self._world.scenarios)]
            self._next += 1
            return found
        for one in self._world.scenarios:
            if one.id == named:
                return one
        some = ", ".join(one.id for one in self._world.scenarios[:8])
        raise ResourceError(f"there is no scenario {named!r} in this split; there are {some}, and so on")


class _Nowhere:
    """No environment."""

    def scenarios(self, split: str) -> list[Any]:
        return []

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Any) -> Messages:
        return []

    def step(self, action: dict[str, Any]) -> Any:
        raise ResourceError("there is no environment that could carry out a tool call: give one with --environment RUN")

    def close(self) -> None: ...


def _show(messages: Messages) -> None:
    for message in messages:
        role, content = message["role"], printable(message.get("content") or "")
        content = content if len(content) <= WIDTH else f"{content[:WIDTH]}… ({len(content)} characters)"
        if content or not message.get("tool_calls"):
            print(f"{role}> {content}")
        for call in message.get("tool_calls") or []:
            print(f"{role} calls> {printable(call['function']['name'])}({printable(call['function']['arguments'])})")


def _said(outcome: dict[str, Any]) -> str:
    return ", ".join(f"{name} {printable(json.dumps(value))}" for name, value in outcome.items()) or "nothing is said"


def _request(root: Path, key: str, reference: str) -> tuple[EvaluateStage, tuple[str, ...]]:
    """How the run that made a checkpoint evaluates."""
    from components.specs import validate
    from flows.history.lineage_graph import Lineage
    from flows.stages.evaluate import EvaluateStage

    lineage = Lineage(root)
    run = lineage.runs.get(lineage.node(key).run or "")
    found = next((one.request for one in run.stages if one.label.startswith("evaluate[")), None) if run else None
    if found is None:
        raise ResourceError(f"{reference}: no run below {root} says in which environment it acts")
    allow = tuple(found.get("allow", ()))
    return validate(EvaluateStage, found["spec"], allow=allow), allow


def _trained(reference: str, root: Path) -> tuple[Engine, EvaluateStage, Context]:
    from flows.history.lineage_graph import Lineage
    from flows.stages.base import Context
    from flows.stages.episodes import warm_engine

    key = Lineage(root).resolve(reference)
    spec, _ = _request(root, key, reference)
    context = Context.at(root)
    policy = context.store.find(key)
    if policy is None or policy.kind != "checkpoint":
        what = f"is {policy.kind}, not a checkpoint" if policy else f"is not in {context.store} any more"
        raise ResourceError(f"{reference}: the artifact {key[:12]} {what}; give a run, RUN@STEP or a checkpoint's key")
    print(f"loading {spec.model.name} with checkpoint {key[:12]} …", file=sys.stderr)
    return warm_engine(spec.model, policy, context), spec, context


def _deployed(url: str, model: str | None, key_variable: str | None) -> Engine:
    from components.inference.remote import RemoteEngine
    from components.inference.spec import RemoteSpec
    from components.specs import validate

    data = {"url": url, "tokens": False, "key_variable": key_variable, "retry_for": PATIENCE}
    engine = RemoteEngine(validate(RemoteSpec, {**data, "model": model or "not known yet"}))
    try:
        if model is not None:
            engine.check()
            return engine
        found = engine.models()
        if not found:
            raise ResourceError(f"{url} lists no model; name one: --model NAME")
    except BaseException:
        engine.close()
        raise
    engine.close()
    print(f"talking to {printable(found[0])} on {url}", file=sys.stderr)
    return RemoteEngine(validate(RemoteSpec, {**data, "model": found[0]}))


def _world(spec: EvaluateStage, context: Context, split: str | None) -> World:
    from flows.stages.episodes import scenarios_of

    if spec.agent.function is not None:
        raise ResourceError(
            f"the agent of this run is a program ({spec.agent.function.target}), which holds no conversation: ask the "
            "model itself at a URL"
        )
    scenarios = scenarios_of(spec.environment, split or spec.evaluate.split, context)
    return World(spec.environment.build(), scenarios, spec.agent)


async def _finished(work: Any) -> None:
    await work


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake in the command."""
    parser = RootParser(
        prog="python -m flows.chat", description="Talks to a trained or deployed policy, in its environment."
    )
    parser.add_argument("policy", metavar="RUN|RUN@STEP|KEY|URL", help="a run's policy, a checkpoint, or a server")
    parser.add_argument("--environment", metavar="RUN", help="at a URL: the run whose environment it acts in")
    parser.add_argument("--model", help="at a URL: its name there; by default the first that is listed")
    parser.add_argument("--key-variable", metavar="NAME", help="at a URL: environment variable that holds the key")
    parser.add_argument("--split", help="whose scenarios are played; by default those of the evaluation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of one answer; by default the agent's")
    options = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")
    if options.temperature < 0 or (options.max_tokens is not None and options.max_tokens < 1):
        parser.error("--temperature is 0 or above, --max-tokens 1 or above")
    at_url = options.policy.startswith(("http://", "https://"))
    if not at_url and (options.environment or options.model or options.key_variable):
        parser.error("--environment, --model and --key-variable go with a URL; a run has its own")
    engine: Engine | None = None
    world: World | None = None
    try:
        from components.inference.protocol import Sampling
        from flows.stages.base import Context

        if at_url:
            engine = _deployed(options.policy, options.model, options.key_variable)
            if options.environment:
                from flows.history.lineage_graph import Lineage

                spec, _ = _request(
                    options.root, Lineage(options.root).resolve(options.environment), options.environment
                )
                world = _world(spec, Context.at(options.root), options.split)
        else:
            engine, spec, context = _trained(options.policy, options.root)
            world = _world(spec, context, options.split)
        most = options.max_tokens or (world.agent.max_tokens if world else 512)
        print("(/help says what there is)", file=sys.stderr)
        with asyncio.Runner() as runner:
            Chat(engine, Sampling(options.temperature, max_tokens=most), world, runner).loop()
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        if world is not None:
            closing: Any = world.environment.close  # plain or async
            if inspect.isawaitable(found := closing()):
                asyncio.run(_finished(found))
        if engine is not None:
            engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
