"""What SkyPilot raises, in words that say what to do. Its errors are told apart by the names of their classes, so that
nothing of it is imported here."""

from __future__ import annotations

import re

from components.compute.sky.report import plain
from components.compute.sky.spec import SkyPlace
from components.errors import EspalierError, ResourceError

QUOTA = re.compile(r"quota|limit ?exceeded|QOS\w{0,40}Limit|AssocGrp|insufficient(?! capacity)", re.IGNORECASE)
FULL = re.compile(r"No space left on device|Disk quota exceeded|Errno 28\b|Errno 122\b")
LOST = ("ClusterDoesNotExist", "ClusterNotUpError", "FetchClusterInfoError")
"""The cluster is not there, or not any more."""
SERVER = (
    "ApiServerConnectionError",
    "ServerTemporarilyUnavailableError",
    "RequestInterruptedError",
    "ConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ChunkedEncodingError",
)
"""SkyPilot's API server did not answer, which may pass."""
KEPT = "what is finished is in the store, and the same command goes on from there"


def wanted(place: SkyPlace) -> str:
    """The machine, in words."""
    parts = [place.accelerators, place.cpus and f"{place.cpus} CPUs", place.memory and f"{place.memory} GB"]
    count = f"{place.nodes} × " if place.nodes > 1 else ""
    what = count + (", ".join(part for part in parts if part) or "a machine")
    return f"{what} on {place.infra or 'any cloud that is enabled'}" + (" (spot)" if place.use_spot else "")


def explain(error: BaseException, place: SkyPlace, cluster: str) -> EspalierError:
    """The same, as one of our own errors."""
    kind, text = type(error).__name__, plain(str(error))
    if isinstance(error, EspalierError):
        return error
    if kind == "NoCloudAccessError":
        return ResourceError(
            f"SkyPilot has no access to {place.infra or 'any cloud'}: `sky check` says what is missing, docs/cloud.md "
            f"what to set up. {_first(text)}"
        )
    if kind == "ResourcesUnavailableError":
        reasons = [_first(plain(str(one))) for one in getattr(error, "failover_history", [])]
        said = "; ".join(dict.fromkeys(filter(None, reasons))) or _first(text)
        advice = "choose another infra, accelerators or cpus for this place, or wait"
        if QUOTA.search(text + said):
            advice = "the quota does not allow it: ask the provider for more, or choose another infra or accelerators"
        return ResourceError(f"there is no {wanted(place)}: {said}. {advice[0].upper()}{advice[1:]}; {KEPT}")
    if kind == "ResourcesMismatchError":
        return ResourceError(
            f"the cluster {cluster} is up with other resources than {wanted(place)}: give this place another "
            f"`cluster`, or end that one with `sky down {cluster}`. {_first(text)}"
        )
    if kind in SERVER:
        return ResourceError(
            f"SkyPilot's API server cannot be reached: {_first(text)}. Start it (`sky api start`), or correct "
            f"SKYPILOT_API_SERVER_ENDPOINT; {KEPT}"
        )
    if kind in LOST:
        return ResourceError(f"the cluster {cluster} is gone: {_first(text)}; {KEPT}")
    if kind == "NotSupportedError":
        return ResourceError(f"{wanted(place)} cannot do what is asked: {text}")
    return EspalierError(f"SkyPilot, {cluster}: {kind}: {text}")


def full_disk(text: str, place: SkyPlace, cluster: str) -> ResourceError | None:
    """Where the node has no room left."""
    if not FULL.search(text):
        return None
    return ResourceError(
        f"the disk of a node of {cluster} is full: raise `disk` of this place (GB; now "
        f"{place.disk or 'what SkyPilot chooses'}), or make room below {place.root}; {KEPT}"
    )


def _first(text: str) -> str:
    """The first lines that say something, as one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:500].rstrip(".")
