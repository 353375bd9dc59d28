"""What streams save: a million trajectories through the filter stage and the conversion, and the same from one JSON
file.

    python tests/benchmarks/streaming.py [--json] [--rows 1000000] [--json-rows 100000] [--group 8]
        [--conversion sft|preference] [--folder DIR]

Episodes of 4 turns with tools, about 350 tokens and their log-probs, in groups of 8, with rewards. `stream` runs the
filter stage (`signal`) on Parquet files through the store, hashing and all, then reads trajectories, rewards and
selection again and writes the conversion as JSON lines. `json` loads one JSON file of trajectories with rewards,
makes the same objects of them, and applies the same filter and conversion to lists. Each has a fresh process;
`peak_gb` is the most memory that it held, in GB (10^9 bytes), imports included.

The JSON way holds everything, some 40 GB for a million, so it gets fewer rows; its speed hardly depends on how many.
`ratio_vs_json` is our rows per second over its rows per second. Making the episodes is not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from components.trajectories.schema import Trajectory

CODE = Path(__file__).resolve().parents[2]
SIGNAL = "components.filters.signal.Signal"
KEYS = {"trajectories": "0" * 64, "scores": "1" * 64}


def main() -> None:
    options = arguments()
    if options.form:
        print(json.dumps(FORMS[options.form](options, options.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="espalier-streaming-", dir=options.folder) as name:
        folder = Path(name)
        made = in_own_process("make", folder)
        stream = in_own_process("stream", folder)
        in_own_process("make-json", folder)
        peer = in_own_process("json", folder)
    result = {
        "rows": options.rows,
        "conversion": options.conversion,
        "rows_per_s": round(options.rows / stream["seconds"]),
        "peak_gb": stream["peak_gb"],
        "ratio_vs_json": round(options.rows / stream["seconds"] / (options.json_rows / peer["seconds"]), 2),
        "filter_seconds": stream["filter_seconds"],
        "convert_seconds": stream["convert_seconds"],
        "records": stream["records"],
        "file_gb": made["file_gb"],
        "json_rows": options.json_rows,
        "json_rows_per_s": round(options.json_rows / peer["seconds"]),
        "json_peak_gb": peer["peak_gb"],
        "json_load_seconds": peer["load_seconds"],
        "json_records": peer["records"],
        "json_file_gb": peer["file_gb"],
    }
    if not options.json:
        print(
            f"{options.rows} trajectories in {stream['seconds']:.0f} s: {result['rows_per_s']} rows/s, at most "
            f"{stream['peak_gb']:.2f} GB; from one JSON file, {options.json_rows} of them only, for all would not fit: "
            f"{result['json_rows_per_s']} rows/s, {peer['peak_gb']:.2f} GB; {result['ratio_vs_json']} times as fast"
        )
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    parser.add_argument("--rows", type=int, default=1_000_000, help="trajectories that stream")
    parser.add_argument("--json-rows", type=int, default=100_000, help="trajectories in the JSON file")
    parser.add_argument("--group", type=int, default=8, help="episodes of one scenario")
    parser.add_argument("--conversion", choices=("sft", "preference"), default="sft")
    parser.add_argument("--folder", type=Path, help="where to put 3 GB for a million; without it the temporary folder")
    parser.add_argument("--form", choices=FORMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(form: str, folder: Path) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--form", form, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{form} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# The episodes

TEXT = """the order was sent to you on monday and has not arrived yet so please tell me whether a refund can be made or
a new one sent at once thank you for waiting i have looked into it parcel number address card customer policy within
days shop returned damaged lost carrier says that delivery took place in front of door"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does what it is called: {name.replace('_', ' ')}, for one order of the shop.",
            "parameters": {
                "type": "object",
                "properties": {"order_id": {"type": "string"}, "reason": {"type": "string"}},
                "required": ["order_id"],
            },
        },
    }
    for name in ("find_order", "refund_order", "send_again", "cancel_order", "ask_manager")
]


def episodes(rows: int, group: int) -> Iterator[Trajectory]:
    """Scored episodes of four turns: three calls of tools and the last word."""
    import numpy as np

    from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory

    draw, generator = random.Random(0), np.random.default_rng(0)
    words = TEXT.split()
    sentences = {length: [" ".join(draw.choices(words, k=length)) for _ in range(5000)] for length in (5, 15, 20, 25)}

    def text(length: int) -> str:
        return draw.choice(sentences[length])

    for index in range(rows):
        number, sample = divmod(index, group)
        if sample == 0:
            request = text(25)
            task = {"order": number, "request": request}
            scenario = Scenario(f"shop-{number:06d}", task, "train", "refund", 1 + number % 5)
        tokens = generator.integers(0, 50_000, 350).tolist()
        logprobs = np.full(350, np.nan, np.float32)
        messages = [Message("system", "You serve the customers of a shop. Use the tools."), Message("user", request)]
        end = 130
        for turn in range(4):
            span = (end, end + 30)
            logprobs[slice(*span)] = -generator.random(30, np.float32)
            if turn == 3:
                messages.append(Message("assistant", text(20), [], None, span, "stop"))
                break
            call = ToolCall(f"call_{turn}", "find_order", json.dumps({"order_id": str(number), "reason": text(5)}))
            messages.append(Message("assistant", "", [call], None, span, "tool_calls"))
            messages.append(Message("tool", text(15), [], call.id))
            end += 60
        success = draw.random() < 0.5
        yield Trajectory(
            id=f"{scenario.id}/{sample}",
            scenario=scenario,
            sample=sample,
            histories=[History(messages, tokens, logprobs.tolist())],
            tools=TOOLS,
            step_rewards=[0.0, 0.0, 0.0, float(success)],
            outcome={"success": success, "refunded": success},
            metrics={"turns": 4.0, "sampled_tokens": 120.0, "invalid_actions": 0.0},
            policy="0123456789abcdef",
            sampling={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 64, "seed": index},
            reward=float(success),
        )


