"""Model of a loop: its policy, and the stages that train and evaluate it."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from components.artifacts import Artifact
from components.specs import Target
from components.trajectories.schema import Trajectory
from flows.experiment.requests import Requests
from flows.loop import collection
from flows.loop.groups import GatheredGroups, RolloutGroup, group
from flows.loop.policy import LoopPolicy
from flows.recipes.episodes import Episodes, training_inputs


@dataclass(frozen=True)
class PolicyEvaluation:
    """Held-out episodes of a policy, with their scores."""

    artifact: Artifact

    @property
    def success(self) -> float | None:
        """Share of successful episodes; None if the rollout does not return `success`."""
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


class TrainableModel(LoopPolicy):
    """Model that a loop trains: a policy with its stages. The arguments are those of `LoopPolicy`."""

    async def gather(
        self,
        groups: Iterable[Any],
        after_each: Target | Callable[[RolloutGroup], Any] | None = None,
        max_failures: float | None = None,
    ) -> GatheredGroups:
        """Return the played groups (`flows.loop.gather`)."""
        return await collection.gather(groups, after_each, max_failures, self)

    async def train(
        self,
        groups: GatheredGroups | Iterable[Any],
        algorithm: str = "grpo",
        *,
        filter: str = "signal",
        **settings: Any,
    ) -> Artifact:
        """Train the policy on groups as one stage, and return its checkpoint.

        groups: those of `gather`, or groups of trajectories with rewards. algorithm: option of `algorithm`. filter:
        option of `filter`; `signal` drops groups with equal rewards. settings: keys of the algorithm, such as
        `learning_rate=1e-4`. Raises SpecError for a wrong setting, and for groups that cannot be trained on."""
        changes = [f"algorithm={algorithm}", f"filter={filter}"]
        changes += [f"algorithm.{name}={json.dumps(value, default=str)}" for name, value in settings.items()]
        data = groups if isinstance(groups, GatheredGroups) and groups.unchanged else collection.own_groups(groups)
        members = [len(group) for group in data]
        sizes = [f"collect.scenarios={len(members)}", f"collect.group_size={max(members)}", f"rounds={self.step + 1}"]
        spec = self.composed(*changes, *sizes)
        number = self.step + 1

        def work() -> Artifact:
            scored = collection.artifacts_of(self, data, number, exact=spec.algorithm.needs_sampled_tokens)
            requests = Requests(spec)
            selection = self.run.stage(f"filter[{number}]", number, requests.filter(*scored))
            episodes = Episodes(str(number), number, *scored, selection)
            request = requests.train(training_inputs([episodes]), number, start=self.checkpoint, reference=None)
            trained = self.run.stage(f"train[{number}]", number, request)
            parts = dict(zip(("collect", "judge", "filter", "train"), (*scored, selection, trained), strict=True))
            self.run.trained(number, parts, spec)
            return trained

        self.checkpoint = await self.run.do(work)
        self.step, self.first_gathered = number, self.gathered
        return self.checkpoint

    async def evaluate(
        self,
        rollout: Callable[[TrainableModel, Any], Coroutine[Any, Any, Any]],
        scenarios: Iterable[Any],
        *,
        name: str | None = None,
        samples: int = 1,
        temperature: float = 0.0,
    ) -> PolicyEvaluation:
        """Play `rollout(model, scenario)` of each held-out scenario as one stage, without training on it.

        name: of an evaluation besides the main one, on scenarios of its own. samples: episodes of each scenario; more
        than one needs a temperature above 0. The rollout returns `success`, or a mapping with it."""
        members = [group(rollout(self, scenario) for _ in range(samples)) for scenario in scenarios]
        return PolicyEvaluation(await collection.planned(self, members, None, heldout=True).evaluate(name, temperature))

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
