"""The Hugging Face Hub: a repository of its own for the model, uploaded by huggingface_hub.

A release is first committed to a branch of its own, and read back: every file has to be there with its size. Only then
it is committed to `main`, where the large files are known by then and are not sent again. So what stands in `main` is
always a whole release; after a failure it is the one before.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.deployment.targets.protocol import Deployment, Release
from components.errors import DeployError, ResourceError
from components.redaction import secret_variable

if TYPE_CHECKING:
    from components.deployment.targets.spec import HubTarget

logger = logging.getLogger(__name__)

MAIN = "main"


class Hub:
    def __init__(self, spec: HubTarget):
        self.spec = spec

    def check(self, name: str) -> None:
        """Raises ResourceError where the token is missing or refused."""
        api = self._api()
        self._told(lambda: api.whoami())

    def deploy(self, release: Release, root: Path) -> Deployment:
        api, repository, branch = self._api(), self.spec.repository, f"release-{release.digest[:12]}"
        self._told(lambda: api.create_repo(repository, private=self.spec.private, exist_ok=True))
        self._told(lambda: api.create_branch(repository, branch=branch, exist_ok=True))
        self._upload(api, release, branch)
        self._compare(api, release, branch)
        commit = self._upload(api, release, MAIN)
        return Deployment(
            target="hub",
            version=release.version,
            digest=release.digest,
            url=None,
            model=repository,
            key_variable=self.spec.key_variable,
            details={"commit": commit, "branch": branch},
        )

    def alive(self, deployment: Deployment) -> bool:
        """Whether it is still what the repository's main branch holds."""
        try:
            api = self._api()
            found = self._told(lambda: api.model_info(deployment.model, revision=MAIN))
        except (ResourceError, DeployError):
            return False
        return found.sha == deployment.details["commit"]

    def take_back(self, deployment: Deployment) -> None:
        """Its branch goes; what is in the history of `main` stays there."""
        api = self._api()
        self._told(lambda: api.delete_branch(deployment.model, branch=deployment.details["branch"]))

    def _upload(self, api: Any, release: Release, branch: str) -> str:
        message = f"{release.name} version {release.version}"
        found = self._told(
            lambda: api.upload_folder(
                repo_id=self.spec.repository,
                folder_path=release.folder,
                revision=branch,
                commit_message=message,
                delete_patterns=["*"],  # of the release before
            )
        )
        return str(found.oid)

    def _compare(self, api: Any, release: Release, branch: str) -> None:
        info = self._told(lambda: api.model_info(self.spec.repository, revision=branch, files_metadata=True))
        there = {one.rfilename: one.size for one in info.siblings or []}
        for path in sorted(release.folder.iterdir()):
            if there.get(path.name) != path.stat().st_size:
                found = there.get(path.name, "nothing")
                raise DeployError(
                    f"{self.spec.repository}: {path.name} has {path.stat().st_size} bytes, and branch {branch} of the "
                    f"hub {found}; main is as it was"
                )

    def _told(self, ask: Any) -> Any:
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

        try:
            return ask()
        except LocalTokenNotFoundError as error:
            raise ResourceError(f"deploy.target.key_variable: {error}") from None
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            said = str(error.server_message or error).splitlines()[0][:300]
            if status in (401, 403):
                raise ResourceError(
                    f"the hub refuses the token for {self.spec.repository} (HTTP {status}: {said}); "
                    f"correct the environment variable {self.spec.key_variable}: it needs a token that may write"
                ) from None
            raise DeployError(f"the hub failed at {self.spec.repository}: HTTP {status}: {said}") from None
        except (OSError, RuntimeError) as error:  # a file whose upload fails is a RuntimeError there
            raise DeployError(f"the hub cannot be reached, or the upload broke: {error}") from None

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        token = secret_variable(self.spec.key_variable)
        if not token:
            raise ResourceError(
                f"deploy.target.key_variable: the environment variable {self.spec.key_variable} is not set; set it to "
                "a token of the Hugging Face Hub that may write"
            )
        return HfApi(endpoint=self.spec.url, token=token)