def make(options: argparse.Namespace, folder: Path) -> dict:
    """Artifacts in a store, written as streams."""
    from components.artifacts import Store
    from components.trajectories.schema import Score
    from components.trajectories.store import write_scores, write_trajectories

    rewards = []

    def unscored() -> Iterator[Trajectory]:
        for episode in episodes(options.rows, options.group):
            rewards.append((episode.id, episode.reward))
            episode.reward = None
            yield episode

    store = Store(folder / "artifacts")
    arguments = {"schema_version": 1, "inputs": {}}
    with store.draft(KEYS["trajectories"], stage="collect", kind="trajectories", **arguments) as draft:
        write_trajectories(draft.path / "trajectories.parquet", unscored())
    with store.draft(KEYS["scores"], stage="judge", kind="scores", **arguments) as draft:
        write_scores(draft.path / "scores.parquet", (Score(*pair, {"success": pair[1]}) for pair in rewards))
    return {"file_gb": gigabytes(store.path(KEYS["trajectories"]) / "trajectories.parquet")}


def make_json(options: argparse.Namespace, folder: Path) -> dict:
    with (folder / "trajectories.json").open("w") as file:
        for index, episode in enumerate(episodes(options.json_rows, options.group)):
            file.write(("," if index else "[") + json.dumps(asdict(episode)))
        file.write("]")
    return {}


# The two ways


def stream(options: argparse.Namespace, folder: Path) -> dict:
    from components.trajectories.convert import to_preference, to_sft, write_jsonl
    from components.trajectories.store import read_scored
    from flows.stages.base import Context, Request
    from flows.stages.execute import run_stage

    start = time.perf_counter()
    context = Context.at(folder)
    selection, _ = run_stage(Request("filter", {"filter": {"_target_": SIGNAL}}, KEYS), context)
    filtered = time.perf_counter()
    kept = read_scored(
        context.store.path(KEYS["trajectories"]) / "trajectories.parquet",
        context.store.path(KEYS["scores"]) / "scores.parquet",
        selection.path / "selection.parquet",
    )
    convert = {"sft": to_sft, "preference": to_preference}[options.conversion]
    records = write_jsonl(folder / "records.jsonl", convert(kept))
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "filter_seconds": round(filtered - start, 1),
        "convert_seconds": round(end - filtered, 1),
        "records": records,
        "peak_gb": peak_gb(),
    }


def from_json(options: argparse.Namespace, folder: Path) -> dict:
    from components.filters.signal import Signal
    from components.trajectories.convert import to_preference, to_sft
    from components.trajectories.groups import by_scenario

    path = folder / "trajectories.json"
    start = time.perf_counter()
    with path.open() as file:
        trajectories = [trajectory_of(data) for data in json.load(file)]
    loaded = time.perf_counter()
    kept = []
    for group in by_scenario(trajectories).values():
        decisions = zip(group, Signal().select(group), strict=True)
        kept += [trajectory for trajectory, selection in decisions if selection.kept]
    records = list({"sft": to_sft, "preference": to_preference}[options.conversion](kept))
    (folder / "records.json").write_text(json.dumps(records))
    return {
        "seconds": time.perf_counter() - start,
        "load_seconds": round(loaded - start, 1),
        "records": len(records),
        "peak_gb": peak_gb(),
        "file_gb": gigabytes(path),
    }


def trajectory_of(data: dict) -> Trajectory:
    from components.trajectories.schema import History, Message, Scenario, ToolCall, Trajectory

    data["scenario"] = Scenario(**data["scenario"])
    for history in data["histories"]:
        for message in history["messages"]:
            message["tool_calls"] = [ToolCall(**call) for call in message["tool_calls"]]
            message["span"] = message["span"] and tuple(message["span"])
        history["messages"] = [Message(**message) for message in history["messages"]]
    data["histories"] = [History(**history) for history in data["histories"]]
    return Trajectory(**data)


def peak_gb() -> float:
    status = Path("/proc/self/status").read_text()
    return round(int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9, 3)


def gigabytes(path: Path) -> float:
    return round(path.stat().st_size / 1e9, 3)


FORMS = {"make": make, "stream": stream, "make-json": make_json, "json": from_json}

if __name__ == "__main__":
    sys.path.insert(0, str(CODE))
    main()
