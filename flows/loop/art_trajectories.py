"""Trajectories of ART's client (`art.Trajectory`) as episodes: by their exact tokens, or by their messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from components.errors import Problem, SpecError
from components.inference.samples import FIELD, SAMPLING, answer_of
from components.rollout.collect_spec import CollectSpec
from components.trajectories import schema
from components.trajectories.recorder import Recorder
from flows.loop.groups import Transcript


def transcript_of(trajectory: Any) -> Transcript:
    """Return a trajectory by its messages."""
    metrics = {name: float(value) for name, value in trajectory.metrics.items()}
    success = metrics.get("success")
    return Transcript(
        [_message(part) for part in trajectory.messages_and_choices],
        trajectory.reward,
        trajectory.tools or [],
        None if success is None else success > 0,
        metrics,
    )


def episodes_of(groups: Iterable[Iterable[Any]], collect: CollectSpec, *, with_messages: bool) -> list[list[Any]]:
    """Return the episodes of groups for `TrainableModel.train`. collect: settings that the policy samples with.
    with_messages: accept trajectories whose tokens are unknown, by their messages. Raises SpecError with all of those
    that cannot be trained on."""
    problems: list[Problem] = []
    result = []
    for number, group in enumerate(groups):
        scenario = schema.Scenario(f"group-{number}", {}, "train")
        episodes: list[Any] = []
        for sample, trajectory in enumerate(group):
            choices = [part for history in _histories(trajectory) for part in history if not isinstance(part, dict)]
            reasons = [reason for choice in choices if (reason := _refusal(choice, collect))]
            if not choices and any(part["role"] == "assistant" for part in trajectory.messages_and_choices):
                reasons = ["has assistant messages, but no choice to train on; append completion.choices[0] instead"]
            if not reasons:
                episodes.append(_episode(trajectory, scenario, sample))
            elif with_messages:
                episodes.append(transcript_of(trajectory))
            else:
                problems.append(Problem(f"trajectory_groups.{number}.{sample}", reasons[0]))
        result.append(episodes)
    if problems:
        raise SpecError(problems)
    return result


def _histories(trajectory: Any) -> Iterator[list[Any]]:
    yield trajectory.messages_and_choices
    for history in trajectory.additional_histories:
        yield history.messages_and_choices


def _refusal(choice: Any, collect: CollectSpec) -> str | None:
    """Return why a choice cannot be trained on; None if it can."""
    sample = (choice.model_extra or {}).get(FIELD)
    if sample is None:
        return (
            "a choice has no tokens of the policy, such as one of a stream or of another model; expected choices of "
            "model.openai_client(), or allow_training_without_logprobs=True"
        )
    for name in SAMPLING:
        if (value := sample["sampling"][name]) != (expected := getattr(collect, name)):
            return (
                f"sampled with {name} = {value:g}, but training computes probabilities with collect.{name} = "
                f"{expected:g}; send {name}={expected:g}, or set overrides=['collect.{name}={value:g}'] of the backend"
            )
    return None


def _episode(trajectory: Any, scenario: schema.Scenario, sample: int) -> schema.Trajectory:
    """Return an episode whose choices have their tokens."""
    histories, versions = [], []
    for parts in _histories(trajectory):
        recorder, messages = Recorder(), [_message(part) for part in parts]
        for index, part in enumerate(parts):
            if not isinstance(part, dict):
                answer = answer_of(messages[index], part.finish_reason, part.model_extra[FIELD])
                recorder.record(messages[:index], answer)
                versions.append(answer.policy)
        recorder.close(messages)
        histories += recorder.histories
    transcript = transcript_of(trajectory)
    outcome = {"reward": transcript.reward}
    return schema.Trajectory(
        f"{scenario.id}/{sample}",
        scenario,
        sample,
        histories,
        transcript.tools,
        outcome=outcome if transcript.success is None else {**outcome, "success": transcript.success},
        metrics=transcript.metrics,
        policy=versions[0] if versions else "",
        reward=transcript.reward,
    )


def _message(part: Any) -> dict[str, Any]:
    """Return a message, or that of a choice, with text as content."""
    message = dict(part) if isinstance(part, dict) else part.message.model_dump(exclude_none=True)
    if "reasoning_content" in message:
        message["reasoning"] = message.pop("reasoning_content")
    if isinstance(message.get("content"), list):
        message["content"] = "".join(text["text"] for text in message["content"])
    return message
