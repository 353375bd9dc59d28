"""Place on a Dask cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from components.compute.cluster import ClusterPlace


class DaskPlace(ClusterPlace):
    """Dask cluster, through `prefect_dask.DaskTaskRunner`."""

    package: ClassVar[str] = "prefect_dask"
    task_runner: ClassVar[str] = "DaskTaskRunner"
    name: Literal["dask"] = "dask"

    def options(self, environment: Mapping[str, str]) -> dict[str, Any]:
        if self.address is not None:
            return {"address": self.address}
        local = {"n_workers": self.workers, "threads_per_worker": 1, "host": "127.0.0.1", "dashboard_address": None}
        return {"cluster_kwargs": local}
