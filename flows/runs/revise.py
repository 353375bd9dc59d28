"""`python -m flows.runs revise RUN --out FILE`: revision by a judge of a run's answers that violate its principles.

    python -m flows.runs revise RUN --out FILE                                    with the run's own reward
    python -m flows.runs revise RUN --out FILE reward.model.url=URL reward.model.model=NAME

The judge is a `reward=constitution`: the run's own, also inside a composed reward, or, with overrides,
`conf/reward/constitution.yaml` with these overrides. The judge's earlier answers come from the cache: after a run with
`reward.revise=true` the command makes no calls.

FILE gets a correction for each revised answer, in the format of human corrections (`flows.runs annotate`), with the
author `constitution NAME`. `feedback=answers feedback.path=FILE fork=RUN` trains on them. Corrections that FILE already
contains are not added again. --pairs FILE gets preferences in TRL's format, one JSON object per line, with `chosen`
(the conversation up to the revised answer), `rejected` (up to the original one) and `tools`. RUN is an id, a prefix of
an id, an experiment's name (its latest run) or `latest`. The default of --stage is the last round's collection.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError, ResourceError
from components.specs import Target
from flows.terminal.arguments import RootParser, add_trust
from flows.terminal.exit_codes import print_message

if TYPE_CHECKING:
    from components.rewards.judges.constitution import Constitution, Revision
    from components.trajectories.feedback import Correction
    from components.trajectories.schema import Trajectory
    from flows.annotation.episodes import StageEpisodes
    from flows.experiment.spec import ExperimentSpec
    from flows.history.records import RunRecord, StageRecord

CONSTITUTION = "components.rewards.judges.constitution.Constitution"
_Verdicts = list[tuple["Trajectory", str, "Revision"]]
"""Tuples of episode, judge's name, and its verdict on an answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 2 for a user error, 130 if interrupted."""
    parser = RootParser(
        prog="python -m flows.runs revise", description="Revises a run's answers that violate its judge's principles."
    )
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name, or latest")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", required=True, help="append corrections to this file (JSONL)"
    )
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="write preferences in TRL's format here (JSONL)")
    add_trust(parser)
    parser.add_argument("--stage", metavar="LABEL", help='stage of the episodes: "collect[1]", "evaluate[final]"')
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="another judge: overrides of its reward")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _revise(options)
    except EspalierError as error:
        print_message(error)
        return 2
    except KeyboardInterrupt:
        return 130


def _revise(options: argparse.Namespace) -> int:
    from components.trajectories.convert import write_jsonl
    from components.trajectories.feedback import append, read, standing
    from flows.annotation.episodes import load, stage_named
    from flows.experiment.recorded import REPLACED, recorded_experiment
    from flows.history.records import Records

    root = options.root.absolute()
    if not root.is_dir():
        raise ResourceError(f"root={root}: the folder does not exist; expected the folder of your runs")
    run = Records(root).get(options.run)
    stage = stage_named(run, options.stage)
    spec = recorded_experiment(run, options.trust, {*REPLACED, "reward"} if options.overrides else REPLACED)
    episodes = load(root, run, stage, trust=options.trust)
    target = _composed(options.overrides, spec, root) if options.overrides else _own(run, spec)
    verdicts, costs = _judge(root, spec, stage, episodes, spec.resolve_dtypes(target, "judge"))
    corrections = [
        _correction(trajectory, judge, revised, episodes)
        for trajectory, judge, revised in verdicts
        if revised.revision is not None
    ]
    present = {_content(answer) for answer in standing(read(options.out))} if options.out.is_file() else set()
    try:
        added = append(options.out, [correction for correction in corrections if _content(correction) not in present])
        if options.pairs is not None:
            write_jsonl(options.pairs, _pairs(verdicts))
    except OSError as error:
        raise ResourceError(f"{error.filename or options.out}: cannot be written: {error.strerror or error}") from None
    unscored = sum(revised.score is None for _, _, revised in verdicts)
    print(
        f"{len(verdicts)} answers of {stage.label} of run {run.short} judged: {len(corrections)} revised ({added} "
        f"added to {options.out}), {unscored} without a valid judgement; {costs}",
        file=sys.stderr,
    )
    print(
        f"to train on them: feedback=answers feedback.path={options.out.absolute()} fork={run.short}", file=sys.stderr
    )
    return 0


