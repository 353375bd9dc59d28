"""`python -m flows.revise RUN --out FILE`: answers of a run that do not keep to principles, written anew by a judge.

    python -m flows.revise RUN --out FILE                                    by the run's own reward
    python -m flows.revise RUN --out FILE reward.model.url=URL reward.model.model=NAME

The judge is that of `reward=constitution`: the run's own, also where it is a part of another reward, or, with
overrides, that of `conf/reward/constitution.yaml` changed by them. What it was asked before and answered is not asked
again: after a run with `reward.revise=true` this makes no call.

FILE gets a correction for each answer that was written anew, as those of people (`flows.annotate`), with the author
`constitution NAME`: `feedback=scores feedback.path=FILE fork=RUN` trains on them. Corrections that it has are not added
again. --pairs FILE gets a JSON object a line with `chosen` (the conversation up to the new answer), `rejected` (up to
the old one) and `tools`: preferences in TRL's form. RUN is an id, the beginning of one, an experiment's name (its
latest run) or `latest`; without --stage it is the last round's collection.
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
from components.specs import Target, validate
from flows.terminal.arguments import RootParser

if TYPE_CHECKING:
    from components.rewards.judges.constitution import Constitution, Revised
    from components.trajectories.feedback import Correction
    from components.trajectories.schema import Trajectory
    from flows.annotation.episodes import Episodes
    from flows.history.records import RunRecord, StageRecord

CONSTITUTION = "components.rewards.judges.constitution.Constitution"
Found = list[tuple["Trajectory", str, "Revised"]]
"""Episode, judge, and what it says of an answer."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 2 for a mistake of the user's, 130 where it was interrupted."""
    parser = RootParser(
        prog="python -m flows.revise", description="Has answers written anew that do not keep to principles."
    )
    parser.add_argument("run", metavar="RUN", help="id, beginning of an id, experiment's name, or latest")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="corrections are added here (JSONL)")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="preferences in TRL's form are written here (JSONL)")
    parser.add_argument("--stage", metavar="LABEL", help='whose episodes: "collect[1]", "evaluate[final]"')
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="another judge, below reward=constitution")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        return _revise(options)
    except EspalierError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _revise(options: argparse.Namespace) -> int:
    from components.trajectories.convert import write_jsonl
    from components.trajectories.feedback import append, read, standing
    from flows.annotation.episodes import load, stage_named
    from flows.history.records import Records

    root = options.root.absolute()
    if not root.is_dir():
        raise ResourceError(f"root={root}: there is no such folder; expected that of your runs")
    run = Records(root).get(options.run)
    stage = stage_named(run, options.stage)
    episodes = load(root, run, stage)
    target = _composed(options.overrides) if options.overrides else _own(run)
    found, figures = _asked(root, run, stage, episodes, target)
    made = [_correction(one, judge, revised, episodes) for one, judge, revised in found if revised.revision is not None]
    known = {_said(one) for one in standing(read(options.out))} if options.out.is_file() else set()
    try:
        added = append(options.out, [one for one in made if _said(one) not in known])
        if options.pairs is not None:
            write_jsonl(options.pairs, _pairs(found))
    except OSError as error:
        raise ResourceError(f"{error.filename or options.out}: cannot be written: {error.strerror or error}") from None
    unread = sum(revised.score is None for _, _, revised in found)
    print(
        f"{len(found)} answers of {stage.label} of run {run.short} judged: {len(made)} written anew ({added} added to "
        f"{options.out}), {unread} that the judge could not judge; {figures}",
        file=sys.stderr,
    )
    print(f"train on them: feedback=scores feedback.path={options.out.absolute()} fork={run.short}", file=sys.stderr)
    return 0


def _composed(overrides: Sequence[str]) -> Target:
    """The judge of the configuration."""
    from flows.experiment.compose import compose

    return compose(["reward=constitution", *overrides]).reward


def _own(run: RunRecord) -> Target:
    """The constitution that the run's reward is, or has as a part. Raises ResourceError where there is none."""
    reward = validate(Target, run.spec["reward"], path="reward", allow=run.spec.get("allow") or [])
    found = next(_targets(reward), None)
    if found is None:
        raise ResourceError(
            f"run {run.short} was judged by {reward.target}, which has no principles; name a judge: "
            "reward.model.url=URL reward.model.model=NAME"
        )
    return found


def _targets(value: Any) -> Iterator[Target]:
    if isinstance(value, Target):
        if value.target == CONSTITUTION:
            yield value
        value = value.arguments
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inside:
        yield from _targets(one)


def _asked(root: Path, run: RunRecord, stage: StageRecord, episodes: Episodes, target: Target) -> tuple[Found, str]:
    """What the judges say of all finished episodes, and what that took."""
    from components.aio import in_order
    from flows.experiment.spec import ExperimentSpec
    from flows.stages.base import Context
    from flows.stages.judge import judging

    spec = validate(ExperimentSpec, run.spec)
    reward: Constitution = target.build()
    context = Context.at(root, spec.store)
    played = stage.request["inputs"].get("policy")
    policy = context.store.find(played) if played else None
    finished = [one for one in episodes.by_id.values() if one.failure is None]
    try:
        with judging(reward, context, spec.judge, spec.model, policy, spec.inference) as judged:

            async def asked(one: Trajectory) -> Found:
                return [
                    (one, name, revised)
                    for name, asker in reward.askers.items()
                    for revised in await reward.judged(asker, one, revise=True)
                ]

            found = [one for some in in_order(asked, finished, spec.judge.concurrency) for one in some]
            figures = judged.figures()
    finally:
        context.warm.close()
    spent = f"{figures.get('calls', 0):g} calls, {figures.get('kept_answers', 0):g} answers known from before"
    return found, f"{spent}, {figures.get('spent', 0):.4g} spent"


def _correction(one: Trajectory, judge: str, revised: Revised, episodes: Episodes) -> Correction:
    from components.trajectories.feedback import CorrectedCall, Correction

    old = one.histories[revised.history].messages[revised.message]
    assert revised.revision is not None
    return Correction(
        author=f"constitution {judge}"[:100],
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        artifact=episodes.artifact.digest,
        trajectory=one.id,
        content=episodes.contents[one.id],
        note="\n".join(
            f"{name} {score:.2g}: {revised.critiques.get(name, '')}" for name, score in revised.scores.items()
        )[:10_000],
        history=revised.history,
        message=revised.message,
        text=revised.revision,
        calls=tuple(CorrectedCall(name=call.name, arguments=call.arguments) for call in old.tool_calls),
    )


def _said(one: Any) -> Any:
    """What an answer says, whenever it was said."""
    return one.model_dump_json(exclude={"time", "note"})


def _pairs(found: Found) -> Iterator[dict[str, Any]]:
    """The conversation up to the new answer, and up to the old one."""
    from dataclasses import replace

    from components.trajectories.convert import to_openai

    for one, _, revised in found:
        if revised.revision is not None:
            messages = one.histories[revised.history].messages[: revised.message + 1]
            before = [to_openai(message) for message in messages[:-1]]
            new, old = replace(messages[-1], content=revised.revision), messages[-1]
            yield {
                "chosen": [*before, to_openai(new)],
                "rejected": [*before, to_openai(old)],
                "tools": one.tools,
                "scenario_id": one.scenario.id,
            }


if __name__ == "__main__":
    raise SystemExit(main())
