"""Spec of a place provided by SkyPilot: machine type, setup and lifetime."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from components.compute.torchrun import Strategy
from components.specs import Spec

SHARED = ("slurm", "kubernetes", "k8s", "ssh")
"""Infrastructures on which a folder of this machine can also be visible to the node."""


class SkyPlace(Spec):
    """Machine that SkyPilot launches or reuses for the stages of a run."""

    name: Literal["sky"] = "sky"
    infra: str | None = None
    """Infrastructure: `aws`, `gcp/us-central1`, `lambda`, `runpod`, `kubernetes`, `slurm/CLUSTER`. None: the cheapest
    of the enabled ones (`sky check`)."""
    accelerators: str | None = None
    """GPUs of each node, such as `H100:1` or `L4:8`; None requests none."""
    cpus: str | None = None
    """CPUs of each node, such as `4`, or `4+` for at least 4; None leaves the choice to SkyPilot."""
    memory: str | None = None
    """Memory of each node in GB, such as `32+`."""
    disk: int | None = Field(None, gt=0)
    """Disk of each node in GB."""
    use_spot: bool = False
    """Use spot instances, which are cheaper but can be preempted. With `managed` a stage resumes on another one."""
    image_id: str | None = None
    """Machine image, or `docker:IMAGE`."""
    nodes: int = Field(1, ge=1)
    """Number of nodes. With more than one, `root` must be on a disk that they share. Training runs on all of them; any
    other stage runs on one, and the others wait for its artifact."""
    processes: int = Field(1, ge=1)
    """Training processes per node: one for each of its GPUs."""
    strategy: Strategy = "ddp"
    """Sharding across the training processes, as in `accelerate`: `ddp`, `zero2` or `fsdp`."""
    group_timeout: float = Field(1800.0, gt=0)
    """Seconds that a training process waits for the others before all end."""
    cluster: str | None = Field(None, pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")
    """Name of a cluster, which is reused if it is up and stays up after the run. None: a cluster for this run, which is
    taken down at its end."""
    managed: bool = False
    """Run each stage as a managed job with machines of its own. After a preemption SkyPilot finds other machines, on
    which the stage resumes from its last checkpoint."""
    launch_timeout: float = Field(3600.0, gt=0)
    """Seconds to wait for a machine."""
    autostop: int | None = Field(10, ge=0)
    """Idle minutes after which a cluster shuts itself down, even without this process. None: never. Not supported on
    Slurm, which has its own time limits."""
    down: bool = True
    """Take the cluster down on `autostop`; otherwise it is only stopped, and its disk remains and is billed."""
    root: str = "~/espalier"
    """Folder on the node for work in progress. If it outlives the node (a shared or mounted disk), a stage resumes from
    its last checkpoint on the next node."""
    python: str | None = None
    """Python on the node that has the project's dependencies; None creates an environment below `root` from the lock
    file, once per cluster."""
    setup: str | None = None
    """Commands to run first on each node when the cluster is launched."""
    envs: dict[str, str] = {}
    """Environment variables of the stage."""
    secrets: list[str] = []
    """Names of environment variables of this machine to pass to the stage, such as `HF_TOKEN`. Their values appear in
    no file, log or YAML."""

    @field_validator("secrets")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"names of environment variables; {name!r} is not one (values do not belong here)")
        return value

    @field_validator("envs")
    @classmethod
    def _unreserved(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.startswith(("ESPALIER_", "SKYPILOT_")):
                raise ValueError(f"other names: {name} is reserved for the project or SkyPilot")
        return value

    @model_validator(mode="after")
    def _compatible(self) -> SkyPlace:
        if self.managed and self.cluster is not None:
            raise ValueError("cluster and managed are mutually exclusive: a managed job has machines of its own")
        if self.autostop is not None and (self.infra or "").partition("/")[0] == "slurm":
            raise ValueError(f"autostop: {self.autostop}: not supported on Slurm; expected null")
        if set(self.envs) & set(self.secrets):
            raise ValueError(
                f"{', '.join(sorted(set(self.envs) & set(self.secrets)))}: set in both envs and secrets; expected one"
            )
        return self

    @property
    def group(self) -> int:
        """Number of processes that train together."""
        return self.nodes * self.processes

    @property
    def shares_folders(self) -> bool:
        """True if a folder of this machine can also be visible to the node."""
        return (self.infra or "").partition("/")[0] in SHARED