def _composed(overrides: Sequence[str], spec: ExperimentSpec, root: Path) -> Target:
    """Return the judge of `reward=constitution` with overrides. spec: the run's experiment."""
    from flows.experiment import run_models
    from flows.experiment.compose import compose
    from flows.stages.base import Context

    own = compose(["reward=constitution", *overrides]).model_copy(update={"root": str(root)})
    return run_models.resolve(own, Context.at(root, spec.store).store).reward


def _own(run: RunRecord, spec: ExperimentSpec) -> Target:
    """Return the first constitution in the run's reward. Raises ResourceError if there is none."""
    constitution = next(_targets(spec.reward), None)
    if constitution is None:
        raise ResourceError(
            f"run {run.short}: its reward {spec.reward.target} contains no constitution; set a judge: "
            "reward.model.url=URL reward.model.model=NAME"
        )
    return constitution


def _targets(value: Any) -> Iterator[Target]:
    if isinstance(value, Target):
        if value.target == CONSTITUTION:
            yield value
        value = value.arguments
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for item in items:
        yield from _targets(item)


def _judge(
    root: Path, spec: ExperimentSpec, stage: StageRecord, episodes: StageEpisodes, target: Target
) -> tuple[_Verdicts, str]:
    """Return the judges' verdicts on all finished episodes, and a text with calls and costs."""
    from components.aio import in_order
    from flows.stages.base import Context
    from flows.stages.judge import judging

    reward: Constitution = target.build()
    context = Context.at(root, spec.store)
    policy_key = stage.request["inputs"].get("policy")
    policy = context.store.find(policy_key) if policy_key else None
    finished = [trajectory for trajectory in episodes.by_id.values() if trajectory.failure is None]
    try:
        model = spec.resolve_dtypes(spec.model, "judge")
        with judging(reward, context, spec.judge, model, policy, spec.inference) as judgements:

            async def judge(trajectory: Trajectory) -> _Verdicts:
                return [
                    (trajectory, name, revised)
                    for name, asker in reward.askers.items()
                    for revised in await reward.judged(asker, trajectory, revise=True)
                ]

            verdicts = [verdict for batch in in_order(judge, finished, spec.judge.concurrency) for verdict in batch]
            figures = judgements.figures()
    finally:
        context.warm.close()
    calls = f"{figures.get('calls', 0):g} calls, {figures.get('kept_answers', 0):g} answers from the cache"
    return verdicts, f"{calls}, {figures.get('spent', 0):.4g} spent"


def _correction(trajectory: Trajectory, judge: str, revised: Revision, episodes: StageEpisodes) -> Correction:
    from components.trajectories.feedback import CorrectedCall, Correction

    original = trajectory.histories[revised.history].messages[revised.message]
    assert revised.revision is not None
    return Correction(
        author=f"constitution {judge}"[:100],
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        artifact=episodes.artifact.digest,
        trajectory=trajectory.id,
        content=episodes.contents[trajectory.id],
        note="\n".join(
            f"{name} {score:.2g}: {revised.critiques.get(name, '')}" for name, score in revised.scores.items()
        )[:10_000],
        history=revised.history,
        message=revised.message,
        text=revised.revision,
        calls=tuple(CorrectedCall(name=call.name, arguments=call.arguments) for call in original.tool_calls),
    )


def _content(answer: Any) -> Any:
    """Return an answer as JSON without its time and note, for comparison."""
    return answer.model_dump_json(exclude={"time", "note"})


def _pairs(verdicts: _Verdicts) -> Iterator[dict[str, Any]]:
    """Yield preference pairs: the conversation up to the revised answer, and up to the original one."""
    from dataclasses import replace

    from components.trajectories.convert import openai_json

    for trajectory, _, revised in verdicts:
        if revised.revision is not None:
            messages = trajectory.histories[revised.history].messages[: revised.message + 1]
            context = [openai_json(message) for message in messages[:-1]]
            revision, original = replace(messages[-1], content=revised.revision), messages[-1]
            yield {
                "chosen": [*context, openai_json(revision)],
                "rejected": [*context, openai_json(original)],
                "tools": trajectory.tools,
                "scenario_id": trajectory.scenario.id,
            }
