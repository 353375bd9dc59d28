"""Trajectories as MLflow traces: a span for every generation and every tool call, an assessment for every score.

The traces are built directly, without MLflow's fluent tracing, which uses global state, exports in a background thread
and records only the present, while an episode is in the past. A trajectory has no wall-clock times, so a span's times
only express order: one millisecond per sampled token, and one per tool call.
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.trajectories.convert import openai_json
from components.trajectories.roles import tools_of
from components.trajectories.schema import History, Score, Trajectory
from components.trajectories.stored import episodes_of

if TYPE_CHECKING:
    from mlflow.entities import Assessment, Span, TraceInfo

_PREVIEW = 500
"""Maximum characters of the question and the answer in MLflow's list of traces."""
_MS = 1_000_000


def sample(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return at most `count` episodes: failed ones first, then the worst and the best in turn."""
    episodes = episodes_of(trajectories)
    columns = episodes.columns
    failed = columns.failed_N.nonzero()[0].tolist()
    names, solved = columns.names, columns.success_N.tolist()
    rewards = [reward if reward == reward else float("-inf") for reward in columns.reward_N.tolist()]
    finished = (~columns.failed_N).nonzero()[0].tolist()
    ranked = deque(sorted(finished, key=lambda place: (solved[place], rewards[place], names[place])))
    chosen = failed[: count // 3]
    while ranked and len(chosen) < count:
        chosen.append(ranked.popleft() if len(chosen) % 2 else ranked.pop())
    return episodes.rows(chosen + failed[count // 3 :][: count - len(chosen)])


def to_trace(
    trajectory: Trajectory, *, experiment_id: str, run_id: str, label: str, start_ms: int, score: Score | None = None
) -> tuple[TraceInfo, list[Span]]:
    """Return the trace of one episode, ready for `log_traces`. `start_ms` is its nominal start as Unix time. score: the
    judge's score."""
    from mlflow.entities import SpanType, TraceInfo, TraceLocation, TraceState
    from mlflow.tracing.constant import TraceMetadataKey, TraceTagKey

    spans = _Spans(start_ns=start_ms * _MS)
    question = next((m.content for h in trajectory.histories for m in h.messages if m.role == "user"), "")
    main = [history for history in trajectory.histories if history.agent == trajectory.histories[0].agent]
    answer = next((m.content for h in main[-1:] for m in reversed(h.messages) if m.role == "assistant"), "")
    root = spans.open(f"episode {trajectory.id}", SpanType.AGENT)
    for history in trajectory.histories:
        parent = root if len(trajectory.histories) == 1 else spans.open(f"agent {history.agent}", SpanType.CHAIN, root)
        _add_history(spans, parent, history, tools_of(trajectory, history))
        if parent is not root:
            spans.close(parent)
    failure = trajectory.failure
    spans.close(
        root,
        inputs={"scenario": trajectory.scenario.input},
        outputs={"outcome": trajectory.outcome, "reward": trajectory.reward},
        attributes={"metrics": trajectory.metrics, "sampling": trajectory.sampling, "policy": trajectory.policy},
        error=f"{failure.boundary}: {failure.kind}: {failure.message}" if failure else None,
    )
    info = TraceInfo(
        trace_id=spans.trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=start_ms,
        execution_duration=(spans.clock_ns - start_ms * _MS) // _MS,
        state=TraceState.ERROR if failure else TraceState.OK,
        request_preview=question[:_PREVIEW],
        response_preview=(str(failure.message) if failure else answer)[:_PREVIEW],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id},
        tags={
            TraceTagKey.TRACE_NAME: f"{label} {trajectory.scenario.id}"[:250],
            "evaluation": label,
            "trajectory": trajectory.id,
            "scenario": trajectory.scenario.id,
            "type": trajectory.scenario.type,
            "difficulty": str(trajectory.scenario.difficulty),
            "policy": trajectory.policy,
        },
        assessments=_assessments(trajectory, run_id, score),
    )
    return info, spans.finished()


