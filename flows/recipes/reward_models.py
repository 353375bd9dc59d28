"""Reward models of a run: trained before its rounds, and retrained between them.

They learn from episodes of the run that the declared reward scores, or from preferences of one's own
(`reward_model.data`). During training the policy moves away from the episodes that its reward model was trained on.
With `reward_model.every` the models follow the policy (arXiv:2203.02155, section 3.1): the declared reward scores new
episodes of the current policy, and each model is trained further from its last state. With `reward_model.adversarial`
it also judges the episodes of the rounds: the models train on the scenarios whose episodes they ordered wrongly, which
the policy exploits.

Labels: `train[reward]` before the rounds, `train[reward 2]` for the second model of an ensemble, and `train[reward@r]`
after round r, with step r; `judge[adversarial@r]` for the episodes of round r.
"""

from __future__ import annotations

from collections.abc import Mapping

from components.artifacts import Artifact
from flows.recipes.stage_calls import StageCalls


class RewardModels:
    """Reward models of one run; none without `reward_model`, and then the declared reward scores the rounds."""

    def __init__(self, run: StageCalls):
        spec = run.spec
        self.trained: dict[int, list[Artifact]] = {}
        """Models by the round after which they were trained; 0: before the rounds."""
        self._run = run
        self._part = spec.reward_model
        self._after = spec.reward_model.refreshed(spec.rounds) if spec.reward_model else []
        self._requests = run.requests
        self._call = run.call
        self._collections: list[dict[str, Artifact]] = []
        """Trajectories and scores to train on, newest first; of a round, also the rewards that the models predicted."""

    @property
    def current(self) -> list[Artifact]:
        """Current models."""
        return self.trained[max(self.trained)] if self.trained else []

    def attack(self, number: int, played: Mapping[str, Artifact], policy: Artifact | None) -> None:
        """Let the declared reward judge the episodes of a round, for the adversarial examples of the next training.
        played: artifacts of the round by stage. policy: the policy that produced them."""
        if self._part is None or not self._part.adversarial or number > max(self._after):
            return
        trajectories = played["collect"]
        scores = self._call(f"judge[adversarial@{number}]", number, self._requests.judge(trajectories, policy))
        self._collections.insert(0, {"trajectories": trajectories, "scores": scores, "predicted": played["judge"]})

    def follow(self, step: int, policy: Artifact | None) -> None:
        """Train the models on episodes of the policy after this step, if they are due for training."""
        if self._part is None or (step and step not in self._after):
            return
        suffix = f"@{step}" if step else ""
        imported = self._run.preferences()
        if imported is not None:
            trajectories = scores = imported
        else:
            number = self._after.index(step) + 1 if step else 0
            request = self._requests.collect_for_reward(policy, number)
            trajectories = self._call(f"collect[reward{suffix}]", step, request)
            scores = self._call(f"judge[reward{suffix}]", step, self._requests.judge(trajectories, policy))
        self._collections.insert(0, {"trajectories": trajectories, "scores": scores})
        starts: list[Artifact | None] = [*self.current] or [policy] * self._part.models

        def train(run: StageCalls, member: int) -> Artifact:
            request = self._requests.train_reward(self._collections, start=starts[member - 1], member=member)
            return run.call(f"train[reward{f' {member}' if member > 1 else ''}{suffix}]", step, request)

        self.trained[step] = self._run.parallel(train, range(1, len(starts) + 1))
        if self._part.keep == "none":
            self._collections.clear()
