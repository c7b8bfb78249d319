"""Credentials: found where docker, nerdctl and podman leave them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from oci import credentials
from oci.errors import AuthError


def auth(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def write(path: Path, config: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("key", ["r.example:5000", "https://r.example:5000", "https://r.example:5000/v2/"])
def test_login_is_found_under_every_form_of_the_name(
    tmp_path: Path, environ: dict[str, str], key: str
) -> None:
    write(tmp_path / ".docker" / "config.json", {"auths": {key: {"auth": auth("ann:pa:ss")}}})
    found = credentials.find("r.example:5000", environ)
    assert found is not None
    assert (found.user, found.password) == ("ann", "pa:ss")
    assert credentials.find("r.example", environ) is None


def test_docker_hub_is_found_under_its_old_name(tmp_path: Path, environ: dict[str, str]) -> None:
    config = {"auths": {"https://index.docker.io/v1/": {"auth": auth("ann:secret")}}}
    write(tmp_path / ".docker" / "config.json", config)
    assert credentials.find("docker.io", environ) is not None


def test_podmans_file_is_read_where_dockers_has_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    write(tmp_path / ".docker" / "config.json", {"auths": {}})
    path = tmp_path / ".config" / "containers" / "auth.json"
    write(path, {"auths": {"r.example": {"auth": auth("ann:x")}}})
    assert credentials.find("r.example", environ) is not None


def test_password_is_not_in_what_is_printed() -> None:
    assert "secret" not in repr(credentials.Credentials("ann", "secret", "secret"))


@pytest.mark.parametrize("content", ["{", '{"auths":[1]}', '{"auths":{"r.example":{"auth":"%%"}}}'])
def test_broken_file_is_told(tmp_path: Path, environ: dict[str, str], content: str) -> None:
    path = tmp_path / ".docker" / "config.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(AuthError, match=r"config\.json"):
        credentials.find("r.example", environ)


def helper(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bin" / "docker-credential-vault"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


def test_credential_helper_is_asked(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = '{"Username":"ann","Secret":"s3"}'
    helper(tmp_path, f"test \"$(cat)\" = r.example && echo '{answer}'", monkeypatch)
    write(tmp_path / ".docker" / "config.json", {"credHelpers": {"r.example": "vault"}})
    found = credentials.find("r.example", environ)
    assert found is not None
    assert (found.user, found.password) == ("ann", "s3")


def test_credential_helper_without_an_answer_means_no_login(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, "echo credentials not found in native keychain; exit 1", monkeypatch)
    write(tmp_path / ".docker" / "config.json", {"credHelpers": {"r.example": "vault"}})
    assert credentials.find("r.example", environ) is None


@pytest.mark.parametrize("name", ["absent", "../x", "a;b"])
def test_credential_helper_that_does_not_work_is_told(
    tmp_path: Path, environ: dict[str, str], name: str
) -> None:
    write(tmp_path / ".docker" / "config.json", {"credHelpers": {"r.example": name}})
    with pytest.raises(AuthError, match="credential helper"):
        credentials.find("r.example", environ)