def _assessments(trajectory: Trajectory, run_id: str, score: Score | None) -> list[Assessment]:
    """Return the reward with its explanation, each of its components, and success if it is stated."""
    from mlflow.entities import AssessmentError, AssessmentSource, Feedback

    judge = AssessmentSource(source_type="CODE", source_id="judge")
    environment = AssessmentSource(source_type="CODE", source_id="environment")
    failure = trajectory.failure or (score.failure if score else None)
    rationale = score.explanation if score and score.explanation else None
    if trajectory.reward is not None:
        feedback = [Feedback(name="reward", value=trajectory.reward, source=judge, rationale=rationale)]
    else:
        error = AssessmentError(
            error_code=failure.kind if failure else "Unscored", error_message=failure.message if failure else None
        )
        feedback = [Feedback(name="reward", error=error, source=judge, rationale=rationale)]
    components: Mapping[str, float] = score.components if score else {}
    feedback += [Feedback(name=f"reward/{name}", value=value, source=judge) for name, value in components.items()]
    if trajectory.outcome.get("success") is not None:
        feedback.append(Feedback(name="success", value=trajectory.success, source=environment))
    for item in feedback:
        item.run_id = run_id
    return feedback


def _add_history(spans: _Spans, parent: str, history: History, tools: list[dict[str, Any]]) -> None:
    """Add a generation span for each assistant message, with the preceding conversation as its input, and a tool span
    for each call."""
    from mlflow.entities import SpanType
    from mlflow.tracing.constant import SpanAttributeKey

    answers = {m.tool_call_id: m.content for m in history.messages if m.role == "tool" and m.tool_call_id}
    for index, message in enumerate(history.messages):
        if message.role != "assistant":
            continue
        span = spans.open("generation", SpanType.CHAT_MODEL, parent)
        attributes: dict[str, Any] = {SpanAttributeKey.MESSAGE_FORMAT: "openai"}
        if tools:
            attributes[SpanAttributeKey.CHAT_TOOLS] = tools
        if message.span is not None:
            prompt, sampled = message.span[0], message.span[1] - message.span[0]
            attributes[SpanAttributeKey.CHAT_USAGE] = {
                "input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
            }  # fmt: skip
            spans.clock_ns += sampled * _MS
        spans.close(
            span,
            inputs={"messages": [openai_json(earlier) for earlier in history.messages[:index]]},
            outputs={"choices": [{"message": openai_json(message), "finish_reason": message.finish_reason or "stop"}]},
            attributes=attributes,
        )
        for call in message.tool_calls:
            span = spans.open(call.name, SpanType.TOOL, parent)
            spans.clock_ns += _MS
            spans.close(span, inputs={"arguments": call.arguments}, outputs=answers.get(call.id))


class _Spans:
    """Builder of the spans of one trace in MLflow's stored form, with a clock of its own."""

    def __init__(self, start_ns: int):
        self.trace_id = f"tr-{uuid.uuid4().hex}"
        self.clock_ns = start_ns
        self._spans: dict[str, dict[str, Any]] = {}

    def open(self, name: str, kind: str, parent: str | None = None) -> str:
        from mlflow.tracing.constant import SpanAttributeKey

        span_id = uuid.uuid4().hex[:16]
        self._spans[span_id] = {
            "trace_id": self.trace_id,
            "span_id": span_id,
            "parent_span_id": parent,
            "name": name,
            "start_time_unix_nano": self.clock_ns,
            "attributes": {SpanAttributeKey.REQUEST_ID: self.trace_id, SpanAttributeKey.SPAN_TYPE: kind},
        }
        return span_id

    def close(
        self,
        span_id: str,
        *,
        inputs: Any = None,
        outputs: Any = None,
        attributes: dict[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        from mlflow.tracing.constant import SpanAttributeKey

        span = self._spans[span_id]
        self.clock_ns = max(self.clock_ns, span["start_time_unix_nano"] + _MS)
        span["end_time_unix_nano"] = self.clock_ns
        span["status"] = {"code": "ERROR", "message": error} if error else {"code": "OK"}
        span["attributes"].update(attributes or {})
        for key, value in ((SpanAttributeKey.INPUTS, inputs), (SpanAttributeKey.OUTPUTS, outputs)):
            if value is not None:
                span["attributes"][key] = value

    def finished(self) -> list[Span]:
        from mlflow.entities import Span

        for span in self._spans.values():
            # MLflow stores every attribute as JSON text.
            span["attributes"] = {key: json.dumps(value, default=str) for key, value in span["attributes"].items()}
        return [Span.from_dict(span) for span in self._spans.values()]
