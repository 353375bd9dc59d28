"""Judgements of the anchors in the rounds of a run (`guards.judge_drift`)."""

from __future__ import annotations

from components.artifacts import Artifact
from flows.experiment.requests import StageRunner
from flows.recipes.stage_calls import StageCalls
from flows.stages.anchors import CONTROL, FIRST, anchor_label, drift_metrics


class JudgeAnchors:
    """Anchors of one run: episodes of its first round. That round judges them twice, first and as a control; each later
    round judges them once, and is compared with both."""

    def __init__(self, run: StageCalls):
        self._run = run
        self._collection: Artifact | None = None
        self._compared: dict[str, Artifact] = {}
        self._first_round = 0
        self._judged: dict[int, Artifact] = {}

    @property
    def active(self) -> bool:
        """True if the experiment measures the judge's drift."""
        return self._run.spec.guards.judge_drift != "off"

    def judge(self, number: int, judged: Artifact, policy: Artifact | None, call: StageRunner) -> None:
        """Judge the anchors beside the episodes of a round. judged: these episodes. policy: as in `Requests.judge`."""
        if not self.active:
            return
        if self._collection is None:
            self._collection, self._first_round = judged, number
            first, control = (self._judge(time, judged, policy, call) for time in (number - 1, number))
            self._compared = {FIRST: first, CONTROL: control}
        else:
            self._judged[number] = self._judge(number, judged, policy, call)

    def check(self, number: int) -> None:
        """Let the guard compare the judgement of a round with the first. Raises GuardTriggered."""
        if number in self._judged:
            drift = drift_metrics(self._judged[number].metrics)
            self._run.guards.judged_again(number, drift, self._run.spec.rounds - self._first_round)

    def _judge(self, number: int, judged: Artifact, policy: Artifact | None, call: StageRunner) -> Artifact:
        assert self._collection is not None
        request = self._run.requests.judge_anchors(self._collection, number, judged, self._compared, policy)
        return call(anchor_label(number), number, request)
