"""One container on this node as the engine sees it: its bundle, its runc state, its processes.

Built by the agent (from containerd) and by the shim's requests; knows nothing of either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import EngineError


@dataclass(frozen=True)
class Mount:
    """A mount as containerd describes it (the rootfs of a task)."""

    type: str
    source: str
    target: str = ""
    """Relative to the root filesystem."""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    id: str
    namespace: str
    bundle: Path
    pid: int
    """Init, in the host's pid namespace; 0 while nothing runs."""
    runc_root: Path
    """runc's state directory of this namespace: `<root>/<namespace>`."""
    runc_binary: str = "runc"
    systemd_cgroup: bool = False
    spec: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """The name people use (nerdctl's), else the id."""
    image: str = ""
    image_digest: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    runtime: str = ""

    @property
    def unique_id(self) -> str:
        return unique_id(self.namespace, self.id)

    @property
    def state_dir(self) -> Path:
        return self.runc_root / self.id

    def runc_state(self) -> dict[str, Any]:
        """runc's own record of the container; raises `EngineError` when it does not run under runc."""
        path = self.state_dir / "state.json"
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise EngineError(
                f"runc has no usable state of container {self.id}",
                hint="the container must be running under runc",
                details=f"{path}: {error}",
            ) from error
        if not isinstance(state, dict):
            raise EngineError(f"runc's state of container {self.id} is not an object", details=str(path))
        return state


def unique_id(namespace: str, container_id: str) -> str:
    """The id on this node: each of containerd's namespaces may have a container of the same id."""
    return f"{namespace}.{container_id}"


def load_spec(bundle: Path) -> dict[str, Any]:
    """The OCI runtime spec of a bundle; raises `EngineError` when it is missing or broken."""
    try:
        spec = json.loads((bundle / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"the bundle {bundle} has no readable config.json", details=str(error)) from error
    if not isinstance(spec, dict):
        raise EngineError(f"the config.json of {bundle} is not an object")
    return spec
