"""Conversion of SkyPilot's errors into our own, with advice. Classes are recognised by name, so this module does not
import SkyPilot."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from components.compute.sky.report import plain
from components.errors import EspalierError, ResourceError

if TYPE_CHECKING:
    from components.compute.sky.spec import SkyPlace

QUOTA = re.compile(r"quota|limit ?exceeded|QOS\w{0,40}Limit|AssocGrp|insufficient(?! capacity)", re.IGNORECASE)
FULL = re.compile(r"No space left on device|Disk quota exceeded|Errno 28\b|Errno 122\b")
LOST_ERRORS = ("ClusterDoesNotExist", "ClusterNotUpError", "FetchClusterInfoError")
"""Error types that mean that the cluster does not exist, or no longer exists."""
SERVER_ERRORS = (
    "ApiServerConnectionError",
    "ServerTemporarilyUnavailableError",
    "RequestInterruptedError",
    "ConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ChunkedEncodingError",
)
"""Error types that mean that SkyPilot's API server did not answer; may be transient."""
RESUME_HINT = "finished work is in the store, and the same command resumes from it"


def explain(error: BaseException, place: SkyPlace, cluster: str) -> EspalierError:
    """Return the error as one of our own."""
    kind, text = type(error).__name__, plain(str(error))
    if isinstance(error, EspalierError):
        return error
    if kind == "NoCloudAccessError":
        return ResourceError(
            f"SkyPilot has no access to {place.infra or 'any cloud'}: `sky check` lists what is missing, "
            f"docs/guides/cloud.md describes the setup. {_first(text)}"
        )
    if kind == "ResourcesUnavailableError":
        reasons = [_first(plain(str(failure))) for failure in getattr(error, "failover_history", [])]
        reason = "; ".join(dict.fromkeys(filter(None, reasons))) or _first(text)
        advice = "choose another infra, accelerators or cpus for this place, or wait"
        if QUOTA.search(text + reason):
            advice = "the quota is exceeded: ask the provider for more, or choose another infra or accelerators"
        return ResourceError(
            f"{place.describe()} is not available: {reason}. {advice[0].upper()}{advice[1:]}; {RESUME_HINT}"
        )
    if kind == "ResourcesMismatchError":
        return ResourceError(
            f"the cluster {cluster} is up with other resources than {place.describe()}: give this place another "
            f"`cluster`, or end that one with `sky down {cluster}`. {_first(text)}"
        )
    if kind in SERVER_ERRORS:
        return ResourceError(
            f"SkyPilot's API server cannot be reached: {_first(text)}. Start it (`sky api start`), or correct "
            f"SKYPILOT_API_SERVER_ENDPOINT; {RESUME_HINT}"
        )
    if kind in LOST_ERRORS:
        return ResourceError(f"the cluster {cluster} no longer exists: {_first(text)}; {RESUME_HINT}")
    if kind == "NotSupportedError":
        return ResourceError(f"{place.describe()} does not support this request: {text}")
    return EspalierError(f"SkyPilot, {cluster}: {kind}: {text}")


def full_disk(text: str, place: SkyPlace, cluster: str) -> ResourceError | None:
    """Return the error for a full disk of a node; None if the text reports none."""
    if not FULL.search(text):
        return None
    return ResourceError(
        f"the disk of a node of {cluster} is full: raise `disk` of this place (GB; now "
        f"{place.disk or 'the choice of SkyPilot'}), or free space below {place.root}; {RESUME_HINT}"
    )


def _first(text: str) -> str:
    """Return the first non-empty lines, joined."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:500].rstrip(".")
