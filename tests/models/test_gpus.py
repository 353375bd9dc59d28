"""GPUs that torch cannot use are an error, not a silent computation on the CPU."""

import pytest
import torch

from components.errors import ResourceError
from components.models import gpus
from components.models.weights import pick_device

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Fri Jun  7 16:55:42 UTC 2024\nGCC version: 12.2.0\n"
FAULTS = [
    (
        "13.0",
        "535.129.03",
        r"torch \S+ is built for CUDA 13.0, which needs NVIDIA's driver 580 .* 535.129.03 is loaded",
    ),
    (
        "12.6",
        "470.57",
        "needs NVIDIA's driver 525 or later, and 470.57 is loaded; update the driver, install torch for",
    ),
    ("13.0", "590.10", "cannot use one with driver 590.10: `nvidia-smi` shows its state"),
    ("13.0", None, "NVIDIA's driver is not loaded"),
    (None, "590.10", "is built without CUDA; install torch for the CUDA of the driver"),
]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with eight GPUs, none of which torch sees, and this driver."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{index}" for index in range(8))):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(gpus, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_an_unusable_gpu_is_an_error_with_driver_build_and_remedy(machine, monkeypatch):
    for cuda, driver, words in FAULTS:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        (machine / "version").unlink(missing_ok=True)
        if driver is not None:
            (machine / "version").write_text(DRIVER.format(driver))
        for device in ("auto", "cuda"):
            with pytest.raises(ResourceError, match=rf"device = '{device}': this machine has 8 NVIDIA GPUs.*{words}"):
                pick_device(device)
    assert pick_device("cpu") == "cpu"


def test_hidden_gpus_are_not_used(machine, monkeypatch):
    assert gpus.visible_gpus() == list("01234567")
    for chosen, names in {"2,5": ["2", "5"], "": [], "-1": [], "1,-1,2": ["1"], "MIG-a1": ["MIG-a1"]}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert gpus.visible_gpus() == names, chosen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto") == "cpu"
