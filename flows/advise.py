r"""`python -m flows.advise`: method and command for what you have.

    python -m flows.advise                                              asks, on a terminal
    python -m flows.advise --environment retail                         an environment that reports success
    python -m flows.advise --environment movie --success no --judge yes
    python -m flows.advise --data preferences.jsonl                     a file, whose content is recognized
    python -m flows.advise --preferences 5000 --pairs --goal simple --json

The answer is a method, the reason, a command, which is composed and validated before it is printed, and what the method
needs and costs, which follows from the declarations of the algorithm and of the stages that the command runs. Further
overrides (`key=value`) become part of the command: values that an environment needs, such as `environment.url=URL`.
`flows.advice.rules` has the decision rules as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from components.errors import EspalierError
from flows.terminal.arguments import refuse_root_option
from flows.terminal.exit_codes import print_message

if TYPE_CHECKING:
    from flows.advice.advice import Advice

NO = ("no", "none", "")
YES_NO, COMPUTE = ("yes", "no"), ("cpu", "gpu", "cluster")
GOALS = ("simple", "regularized", "reasoning", "self-improvement")
QUESTIONS: dict[str, tuple[str, Any]] = {
    "data": ("File with demonstrations, preferences, or questions and answers (none)", str),
    "labels": ("Number of demonstrations (0)", int),
    "preferences": ("Number of preferences (0)", int),
    "form": ("Their form: pairs, thumbs or ranked", ("pairs", "thumbs", "ranked")),
    "environment": ("Environment: an option of conf/environment, mcp, or none", str),
    "success": ("Does it report success? (yes)", YES_NO),
    "sparse": ("Are its episodes long, and successes rare? (no)", YES_NO),
    "slow": ("Does collecting episodes take as long as training? (no)", YES_NO),
    "judge": ("Language model as a judge: yes, no, or PROVIDER/MODEL (no)", str),
    "goal": ("What matters most: simple, regularized, reasoning or self-improvement (none)", (*GOALS, "none")),
    "teacher": ("Larger model to learn from: name or folder (none)", str),
    "compute": ("Compute: cpu, gpu or cluster (cpu)", COMPUTE),
    "tight": ("Does the model hardly fit the GPU memory? (no)", YES_NO),
}
"""Questions with the types of their answers, or the possible answers, in order."""
EPISODES = ("success", "sparse", "slow")
"""Questions about an environment."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0, or 2 for a user error and if nothing can be advised."""
    parser = _parser()
    refuse_root_option(parser, argv)
    options = parser.parse_intermixed_args(argv)
    from flows.advice.advice import advise

    try:
        situation = _situation(options)
        advice = advise(situation, options.overrides, options.config_dir)
    except EspalierError as error:
        print_message(error)
        return 2
    except (EOFError, KeyboardInterrupt):
        return 130
    print(json.dumps(advice.to_json()) if options.json else _shown(advice), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.advise",
        description="Advises a training method, with the command, for what you have. Without options it asks.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides of the command")
    parser.add_argument("--config-dir", "-cd", help="folder with your own config groups")
    parser.add_argument("--labels", type=int, metavar="N", help="number of demonstrations")
    parser.add_argument("--preferences", type=int, metavar="N", help="number of preferences")
    forms = parser.add_mutually_exclusive_group()
    for name, text in (
        ("pairs", "preferences are pairs of a better and a worse answer"),
        ("thumbs", "preferences are single answers, marked good or bad"),
        ("ranked", "preferences are several answers in order"),
    ):
        forms.add_argument(f"--{name}", dest="form", action="store_const", const=name, help=text)
    parser.add_argument("--environment", metavar="NAME", help="option of conf/environment, mcp, or none")
    parser.add_argument("--success", choices=YES_NO, help="whether it reports success (default: yes; mcp: no)")
    parser.add_argument("--sparse", choices=YES_NO, help="whether episodes are long and rarely succeed")
    parser.add_argument("--slow", choices=YES_NO, help="whether collecting takes as long as training")
    parser.add_argument("--judge", metavar="yes|no", help="whether a language model can judge; or PROVIDER/MODEL")
    parser.add_argument("--teacher", metavar="MODEL", help="larger model to learn from: name on the hub, or folder")
    parser.add_argument(
        "--goal",
        choices=GOALS,
        help="what matters most: fewest models and settings, a bounded distance from the reference policy, rewards of "
        "single steps, or learning from the policy's own selected attempts",
    )
    parser.add_argument("--compute", choices=COMPUTE, help="machines (default: cpu)")
    parser.add_argument("--tight", choices=YES_NO, help="whether the model hardly fits the GPU memory")
    parser.add_argument(
        "--data", metavar="FILE", help="file with demonstrations, preferences, or questions and answers"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: method, reason, command")
    return parser


def _situation(options: argparse.Namespace) -> Any:
    """Return the situation of the options; ask if there are none, on a terminal. Raises SpecError."""
    from components.errors import Problem, SpecError
    from flows.advice.situation import JUDGE, Situation, with_data

    answers = {name: value for name in QUESTIONS if (value := getattr(options, name)) is not None}
    if not answers:
        if not sys.stdin.isatty():
            raise SpecError([Problem("flows.advise", "got no option, and asks on a terminal only; see --help")])
        answers = _ask()
    if answers.get("environment") in NO:
        answers["environment"] = None
    for name in ("success", "sparse", "slow", "tight"):
        if name in answers:
            answers[name] = answers[name] == "yes"
    answers.setdefault("success", answers.get("environment") != "mcp")
    judge = answers.get("judge")
    if judge is not None:
        if judge not in ("yes", *NO) and "/" not in judge:
            raise SpecError([Problem("--judge", f"is {judge!r}; expected yes, no or PROVIDER/MODEL")])
        answers["judge"] = None if judge in NO else JUDGE if judge == "yes" else judge
    teacher = answers.get("teacher")
    answers["teacher"] = None if teacher in (None, *NO) else teacher
    data = answers.pop("data", None)
    return Situation(**with_data(answers, None if data in NO else data))


def _ask() -> dict[str, Any]:
    """Return the answers to the questions that matter."""
    answers: dict[str, Any] = {}
    for name, (text, kind) in QUESTIONS.items():
        if name in ("labels", "preferences") and answers.get("data", "") not in NO:
            continue
        if name == "form" and not answers.get("preferences"):
            continue
        if name in EPISODES and answers.get("environment") in (None, *NO):
            continue
        while True:
            print(f"{text}: ", end="", file=sys.stderr, flush=True)
            answer = input().strip()
            if not answer or (answer.isdecimal() if kind is int else kind is str or answer in kind):
                break
            expected = "a whole number" if kind is int else f"one of {', '.join(kind)}"
            print(f"  {answer!r}: expected {expected}", file=sys.stderr)
        if answer and (name, answer) != ("goal", "none"):
            answers[name] = int(answer) if kind is int else answer
    return answers


def _shown(advice: Advice) -> str:
    lines = [f"method:  {advice.method}", f"reason:  {advice.reason}", f"command: {advice.command}"]
    needs = ", ".join(f"{name} ({value})" for name, value in advice.needs.items() if value is not None)
    unneeded = ", ".join(name for name, value in advice.needs.items() if value is None)
    lines.append(f"needs:   {needs or 'nothing besides the policy'}; not {unneeded}")
    lines.append(f"costs:   {_costs(advice)}")
    return "\n".join([*lines, *(f"note:    {note}" for note in advice.notes)])


def _costs(advice: Advice) -> str:
    costs = advice.costs
    parts = [f"up to {costs['episodes']:,} episodes, {costs['trainings']} trainings"] * ("episodes" in costs)
    if "gradient passes" in costs:
        passes = f"{costs['gradient passes']} forward and backward, {costs['forward passes']} forward only"
        parts.append(f"passes over each token that trains the policy: {passes}")
    return "; ".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
