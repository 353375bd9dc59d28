"""Model of a loop: the policy, its settings, and the stages that train and evaluate it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from components.artifacts import Artifact
from components.errors import SpecError
from components.rollout.own_agent import MODEL
from components.specs import Target
from components.trajectories.schema import Trajectory
from flows.experiment.compose import compose
from flows.experiment.requests import Requests
from flows.experiment.spec import ExperimentSpec
from flows.loop import collection
from flows.loop.groups import Groups, group
from flows.loop.run import LoopRun
from flows.recipes.episodes import Episodes, training_inputs
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
class Episode:
    """Endpoint of the episode that a rollout plays."""

    base_url: str
    api_key: str


EPISODE: ContextVar[Episode | None] = ContextVar("episode", default=None)


@dataclass(frozen=True)
class Evaluation:
    """Held-out episodes of a policy, with their scores."""

    artifact: Artifact

    @property
    def success(self) -> float | None:
        """Share of successful episodes; 0 if the rollout does not return `success`."""
        return self.artifact.metrics.get("success")

    @property
    def reward(self) -> float | None:
        """Mean reward."""
        return self.artifact.metrics.get("reward")

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.artifact.metrics)

    @property
    def trajectories(self) -> list[Trajectory]:
        from components.trajectories.store import load_scored

        folder = self.artifact.path
        return load_scored(folder / "trajectories.parquet", folder / "scores.parquet", None)


class TrainableModel:
    """Policy that a loop trains.

    name: of the experiment in `flows.runs` and MLflow. base: option of `model` (`conf/model`). root: folder of all
    files. overrides: further settings as on the command line, such as `agent.max_tokens=64`, `collect.temperature=0.8`
    or `inference=vllm`. Raises SpecError for invalid settings, ResourceError for a root that cannot be used."""

    def __init__(
        self,
        name: str,
        *,
        base: str = "smollm2_135m",
        root: str | Path = "runs",
        seed: int = 0,
        overrides: Sequence[str] = (),
    ):
        self._own = [f"name={name}", f"model={base}", f"root={Path(root).absolute()}", f"seed={seed}", *overrides]
        spec = self.composed()
        for stage in ("collect", "evaluate"):
            if (place := spec.compute.placement(stage)) != "local":
                text = f"{place}: the rollouts of a loop run in this process; expected compute.stages.{stage}=local"
                raise SpecError.at(f"compute.stages.{stage}", text)
        self.spec = collection.with_program(spec)
        self.name = name
        self.step = 0
        """Number of trainings so far."""
        self.checkpoint: Artifact | None = None
        """Checkpoint of the policy; None: the base model."""
        self._gathered = 0
        """Number of collections by the current policy."""
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

    def _episode(self, name: str) -> Episode:
        episode = EPISODE.get()
        if episode is None:
            raise SpecError.at(
                f"model.{name}",
                "exists within a rollout that gather or evaluate plays, because each episode has a key of its own. "
                "Create the client in the rollout, or take model.openai_client(), which may be created anywhere",
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

    async def gather(
        self, groups: Iterable[Any], after_each: Target | None = None, max_failures: float | None = None
    ) -> Groups:
        """Return the played groups (`flows.loop.gather`)."""
        planned = collection.planned(self, groups, max_failures)
        number, self._gathered = self._gathered, self._gathered + 1
        return await planned.gather(number, after_each)

    async def train(
        self, groups: Groups | Iterable[Any], algorithm: str = "grpo", *, filter: str = "signal", **settings: Any
    ) -> Artifact:
        """Train the policy on groups as one stage, and return its checkpoint.

        groups: those of `gather`, or groups of trajectories with rewards. algorithm: option of `algorithm`. filter:
        option of `filter`; `signal` drops groups with equal rewards. settings: keys of the algorithm, such as
        `learning_rate=1e-4`. Raises SpecError for a wrong setting, and for groups that cannot be trained on."""
        changes = [f"algorithm={algorithm}", f"filter={filter}"]
        changes += [f"algorithm.{name}={json.dumps(value)}" for name, value in settings.items()]
        data = groups if isinstance(groups, Groups) and groups.unchanged else collection.own_groups(groups)
        members = [len(group) for group in data]
        sizes = [f"collect.scenarios={len(members)}", f"collect.group_size={max(members)}", f"rounds={self.step + 1}"]
        spec = self.composed(*changes, *sizes)
        number = self.step + 1

        def work() -> Artifact:
            found = collection.artifacts_of(self, data, number, exact=spec.algorithm.needs_sampled_tokens)
            requests = Requests(spec)
            selection = self.run.stage(f"filter[{number}]", number, requests.filter(*found))
            episodes = Episodes(str(number), number, *found, selection)
            request = requests.train(training_inputs([episodes]), number, start=self.checkpoint, reference=None)
            trained = self.run.stage(f"train[{number}]", number, request)
            parts = dict(zip(("collect", "judge", "filter", "train"), (*found, selection, trained), strict=True))
            self.run.trained(number, parts, spec)
            return trained

        self.checkpoint = await self.run.do(work)
        self.step, self._gathered = number, 0
        return self.checkpoint

    async def evaluate(
        self,
        rollout: Callable[[TrainableModel, Any], Coroutine[Any, Any, Any]],
        scenarios: Iterable[Any],
        *,
        name: str | None = None,
        samples: int = 1,
        temperature: float = 0.0,
    ) -> Evaluation:
        """Play `rollout(model, scenario)` of each held-out scenario as one stage, without training on it.

        name: of an evaluation besides the main one, on scenarios of its own. samples: episodes of each scenario; more
        than one needs a temperature above 0. The rollout returns `success`, or a mapping with it."""
        members = [group(rollout(self, scenario) for _ in range(samples)) for scenario in scenarios]
        return Evaluation(await collection.planned(self, members, None, heldout=True).evaluate(name, temperature))

    def close(self) -> str | None:
        """End the run: write its report and its results. Return the address of the report; None without a stage. The
        process does the same at its end; a later stage begins another run."""
        results = self.run.close()
        self.context.warm.close()
        return None if results is None else results.report

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.run.do(lambda: self.run.close(error))
        self.context.warm.close()
