"""Policy of a loop: its settings, its run, and the endpoint of the episode that a rollout plays."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.artifacts import Artifact
from components.errors import SpecError
from components.rollout.own_agent import MODEL
from components.rollout.spec import OwnAgentTarget
from components.specs import Target
from flows.experiment.compose import compose, model_overrides
from flows.experiment.spec import ExperimentSpec
from flows.loop.run import LoopRun
from flows.stages.base import Context

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SETTINGS = (
    "environment=arithmetic",  # of the checks; each stage has the scenarios of its call
    "reward=returned",
    "warmup=none",
    "deploy=none",
    "agent.max_turns=100",
    "agent.max_tokens=512",
)
"""Settings of a loop that differ from the defaults."""


@dataclass(frozen=True)
class EpisodeEndpoint:
    """Endpoint of the episode that a rollout plays."""

    base_url: str
    api_key: str


EPISODE: ContextVar[EpisodeEndpoint | None] = ContextVar("episode", default=None)


def with_program(
    spec: ExperimentSpec, digest: str = "", name: str = "", source: str = "", **changes: Any
) -> ExperimentSpec:
    """Return the spec with the scenarios and the rollout of a program. changes: other sections of the experiment."""
    names = {"digest": digest, "name": name, "source": source}
    scenarios = Target.model_validate({"_target_": "components.rollout.program.ProgramScenarios", "digest": digest})
    function = OwnAgentTarget.model_validate({"_target_": "components.rollout.program.play", **names})
    agent = spec.agent.model_copy(update={"function": function})
    return spec.model_copy(update={"environment": scenarios, "agent": agent, **changes})


class LoopPolicy:
    """Policy of a loop, with its settings.

    name: of the experiment in `flows.runs` and MLflow. base: option of `model` (`conf/model`), or ORG/NAME of the hub.
    root: folder of all files. overrides: further settings as on the command line, such as `agent.max_tokens=64`,
    `collect.temperature=0.8` or `inference=vllm`. Raises SpecError for invalid settings, ResourceError for a root that
    cannot be used."""

    def __init__(
        self,
        name: str,
        *,
        base: str = "smollm2_135m",
        root: str | Path = "runs",
        seed: int = 0,
        overrides: Sequence[str] = (),
    ):
        if isinstance(overrides, str):
            raise SpecError.at("overrides", f"{overrides!r}: a text; expected a list, overrides=[{overrides!r}]")
        folder = str(Path(root).absolute())
        if not re.fullmatch(r"[A-Za-z0-9/._-]+", folder):
            folder = '"' + folder.replace('"', r"\"") + '"'
        model = model_overrides(base) if "/" in base else [f"model={base}"]
        self._own = [f"name={name}", *model, f"root={folder}", f"seed={seed}", *overrides]
        for override in overrides:
            if (key := override.lstrip("+~").partition("=")[0]) in ("environment", "rounds"):
                raise SpecError.at("overrides", f"{override}: {key} has no effect in a loop, whose calls decide it")
        spec = self.composed()
        for stage in ("collect", "evaluate"):
            if (place := spec.compute.placement(stage)) != "local":
                text = f"{place}: the rollouts of a loop run in this process; expected compute.stages.{stage}=local"
                raise SpecError.at(f"compute.stages.{stage}", text)
        unused = {
            "collect.overlap": spec.collect.overlap,
            "collect.partial": spec.collect.partial,
            "warmup": spec.warmup,
        }
        for key in (key for key, value in unused.items() if value):
            text = "has no effect in a loop, which itself decides when it collects and trains; remove the override"
            raise SpecError.at(key, text)
        self.spec = with_program(spec)
        self.name = name
        self.step = 0
        """Number of trainings so far."""
        self.checkpoint: Artifact | None = None
        """Checkpoint of the policy; None: the base model."""
        self.gathered = 0
        """Number of collections so far: each one has random numbers of its own."""
        self.first_gathered = 0
        """Number of collections before the last training."""
        self.context = Context.created(self.spec.root, self.spec.store, lock_timeout=self.spec.compute.lock_timeout)
        self.run = LoopRun(self.spec, self.context, self._own)

    def composed(self, *overrides: str) -> ExperimentSpec:
        """Return the spec of the loop with further overrides. Raises SpecError with all problems."""
        return compose([*SETTINGS, *self._own, *overrides])

    @property
    def base_url(self) -> str:
        """Address of the endpoint, for a client that a rollout creates. Raises SpecError outside of a rollout."""
        return self._episode("base_url").base_url

    @property
    def api_key(self) -> str:
        """Key of the episode, by which its calls are recorded. Raises SpecError outside of a rollout."""
        return self._episode("api_key").api_key

    @property
    def inference_name(self) -> str:
        """Name of the policy in requests."""
        return MODEL

    def _episode(self, name: str) -> EpisodeEndpoint:
        episode = EPISODE.get()
        if episode is None:
            raise SpecError.at(
                f"model.{name}",
                "exists within a rollout that gather or evaluate plays, because each episode has a key of its own. "
                "Create the client in the rollout, or take model.openai_client(), which may be created anywhere. A "
                "thread belongs to the episode if asyncio.to_thread starts it",
            )
        return episode

    def openai_client(self) -> AsyncOpenAI:
        """Return the client of the policy. It may be created anywhere, and shared by rollouts: each request goes to the
        endpoint with the key of the episode that sends it."""
        return self._client

    @cached_property
    def _client(self) -> AsyncOpenAI:
        import httpx
        import openai

        async def to_episode(request: httpx.Request) -> None:
            url = httpx.URL(self.base_url)
            request.url = request.url.copy_with(host=url.host, port=url.port)
            request.headers["host"] = url.netloc.decode()
            request.headers["authorization"] = f"Bearer {self.api_key}"

        http = openai.DefaultAsyncHttpxClient(
            event_hooks={"request": [to_episode]},
            trust_env=False,  # the endpoint is local
            limits=httpx.Limits(max_keepalive_connections=0),  # each stage has a server of its own
        )
        return openai.AsyncOpenAI(base_url="http://episode/v1", api_key="episode", max_retries=0, http_client=http)
