"""`python -m flows.chat RUN|RUN@STEP|KEY|URL`: chat with a trained or deployed policy, in its environment, with tools.

You are the user: the policy gets your messages, the environment executes its tool calls, and both are shown.
`/scenario` shows the policy solve a task of the environment. A run's policy uses the environment and the agent limits
of the run, if it has one. A policy at a URL has no environment unless `--environment RUN` sets one.

Empty lines are ignored. `/reset` starts a new conversation. `/quit`, Ctrl-D and Ctrl-C at the prompt leave; Ctrl-C
during an answer stops the answer. Standard input may be a pipe.
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
from flows.terminal.arguments import RootParser, add_trust
from flows.terminal.console import printable
from flows.terminal.exit_codes import print_message

if TYPE_CHECKING:
    from components.environments.protocol import Environment, Messages
    from components.inference.protocol import Engine, ModelEngine, Sampling
    from components.rollout.agent import Episode
    from components.rollout.spec import AgentSpec
    from components.trajectories.schema import Scenario
    from flows.stages.base import Context
    from flows.stages.evaluate import EvaluateStage
    from flows.stages.sample import SampleStage

HELP = """\
/scenario [ID]   watch the policy solve a task: the one with this id, or the next one
/reset           start a new conversation
/help            show these commands
/quit            leave"""
PATIENCE = 5.0
"""Seconds for which requests to a failing server are retried. Short, because a person waits."""
WIDTH = 2000
"""Maximum number of characters shown of one message."""


@dataclass
class World:
    """Environment, scenarios and agent limits of the policy."""

    environment: Environment
    scenarios: Sequence[Scenario]
    agent: AgentSpec


class ChatSession:
    """Sequence of conversations with an engine's policy."""

    def __init__(self, engine: Engine, sampling: Sampling, world: World | None, runner: asyncio.Runner):
        self._engine = engine
        self._sampling = sampling
        self._world = world
        self._runner = runner
        self._next = 0
        """Index of the next scenario."""
        self._episode: Episode | None = None

    def loop(self) -> None:
        """Read and handle lines until the user leaves."""
        interactive = sys.stdin.isatty()
        while True:
            try:
                line = input("you> ") if interactive else input()
            except (EOFError, KeyboardInterrupt):
                if interactive:
                    print()
                return
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self._handle(line.strip())
            except KeyboardInterrupt:
                print("(stopped)")
                self._episode = None
            except EspalierError as error:
                print(printable(f"error: {error}"))
                self._episode = None

    def _handle(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if not line:
            return
        if command == "/help":
            print(HELP)
        elif command == "/reset":
            self._episode = None
            print("(a new conversation)")
        elif command == "/scenario":
            self._runner.run(self._watch(argument.strip()))
        elif command.startswith("/"):
            print(f"unknown command {command}; expected one of:\n{HELP}")
        else:
            self._runner.run(self._talk(line))

    async def _talk(self, text: str) -> None:
        """Send the user's message and run the policy's turns until it answers."""
        if self._episode is None:
            self._episode = await self._begin()
        episode, max_turns = self._episode, self._episode.request.max_turns
        episode.talk.messages.append({"role": "user", "content": text})
        for _ in range(max_turns):
            action = await episode.decide()
            if action is None:  # it cannot be parsed; the policy gets the error as a message
                _show(episode.talk.messages[-2:])
                continue
            _show(episode.talk.messages[-1:])
            if not action.get("tool_calls"):
                return
            if episode.done:
                print("(the episode is over, so no tool can be called; /reset starts a new conversation)")
                return
            before = len(episode.talk.messages)
            step = await episode.step(action)
            episode.see(step)
            _show(episode.talk.messages[before:])
            if step.done:
                print(
                    printable(
                        f"(the episode is over: {_format_outcome(episode.outcome)}; /reset starts a new conversation)"
                    )
                )
                return
        if self._world is not None:
            print(f"(no answer within agent.max_turns = {max_turns})")

    async def _begin(self) -> Episode:
        """Start an episode with the environment's opening messages, without those of its user, whom you play."""
        from components.rollout.formats import SingleActionFormat, make
        from components.trajectories.schema import Scenario

        if self._world is None:
            episode = self._new(Scenario("chat", {}, "chat"))
            episode.open([], [])
            return episode
        if not isinstance(make(self._world.agent.format, None), SingleActionFormat):
            raise ResourceError(
                f"agent.format = {self._world.agent.format}: this policy writes programs and cannot chat; use "
                "/scenario to watch it"
            )
        scenario = self._scenario("")
        episode = self._new(scenario)
        opening, tools = await episode.start()
        users = [message["content"] for message in opening if message["role"] == "user"]
        episode.open([message for message in opening if message["role"] != "user"], tools)
        hint = f"; its user would say: {printable(users[0])}" if users else ""
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        print(printable(f"(scenario {scenario.id}, tools: {names}{hint})"))
        return episode

    async def _watch(self, scenario_id: str) -> None:
        """Play a scenario as in an evaluation and show its messages."""
        if self._world is None:
            print("/scenario needs an environment; start with --environment RUN")
            return
        scenario = self._scenario(scenario_id)
        episode = self._new(scenario)
        print(printable(f"(scenario {scenario.id})"))
        async with episode.within():
            await episode.begin()
            _show(episode.talk.messages)
            while not episode.ended:
                context, before = episode.talk.messages, len(episode.talk.messages)
                await episode.turn()
                _show(context[before:])
                if episode.talk.messages is not context:
                    print("(a new context)")
                    _show(episode.talk.messages)
        if episode.failure is not None:
            print(printable(f"(failed, {episode.failure.boundary}: {episode.failure.message})"))
        elif episode.done:
            print(printable(f"(the episode is over: {_format_outcome(episode.outcome)})"))
        else:
            print(f"(the episode did not end within agent.max_turns = {self._world.agent.max_turns})")
        self._episode = None  # the environment serves one episode at a time

    def _new(self, scenario: Scenario) -> Episode:
        from components.rollout.agent import Episode
        from components.rollout.formats import Presentation
        from components.rollout.request import EpisodeRequest

        environment = self._world.environment if self._world else _EmptyEnvironment()
        max_turns = self._world.agent.max_turns if self._world else 1
        request = EpisodeRequest(scenario=scenario, sample=0, seed=0, sampling=self._sampling, max_turns=max_turns)
        presentation = self._world.agent.presentation() if self._world else Presentation()
        return Episode(self._engine, environment, request, presentation)

    def _scenario(self, scenario_id: str) -> Scenario:
        """Return the scenario with this id, or the next one if the id is empty. Raises ResourceError if unknown."""
        assert self._world is not None
        if not scenario_id:
            scenario = self._world.scenarios[self._next % len(self._world.scenarios)]
            self._next += 1
            return scenario
        for scenario in self._world.scenarios:
            if scenario.id == scenario_id:
                return scenario
        examples = ", ".join(scenario.id for scenario in self._world.scenarios[:8])
        raise ResourceError(f"no scenario {scenario_id!r} in this split; expected an id such as {examples}")


class _EmptyEnvironment:
    """Environment without scenarios and tools, for a policy at a URL."""

    def scenarios(self, split: str) -> list[Any]:
        return []

    def tools(self) -> list[dict[str, Any]]:
        return []

    def reset(self, scenario: Any) -> Messages:
        return []

    def step(self, action: dict[str, Any]) -> Any:
        raise ResourceError("the policy called a tool, but there is no environment; start with --environment RUN")

    def close(self) -> None: ...


def _show(messages: Messages) -> None:
    for message in messages:
        role, content = message["role"], printable(message.get("content") or "")
        content = content if len(content) <= WIDTH else f"{content[:WIDTH]}… ({len(content)} characters)"
        if content or not message.get("tool_calls"):
            print(f"{role}> {content}")
        for call in message.get("tool_calls") or []:
            print(f"{role} calls> {printable(call['function']['name'])}({printable(call['function']['arguments'])})")


def _format_outcome(outcome: dict[str, Any]) -> str:
    return ", ".join(f"{name} {printable(json.dumps(value))}" for name, value in outcome.items()) or "no outcome"


def _measurement(root: Path, key: str, reference: str, trust: bool) -> EvaluateStage | SampleStage:
    """Return the spec of an evaluation by the run that produced a checkpoint; of its answers to held-out rows if it has
    no environment. Raises SpecError if it reaches out of the run and is not trusted."""
    from flows.history.lineage_graph import Lineage
    from flows.history.trust import admit_request
    from flows.stages.base import Request
    from flows.stages.evaluate import EvaluateStage
    from flows.stages.sample import SampleStage

    lineage = Lineage(root)
    run = lineage.runs.get(lineage.node(key).run or "")
    requests = [stage.request for stage in run.stages if stage.request] if run else []
    for kind in ("evaluate", "sample"):
        request = next((request for request in requests if request["stage"] == kind), None)
        if request is not None:
            spec = admit_request(Request.from_json(request), reference, trust)
            assert isinstance(spec, EvaluateStage | SampleStage)
            return spec
    raise ResourceError(f"{reference}: no run below {root} has an evaluate stage for it, so its environment is unknown")


def _trained(reference: str, root: Path, trust: bool) -> tuple[ModelEngine, EvaluateStage | SampleStage, Context]:
    from components.models.trained_weights import folder_of, role_folders
    from flows.history.lineage_graph import Lineage
    from flows.stages.base import Context
    from flows.stages.episodes import warm_engine

    key = Lineage(root).resolve(reference)
    context = Context.at(root)
    policy = context.store.find(key)
    if policy is None or policy.kind != "checkpoint":
        problem = f"is of kind {policy.kind}" if policy else f"is no longer in {context.store}"
        raise ResourceError(
            f"{reference}: artifact {key[:12]} {problem}; expected a run, RUN@STEP or a checkpoint's key"
        )
    if roles := role_folders(folder_of(policy.path)):
        raise ResourceError(
            f"{reference}: the policy has an adapter for each of the roles {', '.join(roles)}, and a chat has none of "
            "them; play its episodes with flows.evaluate, or chat with a policy of one adapter (model.lora.roles=null)"
        )
    spec = _measurement(root, key, reference, trust)
    print(f"loading {spec.model.name} with checkpoint {key[:12]} …", file=sys.stderr)
    return warm_engine(spec.model, policy, context), spec, context


def _deployed(url: str, model: str | None, key_variable: str | None) -> ModelEngine:
    from components.inference.engines.remote import RemoteEngine, RemoteSpec
    from components.specs import validate

    data = {"url": url, "tokens": False, "key_variable": key_variable, "retry_for": PATIENCE}
    engine = RemoteEngine(validate(RemoteSpec, {**data, "model": model or "not known yet"}))
    try:
        if model is not None:
            engine.check()
            return engine
        models = engine.models()
        if not models:
            raise ResourceError(f"{url} lists no model; set --model NAME")
    except BaseException:
        engine.close()
        raise
    engine.close()
    print(f"using model {printable(models[0])} at {url}", file=sys.stderr)
    return RemoteEngine(validate(RemoteSpec, {**data, "model": models[0]}))


def _world(spec: EvaluateStage | SampleStage, context: Context, split: str | None) -> World | None:
    """Return the environment of an evaluation; None for a run without one."""
    from flows.stages.episodes import scenarios_of
    from flows.stages.sample import SampleStage

    if isinstance(spec, SampleStage):
        return None
    if spec.agent.own is not None:
        raise ResourceError(
            f"{spec.agent.own}: this run's agent is a program and cannot chat; serve the model and give its URL"
        )
    scenarios = scenarios_of(spec.environment, split or spec.evaluate.split, context)
    return World(spec.environment.build(), scenarios, spec.agent)


async def _await(awaitable: Any) -> None:
    await awaitable


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for an error in the command."""
    parser = RootParser(
        prog="python -m flows.chat", description="Chats with a trained or deployed policy, in its environment."
    )
    parser.add_argument(
        "policy", metavar="RUN|RUN@STEP|KEY|URL", help="run, checkpoint, or URL of an OpenAI-compatible server"
    )
    parser.add_argument("--environment", metavar="RUN", help="with a URL: use the environment of this run")
    parser.add_argument("--model", help="with a URL: model name (default: the first one that the server lists)")
    parser.add_argument("--key-variable", metavar="NAME", help="with a URL: environment variable with the API key")
    parser.add_argument("--split", help="split of the scenarios (default: the split of the evaluation)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy (default)")
    parser.add_argument(
        "--max-tokens", type=int, help="maximum tokens of one answer (default: agent.max_tokens, else 512)"
    )
    add_trust(parser)
    options = parser.parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")
    if options.temperature < 0 or (options.max_tokens is not None and options.max_tokens < 1):
        parser.error("expected --temperature of at least 0 and --max-tokens of at least 1")
    at_url = options.policy.startswith(("http://", "https://"))
    if not at_url and (options.environment or options.model or options.key_variable):
        parser.error("--environment, --model and --key-variable require a URL; a run defines its own")
    engine: ModelEngine | None = None
    world: World | None = None
    try:
        from components.inference.protocol import Sampling
        from flows.stages.base import Context

        if at_url:
            engine = _deployed(options.policy, options.model, options.key_variable)
            if options.environment:
                from flows.history.lineage_graph import Lineage

                key = Lineage(options.root).resolve(options.environment)
                spec = _measurement(options.root, key, options.environment, options.trust)
                world = _world(spec, Context.at(options.root), options.split)
        else:
            engine, spec, context = _trained(options.policy, options.root, options.trust)
            world = _world(spec, context, options.split)
        max_tokens = options.max_tokens or (world.agent.max_tokens if world else 512)
        print("(/help lists the commands)", file=sys.stderr)
        with asyncio.Runner() as runner:
            ChatSession(engine, Sampling(options.temperature, max_tokens=max_tokens), world, runner).loop()
    except EspalierError as error:
        print_message(error)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        if world is not None:
            closing: Any = world.environment.close  # plain or async
            if inspect.isawaitable(result := closing()):
                asyncio.run(_await(result))
        if engine is not None:
            engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
