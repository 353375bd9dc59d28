"""The credential of a root's Prefect servers: who can read it, where it goes, and what it opens."""

from __future__ import annotations

import base64
import os
import stat

import psutil
import pytest

from components.errors import ResourceError
from flows.execution.prefect_credential import credential
from flows.orchestration import server
from tests.flows.test_server_attacks import request

pytestmark = pytest.mark.security


def test_it_is_created_once_for_its_owner_only(tmp_path):
    before = os.umask(0)  # a user whose files others may change
    try:
        text = credential(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "credential").stat().st_mode) == 0o600
    assert credential(tmp_path) == text
    assert len(text) > 40
    (tmp_path / "other").mkdir()
    assert credential(tmp_path / "other") != text


def test_a_file_that_others_can_read_or_change_is_refused(tmp_path):
    credential(tmp_path)
    words = r"credential has mode 6.. *: other users can read or change it; expected 600"
    for mode in (0o640, 0o604, 0o620, 0o602, 0o644, 0o666):
        (tmp_path / "credential").chmod(mode)
        with pytest.raises(ResourceError, match=words):
            credential(tmp_path)
    (tmp_path / "prefect").symlink_to(tmp_path)
    with pytest.raises(ResourceError, match="expected 600"):
        server.start(tmp_path)


def test_a_link_a_pipe_and_another_text_are_refused(tmp_path):
    file = tmp_path / "credential"
    credential(tmp_path)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResourceError, match=r"is a symbolic link; expected a file\. Delete it"):
        credential(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResourceError, match="is a symbolic link"):
        credential(tmp_path)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(ResourceError, match="is not a regular file"):
        credential(tmp_path)
    file.unlink()
    file.touch(0o600)
    with pytest.raises(ResourceError, match="contains no credential"):
        credential(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(tmp_path):
    credential(tmp_path)
    os.chown(tmp_path / "credential", 12345, -1)
    with pytest.raises(ResourceError, match="belongs to user 12345; expected 0"):
        credential(tmp_path)


def test_it_is_in_no_argument_and_no_environment_that_stages_inherit(prefect_server, prefect_root):
    from flows.execution.executor import environment

    text = credential(server.home(prefect_root))
    prefect_server.url()
    for process in psutil.process_iter():
        try:
            assert text not in " ".join(process.cmdline())
        except psutil.Error:
            continue
    assert text not in os.environ.values()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_AUTH_STRING", text)
        patch.setenv("PREFECT_API_KEY", text)
        assert text not in environment().values()
    assert text not in prefect_server.ui_command + prefect_server.login(show=False) + prefect_server.advice
    assert text in prefect_server.login(show=True)
    for log in (prefect_root / "logs").iterdir():
        assert text not in log.read_text()


def basic(text: str) -> str:
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def test_what_it_opens(prefect_server, prefect_root):
    """Reads need it, changes need a CSRF token too, which a form of another site cannot send."""
    text = credential(server.home(prefect_root))
    right = {"Authorization": basic(text)}
    assert request(prefect_server, "POST", "/flows/filter", {}, **right).status == 403  # no CSRF token
    assert request(prefect_server, "GET", "/admin/version", **right).status == 200
    for wrong in (basic("espalier:wrong"), basic(text[:-1]), f"Bearer {text}", text, "Basic", "Basic %%%", basic("")):
        assert request(prefect_server, "GET", "/admin/version", Authorization=wrong).status == 401
    token = request(prefect_server, "GET", "/csrf-token?client=test", **right)
    assert token.status == 200
    import json

    allowed = {**right, "Prefect_Csrf_Client": "test", "Prefect_Csrf_Token": json.loads(token.content)["token"]}
    assert request(prefect_server, "POST", "/flows/filter", {}, **allowed).status == 200
    assert request(prefect_server, "POST", "/flows/filter", {}, **allowed, Origin="http://evil.test").status == 403
    secrets = request(prefect_server, "GET", "/admin/settings", **right).content.decode()
    assert text not in secrets
