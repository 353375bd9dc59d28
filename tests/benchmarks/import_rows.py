"""Time and memory of an import: a million rows through form, checks and writers.

    python -m tests.benchmarks.import_rows [--json] [--rows 1000000] [--form messages|preference] [--folder DIR]

Rows of a conversation with 60 words, or pairs of answers of 30 words; one in a thousand a duplicate, and one
malformed. The import stage runs in a process of its own, with the tokenizer of the tiny model and all checks.
`peak_gb` is the most memory that the process held, in GB (10^9 bytes), imports included; `base_gb` the same after an
import of 1,000 rows. Making the rows is not measured.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parents[2]
MODEL = {"name": "tiny", "source": "random", "max_length": 4096, "lora": None, "device": "cpu"}


def main() -> None:
    options = arguments()
    if options.run:
        print(json.dumps(measured(options.run, options.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="espalier-import-", dir=options.folder) as name:
        folder = Path(name)
        result: dict[str, Any] = {"form": options.form}
        for rows, prefix in ((1000, "base_"), (options.rows, "")):
            path = folder / f"{rows}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                file.writelines(lines(options.form, rows))
            command = [sys.executable, "-m", "tests.benchmarks.import_rows", "--run", str(path), "--folder", name]
            child = subprocess.run(command, cwd=CODE, check=True, stdout=subprocess.PIPE)
            result |= {f"{prefix}{key}": value for key, value in json.loads(child.stdout.splitlines()[-1]).items()}
    print(json.dumps(result) if options.json else "\n".join(f"{key}: {value}" for key, value in result.items()))


def lines(form: str, count: int) -> Iterator[str]:
    """Yield rows as JSON lines."""
    random_ = random.Random(0)
    words = ["".join(random_.choices("abcdefghijklmnopqrstuvwxyz", k=random_.randint(2, 9))) for _ in range(20_000)]
    previous = "{}\n"
    for number in range(count):
        if number % 1000 == 500:
            yield previous
        elif number % 1000 == 600:
            yield '{"messages": \n'
        else:
            text = [" ".join(random_.choices(words, k=30)) for _ in range(3)]
            previous = json.dumps(row(form, text)) + "\n"
            yield previous


def row(form: str, text: list[str]) -> dict[str, Any]:
    """Return one row."""
    if form == "preference":
        return {"prompt": text[0], "chosen": text[1], "rejected": text[2]}
    return {"messages": [{"role": "user", "content": text[0]}, {"role": "assistant", "content": text[1]}]}


def measured(path: str, root: Path) -> dict[str, Any]:
    """Run the import stage on a file, and return its time, its memory and its counts."""
    from components.data.spec import DataSpec
    from flows.experiment.data import resolve
    from flows.stages.base import Context, Request
    from flows.stages.execute import run_stage

    begun, used = time.monotonic(), time.process_time()
    source = resolve(DataSpec(path=path))
    part = {"data": source.spec.model_dump(mode="json"), "content": source.content, "model": MODEL}
    artifact, _ = run_stage(Request("import", part), Context.at(root / "root"))
    return {
        **{name: int(artifact.metrics[name]) for name in ("rows", "episodes", "dropped")},
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(time.process_time() - used, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3),
        "file_gb": round(Path(path).stat().st_size / 1e9, 3),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--form", choices=("messages", "preference"), default="messages")
    parser.add_argument("--folder", type=Path, help="folder for the files; default: the temporary one")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
