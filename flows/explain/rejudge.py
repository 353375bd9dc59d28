r"""`python -m flows.explain rejudge RUN reward=A reward=B`: rewards compared by what they teach on the same episodes.

    python -m flows.explain rejudge RUN reward=outcome reward.turn_cost=0.1     own reward and another one
    python -m flows.explain rejudge RUN reward=length reward.target=9 reward=steps  two; overrides follow each
    python -m flows.explain rejudge latest reward=ruler --round 3 --json        collection of an earlier round
    python -m flows.explain rejudge latest reward=steps --whole-round           the effect of a round in place of a step

All rewards judge the episodes that the run collected in its last round, or in `--round N`. For each pair: Kendall's
tau-b within groups; the share of groups in which an advantage changes sign, or two episodes change order; the cosine of
the policy gradients of the run's algorithm, at the policy that collected the episodes; and the difference in held-out
success after one gradient step on each, with its paired 95 % interval. `own` is the run's reward.

Judging, the step and its evaluation are stages: they come from the cache, and resume. RUN is an id, a prefix of an id,
an experiment's name (its latest run) or `latest`. The page with the episodes is written below `<root>/rejudge/`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flows.explain.round_command import RoundCommand, signed

if TYPE_CHECKING:
    from components.evaluation.rank_agreement import FlippedGroup
    from components.trajectories.schema import Trajectory
    from flows.experiment.spec import ExperimentSpec
    from flows.influence.rejudging import JudgedReward, Rejudging, RewardPair
    from flows.influence.rounds import TrainedRound

MOST_FLIPS = 20
"""Maximum number of flipped groups of a pair in the JSON output and on the page."""
MOST_EPISODES = 4
"""The same of the episodes of a group."""


def rejudge(options: argparse.Namespace, trained: TrainedRound, spec: ExperimentSpec) -> tuple[dict[str, Any], str]:
    """Compare rewards on the episodes of a round. Return the result as JSON data, and the page."""
    from flows.influence import rejudging, workplace

    compared = rejudging.compose_rewards(options.overrides, spec, trained.run.spec, options.config_dir)
    workplace.check_judges(spec, [reward.target for reward in compared])
    with workplace.workplace(trained.run, spec, "rejudge") as place:
        result = rejudging.rejudge(place, trained, compared, one_step=not options.whole_round)
    data = to_json(result, not options.whole_round)
    return data, _page(result, data)


def to_json(result: Rejudging, one_step: bool = True) -> dict[str, Any]:
    """Return the comparison as JSON data. one_step: True if the policies took one gradient step."""
    trained = result.trained
    return {
        "run": trained.run.id,
        "round": trained.number,
        "collection": trained.label,
        "episodes": len(result.episodes),
        "training": "one step" if one_step else "whole round",
        "rewards": [_reward_row(reward) for reward in result.rewards],
        "pairs": [_pair_row(pair, result.episodes) for pair in result.pairs],
        "control": None if result.control is None else _effect(result.control),
    }


def _reward_row(reward: JudgedReward) -> dict[str, Any]:
    return {
        "name": reward.name,
        "reward": reward.target,
        "scored": reward.scored,
        "unscored": reward.unscored,
        "signal": reward.signal,
        "gradient_norm": reward.gradient_norm,
        "success": reward.step["after"],
        **_effect(reward.step),
    }


def _pair_row(pair: RewardPair, episodes: Mapping[str, Trajectory]) -> dict[str, Any]:
    agreement = pair.agreement
    return {
        "first": pair.first,
        "second": pair.second,
        "tau": agreement.tau,
        "ranked": agreement.ranked,
        "groups": agreement.groups,
        "flipped": agreement.flipped,
        "cosine": pair.cosine,
        **_effect(pair.effect),
        "scenarios": pair.effect["n"],
        "flipped_groups": len(agreement.flips),
        "flips": [_flip(flip, episodes) for flip in agreement.flips[:MOST_FLIPS]],
    }


def _effect(difference: Mapping[str, Any]) -> dict[str, Any]:
    from components.evaluation.metrics import interval_of

    return {"effect": difference["difference"], "interval": interval_of(difference)}


def _flip(flip: FlippedGroup, episodes: Mapping[str, Trajectory]) -> dict[str, Any]:
    from flows.influence.rounds import excerpt

    return {
        "group": flip.group,
        "episodes": [
            {
                "id": name,
                "advantages": [flip.first[name], flip.second[name]],
                "text": excerpt(episodes[name]),
            }
            for name in flip.episodes[:MOST_EPISODES]
        ],
    }


def _page(result: Rejudging, data: Mapping[str, Any]) -> str:
    from components.pages.page import page

    return page(
        "rejudge.html.j2",
        title=f"{result.trained.run.name}, {result.trained.label}",
        created=time.strftime("%Y-%m-%d %H:%M:%S"),
        data=data,
        pairs=result.pairs,
        episodes=result.episodes,
        most_groups=MOST_FLIPS,
        most_episodes=MOST_EPISODES,
    )


def show(data: Mapping[str, Any]) -> str:
    """Return the result as text."""
    names = [row["name"] for row in data["rewards"]]
    width = max(6, *map(len, names))
    lines = [
        f"{data['episodes']} episodes of {data['collection']} of run {data['run'][:8]}, judged {len(names)} times",
        "",
    ]
    after = f"success after {'one step' if data['training'] == 'one step' else 'the whole round'}, and change"
    lines.append(f"{'reward':{width}}  scored  groups with signal  gradient norm  {after}")
    for row in data["rewards"]:
        lines.append(
            f"{row['name']:{width}}  {row['scored']:6}  {row['signal']:18}  {row['gradient_norm']:13.4g}  "
            f"{row['success']:.3f}  {_gain(row)}"
        )
    lines += ["", f"{'pair':{2 * width + 9}}  tau-b   flipped  cosine  second minus first, held-out success"]
    for row in data["pairs"]:
        pair = f"{row['first']} against {row['second']}"
        flipped = "–" if row["flipped"] is None else f"{row['flipped']:.0%}"
        lines.append(
            f"{pair:{2 * width + 9}}  {_number(row['tau'])}  {flipped:>7}  {_number(row['cosine'])}  {_gain(row)}"
        )
    if data["control"] is not None:
        lines += ["", f"control: own in another order of its groups changes success by {_gain(data['control'])}"]
    for row in data["pairs"]:
        if row["flips"]:
            lines += ["", f"{row['first']} against {row['second']}: {row['flipped_groups']} groups flipped, such as"]
            lines += _episodes(row["flips"][0])
    return "\n".join([*lines, "", f"page: {data['html']}"])


def _episodes(flip: Mapping[str, Any]) -> list[str]:
    return [
        f"  {episode['id']}  advantage {episode['advantages'][0]:+.3g} and {episode['advantages'][1]:+.3g}: "
        f"{episode['text']}"
        for episode in flip["episodes"]
    ]


def _number(value: float | None) -> str:
    return "     –" if value is None else f"{value:+.3f}"


def _gain(row: Mapping[str, Any]) -> str:
    return signed(row["effect"], row["interval"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    text = "rewards to compare; overrides reward.KEY=VALUE follow each"
    parser.add_argument("overrides", nargs="*", metavar="reward=NAME", help=text)
    text = "train on the round in the run's gradient steps, in place of one step"
    parser.add_argument("--whole-round", action="store_true", help=text)
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")


COMMAND = RoundCommand(
    "rejudge",
    "Compares rewards by what they teach on the episodes of a run.",
    add_arguments,
    rejudge,
    show,
)
main = COMMAND.main
