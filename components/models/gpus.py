"""NVIDIA GPUs of this machine according to its driver, without CUDA."""

from __future__ import annotations

import os
import re
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")
"""Folder of the device files."""
DRIVER = Path("/proc/driver/nvidia/version")
"""Description of the driver by Linux."""
OLDEST_DRIVER = {13: 580, 12: 525}
"""Oldest driver for each major version of CUDA (CUDA release notes, minor version compatibility)."""


def visible_gpus() -> list[str]:
    """Return the GPUs that a process may use, as names for `CUDA_VISIBLE_DEVICES`."""
    present = [path for path in DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    chosen = os.environ.get(VISIBLE)
    if not present or chosen is None:
        return [str(index) for index in range(len(present))]
    names: list[str] = []
    for name in chosen.split(","):
        if name.strip() in ("", "-1"):  # as CUDA does, which ignores what follows
            break
        names.append(name.strip())
    return names


def unusable(torch_version: str, cuda: str | None) -> str:
    """Return the reason why torch cannot use the GPUs of this machine, and what to do. cuda: version for which torch is
    built; None: without CUDA."""
    remedy = "install torch for the CUDA of the driver (rm -r .venv; make setup), or set model.device=cpu"
    here = f"this machine has {len(visible_gpus())} NVIDIA GPUs, but torch {torch_version}"
    if cuda is None:
        return f"{here} is built without CUDA; {remedy}"
    text = DRIVER.read_text(encoding="utf-8", errors="replace") if DRIVER.is_file() else ""
    loaded = re.search(r"\b(\d{3,})\.\d[\d.]*", text)
    needed = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    if loaded is None:
        return f"{here} (CUDA {cuda}) sees none: NVIDIA's driver is not loaded; load it, or set model.device=cpu"
    if needed is None or int(loaded[1]) >= needed:
        return f"{here} (CUDA {cuda}) cannot use one with driver {loaded[0]}: `nvidia-smi` shows its state"
    return (
        f"{here} is built for CUDA {cuda}, which needs NVIDIA's driver {needed} or later, and {loaded[0]} is loaded; "
        f"update the driver, {remedy}"
    )
