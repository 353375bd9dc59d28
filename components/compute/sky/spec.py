"""A place that SkyPilot provides: which machine, what is set up there, how long it stays."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from components.compute.torchrun import Strategy
from components.specs import Spec

SHARED = ("slurm", "kubernetes", "k8s", "ssh")
"""Where a folder of this machine can be one of the node's too."""


class SkyPlace(Spec):
    """A machine that SkyPilot launches, or reuses, for the stages of a run."""

    name: Literal["sky"] = "sky"
    infra: str | None = None
    """Where: `aws`, `gcp/us-central1`, `lambda`, `runpod`, `kubernetes`, `slurm/CLUSTER`. None: the cheapest of what
    is enabled (`sky check`)."""
    accelerators: str | None = None
    """GPUs of each node, such as `H100:1` or `L4:8`; None asks for none."""
    cpus: str | None = None
    """CPUs of each node, such as `4`, or `4+` for at least so many; None leaves it to SkyPilot."""
    memory: str | None = None
    """Memory of each node in GB, such as `32+`."""
    disk: int | None = Field(None, gt=0)
    """Disk of each node in GB."""
    use_spot: bool = False
    """Machines that may be taken away, at a lower price. With `managed` the stage goes on on another one."""
    image_id: str | None = None
    """Machine image, or `docker:IMAGE`."""
    nodes: int = Field(1, ge=1)
    """Machines. On more than one, `root` lies on a disk that they share. A training runs on all of them together; any
    other stage on one of them, and the others wait for its artifact."""
    processes: int = Field(1, ge=1)
    """Of a training, on each node: one for each of its GPUs."""
    strategy: Strategy = "ddp"
    """What lies in parts on the processes of a training, as in `accelerate`: `ddp`, `zero2` or `fsdp`."""
    group_timeout: float = Field(1800.0, gt=0)
    """Seconds that a process of a training waits for the others before all end."""
    cluster: str | None = Field(None, pattern=r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$")
    """A cluster by this name is reused where it is up, and stays up when the run ends. None: one for this run, which
    goes down when the run ends."""
    managed: bool = False
    """Each stage is a managed job: it has machines of its own, and where they are taken away SkyPilot finds others, on
    which it goes on from its last checkpoint."""
    launch_timeout: float = Field(3600.0, gt=0)
    """Seconds to wait for a machine."""
    autostop: int | None = Field(10, ge=0)
    """Minutes without work after which a cluster goes down by itself, also if nobody is left to ask for it. None:
    never. Slurm has none, but time limits of its own."""
    down: bool = True
    """Whether `autostop` takes the cluster down; else it is stopped, and its disk stays and is paid for."""
    root: str = "~/espalier"
    """Folder on the node for what is under way. Where it outlives the node (a shared or mounted disk), a stage goes on
    from its last checkpoint on the next one."""
    python: str | None = None
    """A Python on the node that has the project's dependencies; None makes an environment below `root` from the lock
    file, once for each cluster."""
    setup: str | None = None
    """Commands to run on each node when the cluster is launched, before anything else."""
    envs: dict[str, str] = {}
    """Environment variables of the stage."""
    secrets: list[str] = []
    """Names of environment variables of this machine that the stage gets too, such as `HF_TOKEN`. Their values are in
    no file, no log and no YAML."""

    @field_validator("secrets")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"names of environment variables; {name!r} is none (a value does not belong here)")
        return value

    @field_validator("envs")
    @classmethod
    def _ours(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.startswith(("ESPALIER_", "SKYPILOT_")):
                raise ValueError(f"other names: {name} is set by the project or by SkyPilot")
        return value

    @model_validator(mode="after")
    def _together(self) -> SkyPlace:
        if self.managed and self.cluster is not None:
            raise ValueError("cluster and managed do not go together: a managed job has machines of its own")
        if self.autostop is not None and (self.infra or "").partition("/")[0] == "slurm":
            raise ValueError(f"autostop: {self.autostop}: Slurm has none; expected null")
        if set(self.envs) & set(self.secrets):
            raise ValueError(
                f"{', '.join(sorted(set(self.envs) & set(self.secrets)))}: in envs and in secrets; one of them"
            )
        return self

    @property
    def group(self) -> int:
        """Processes that train together."""
        return self.nodes * self.processes

    @property
    def shares_folders(self) -> bool:
        """Whether a folder of this machine can be one of the node's too."""
        return (self.infra or "").partition("/")[0] in SHARED
