"""The reward models of a run: trained before its rounds, and further in their course.

A policy that learns leaves the episodes of which its reward model learned. With `reward_model.every` the models follow
it (arXiv:2203.02155, section 3.1): new episodes of the policy as it stands are judged by the declared reward, and each
model is trained further from its last state.

What comes before the rounds is `train[reward]`, of the second model `train[reward 2]`; what comes after round r
`train[reward@r]`, and stands at step r.
"""

from __future__ import annotations

from components.artifacts import Artifact
from flows.experiment.requests import Call, Requests
from flows.experiment.spec import ExperimentSpec


class RewardModels:
    """Those of one run; without `reward_model` there are none, and the declared reward judges."""

    def __init__(self, spec: ExperimentSpec, requests: Requests, call: Call):
        self.trained: dict[int, list[Artifact]] = {}
        """By the round after which they were trained; 0: before the rounds."""
        self._part = spec.reward_model
        self._after = spec.reward_model.refreshed(spec.rounds) if spec.reward_model else []
        self._requests = requests
        self._call = call
        self._collections: list[dict[str, Artifact]] = []
        """Trajectories and scores that they learned from, the newest first."""

    @property
    def in_force(self) -> list[Artifact]:
        """Those that judge now."""
        return self.trained[max(self.trained)] if self.trained else []

    def follow(self, step: int, policy: Artifact | None) -> None:
        """Trains them on episodes of the policy that stands after this step, where they are to be trained then."""
        if self._part is None or (step and step not in self._after):
            return
        at = f"@{step}" if step else ""
        number = self._after.index(step) + 1 if step else 0
        shown = self._call(f"collect[reward{at}]", step, self._requests.collect_for_reward(policy, number))
        scores = self._call(f"judge[reward{at}]", step, self._requests.judge(shown, policy))
        self._collections.insert(0, {"trajectories": shown, "scores": scores})
        before: list[Artifact | None] = [*self.in_force] or [policy] * self._part.models
        self.trained[step] = [
            self._call(
                f"train[reward{f' {member}' if member > 1 else ''}{at}]",
                step,
                self._requests.train_reward(self._collections, start=start, member=member),
            )
            for member, start in enumerate(before, 1)
        ]
