"""Command that converts recorded episodes of tau-bench to rows for `data.path`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.environments.tau_bench.data import DOMAINS, TASK_FILES
from components.environments.tau_bench.environment import TauBench
from components.errors import EspalierError, ResourceError

logger = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code: 2 for a user error."""
    parser = argparse.ArgumentParser(
        prog="python -m components.environments.tau_bench",
        description="Writes recorded episodes as rows of data.form=messages: messages, tools, reward, id, type.",
    )
    parser.add_argument("--data", required=True, help="folder with the published data")
    parser.add_argument("--domain", choices=sorted(DOMAINS), default="airline", help="default: %(default)s")
    parser.add_argument("--recorded", required=True, help="file of recorded episodes, such as recorded_gpt-4o.json")
    parser.add_argument("--split", choices=TASK_FILES, default="test", help="split of its tasks (default: %(default)s)")
    parser.add_argument("--min-reward", type=float, default=0.0, help="leave out episodes below (default: %(default)s)")
    parser.add_argument(
        "--train-share", type=float, help="only tasks that environment.train_share=SHARE has for training; default: all"
    )
    parser.add_argument("--out", required=True, help="JSON Lines file to write")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        if options.train_share is not None and not 0 <= options.train_share < 1:
            raise ResourceError(f"--train-share {options.train_share:g}: expected a share from 0 to below 1")
        environment = TauBench(options.data, options.domain, train_share=options.train_share or 0)
        rows = list(converted(environment, read_episodes(Path(options.recorded)), options.split))
        training = {scenario.id for scenario in environment.scenarios("train")}
        selected = [
            row
            for row in rows
            if row["reward"] >= options.min_reward
            and (options.train_share is None or row["id"].rpartition("-")[0] in training)
        ]
        Path(options.out).write_text("".join(json.dumps(row) + "\n" for row in selected), encoding="utf-8")
    except (EspalierError, OSError) as error:
        logger.error("%s", error)
        return 2
    logger.info("%s: %d of %d episodes", options.out, len(selected), len(rows))
    return 0


def read_episodes(path: Path) -> list[dict[str, Any]]:
    """Return the episodes of a file. Raises ResourceError if it has another form."""
    try:
        episodes = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResourceError(f"--recorded {path}: not valid JSON: {error!s:.200}") from None
    expected = {"task_id", "reward", "traj"}
    if not isinstance(episodes, list) or any(not isinstance(item, dict) or expected - set(item) for item in episodes):
        raise ResourceError(f"--recorded {path}: expected a list of objects with {', '.join(sorted(expected))}")
    return episodes


def converted(environment: TauBench, episodes: list[dict[str, Any]], split: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each episode. The tools are those of the environment; the messages are as recorded."""
    types = {scenario.id: scenario for name in ("train", "heldout") for scenario in environment.scenarios(name)}
    for number, episode in enumerate(episodes):
        scenario = f"{environment.domain}-{split}-{episode['task_id']}"
        known = types.get(scenario)
        yield {
            "id": f"{scenario}-{number}",
            "type": known.type if known else "",
            "difficulty": known.difficulty if known else 0,
            "messages": [_message(message) for message in episode["traj"]],
            "tools": environment.tools(),
            "reward": float(episode["reward"]),
        }


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's format: content as text, the call that was executed."""
    fields: dict[str, Any] = {name: message[name] for name in ("role", "tool_call_id") if name in message}
    calls = (message.get("tool_calls") or [])[:1]
    return {**fields, "content": message.get("content") or "", **({"tool_calls": calls} if calls else {})}


if __name__ == "__main__":
    sys.exit(main())
