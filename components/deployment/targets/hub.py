"""Hugging Face Hub target: a repository for the model, uploaded by huggingface_hub.

A release is first committed to a branch of its own and verified: every file must exist with its size. Only then it is
committed to `main`; the hub already has the large files, so they are not uploaded again. So `main` always holds a
complete release; after a failure it holds the previous one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from components.deployment.targets.base import Deployment, DeploymentTarget, Release
from components.errors import DeployError, ResourceError
from components.redaction import secret_variable
from components.specs.served import VARIABLE

logger = logging.getLogger(__name__)

MAIN = "main"


class HubTarget(DeploymentTarget):
    """Repository on the Hugging Face Hub; upload only, without an endpoint."""

    name: Literal["hub"] = "hub"
    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """Repository as `owner/name`; created if it does not exist."""
    private: bool = True
    """Create the repository as private."""
    url: str | None = None
    """Base URL of the hub; null uses HF_ENDPOINT, or huggingface.co."""
    key_variable: str = Field("HF_TOKEN", pattern=VARIABLE)
    """Environment variable that holds the token, which needs write permission."""

    keeps_previous: ClassVar[bool] = True

    def check(self, name: str, active: Deployment | None = None) -> None:
        """Raise ResourceError if the token is missing or rejected."""
        api = self._api()
        self._call(lambda: api.whoami())

    def deploy(self, release: Release, root: Path) -> Deployment:
        api, repository, branch = self._api(), self.repository, f"release-{release.digest[:12]}"
        self._call(lambda: api.create_repo(repository, private=self.private, exist_ok=True))
        self._call(lambda: api.create_branch(repository, branch=branch, exist_ok=True))
        self._upload(api, release, branch)
        self._compare(api, release, branch)
        commit = self._upload(api, release, MAIN)
        return Deployment(
            target=self.name,
            version=release.version,
            digest=release.digest,
            url=None,
            model=repository,
            key_variable=self.key_variable,
            details={"commit": commit, "branch": branch},
        )

    def alive(self, deployment: Deployment) -> bool:
        """Return True if the repository's main branch still holds the deployment."""
        try:
            api = self._api()
            info = self._call(lambda: api.model_info(deployment.model, revision=MAIN))
        except (ResourceError, DeployError):
            return False
        return info.sha == deployment.details["commit"]

    def take_back(self, deployment: Deployment) -> None:
        """Delete the deployment's branch, if it exists; the history of `main` keeps its files."""
        from huggingface_hub.errors import HfHubHTTPError

        api = self._api()

        def delete() -> None:
            try:
                api.delete_branch(deployment.model, branch=deployment.details["branch"])
            except HfHubHTTPError as error:
                if error.response is None or error.response.status_code != 404:
                    raise

        self._call(delete)

    def _upload(self, api: Any, release: Release, branch: str) -> str:
        message = f"{release.name} version {release.version}"
        commit = self._call(
            lambda: api.upload_folder(
                repo_id=self.repository,
                folder_path=release.folder,
                revision=branch,
                commit_message=message,
                delete_patterns=["*"],  # files of the previous release
            )
        )
        return str(commit.oid)

    def _compare(self, api: Any, release: Release, branch: str) -> None:
        info = self._call(lambda: api.model_info(self.repository, revision=branch, files_metadata=True))
        sizes = {file.rfilename: file.size for file in info.siblings or []}
        for path in sorted(release.folder.iterdir()):
            if sizes.get(path.name) != path.stat().st_size:
                size = sizes.get(path.name, "nothing")
                raise DeployError(
                    f"{self.repository}: {path.name} has {path.stat().st_size} bytes, but {size} on branch "
                    f"{branch} of the hub; main is unchanged"
                )

    def _call(self, request: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        try:
            return request()
        except LocalTokenNotFoundError as error:
            raise ResourceError(f"deploy.target.key_variable: {error}") from None
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            reason = str(error.server_message or error).splitlines()[0][:300]
            if status in (401, 403):
                raise ResourceError(
                    f"the hub rejects the token for {self.repository} (HTTP {status}: {reason}); "
                    f"correct the environment variable {self.key_variable}: it needs a token with write permission"
                ) from None
            raise DeployError(f"the hub failed at {self.repository}: HTTP {status}: {reason}") from None
        except (OSError, RuntimeError) as error:  # huggingface_hub raises RuntimeError for a failed upload
            raise DeployError(f"the hub cannot be reached, or the upload failed: {error}") from None

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        token = secret_variable(self.key_variable)
        if not token:
            raise ResourceError(
                f"deploy.target.key_variable: the environment variable {self.key_variable} is not set; set it to "
                "a token of the Hugging Face Hub with write permission"
            )
        return HfApi(endpoint=self.url, token=token)
