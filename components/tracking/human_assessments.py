"""Feedback of people on the episodes of a run, as assessments of MLflow traces with source HUMAN and the author.

    score        feedback `human_score`, 1 to 5
    choice       feedback `human_choice` on both episodes: better, worse or tie; one per compared episode
    correction   expectation `correction`; one per corrected message
    step         feedback `human_step`: true for good; one per labelled message

An episode without a trace gets one. The files of answers are the source of truth: `tell` synchronises the assessments
of an episode with them and is idempotent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from components.tracking import traces
from components.trajectories.feedback import Answer, Correction, MessageAnswer, PairChoice, Rating, StepLabel
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Assessment

_NAMES = ("human_score", "human_choice", "correction", "human_step")
_ANSWER = "answer"
"""Metadata key of an assessment: the id of its answer."""
_SIDES = {"a": ("better", "worse"), "b": ("worse", "better"), "tie": ("tie", "tie")}


class HumanAssessments:
    """Human assessments of one stage of a run. label: label of the stage, `evaluate[final]`. Raises MlflowException if
    MLflow does not have the run or is unreachable."""

    def __init__(self, client: MlflowClient, run_id: str, label: str):
        from mlflow.tracing.client import TracingClient

        self._client = TracingClient(client.tracking_uri)
        self._run_id = run_id
        self._label = label
        self._experiment = client.get_run(run_id).info.experiment_id
        self._traces: dict[str, str] = {}
        """Trace ids by trajectory."""
        token = None
        while True:
            page = self._client.search_traces(
                locations=[self._experiment], run_id=run_id, include_spans=False, page_token=token
            )
            for trace in page:
                if trace.info.tags.get("evaluation") == label and "trajectory" in trace.info.tags:
                    self._traces[trace.info.tags["trajectory"]] = trace.info.trace_id
            if not (token := page.token):
                break

    def tell(self, episode: Trajectory, answers: Sequence[Answer]) -> str:
        """Synchronise the human assessments of the episode with these answers; return the id of its trace."""
        trace_id = self._traces.get(episode.id) or self._create_trace(episode)
        expected = {
            str((assessment.metadata or {})[_ANSWER]): assessment
            for assessment in assessments(episode, answers, self._run_id)
        }
        stored: dict[str, str] = {}
        for assessment in self._client.get_trace_info(trace_id).assessments:
            if assessment.source.source_type == "HUMAN" and assessment.name in _NAMES and assessment.assessment_id:
                stored[str((assessment.metadata or {}).get(_ANSWER))] = assessment.assessment_id
        for answer, assessment_id in stored.items():
            if answer not in expected:
                self._client.delete_assessment(trace_id, assessment_id)
        for answer, assessment in expected.items():
            if answer not in stored:
                self._client.log_assessment(trace_id, assessment)
        return trace_id

    def _create_trace(self, episode: Trajectory) -> str:
        info, spans = traces.to_trace(
            episode,
            experiment_id=self._experiment,
            run_id=self._run_id,
            label=self._label,
            start_ms=int(time.time() * 1000),
        )
        self._client.start_trace(info)
        self._client.log_spans(self._experiment, spans)
        self._traces[episode.id] = info.trace_id
        return info.trace_id


def assessments(episode: Trajectory, answers: Sequence[Answer], run_id: str) -> Iterator[Assessment]:
    """Yield one assessment for each answer about the episode."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    for answer in answers:
        if episode.id not in (answer.trajectory, getattr(answer, "other", None)):
            continue
        common: dict[str, Any] = {
            "source": AssessmentSource(source_type="HUMAN", source_id=answer.author),
            "create_time_ms": int(answer.moment * 1000),
            "last_update_time_ms": int(answer.moment * 1000),
        }
        metadata = {_ANSWER: answer.id, **({"note": answer.note} if answer.note else {})}
        if isinstance(answer, MessageAnswer):
            metadata |= {"history": str(answer.history), "message": str(answer.message)}
        assessment: Assessment
        if isinstance(answer, Rating):
            assessment = Feedback(
                "human_score", answer.score, rationale=answer.note or None, metadata=metadata, **common
            )
        elif isinstance(answer, PairChoice):
            side = int(answer.trajectory != episode.id)
            metadata |= {"other": (answer.other, answer.trajectory)[side]}
            value = _SIDES[answer.better][side]
            assessment = Feedback("human_choice", value, rationale=answer.note or None, metadata=metadata, **common)
        elif isinstance(answer, StepLabel):
            assessment = Feedback("human_step", answer.good, metadata=metadata, **common)
        else:
            assert isinstance(answer, Correction)
            correction = {"text": answer.text, "calls": [call.model_dump() for call in answer.calls]}
            assessment = Expectation("correction", correction, metadata=metadata, **common)
        assessment.run_id = run_id
        yield assessment
