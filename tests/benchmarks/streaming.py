"""Speed and memory of the filter stage and of a conversion on files of up to a million trajectories.

Reading the same columns, and the same work on one JSON file, are measured beside them.

    python tests/benchmarks/streaming.py [--json] [--rows 1000000] [--json-rows 20000] [--group 8]
        [--conversion sft|preference] [--folder DIR]

Episodes of 4 turns with tools, about 350 tokens and their log-probs, in groups of 8, with rewards. Each form has a
fresh process; a peak is the most memory that it held, imports included. Making the episodes is not measured.

- `filter_rows_per_s`, `filter_peak_mb`: the filter stage (`signal`) on the files, its selection written and hashed.
- `by_scenario_rows_per_s`, `by_scenario_peak_mb`: the same with the filter `difficulty`, which keeps two of five.
- `bound_rows_per_s`: pyarrow reads the columns that this filter reads, and does nothing with them.
- `sft_rows_per_s`: trajectories, rewards and selection are read, and the kept episodes written as JSON lines; rows are
  the kept episodes. `sft_bound_rows_per_s`: pyarrow reads the columns that the conversion reads, of all episodes; its
  rows are the kept ones too.
- `json_rows_per_s`: one JSON file of trajectories with rewards is loaded, made into the same objects, filtered and
  converted in lists. It holds everything in memory, some 40 GB for a million, so it gets fewer rows; its speed hardly
  depends on how many. `ratio_vs_json` is the rows per second of filter and conversion together over it.
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
    import pyarrow as pa

    from components.trajectories.schema import Trajectory

CODE = Path(__file__).resolve().parents[2]
BLOCK = 40_000
"""Episodes that are made one by one."""
SIGNAL = {"_target_": "components.filters.signal.Signal"}
DIFFICULTY = {"_target_": "components.filters.among.Among", "by": "difficulty", "keep": [1, 2]}
KEYS = {"trajectories": "0" * 64, "scores": "1" * 64}


def main() -> None:
    options = arguments()
    if options.form:
        print(json.dumps(FORMS[options.form](options, options.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="espalier-streaming-", dir=options.folder) as name:
        folder = Path(name)
        made = in_own_process("make", folder)
        bounds = in_own_process("bounds", folder)
        filtered = in_own_process("filter", folder)
        by_scenario = in_own_process("filter-by-scenario", folder)
        converted = in_own_process("convert", folder)
        in_own_process("make-json", folder)
        peer = in_own_process("json", folder)
    seconds = filtered["seconds"] + converted["seconds"]
    result = {
        "rows": options.rows,
        "conversion": options.conversion,
        "filter_rows_per_s": round(options.rows / filtered["seconds"]),
        "bound_rows_per_s": round(options.rows / bounds["filter_seconds"]),
        "filter_peak_mb": round(filtered["peak_gb"] * 1000),
        "by_scenario_rows_per_s": round(options.rows / by_scenario["seconds"]),
        "by_scenario_peak_mb": round(by_scenario["peak_gb"] * 1000),
        "sft_rows_per_s": round(converted["records"] / converted["seconds"]),
        "sft_bound_rows_per_s": round(converted["records"] / bounds["convert_seconds"]),
        "sft_peak_mb": round(converted["peak_gb"] * 1000),
        "rows_per_s": round(options.rows / seconds),
        "peak_gb": max(filtered["peak_gb"], converted["peak_gb"]),
        "ratio_vs_json": round(options.rows / seconds / (options.json_rows / peer["seconds"]), 2),
        "filter_seconds": round(filtered["seconds"], 2),
        "filter_cpu_seconds": filtered["cpu_seconds"],
        "by_scenario_cpu_seconds": by_scenario["cpu_seconds"],
        "convert_seconds": round(converted["seconds"], 2),
        "convert_cpu_seconds": converted["cpu_seconds"],
        "make_seconds": made["seconds"],
        "records": converted["records"],
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
            f"{options.rows} trajectories\n"
            f"filter: {result['filter_rows_per_s']} rows/s in {result['filter_peak_mb']} MB; reading its columns: "
            f"{result['bound_rows_per_s']}\n"
            f"filter by difficulty: {result['by_scenario_rows_per_s']} rows/s in {result['by_scenario_peak_mb']} MB\n"
            f"conversion: {result['sft_rows_per_s']} kept rows/s in {result['sft_peak_mb']} MB; reading: "
            f"{result['sft_bound_rows_per_s']}\n"
            f"one JSON file of {options.json_rows}: {result['json_rows_per_s']} rows/s in {peer['peak_gb']:.2f} GB; "
            f"filter and conversion together are {result['ratio_vs_json']} times as fast"
        )
    print(json.dumps(result))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line, nothing else")
    parser.add_argument("--rows", type=int, default=1_000_000, help="trajectories that stream")
    parser.add_argument("--json-rows", type=int, default=20_000, help="trajectories in the JSON file")
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
    """Artifacts in a store, written as streams. After the first block, its episodes repeat with other scenario ids."""
    import pyarrow.parquet as pq

    from components.artifacts import Store
    from components.trajectories import store as files
    from components.trajectories.schema import Score

    begin = time.perf_counter()
    block = min(options.rows, BLOCK - BLOCK % options.group)
    rewards = []

    def unscored() -> Iterator[Trajectory]:
        for episode in episodes(block, options.group):
            rewards.append((f"{episode.scenario.id}", episode.sample, episode.reward))
            episode.reward = None
            yield episode

    files.write_trajectories(folder / "block.parquet", unscored())
    table = pq.read_table(folder / "block.parquet").replace_schema_metadata(None)
    (folder / "block.parquet").unlink()
    repeats = -(-options.rows // block)
    lengths = [min(block, options.rows - number * block) for number in range(repeats)]
    store = Store(folder / "artifacts")
    arguments = {"schema_version": 1, "inputs": {}}
    with store.draft(KEYS["trajectories"], stage="collect", kind="trajectories", **arguments) as draft:
        batches = (
            renamed(batch, number)
            for number, length in enumerate(lengths)
            for batch in table.slice(0, length).to_batches(256)
        )
        files._TRAJECTORIES.write_batches(draft.path / "trajectories.parquet", batches)
    with store.draft(KEYS["scores"], stage="judge", kind="scores", **arguments) as draft:
        scores = (
            Score(f"{number:03d}-{name}/{sample}", reward, {"success": reward})
            for number, length in enumerate(lengths)
            for name, sample, reward in rewards[:length]
        )
        files.write_scores(draft.path / "scores.parquet", scores)
    path = store.path(KEYS["trajectories"]) / "trajectories.parquet"
    return {"file_gb": gigabytes(path), "seconds": round(time.perf_counter() - begin, 1)}


def renamed(batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """The batch with other ids of scenarios and episodes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    scenario = batch.column("scenario")
    names = pc.binary_join_element_wise(f"{number:03d}", scenario.field("id"), "-")
    parts = [names, *(scenario.field(index) for index in range(1, scenario.type.num_fields))]
    columns = [pc.binary_join_element_wise(f"{number:03d}", batch.column("id"), "-")]
    columns.append(pa.StructArray.from_arrays(parts, fields=list(scenario.type)))
    return pa.RecordBatch.from_arrays([*columns, *batch.columns[2:]], schema=batch.schema)


