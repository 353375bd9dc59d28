"""`flows.explain attribute RUN`: training groups that pushed against the held-out scenarios which a round lost.

    python -m flows.explain attribute RUN                            the last round
    python -m flows.explain attribute RUN --round 3 --json           another round
    python -m flows.explain attribute RUN --round 3 --without GROUP  train the round again without a group; repeatable

A scenario is lost if the policy before the round solved it and the policy after the round does not. For each, the
groups of the round by influence, most negative first: the dot product of the gradient of the group's loss and that of
the negative log-likelihood of the episode that solved the scenario, at the policy before the round (TracIn,
arXiv:2002.08484). With `--without` the round is trained again without these groups, from the same policy: the result
shows which scenarios come back, and the change in held-out success.

Evaluations and the training are stages: they come from the cache, and resume. RUN is an id, a prefix of an id, an
experiment's name (its latest run) or `latest`. The page with the episodes is written below `<root>/attribute/`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flows.explain.round_command import RoundCommand, signed

if TYPE_CHECKING:
    from flows.experiment.spec import ExperimentSpec
    from flows.influence.attribution import Attribution, LostScenario, Retrained
    from flows.influence.rounds import TrainedRound

MOST_SCENARIOS = 5
"""Lost scenarios whose groups are shown in the terminal."""
MOST_GROUPS = 5
"""Groups that are shown of each scenario."""
MOST_ON_PAGE = 50
"""Lost scenarios whose episodes are on the page."""


def attribute(options: argparse.Namespace, trained: TrainedRound, spec: ExperimentSpec) -> tuple[dict[str, Any], str]:
    """Attribute the scenarios that a round lost. Return the result as JSON data, and the page."""
    from flows.influence import attribution, workplace

    workplace.check_judges(spec, [])
    groups = list(dict.fromkeys(options.without))
    with workplace.workplace(trained.run, spec, "attribute") as place:
        result = attribution.attribute(place, trained, groups)
        retrained = attribution.retrain(place, result, groups) if groups else None
        control = attribution.control(place, result) if groups else None
    data = to_json(result, retrained, control)
    return data, _page(result, data)


def to_json(
    result: Attribution, retrained: Retrained | None = None, control: Retrained | None = None
) -> dict[str, Any]:
    """Return the attribution as JSON data. retrained: the round without some groups. control: in another order."""
    trained, difference = result.trained, result.difference
    return {
        "run": trained.run.id,
        "round": trained.number,
        "success": [difference["before"], difference["after"]],
        **_change(difference),
        "scenarios": difference["n"],
        "groups": len(result.groups),
        "gained": len(difference["improved"]),
        "lost": [_lost(lost, result, retrained, control) for lost in result.lost],
        "totals": totals(result),
        "without": None if retrained is None else _retrained(retrained),
        "control": None if control is None else _retrained(control),
    }


def totals(result: Attribution) -> list[dict[str, Any]]:
    """Return the sum of the influences of each group on all lost scenarios, most negative first."""
    sums = {name: sum(lost.influence([name]) for lost in result.lost) for name in result.groups}
    return [{"group": name, "influence": sums[name]} for name in sorted(sums, key=lambda name: (sums[name], name))]


def _change(difference: Mapping[str, Any]) -> dict[str, Any]:
    from components.evaluation.metrics import interval_of

    return {"change": difference["difference"], "interval": interval_of(difference)}


def _lost(
    lost: LostScenario, result: Attribution, retrained: Retrained | None, control: Retrained | None
) -> dict[str, Any]:
    from flows.influence.rounds import excerpt

    row = {
        "scenario": lost.scenario,
        "before": {"id": lost.before.id, "text": excerpt(lost.before), "log_likelihood": lost.likelihoods[0]},
        "after": {"id": lost.after.id, "text": excerpt(lost.after), "log_likelihood": lost.likelihoods[1]},
        "negative": sum(item.influence < 0 for item in lost.influences),
        "groups": [
            {
                "group": item.group,
                "influence": item.influence,
                "cosine": item.cosine,
                "episodes": [
                    {"id": episode.id, "advantage": episode.advantage, "text": excerpt(episode)}
                    for episode in by_advantage(result, item.group)
                ],
            }
            for item in lost.influences[:MOST_GROUPS]
        ],
    }
    for name, training in (("without", retrained), ("control", control)):
        if training is not None:
            row[name] = {
                "influence": lost.influence(training.groups),
                "recovered": training.recovered[lost.scenario],
                "log_likelihood": training.likelihoods[lost.scenario],
            }
    return row


def by_advantage(result: Attribution, group: str) -> list[Any]:
    """Return the episodes of a group with the highest and with the lowest advantage."""
    ordered = sorted(result.groups[group], key=lambda episode: -(episode.advantage or 0.0))
    return [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered


def _retrained(retrained: Retrained) -> dict[str, Any]:
    return {
        "groups": list(retrained.groups),
        "recovered": [name for name, back in retrained.recovered.items() if back],
        "success": retrained.change["after"],
        **_change(retrained.change),
        "newly_lost": len(retrained.change["regressed"]),
    }


def _page(result: Attribution, data: Mapping[str, Any]) -> str:
    from components.pages.page import page

    lost = [(row, item.before, item.after) for row, item in zip(data["lost"], result.lost, strict=True)]
    return page(
        "attribution.html.j2",
        title=f"{result.trained.run.name}, round {result.trained.number}",
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        data=data,
        lost=lost[:MOST_ON_PAGE],
        shown={name: by_advantage(result, name) for name in result.groups},
        more=len(lost) - MOST_ON_PAGE,
    )


def show(data: Mapping[str, Any]) -> str:
    """Return the result as text."""
    before, after = data["success"]
    lines = [
        f"round {data['round']} of run {data['run'][:8]}: held-out success {before:.3f} before, {after:.3f} after "
        f"({_gain(data)}); {len(data['lost'])} of {data['scenarios']} scenarios lost, {data['gained']} gained",
    ]
    for row in data["lost"][:MOST_SCENARIOS]:
        lines += ["", *_lost_lines(row, data["groups"])]
    if (more := len(data["lost"]) - MOST_SCENARIOS) > 0:
        lines += ["", f"{more} more lost scenarios: see the page"]
    lines += ["", "all lost scenarios together, most negative groups"]
    lines += [f"  {row['influence']:+10.3g}  {row['group']}" for row in data["totals"][:MOST_GROUPS]]
    if data["without"] is not None:
        lines += ["", *_without_lines(data)]
    return "\n".join([*lines, "", f"page: {data['html']}"])


def _lost_lines(row: Mapping[str, Any], groups: int) -> list[str]:
    first, second = row["before"], row["after"]
    lines = [
        f"{row['scenario']}: {row['negative']} of {groups} groups pushed against it; log-likelihood "
        f"{first['log_likelihood']:.2f} before, {second['log_likelihood']:.2f} after",
        f"  solved before: {first['text']}",
        f"  not after:     {second['text']}",
    ]
    for group in row["groups"]:
        lines.append(f"  {group['influence']:+10.3g}  {group['group']}")
        lines += [f"{'':14}{_advantage(episode)}: {episode['text']}" for episode in group["episodes"]]
    return lines


def _advantage(episode: Mapping[str, Any]) -> str:
    return f"{episode['id'].rpartition('/')[2]:>2} advantage {episode['advantage']:+.2f}"


def _without_lines(data: Mapping[str, Any]) -> list[str]:
    without, control, count = data["without"], data["control"], len(data["lost"])
    lines = [
        f"without {', '.join(without['groups'])}: {len(without['recovered'])} of {count} lost scenarios come back; "
        f"held-out success {without['success']:.3f} ({_gain(without)})",
        f"control, all groups in another order: {len(control['recovered'])} of {count} come back; "
        f"held-out success {control['success']:.3f} ({_gain(control)})",
        "",
        "                     log-likelihood of the successful episode          comes back",
        "  influence removed    before     after   without   control    without  control",
    ]
    for row in data["lost"]:
        states = (row["before"], row["after"], row["without"], row["control"])
        figures = " ".join(f"{state['log_likelihood']:9.3f}" for state in states)
        back = ["yes" if row[name]["recovered"] else "no" for name in ("without", "control")]
        influence = row["without"]["influence"]
        lines.append(f"  {influence:+17.3g} {figures} {back[0]:>10} {back[1]:>8}  {row['scenario']}")
    return lines


def _gain(row: Mapping[str, Any]) -> str:
    return signed(row["change"], row["interval"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    text = "train the round again without this group, and evaluate it; repeatable"
    parser.add_argument("--without", action="append", default=[], metavar="GROUP", help=text)


COMMAND = RoundCommand(
    "attribute",
    "Attributes the held-out scenarios that a round lost to its training groups.",
    add_arguments,
    attribute,
    show,
)
main = COMMAND.main
