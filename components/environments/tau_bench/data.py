"""The published data of a domain in a folder: databases, policy, tasks.

    FOLDER/retail/   orders.json products.json users.json policy.md tasks_train.json tasks_dev.json tasks_test.json
    FOLDER/airline/  flights.json reservations.json users.json policy.md tasks_test.json

The content is read once in a process and shared by all environments. Stage keys have its digest, not its path.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from components.environments.tau_bench.airline import AirlineTools
from components.environments.tau_bench.database import Tables
from components.environments.tau_bench.retail import RetailTools
from components.environments.tau_bench.toolset import Toolset
from components.errors import ResourceError, SpecError
from components.json_text import STRICT
from components.specs import Spec
from components.specs.wording import first_problem

DOMAINS: dict[str, type[Toolset]] = {"retail": RetailTools, "airline": AirlineTools}
TASK_FILES = ("train", "dev", "test")
"""Names of the published splits."""
KEY = "environment.data"
MAX_FILE = 2**28
"""Maximum size of a file, in bytes."""


class GoldAction(Spec):
    """A call of a tool."""

    name: str
    kwargs: dict[str, Any] = {}


class PublishedTask(Spec):
    """A published task."""

    annotator: str = ""
    user_id: str
    instruction: str = Field(min_length=1)
    """Instruction of the simulated user."""
    actions: list[GoldAction] = []
    """Calls that lead to the right database."""
    outputs: list[str] = []
    """Texts that the user must be told."""


@dataclass(frozen=True)
class DomainData:
    """Content of the folder of a domain."""

    tables: Tables
    policy: str
    tasks: Mapping[str, tuple[PublishedTask, ...]]
    """Tasks of each published split that the domain has."""
    digest: str
    """Digest of all of it."""


def read_domain(folder: str, domain: str) -> DomainData:
    """Return the data of a domain. Raises SpecError or ResourceError, which name `environment.data`."""
    path = Path(folder).expanduser() / domain
    if not path.is_dir():
        raise ResourceError(
            f"{KEY} = {folder}: there is no folder {path}; expected the published data of tau-bench, with a folder "
            f"{domain}/ that has {_listed(domain)}"
        )
    files = [path / name for name in _names(domain)]
    optional = [path / f"tasks_{split}.json" for split in TASK_FILES]
    if not any(file.is_file() for file in optional):
        raise ResourceError(f"{KEY} = {folder}: {path} has no tasks; expected {_listed(domain)}")
    present = tuple((str(file), *_fingerprint(folder, file)) for file in [*files, *filter(Path.is_file, optional)])
    return _read(folder, domain, present)


def _names(domain: str) -> list[str]:
    return [*(f"{table}.json" for table in DOMAINS[domain].tables), "policy.md"]


def _listed(domain: str) -> str:
    return f"{', '.join(_names(domain))} and tasks_train.json, tasks_dev.json or tasks_test.json"


def _fingerprint(folder: str, file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise ResourceError(f"{KEY} = {folder}: {file}: {error.strerror}") from None
    if status.st_size > MAX_FILE:
        raise ResourceError(f"{KEY} = {folder}: {file} has {status.st_size} bytes; expected at most {MAX_FILE}")
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=4)  # a collector creates many environments with the same data
def _read(folder: str, domain: str, present: tuple[tuple[str, int, int], ...]) -> DomainData:
    """present: files with their modification times and sizes, so that changed files are read again."""
    texts = {Path(name).name: _text(folder, Path(name)) for name, *_ in present}
    tables = {
        table: _table(folder, f"{domain}/{table}.json", texts[f"{table}.json"], fields)
        for table, fields in DOMAINS[domain].tables.items()
    }
    tasks = {
        split: _tasks(folder, f"{domain}/tasks_{split}.json", texts[f"tasks_{split}.json"])
        for split in TASK_FILES
        if f"tasks_{split}.json" in texts
    }
    digest = hashlib.sha256(json.dumps([domain, texts], sort_keys=True).encode()).hexdigest()
    return DomainData(tables, texts["policy.md"].strip(), tasks, digest)


def _text(folder: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{KEY} = {folder}: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise _invalid(folder, f"{file.name} is no text in UTF-8") from None


def _json(folder: str, name: str, text: str) -> Any:
    try:
        return json.loads(text, **STRICT)
    except (ValueError, RecursionError) as error:
        raise _invalid(folder, f"{name} is not valid JSON: {error!s:.200}") from None


def _table(folder: str, name: str, text: str, fields: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return a table: a JSON object of records, each with the fields that the tools read."""
    table = _json(folder, name, text)
    if not isinstance(table, dict) or not table:
        raise _invalid(folder, f"{name} is {type(table).__name__}; expected an object with a record for each id")
    for key, record in table.items():
        missing = [field for field in fields if not isinstance(record, dict) or field not in record]
        if missing:
            raise _invalid(folder, f"{name}: the record {key[:80]!r} has no {missing[0]}; expected {', '.join(fields)}")
    return table


def _tasks(folder: str, name: str, text: str) -> tuple[PublishedTask, ...]:
    entries = _json(folder, name, text)
    if not isinstance(entries, list) or not entries:
        raise _invalid(folder, f"{name} is {type(entries).__name__}; expected a list of tasks")
    tasks = []
    for number, entry in enumerate(entries):
        try:
            tasks.append(PublishedTask.model_validate(entry))
        except ValidationError as error:
            raise _invalid(folder, f"{name}: task {number}: {first_problem(error)}") from None
    return tuple(tasks)


def _invalid(folder: str, message: str) -> SpecError:
    return SpecError.at(KEY, f"{folder}: {message}")
