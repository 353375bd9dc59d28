"""State of a training in parts: each process writes the rows of trained weights and optimizer state that it holds, and
any number of processes read them.

    FOLDER/<process>-of-<processes>/state.safetensors    NAME/value of each trained parameter, and AdamW's state of it
                                    rng.safetensors      state of torch's random generators
                                    state.json           first row of each parameter, AdamW's steps, loss scale, metrics
                                                         of the gradient steps, and digests of the files

A part appears all at once, and a folder is complete if it has the parts of all processes; so no process waits for
another one to write. A sharded parameter is split along its first dimension (`sharded`), of others the first process
has all rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from components.algorithms.loop.adamw import FLOAT32_STATE, MASTER
from components.algorithms.policy.sharded import first_row, local_shard
from components.artifacts import sync, sync_tree
from components.artifacts.keys import file_digest
from components.json_text import read_json

STATE, RANDOM, RECORD = "state.safetensors", "rng.safetensors", "state.json"
VALUE = "value"
_PART = re.compile(r"(\d+)-of-(\d+)")


def complete(folder: Path) -> list[Path]:
    """Return the parts of a folder in order; [] if it lacks one."""
    names = [match for path in folder.glob("*-of-*") if (match := _PART.fullmatch(path.name))]
    for count in {int(match[2]) for match in names}:
        parts = [folder / f"{process}-of-{count}" for process in range(count)]
        if {path.name for path in parts} <= {match[0] for match in names}:
            return parts
    return []


class HostCopies:
    """Copies of tensors in host memory that is used again by the next copies; pinned for tensors of a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begin to copy; kernels that are started later do not change the copies."""
        old, self._copies = self._copies, {}
        for name, tensor in tensors.items():
            copy = old.get(name)
            if copy is None:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._copies[name] = copy.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the copies, once they are complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies


def rows(optimizer: torch.optim.Optimizer, names: Sequence[str], *, first: bool) -> dict[str, torch.Tensor]:
    """Return the rows that this process writes, by name in the file. names: of the optimizer's parameters. first: this
    is the first process."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in zip(names, _parameters(optimizer), strict=True):
        if first or isinstance(parameter, DTensor):
            state = optimizer.state.get(parameter, {})
            of_parameter = {VALUE: parameter.detach(), **{kind: state[kind] for kind in FLOAT32_STATE if kind in state}}
            tensors |= {f"{name}/{kind}": local_shard(tensor).contiguous() for kind, tensor in of_parameter.items()}
    return tensors


def record(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, Any]:
    """Return the first row of each parameter that this process writes, and the optimizer's steps of each."""
    parameters = dict(zip(names, _parameters(optimizer), strict=True))
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in parameters.items()}
    return {
        "first_row": {name: first_row(parameter) for name, parameter in parameters.items()},
        "optimizer_steps": {name: float(state["step"]) for name, state in states.items() if "step" in state},
    }


def draft_path(part: Path) -> Path:
    """Return the folder in which a part is written before it is renamed."""
    return part.with_name(f"draft-{part.name}")


def begin(part: Path) -> Path:
    """Create the folder in which a part is written; further files in it become files of the part."""
    draft = draft_path(part)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def write(
    part: Path, tensors: dict[str, torch.Tensor], random: dict[str, torch.Tensor], record: Mapping[str, Any]
) -> None:
    """Write a part that was begun. When it returns, the part survives a loss of power, so earlier states can be
    removed."""
    from safetensors.torch import save_file

    draft = draft_path(part)
    save_file(tensors, draft / STATE)
    save_file(random, draft / RANDOM)
    (draft / RECORD).write_text(json.dumps({**record, "files": _digests(draft, record)}))
    sync_tree(draft)
    draft.rename(part)
    sync(part.parent)
    sync(part.parent.parent)


def check(part: Path) -> None:
    """Raise ValueError if the files of a part are damaged, LookupError or TypeError if it is none of a training."""
    content = read_json(part / RECORD)
    if content.pop("files") != _digests(part, content):
        raise ValueError("its files do not match their digests")
    float(content["steps"][-1]["step"])


@torch.no_grad()
def load(parts: Sequence[Path], optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Load the rows of this process into the optimizer's parameters and its state. Raises ValueError or LookupError if
    the parts do not have them."""
    from safetensors import safe_open

    first_rows = [read_json(part / RECORD)["first_row"] for part in parts]
    steps: dict[str, float] = read_json(parts[0] / RECORD)["optimizer_steps"]
    with contextlib.ExitStack() as files:
        opened = [files.enter_context(safe_open(part / STATE, "pt")) for part in parts]
        stored = [set(file.offset_keys()) for file in opened]
        for name, parameter in zip(names, _parameters(optimizer), strict=True):
            values: dict[str, torch.Tensor] = {}
            for kind in (VALUE, *FLOAT32_STATE):
                key = f"{name}/{kind}"
                holders = [
                    (file, first[name])
                    for file, first, keys in zip(opened, first_rows, stored, strict=True)
                    if key in keys
                ]
                if holders:
                    values[kind] = _read(holders, key, first_row(parameter), local_shard(parameter).shape)
            master = values.pop(MASTER, values[VALUE])
            local_shard(parameter).copy_(master)
            del values[VALUE]
            if name not in steps:
                continue
            if parameter.dtype != torch.float32:
                values[MASTER] = master
            state = {kind: torch.empty_like(parameter, dtype=torch.float32) for kind in values}
            for kind, value in values.items():
                local_shard(state[kind]).copy_(value)
            optimizer.state[parameter] = {"step": torch.tensor(steps[name]), **state}


def _read(holders: Sequence[tuple[Any, int]], key: str, first: int, shape: torch.Size) -> torch.Tensor:
    """Return the rows from `first` on of a tensor whose rows are in several files. holders: each file that has some,
    with the number of its first row."""
    pieces = [torch.empty(0, *shape[1:])] if shape else [file.get_tensor(key) for file, _ in holders]
    for file, begin in holders if shape else ():
        content = file.get_slice(key)
        low, high = max(first, begin), min(first + shape[0], begin + content.get_shape()[0])
        if low < high:
            pieces.append(content[low - begin : high - begin])
    whole = torch.cat(pieces) if shape else pieces[0]
    if whole.shape != shape:
        raise ValueError(f"{key} has {tuple(whole.shape)} in place of {tuple(shape)}")
    return whole


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _digests(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    return {RECORD: hashlib.sha256(json.dumps(record).encode()).hexdigest()} | {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != RECORD
    }
