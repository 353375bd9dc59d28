r"""`flows.explain replay RUN EPISODE --step N`: an episode continued from one of its steps, with another tool answer.

    python -m flows.explain replay RUN EPISODE --step 3                              with the recorded answer
    python -m flows.explain replay RUN EPISODE --step 3 --tool-answer 'not found'    and with another one
    python -m flows.explain replay RUN EPISODE --step 3 --stage 'evaluate[start]'    by the policy of another stage

The environment executes the recorded actions up to response N again, and the policy that played the episode continues
from there, `--continuations` times for each answer. The tokens before the branch are the recorded ones. The result is
how often the outcome differs from the recorded one, and the change in success that the other answer makes, each with
its 95 % interval: what the answer decided. Another answer changes what the policy reads, and not the state of the
environment. An environment that does not repeat its observations is refused.

EPISODE is SCENARIO/SAMPLE, as in the report and in `flows.runs export`. RUN is an id, a prefix of an id, an
experiment's name (its latest run) or `latest`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from flows.explain.round_command import signed
from flows.terminal.arguments import RootParser, add_trust
from flows.terminal.console import printable_lines, shorten
from flows.terminal.exit_codes import with_exit_codes

SHOWN = 300
"""Maximum number of characters of an action or an answer that are shown; JSON has all."""


@with_exit_codes
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return exit code 0; 1 if too many continuations fail; 2 for a user error; 130 if interrupted."""
    parser = RootParser(
        prog="python -m flows.explain replay",
        description="Continues a recorded episode from one of its steps, with another tool answer.",
    )
    parser.add_argument("run", metavar="RUN", help="id, prefix of an id, experiment's name, or latest")
    parser.add_argument("episode", metavar="EPISODE", help="id of the episode: SCENARIO/SAMPLE")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="response before the branch, from 1")
    parser.add_argument("--tool-answer", metavar="TEXT", help="answer in place of the recorded one")
    parser.add_argument("--stage", metavar="LABEL", help="stage that played the episode (default: the last one)")
    parser.add_argument(
        "--continuations", type=int, default=16, metavar="N", help="continuations for each answer (default: 16)"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature (default: the episode's, else collect's)"
    )
    add_trust(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    if options.continuations < 1:
        parser.error(f"--continuations {options.continuations}: expected at least 1")
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        parser.error(f"--temperature {options.temperature}: expected a finite number above 0")
    out = sys.stdout
    data = replay(options)
    print(json.dumps(data) if options.json else printable_lines(show(data).split("\n")), file=out, flush=True)
    return 0


def replay(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result as JSON data. Raises SpecError, ResourceError and TooManyFailures."""
    from flows.experiment.prerequisites import check_used
    from flows.influence import workplace
    from flows.influence.counterfactual import branch_of, continued, effect, outcomes

    run, spec = workplace.recorded_run(options.root, options.run, options.trust)
    check_used(spec, [spec.inference], [], ())
    with workplace.workplace(run, spec, "replay") as place:
        branch = branch_of(run, place.context.store, options.episode, options.step, options.stage)
        answers = [None, *([options.tool_answer] if options.tool_answer is not None else [])]
        arms = continued(place, branch, answers, options.continuations, options.temperature, options.trust)
    results = [outcomes(branch, episodes) for episodes in arms]
    other = {"other": results[1], "effect": effect(*results)} if len(results) > 1 else {}
    return {
        "run": run.id,
        "stage": branch.stage.label,
        "episode": branch.episode.id,
        "step": branch.step,
        "success": branch.episode.success,
        "action": branch.action.content
        or " ".join(f"{call.name}({call.arguments})" for call in branch.action.tool_calls),
        "answers": [branch.answer.content, *answers[1:]],
        "original": results[0],
        **other,
    }


def show(data: Mapping[str, Any]) -> str:
    """Return the result as text."""
    outcome = "succeeded" if data["success"] else "did not succeed"
    lines = [
        f"{data['episode']} of {data['stage']}, run {data['run'][:8]}, {outcome}",
        f"step {data['step']}: {shorten(data['action'], SHOWN)}",
        "",
        "answer    n  success                 outcome differs         text",
    ]
    for name, text in zip(("original", "other"), data["answers"], strict=False):
        arm = data[name]
        rates = "  ".join(f"{_rate(arm[part]):22}" for part in ("success", "changed"))
        lines.append(f"{name:8} {arm['n']:2}  {rates}  {shorten(text, SHOWN)}")
    if "effect" in data:
        lines += ["", f"success changes by {signed(data['effect']['change'], data['effect']['interval'])}"]
    return "\n".join(lines)


def _rate(part: Mapping[str, Any]) -> str:
    return "{:.3f} [{:.3f}, {:.3f}]".format(part["rate"], *part["interval"])
