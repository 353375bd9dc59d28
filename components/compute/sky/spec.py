"""Place on machines provided by SkyPilot: machine type, setup, lifetime, and SkyPilot's offers for it.

SkyPilot's optimizer runs in a subprocess (`optimizer`), because importing SkyPilot takes
seconds and changes the importing process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from components.compute.place import Offer, Place
from components.compute.runners import RunnerContext
from components.compute.training_group import Processes, Strategy, TrainingGroup
from components.errors import Problem, ResourceError
from components.specs import FieldError

if TYPE_CHECKING:
    from components.compute.sky.runner import SkyRunner
    from components.inference.spec import InferenceSpec
    from components.models.precision import Hardware

TIMEOUT = 90.0
"""Seconds for importing SkyPilot and querying clouds that it has not queried yet."""
COMMAND = (sys.executable, "-m", "components.compute.sky.optimizer")


def offers(places: Mapping[str, SkyPlace], timeout: float = TIMEOUT) -> dict[str, Offer]:
    """Return the offers by name of the place. Errors are recorded in the offer, because a plan works without prices."""
    request = json.dumps({name: place.model_dump(mode="json") for name, place in places.items()})
    try:
        completed = subprocess.run(COMMAND, input=request, capture_output=True, text=True, timeout=timeout, check=True)
        return {name: Offer(**offer) for name, offer in json.loads(completed.stdout).items()}
    except subprocess.TimeoutExpired:
        problem = f"SkyPilot's optimizer timed out after {timeout:g} s"
    except (subprocess.CalledProcessError, ValueError) as error:
        stderr_lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        problem = f"SkyPilot's optimizer failed: {stderr_lines[-1] if stderr_lines else error}"
    return {name: Offer(place.describe(), None, problem) for name, place in places.items()}


LOCK = Path(__file__).resolve().parents[3] / "requirements" / "lock.txt"
"""Packages that a machine installs (`requirements/node.sh`)."""
SHARED = ("slurm", "kubernetes", "k8s", "ssh")
"""Infrastructures on which a folder of this machine can also be visible to the node."""


class SkyPlace(Place):
    """Machine that SkyPilot launches or reuses for the stages of a run."""

    remote: ClassVar[bool] = True
    price_source: ClassVar[str | None] = "SkyPilot's optimizer"

    name: Literal["sky"] = "sky"
    infra: str | None = None
    """Infrastructure: `aws`, `gcp/us-central1`, `lambda`, `runpod`, `kubernetes`, `slurm/CLUSTER`. None: the cheapest
    of the enabled ones (`sky check`)."""
    accelerators: str | None = Field(None, pattern=r"^[A-Za-z0-9][\w.-]*(:\d+(\.\d+)?)?$")
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
    processes: Processes = "auto"
    """Training processes per node. `auto`: one for each GPU of `accelerators`, one without."""
    strategy: Strategy = "ddp"
    """Sharding across the training processes, as in `torchrun`: `ddp`, `zero2`, `fsdp` or `fsdp_offload`."""
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
    """Python on the node that has the project's dependencies; None installs them from the lock file, once per cluster,
    and vLLM in an environment of its own where a stage needs it."""
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
            message = f"{self.cluster}: a managed job has machines of its own (managed=true); expected null"
            raise FieldError("cluster", message)
        if self.autostop is not None and (self.infra or "").partition("/")[0] == "slurm":
            raise FieldError("autostop", f"{self.autostop}: not supported on Slurm; expected null")
        if set(self.envs) & set(self.secrets):
            both = ", ".join(sorted(set(self.envs) & set(self.secrets)))
            raise FieldError("envs", f"{both}: secrets has the same names; expected each name in one of them")
        return self

    @property
    def gpus(self) -> int:
        return max(1, int(float(self.accelerators.partition(":")[2] or 1))) if self.accelerators else 0

    @property
    def group(self) -> TrainingGroup:
        count = (self.gpus or 1) if self.processes == "auto" else self.processes
        return TrainingGroup(count, self.strategy, self.group_timeout, self.nodes)

    @property
    def hardware(self) -> Hardware:
        return "cpu" if self.accelerators is None else "gpu"

    @property
    def shares_folders(self) -> bool:
        return (self.infra or "").partition("/")[0] in SHARED

    def describe(self) -> str:
        parts = [self.accelerators, self.cpus and f"{self.cpus} CPUs", self.memory and f"{self.memory} GB"]
        count = f"{self.nodes} × " if self.nodes > 1 else ""
        machine = count + (", ".join(part for part in parts if part) or "a machine")
        return f"{machine} on {self.infra or 'any cloud that is enabled'}" + (" (spot)" if self.use_spot else "")

    @classmethod
    def offers(cls, places: Mapping[str, Self]) -> dict[str, Offer]:
        return offers(places)

    def prerequisites(self) -> Iterator[str]:
        if not LOCK.is_file():
            yield "machines install the locked packages of a checkout; expected a run from a clone of the repository"
        missing = [variable for variable in self.secrets if variable not in os.environ]
        if missing:
            yield f"secrets: environment variable {', '.join(missing)} is not set on this machine; set it"

    def check_engine(self, name: str, engine: InferenceSpec) -> None:
        place, environment = f"compute.places.{name}", engine.environment
        if environment is None:
            engine.check_prerequisites()
        elif environment.python is None and self.python is not None:
            raise ResourceError(
                f"inference.python: null, but {place}.python = {self.python}, so nothing installs "
                f"{environment.package} on its machines; expected the path of a Python with {environment.package} "
                f"there, or {place}.python=null"
            )
        key = getattr(engine, "key_variable", None)
        if key is not None and key not in self.secrets:
            raise ResourceError(
                f"{place}.secrets: lacks {key} of inference.key_variable, with which its stages query the model; "
                f"expected {place}.secrets=[{', '.join([*self.secrets, key])}]"
            )

    def parallel_problems(self, name: str, parallel: int) -> Iterator[Problem]:
        if self.cluster is not None:
            message = f"{self.cluster!r}: {parallel} stages at the same time need one machine each; expected null"
            yield Problem(f"compute.places.{name}.cluster", message, "compute.parallel=1")

    def runner(self, name: str, context: RunnerContext) -> SkyRunner:
        from components.compute.sky.runner import SkyRunner

        log = context.log.with_suffix(f".{name}.log")
        context.say(f"{name}: log of its machines: {log}")
        cluster = re.sub(r"[^a-z0-9]+", "-", f"espalier-{context.run}-{name}".lower()).strip("-")
        process = replace(context.process, log=log)
        return SkyRunner(self, cluster, context.code, context.packages, process, context.say)
