"""Place on a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from components.compute.cluster import ClusterPlace

OBJECT_STORE_BYTES = 100_000_000
"""Memory of Ray's object store on this machine: requests and results are a few kB."""


class RayPlace(ClusterPlace):
    """Ray cluster, through `prefect_ray.RayTaskRunner`."""

    package: ClassVar[str] = "prefect_ray"
    task_runner: ClassVar[str] = "RayTaskRunner"
    variables: ClassVar[Mapping[str, str]] = {"RAY_USAGE_STATS_ENABLED": "0"}
    name: Literal["ray"] = "ray"

    def options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        init: dict[str, Any] = {"log_to_driver": False, "runtime_env": {"env_vars": dict(environment)}}
        if self.address is not None:
            return {"address": self.address, "init_kwargs": init}
        local = {"num_cpus": self.workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        return {"init_kwargs": {**init, **local, "_node_ip_address": "127.0.0.1"}}