def make_json(options: argparse.Namespace, folder: Path) -> dict:
    with (folder / "trajectories.json").open("w") as file:
        for index, episode in enumerate(episodes(options.json_rows, options.group)):
            file.write(("," if index else "[") + json.dumps(asdict(episode)))
        file.write("]")
    return {}


# The ways


def bounds(options: argparse.Namespace, folder: Path) -> dict:
    """Reading the columns of the filter, and those of the conversion, without doing anything with them."""
    from components.trajectories.tables import CONVERSATION_COLUMNS

    start = time.perf_counter()
    read(folder, "trajectories", ["id", "scenario.id", "failure.boundary"])
    read(folder, "scores", ["trajectory_id", "reward"])
    middle = time.perf_counter()
    read(folder, "trajectories", ["failure.boundary", "outcome", *CONVERSATION_COLUMNS])
    read(folder, "scores", ["trajectory_id", "reward"])
    return {"filter_seconds": middle - start, "convert_seconds": time.perf_counter() - middle}


def read(folder: Path, name: str, columns: list[str]) -> None:
    import pyarrow.parquet as pq

    from components.artifacts import Store

    with pq.ParquetFile(Store(folder / "artifacts").path(KEYS[name]) / f"{name}.parquet") as file:
        for group in range(file.num_row_groups):
            for _ in file.iter_batches(65_536, row_groups=[group], columns=columns):
                pass


def run_filter(options: argparse.Namespace, folder: Path) -> dict:
    figures, path = select(SIGNAL, folder)
    (folder / "selection").symlink_to(path)
    return figures


def run_filter_by_scenario(options: argparse.Namespace, folder: Path) -> dict:
    return select(DIFFICULTY, folder)[0]


def select(filter_: dict, folder: Path) -> tuple[dict, Path]:
    """The times of the filter stage, and the folder of its artifact."""
    from flows.stages.base import Context, Request
    from flows.stages.execute import run_stage

    start = time.perf_counter()
    artifact, _ = run_stage(Request("filter", {"filter": filter_}, KEYS), Context.at(folder))
    seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "cpu_seconds": round(time.process_time(), 2), "peak_gb": peak_gb()}
    return figures, artifact.path


def convert(options: argparse.Namespace, folder: Path) -> dict:
    from components.artifacts import Store
    from components.trajectories.convert import read_sft, to_preference, write_jsonl
    from components.trajectories.store import read_scored

    start = time.perf_counter()
    store = Store(folder / "artifacts")
    files = (store.path(KEYS[name]) / f"{name}.parquet" for name in ("trajectories", "scores"))
    kept = (*files, folder / "selection" / "selection.parquet")
    converted = read_sft(*kept) if options.conversion == "sft" else to_preference(read_scored(*kept))
    records = write_jsonl(folder / "records.jsonl", converted)
    seconds = time.perf_counter() - start
    cpu_seconds = round(time.process_time(), 2)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "records": records, "peak_gb": peak_gb()}


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


FORMS = {
    "make": make,
    "bounds": bounds,
    "filter": run_filter,
    "filter-by-scenario": run_filter_by_scenario,
    "convert": convert,
    "make-json": make_json,
    "json": from_json,
}

if __name__ == "__main__":
    sys.path.insert(0, str(CODE))
    main()
