"""What people say of the episodes of a run, as assessments of their MLflow traces: source HUMAN, with the author.

    score        feedback `human_score`, 1 to 5
    choice       feedback `human_choice` on both episodes: better, worse or tie; one for each other episode
    correction   expectation `correction`; one for each corrected message

An episode of which the run logged no trace gets one. The files of answers are the truth: `tell` makes the assessments
of an episode what stands there, so it can be said again at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from components.tracking import traces
from components.trajectories.feedback import Answer, Choice, Correction, Rating
from components.trajectories.schema import Trajectory

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Assessment

_NAMES = ("human_score", "human_choice", "correction")
_ANSWER = "answer"
"""Metadata of an assessment: the id of the answer that it stands for."""
_SIDES = {"a": ("better", "worse"), "b": ("worse", "better"), "tie": ("tie", "tie")}


class People:
    """Of one stage of a run. label: of the stage, `evaluate[final]`. Raises MlflowException where MLflow does not know
    the run or is away."""

    def __init__(self, client: MlflowClient, run_id: str, label: str):
        from mlflow.tracing.client import TracingClient

        self._client = TracingClient(client.tracking_uri)
        self._run_id = run_id
        self._label = label
        self._experiment = client.get_run(run_id).info.experiment_id
        self._traces: dict[str, str] = {}
        """Ids of traces by trajectory."""
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
        """Makes the assessments by people what these answers say of the episode; returns the id of its trace."""
        trace_id = self._traces.get(episode.id) or self._made(episode)
        wanted = {str((one.metadata or {})[_ANSWER]): one for one in assessments(episode, answers, self._run_id)}
        there: dict[str, str] = {}
        for one in self._client.get_trace_info(trace_id).assessments:
            if one.source.source_type == "HUMAN" and one.name in _NAMES and one.assessment_id:
                there[str((one.metadata or {}).get(_ANSWER))] = one.assessment_id
        for answer, assessment_id in there.items():
            if answer not in wanted:
                self._client.delete_assessment(trace_id, assessment_id)
        for answer, assessment in wanted.items():
            if answer not in there:
                self._client.log_assessment(trace_id, assessment)
        return trace_id

    def _made(self, episode: Trajectory) -> str:
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
    """One for each answer about the episode."""
    from mlflow.entities import AssessmentSource, Expectation, Feedback

    for answer in answers:
        if episode.id not in (answer.trajectory, getattr(answer, "other", None)):
            continue
        rest: dict[str, Any] = {
            "source": AssessmentSource(source_type="HUMAN", source_id=answer.author),
            "create_time_ms": int(answer.moment * 1000),
            "last_update_time_ms": int(answer.moment * 1000),
        }
        metadata = {_ANSWER: answer.id, **({"note": answer.note} if answer.note else {})}
        made: Assessment
        if isinstance(answer, Rating):
            made = Feedback("human_score", answer.score, rationale=answer.note or None, metadata=metadata, **rest)
        elif isinstance(answer, Choice):
            side = int(answer.trajectory != episode.id)
            metadata |= {"other": (answer.other, answer.trajectory)[side]}
            value = _SIDES[answer.better][side]
            made = Feedback("human_choice", value, rationale=answer.note or None, metadata=metadata, **rest)
        else:
            assert isinstance(answer, Correction)
            metadata |= {"history": str(answer.history), "message": str(answer.message)}
            said = {"text": answer.text, "calls": [one.model_dump() for one in answer.calls]}
            made = Expectation("correction", said, metadata=metadata, **rest)
        made.run_id = run_id
        yield made
