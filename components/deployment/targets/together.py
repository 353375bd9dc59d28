"""Together: upload by reference, wait for the job, an endpoint of one's own, wait until it has started.

After the documented API (docs.together.ai, reference of models, jobs and endpoints): `POST /models` begins a job that
fetches the model from where it lies, `GET /jobs/ID` says how it goes (Queued, Running, Complete, Failed), `POST
/endpoints` makes an endpoint, `GET /endpoints/ID` says its state (PENDING, STARTING, STARTED, ERROR and so on), `DELETE
/endpoints/ID` takes it down, which ends what it costs. The model itself stays in the account.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.deployment.targets.protocol import Deployment, Release
from components.errors import DeployError, ResourceError, WaitTimeout
from components.json_client import Client, Patience, Reply
from components.redaction import dereference, secret_variable

if TYPE_CHECKING:
    from components.deployment.targets.spec import TogetherTarget

logger = logging.getLogger(__name__)


class Together:
    def __init__(self, spec: TogetherTarget):
        self.spec = spec

    def check(self, name: str) -> None:
        """Raises ResourceError where a key is missing, or refused."""
        dereference(self.spec.source, "deploy.target.source")
        client = self._client()
        try:
            client.now("GET", "/endpoints", None, lambda reply: reply.content)
        except DeployError as error:
            raise ResourceError(f"deploy.target.url: {self.spec.url} cannot be used: {error}") from None
        finally:
            client.close()

    def deploy(self, release: Release, root: Path) -> Deployment:
        client = self._client()
        endpoint: dict[str, Any] | None = None
        try:
            self._fetched(client, release)
            endpoint = self._made(client, release)
            ready = self._wait(
                f"the endpoint {endpoint['id']}",
                lambda: client.now("GET", f"/endpoints/{endpoint['id']}", None, _object),
                key="state",
                done="STARTED",
                failed=("ERROR", "STOPPED"),
            )
        except BaseException:
            if endpoint is not None:
                self._remove(client, str(endpoint["id"]))
            raise
        finally:
            client.close()
        return Deployment(
            target="together",
            version=release.version,
            digest=release.digest,
            url=self.spec.url,
            model=str(ready["name"]),
            key_variable=self.spec.key_variable,
            details={"endpoint": str(endpoint["id"]), "model": release.slug},
        )

    def alive(self, deployment: Deployment) -> bool:
        client = self._client()
        try:
            found = client.now("GET", f"/endpoints/{deployment.details['endpoint']}", None, _object)
            return found.get("state") == "STARTED"
        except (DeployError, ResourceError):
            return False
        finally:
            client.close()

    def take_back(self, deployment: Deployment) -> None:
        client = self._client()
        try:
            self._remove(client, deployment.details["endpoint"])
        finally:
            client.close()

    def _fetched(self, client: Client, release: Release) -> None:
        """The model in the account, under a name that only this very export has."""
        body = {
            "model_name": release.slug,
            "model_source": dereference(self.spec.source, "deploy.target.source"),
            "model_type": "model",
        }
        token = secret_variable(self.spec.source_key_variable or "")
        if token:
            body["hf_token"] = token
        job = client.now("POST", "/models", body, _object).get("data", {}).get("job_id")
        if not job:
            raise DeployError(f"{self.spec.url} took the model and names no job")
        self._wait(
            f"the upload of {release.slug} (job {job})",
            lambda: client.now("GET", f"/jobs/{job}", None, _object),
            key="status",
            done="Complete",
            failed=("Failed", "Cancelled"),
        )

    def _made(self, client: Client, release: Release) -> dict[str, Any]:
        count = self.spec.replicas
        body = {
            "model": release.slug,
            "hardware": self.spec.hardware,
            "display_name": release.slug,
            "autoscaling": {"min_replicas": count, "max_replicas": count},
        }
        made = client.now("POST", "/endpoints", body, _object)
        if not made.get("id"):
            raise DeployError(f"{self.spec.url} made an endpoint and does not name it")
        return made

    def _wait(
        self, what: str, look: Callable[[], dict[str, Any]], *, key: str, done: str, failed: tuple[str, ...]
    ) -> dict[str, Any]:
        """What a look says when it is done. Raises DeployError where it has failed, WaitTimeout where it takes too
        long."""
        deadline = time.monotonic() + self.spec.ready_timeout
        while True:
            found = look()
            state = str(found.get(key))
            logger.info("%s: %s", what, state)
            if state == done:
                return found
            if state in failed:
                said = found.get("status_updates") or found.get("message") or ""
                raise DeployError(f"{what} is {state}" + (f": {str(said)[:500]}" if said else ""))
            if time.monotonic() + self.spec.poll > deadline:
                raise WaitTimeout(
                    f"waited {self.spec.ready_timeout:g} s (deploy.target.ready_timeout) for {what}; it is {state}"
                )
            time.sleep(self.spec.poll)

    def _remove(self, client: Client, endpoint: str) -> None:
        def taken(reply: Reply, text: str) -> Exception | None:
            return _Gone() if reply.status in (202, 204, 404) else None

        try:
            client.now("DELETE", f"/endpoints/{endpoint}", None, lambda reply: None, taken)
        except _Gone:
            pass
        except (DeployError, ResourceError) as error:
            logger.warning("the endpoint %s is still there, and costs: %s. Delete it by hand", endpoint, error)

    def _client(self) -> Client:
        key = secret_variable(self.spec.key_variable)
        if not key:
            raise ResourceError(
                f"deploy.target.key_variable: the environment variable {self.spec.key_variable} is not set; set it to "
                f"your key of {self.spec.url}"
            )
        return Client(
            self.spec.url,
            key,
            Patience(self.spec.timeout, self.spec.retry_for, "deploy.target"),
            key_hint=f"correct the environment variable {self.spec.key_variable}",
            error=DeployError,
        )


def _object(reply: Reply) -> dict[str, Any]:
    return reply.json()


class _Gone(Exception):
    """An endpoint is on its way out, or was not there."""
