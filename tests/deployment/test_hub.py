"""Hub target against the Hub's endpoints over a real socket, called by huggingface_hub, and its failures."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest

from components.deployment.targets.base import Release
from components.deployment.targets.hub import HubTarget
from components.errors import DeployError, ResourceError
from tests.http_server import HttpServer

TOKEN = "hf_secret"

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own uploads


class FakeHub(HttpServer):
    """Repositories with branches; small files in the commit, large ones by LFS. failing: operations that fail."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.branches: dict[str, dict[str, bytes]] = {}
        self.heads: dict[str, str] = {}
        self.large: dict[str, bytes] = {}
        super().__init__()

    def answer(self, method: str, path: str, content: bytes, headers: Any) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path.startswith("/lfs/"):
            if "upload" in self.failing:
                return 400, {"error": "the upload failed"}
            self.large[path.removeprefix("/lfs/")] = content
            return 200, {}
        if headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user", "auth": {"accessToken": {"role": "write"}}}
        if path == "/api/repos/create":
            self.branches.setdefault("main", {})
            self.heads.setdefault("main", "0" * 40)
            return 200, {"url": f"{self.url}/me/shop"}
        if match := re.fullmatch(r"/api/models/me/shop/branch/(.+)", path):
            if method == "DELETE" and "delete" in self.failing:
                return 400, {"error": "the branch is protected"}
            if method == "DELETE":
                if self.branches.pop(match[1], None) is None:
                    return 404, {"error": f"no branch {match[1]}"}
            else:
                self.branches.setdefault(match[1], dict(self.branches["main"]))
                self.heads.setdefault(match[1], self.heads["main"])
            return 200, {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if re.fullmatch(r"/api/models/me/shop/preupload/(.+)", path):
            files = json.loads(content)["files"]
            return 200, {
                "files": [
                    {
                        "path": entry["path"],
                        "uploadMode": "lfs" if entry["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for entry in files
                ]
            }
        if path == "/me/shop.git/info/lfs/objects/batch":
            objects = json.loads(content)["objects"]
            upload = [
                {"oid": entry["oid"], "size": entry["size"]}
                | (
                    {}
                    if entry["oid"] in self.large
                    else {"actions": {"upload": {"href": f"{self.url}/lfs/{entry['oid']}", "header": {}}}}
                )
                for entry in objects
            ]
            return 200, {"transfer": "basic", "objects": upload}
        if match := re.fullmatch(r"/api/models/me/shop/commit/(.+)", path):
            files = self.branches[match[1]]
            for line in content.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    files[entry["value"]["path"]] = self.large[entry["value"]["oid"]]
                elif entry["key"] == "deletedFile":
                    files.pop(entry["value"]["path"], None)
            if "short" in self.failing:
                files["model.safetensors"] = b""
            self.heads[match[1]] = f"{len(self.heads) + 7:040x}"
            head = self.heads[match[1]]
            return 200, {"commitUrl": f"{self.url}/me/shop/commit/{head}", "commitOid": head}
        if match := re.fullmatch(r"/api/models/me/shop(?:/revision/(.+))?", path):
            branch = match[1] or "main"
            listed = [
                {"rfilename": name, "size": len(data), "blobId": "0" * 40}
                for name, data in self.branches[branch].items()
            ]
            return 200, {"id": "me/shop", "modelId": "me/shop", "sha": self.heads[branch], "siblings": listed}
        if match := re.fullmatch(r"/api/models/me/shop/tree/([^/]+)", path):
            files = self.branches[match[1]]
            return 200, [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()
            ]
        return 404, {"error": f"no {method} {path}"}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with FakeHub() as fake:
        yield fake


@pytest.fixture
def release(tmp_path):
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# shop\n")
    (folder / "model.safetensors").write_bytes(b"w" * 4000)
    return Release("shop", "2", "ab" * 32, folder, 512)


def target(hub: FakeHub) -> Any:
    return HubTarget(repository="me/shop", url=hub.url)


def test_release_is_verified_before_main(hub, release, tmp_path):
    hub_target = target(hub)
    hub_target.check("shop")
    deployment = hub_target.deploy(release, tmp_path)
    assert set(hub.branches["main"]) == {"config.json", "README.md", "model.safetensors"}
    assert hub.branches["main"]["model.safetensors"] == b"w" * 4000
    assert (deployment.url, deployment.model, deployment.details["branch"]) == (None, "me/shop", "release-abababababab")
    assert hub_target.alive(deployment)
    hub.heads["main"] = "f" * 40  # somebody else has committed
    assert not hub_target.alive(deployment)
    hub.failing.add("delete")
    with pytest.raises(DeployError, match="HTTP 400"):
        hub_target.take_back(deployment)
    hub.failing.clear()
    for _ in range(2):
        hub_target.take_back(deployment)
        assert set(hub.branches) == {"main"}
    assert TOKEN not in repr(deployment)


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("upload", "upload failed|the hub failed at"),
        ("short", "model.safetensors has 4000 bytes, but .* on branch"),
    ],
)
def test_failed_upload_leaves_main_unchanged(hub, release, tmp_path, failing, message):
    hub.failing.add(failing)
    with pytest.raises(DeployError, match=message):
        target(hub).deploy(release, tmp_path)
    assert hub.branches["main"] == {}


def test_missing_or_rejected_token(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        ResourceError, match=r"rejects the token .*HF_TOKEN: it needs a token with write permission"
    ) as caught:
        target(hub).check("shop")
    assert "hf_wrong" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ResourceError, match="variable HF_TOKEN is not set"):
        target(hub).check("shop")
