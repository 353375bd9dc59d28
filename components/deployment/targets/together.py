"""Together target: upload by reference, wait for the job, create a dedicated endpoint, wait until it has started.

It follows the documented API (docs.together.ai, reference of models, jobs and endpoints): `POST /models` starts a job
that fetches the model from its source, `GET /jobs/ID` returns its status (Queued, Running, Complete, Failed), `POST
/endpoints` creates an endpoint, `GET /endpoints/ID` returns its state (PENDING, STARTING, STARTED, ERROR and so on),
`DELETE /endpoints/ID` removes it, which ends its costs. The model itself stays in the account.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from components.deployment.targets.base import Deployment, DeploymentTarget, Release
from components.errors import DeployError, ResourceError, WaitTimeout
from components.json_client import Client
from components.json_reply import Reply
from components.redaction import dereference, secret_variable
from components.retry import ClientTimeouts
from components.specs.served import VARIABLE, check_address

logger = logging.getLogger(__name__)


class TogetherTarget(DeploymentTarget):
    """Together's dedicated endpoints. Together fetches the model from the Hugging Face Hub or a presigned URL."""

    name: Literal["together"] = "together"
    source: str = Field(min_length=1)
    """Repository on the Hugging Face Hub (`owner/name`) with the merged export, or a presigned URL of its archive. Such
    a URL is a secret, so give it as `env:NAME`, the environment variable that holds it."""
    hardware: str = Field(min_length=1)
    """Hardware id, as listed by Together."""
    replicas: int = Field(1, ge=1)
    """Number of replicas."""
    url: str = "https://api.together.xyz/v1"
    """Base URL of the API."""
    key_variable: str = Field("TOGETHER_API_KEY", pattern=VARIABLE)
    """Environment variable that holds the API key."""
    source_key_variable: str | None = Field("HF_TOKEN", pattern=VARIABLE)
    """Environment variable with the token for a private repository; null sends none."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that one request may take."""
    retry_for: float = Field(120.0, ge=0)
    """Seconds for which a failed request is retried."""
    ready_timeout: float = Field(3600.0, gt=0)
    """Seconds in which the model must be ready, and again the endpoint."""
    poll: float = Field(10.0, gt=0)
    """Seconds between two status requests."""

    @field_validator("url")
    @classmethod
    def _address(cls, value: str) -> str:
        check_address(value, example="https://api.together.xyz/v1", key="deploy.target.key_variable")
        return value.rstrip("/")

    def check(self, name: str, active: Deployment | None = None) -> None:
        """Raise ResourceError if a key is missing or rejected."""
        dereference(self.source, "deploy.target.source")
        with closing(self._client()) as client:
            try:
                client.now("GET", "/endpoints", None, lambda reply: reply.content)
            except DeployError as error:
                raise ResourceError(f"deploy.target.url: {self.url} cannot be used: {error}") from None

    def deploy(self, release: Release, root: Path) -> Deployment:
        with closing(self._client()) as client:
            self._upload(client, release)
            endpoint = str(self._create_endpoint(client, release)["id"])
            try:
                ready = self._wait(
                    f"the endpoint {endpoint}",
                    lambda: client.now("GET", f"/endpoints/{endpoint}", None, _object),
                    key="state",
                    done="STARTED",
                    failed=("ERROR", "STOPPED"),
                )
            except BaseException:
                self._remove(client, endpoint)
                raise
        return Deployment(
            target=self.name,
            version=release.version,
            digest=release.digest,
            url=self.url,
            model=str(ready["name"]),
            key_variable=self.key_variable,
            details={"endpoint": endpoint, "model": release.slug},
        )

    def alive(self, deployment: Deployment) -> bool:
        with closing(self._client()) as client:
            try:
                response = client.now("GET", f"/endpoints/{deployment.details['endpoint']}", None, _object)
                return response.get("state") == "STARTED"
            except (DeployError, ResourceError):
                return False

    def take_back(self, deployment: Deployment) -> None:
        with closing(self._client()) as client:
            self._remove(client, deployment.details["endpoint"])

    def _upload(self, client: Client, release: Release) -> None:
        """Upload the model to the account, under a name that is unique to this export."""
        body = {
            "model_name": release.slug,
            "model_source": dereference(self.source, "deploy.target.source"),
            "model_type": "model",
        }
        token = secret_variable(self.source_key_variable or "")
        if token:
            body["hf_token"] = token
        job = client.now("POST", "/models", body, _object).get("data", {}).get("job_id")
        if not job:
            raise DeployError(f"{self.url} accepted the model, but its response has no job id")
        self._wait(
            f"the upload of {release.slug} (job {job})",
            lambda: client.now("GET", f"/jobs/{job}", None, _object),
            key="status",
            done="Complete",
            failed=("Failed", "Cancelled"),
        )

    def _create_endpoint(self, client: Client, release: Release) -> dict[str, Any]:
        count = self.replicas
        body = {
            "model": release.slug,
            "hardware": self.hardware,
            "display_name": release.slug,
            "autoscaling": {"min_replicas": count, "max_replicas": count},
        }
        endpoint = client.now("POST", "/endpoints", body, _object)
        if not endpoint.get("id"):
            raise DeployError(f"{self.url} created an endpoint, but its response has no id")
        return endpoint

    def _wait(
        self, name: str, poll: Callable[[], dict[str, Any]], *, key: str, done: str, failed: tuple[str, ...]
    ) -> dict[str, Any]:
        """Poll until the state is `done` and return the response. Raise DeployError for a state in `failed`,
        WaitTimeout after `ready_timeout`."""
        deadline = time.monotonic() + self.ready_timeout
        while True:
            response = poll()
            state = str(response.get(key))
            logger.info("%s: %s", name, state)
            if state == done:
                return response
            if state in failed:
                detail = response.get("status_updates") or response.get("message") or ""
                raise DeployError(f"{name} is {state}" + (f": {str(detail)[:500]}" if detail else ""))
            if time.monotonic() + self.poll > deadline:
                raise WaitTimeout(
                    f"timed out after {self.ready_timeout:g} s (deploy.target.ready_timeout) waiting for {name}; "
                    f"its state is {state}"
                )
            time.sleep(self.poll)

    def _remove(self, client: Client, endpoint: str) -> None:
        def accepted(reply: Reply, text: str) -> Exception | None:
            return _Gone() if reply.status in (202, 204, 404) else None

        try:
            client.now("DELETE", f"/endpoints/{endpoint}", None, lambda reply: None, accepted)
        except _Gone:
            pass
        except (DeployError, ResourceError) as error:
            logger.warning("could not delete the endpoint %s, which is still billed: %s. Delete it", endpoint, error)

    def _client(self) -> Client:
        key = secret_variable(self.key_variable)
        if not key:
            raise ResourceError(
                f"deploy.target.key_variable: the environment variable {self.key_variable} is not set; set it to "
                f"your key of {self.url}"
            )
        return Client(
            self.url,
            key,
            ClientTimeouts(self.timeout, self.retry_for, "deploy.target"),
            key_hint=f"correct the environment variable {self.key_variable}",
            error=DeployError,
        )


def _object(reply: Reply) -> dict[str, Any]:
    return reply.json()


class _Gone(Exception):
    """Endpoint that is being deleted, or does not exist."""
