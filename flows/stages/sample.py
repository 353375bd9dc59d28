"""Sample stage: a policy's answers to held-out prompts of imported data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from components.artifacts import Draft
from components.inference.spec import EmbeddedSpec, InferenceSpec
from components.models.spec import ModelSpec
from components.trajectories.schema import Message, Trajectory
from flows.stages.base import Context, Inputs, Request, Stage, StageSpec, base_model

FILE = "answers.jsonl"


class SampleStage(StageSpec):
    model: ModelSpec
    inference: InferenceSpec = EmbeddedSpec()
    max_tokens: int = Field(ge=1)
    """Maximum number of tokens of an answer."""
    prompts: int = Field(8, ge=1)
    """Maximum number of prompts, from the first held-out row."""

    def key_part(self) -> dict[str, Any]:
        model = {"model": base_model(self.model)} if self.inference.loads_policies else {}
        return model | self.inference.key_part() | {"max_tokens": self.max_tokens, "prompts": self.prompts}


def sample(spec: SampleStage, inputs: Inputs, draft: Draft, context: Context) -> dict[str, float]:
    """Write `answers.jsonl`: for each prompt its messages and tools, the answer of the data and that of the policy, by
    greedy decoding. Inputs: `data`, an import with held-out rows; `policy`, a checkpoint (without: the base model)."""
    from components.aio import run
    from components.data.importing import HELDOUT
    from components.inference.protocol import ChatRequest, Sampling, gather_completions
    from components.trajectories.convert import to_openai
    from components.trajectories.store import read_scored
    from flows.stages.episodes import warm_engine

    folder = inputs["data"].path / HELDOUT
    rows = read_scored(*(folder / f"{name}.parquet" for name in ("trajectories", "scores", "selection")))
    best = _best_answers(rows, spec.prompts)
    prompts = [
        ([to_openai(message) for message in prompt], tools, answer) for prompt, tools, answer in map(_turn, best)
    ]
    context.progress(0, len(prompts), {"loading": 1.0})
    engine = warm_engine(spec.model, inputs.get("policy"), context, spec.inference)
    sampling = Sampling(temperature=0.0, max_tokens=spec.max_tokens)
    requests = [ChatRequest(messages, tools, engine.policy, sampling) for messages, tools, _ in prompts]
    try:
        completions = run(gather_completions(engine.chat, requests))
    finally:
        engine.release()  # the trainer needs the memory
    context.progress(len(prompts), len(prompts))
    with (draft.path / FILE).open("w", encoding="utf-8") as file:
        for (messages, tools, answer), completion in zip(prompts, completions, strict=True):
            row = {"messages": messages, "tools": tools, "reference": to_openai(answer), "answer": completion.message}
            file.write(json.dumps(row | {"finish_reason": completion.finish_reason}, ensure_ascii=False) + "\n")
    cut = sum(completion.finish_reason == "length" for completion in completions)
    return {"answers": float(len(completions)), "cut": float(cut)}


def _best_answers(rows: Iterable[Trajectory], count: int) -> list[Trajectory]:
    """Return the episode with the highest reward of each of the first `count` scenarios."""
    best: dict[str, Trajectory] = {}
    for row in rows:
        if row.group not in best and len(best) == count:
            break
        if row.group not in best or (row.reward or 0.0) > (best[row.group].reward or 0.0):
            best[row.group] = row
    return list(best.values())


def _turn(episode: Trajectory) -> tuple[list[Message], list[dict[str, Any]], Message]:
    """Return the first answer of an episode that is trained on, with the messages before it and the tools."""
    from components.trajectories.roles import tools_of

    history, place = next(
        (history, place)
        for history in episode.histories
        for place, message in enumerate(history.messages)
        if message.role == "assistant" and message.trained
    )
    return history.messages[:place], tools_of(episode, history), history.messages[place]


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an artifact of this stage."""
    return [json.loads(line) for line in (folder / FILE).read_text(encoding="utf-8").splitlines()]


def summary_text(metrics: Mapping[str, float]) -> str:
    """Return the metrics in the console line of the stage as text."""
    if "answers" not in metrics:
        return ""
    cut = f", {metrics['cut']:.0f} cut at agent.max_tokens" if metrics["cut"] else ""
    return f"{metrics['answers']:.0f} answers to held-out prompts{cut}"


def prompts_of(request: Request) -> int:
    """Return the maximum number of answers of a request."""
    count: int = request.spec["prompts"]
    return count


STAGE = Stage(
    "sample",
    1,
    SampleStage,
    "answers",
    1,
    sample,
    files={FILE: "held-out prompts with the answers of the data and of the policy"},
    inputs={"data": "dataset", "policy": "checkpoint"},
    order=76,
    unit="answers",
    size=prompts_of,
    summary=summary_text,
)
