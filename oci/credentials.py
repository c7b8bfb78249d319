"""Credentials for registries, where `docker login`, `nerdctl login` and `podman login` leave them.

`$DOCKER_CONFIG/config.json` or `~/.docker/config.json` (with its credential helpers), then podman's
`auth.json` files. Read when a registry asks, never stored or logged.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci.errors import AuthError

_HELPER_TIMEOUT_S = 20
_HELPER = re.compile(r"[A-Za-z0-9_.-]+")
_TOKEN_USER = "<token>"
"""The user name by which a credential helper says that the secret is an identity token."""


@dataclass(frozen=True)
class Credentials:
    user: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)

    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find(registry: str, environ: Mapping[str, str] = os.environ) -> Credentials | None:
    """The credentials for `registry` (host[:port]), or None; raises `AuthError` for a broken file."""
    for path in _files(environ):
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise AuthError(f"cannot read the credentials in {path}", details=str(error)) from error
        if isinstance(config, dict) and (found := _from_config(config, registry, path)):
            return found
    return None


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    home = Path(environ.get("HOME") or "/root")
    yield Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json"
    if runtime_dir := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime_dir) / "containers" / "auth.json"
    yield Path("/run/containers/0/auth.json")
    yield home / ".config" / "containers" / "auth.json"


def _from_config(config: Mapping[str, Any], registry: str, path: Path) -> Credentials | None:
    helpers = config.get("credHelpers") or {}
    entries = config.get("auths") or {}
    if not isinstance(helpers, dict) or not isinstance(entries, dict):
        raise AuthError(f"the credentials in {path} are malformed")
    for key, helper in helpers.items():
        if _host(key) == registry:
            return _ask_helper(str(helper), key)
    for key, entry in entries.items():
        if _host(key) != registry or not isinstance(entry, dict):
            continue
        if entry.get("auth") or entry.get("identitytoken"):
            return _decode(entry, path)
        if store := config.get("credsStore"):
            return _ask_helper(str(store), key)
    return None


def _host(key: str) -> str:
    """The host[:port] of a key of docker's file: a host, a URL, or Docker Hub's old URL."""
    host = key.split("://")[-1].split("/")[0]
    return "docker.io" if host in ("index.docker.io", "registry-1.docker.io") else host


def _decode(entry: Mapping[str, Any], path: Path) -> Credentials:
    try:
        user, _, password = base64.b64decode(entry.get("auth") or "", validate=True).decode().partition(":")
    except (binascii.Error, ValueError, TypeError) as error:
        raise AuthError(f"the credentials in {path} are malformed", details=str(error)) from error
    return Credentials(user, password.rstrip("\0"), str(entry.get("identitytoken") or ""))


def _ask_helper(helper: str, key: str) -> Credentials | None:
    if not _HELPER.fullmatch(helper):
        raise AuthError(f"the credential helper has the malformed name {helper!r}")
    argv = [f"docker-credential-{helper}", "get"]
    try:
        done = subprocess.run(
            argv, input=key, capture_output=True, text=True, check=False, timeout=_HELPER_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AuthError(f"the credential helper {argv[0]} does not work", details=str(error)) from error
    if done.returncode != 0:
        if "not found" in done.stdout:
            return None
        raise AuthError(f"the credential helper {argv[0]} failed", details=done.stdout.strip()[:200])
    try:
        answer = json.loads(done.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise AuthError(f"the credential helper {argv[0]} gave no proper answer") from error
    return Credentials("", "", secret) if user == _TOKEN_USER else Credentials(user, secret)
