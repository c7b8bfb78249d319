"""Every path, socket and binary this node uses, read once.

Weakest first: built-in defaults, `/etc/cedana/config.toml` (or the file `CEDANA_CONFIG` names),
environment variables `CEDANA_<FIELD>`, then whatever flags the caller applies with
`dataclasses.replace`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from base.errors import UsageError

DEFAULT_CONFIG_FILE = Path("/etc/cedana/config.toml")


@dataclass(frozen=True)
class Node:
    """Another node, reached by running `command` + `cedana` arguments (an `ssh` line, say)."""

    command: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    containerd_address: Path = Path("/run/containerd/containerd.sock")
    containerd_namespace: str = "default"
    run_dir: Path = Path("/run/cedana")
    """Node-local, lost at reboot, on tmpfs: CRIU images being written or restored, netns mounts."""
    state_dir: Path = Path("/var/lib/cedana")
    """Durable: the default image layout (`checkpoints/`), logs of failed dumps, container logs."""
    tools_dir: Path = Path("/opt/cedana/node/bin")
    """Searched before PATH for runc, criu, containerd, ctr, nerdctl."""
    plain_http: tuple[str, ...] = ()
    """Registries (host:port) spoken to without TLS, besides loopback addresses."""
    nodes: Mapping[str, Node] = field(default_factory=dict)

    @property
    def layout_dir(self) -> Path:
        """The image layout checkpoints go to when no `--to` is given."""
        return self.state_dir / "checkpoints"

    @property
    def log_dir(self) -> Path:
        """Where the logs of failed dumps and restores are kept."""
        return self.state_dir / "log"

    def tool(self, name: str) -> str:
        """Absolute path of the program `name`: `tools_dir` first, then PATH; `name` if neither."""
        for directory in (str(self.tools_dir), *os.environ.get("PATH", os.defpath).split(":")):
            candidate = os.path.join(directory, name)
            if directory and os.access(candidate, os.X_OK):
                return candidate
        return name

    def tool_path(self) -> str:
        """PATH for the programs we start, so that runc finds the CRIU that works."""
        return f"{self.tools_dir}:{os.environ.get('PATH', os.defpath)}"


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration; raises `UsageError` naming the file and key that is wrong."""
    path = Path(environ.get("CEDANA_CONFIG", DEFAULT_CONFIG_FILE))
    values: dict[str, object] = {}
    if path.exists():
        try:
            values = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} is not valid TOML: {error}") from error
    known = {f.name for f in fields(Config)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(
            f"{path} has the unknown key {unknown[0]!r}", hint=f"known keys: {', '.join(sorted(known))}"
        )
    for name in known - {"nodes"}:
        if (text := environ.get(f"CEDANA_{name.upper()}")) is not None:
            values[name] = [h for h in text.split(",") if h] if name == "plain_http" else text
    return Config(**{name: _convert(path, name, value) for name, value in values.items()})  # type: ignore[arg-type]


def _convert(path: Path, name: str, value: object) -> object:
    if name == "nodes":
        if isinstance(value, dict):
            return {str(n): Node(tuple(str(w) for w in v["command"])) for n, v in value.items()}
    elif name == "plain_http":
        if isinstance(value, list):
            return tuple(str(host) for host in value)
    elif isinstance(value, str):
        return value if name == "containerd_namespace" else Path(value)
    raise UsageError(f"{path}: the value of {name!r} has the wrong type")
