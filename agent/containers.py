"""Finds the container a person means, and describes a running one to the engine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.errors import NotRunningError
from base.errors import NotFoundError, UsageError
from runtime.container import Container, load_spec
from runtime.errors import IncompatibleError
from shim import options
from shim.log import RUNTIME

NERDCTL_NAME = "nerdctl/name"
CHECKPOINTED_LABEL = "ai.cedana.checkpointed"
"""On a container that ended with a checkpoint: the checkpoint's id and when (seconds since the epoch)."""
ATTACHABLE_LABEL = "ai.cedana.attachable"
"""In an artifact: the terminal was connected to FIFOs, for clients to attach to, not to a log."""
_RUNC_RUNTIMES = frozenset({RUNTIME, "io.containerd.runc.v2"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def check_name(name: str) -> str:
    """`name` if containerd and nerdctl take it as the name of a container; raises `UsageError`."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot be the name of a container",
            hint="letters, digits and . _ - after the first, 128 at most",
        )
    return name


def find(client: Client, name: str) -> api.Container:
    """The container with this id, this nerdctl name, or the only one whose id begins like this."""
    check_name(name)
    begins = name.replace(".", "[.]")
    found = client.containers(f'labels."{NERDCTL_NAME}"=={name}', f'id~="^{begins}"')
    for choice in (
        [c for c in found if c.id == name],
        [c for c in found if c.labels.get(NERDCTL_NAME) == name],
        found,
    ):
        if len(choice) == 1:
            return choice[0]
        if choice:
            raise UsageError(
                f"{name!r} may be any of {len(choice)} containers",
                hint="use more of the id",
                details=", ".join(sorted(c.id[:16] for c in choice)[:8]),
            )
    raise NotFoundError(
        f"there is no container {name!r} in the namespace {client.namespace!r}",
        hint=_elsewhere(client, name) or "`nerdctl ps -a` and `ctr containers ls` list them",
    )


def describe(client: Client, container: api.Container) -> Container:
    """The running container as the engine sees it; raises `NotRunningError` if nothing of it runs."""
    name = container.labels.get(NERDCTL_NAME) or container.id
    task = client.task(container.id)
    if task is None or task.status not in (api.RUNNING, api.PAUSED):
        raise NotRunningError(
            f"container {name} is not running",
            hint=f"start it (nerdctl start {name}); only a running container has something to save",
        )
    if container.runtime.name not in _RUNC_RUNTIMES:
        raise IncompatibleError(
            f"container {name} runs under {container.runtime.name}",
            hint=f"only containers under runc can be checkpointed: {', '.join(sorted(_RUNC_RUNTIMES))}",
        )
    runc = options.decode(container.runtime.options)
    described = Container(
        id=container.id,
        namespace=client.namespace,
        bundle=Path(),
        pid=task.pid,
        runc_root=runc.runc_root(client.namespace),
        runc_binary=runc.binary_name or "runc",
        systemd_cgroup=runc.systemd_cgroup,
        name=name,
        image=container.image,
        labels={**container.labels, **({ATTACHABLE_LABEL: "true"} if _attachable(task) else {})},
        runtime=container.runtime.name,
    )
    bundle = _bundle(described)
    return replace(described, bundle=bundle, spec=load_spec(bundle))


def _attachable(task: api.Process) -> bool:
    return task.terminal and task.stdout.startswith("/")


def _bundle(container: Container) -> Path:
    """runc's state names the bundle: containerd does not tell where its state directory is."""
    for label in container.runc_state().get("config", {}).get("labels") or []:
        if isinstance(label, str) and label.startswith("bundle="):
            return Path(label.removeprefix("bundle="))
    raise IncompatibleError(
        f"runc's state of container {container.name} does not name its bundle",
        hint="update runc: run packaging/node/install",
    )


def _elsewhere(client: Client, name: str) -> str:
    """A hint if another namespace has a container of this name."""
    for namespace in client.namespaces():
        if namespace == client.namespace:
            continue
        with Client(client.address, namespace) as other:
            if other.containers(f"id=={name}", f'labels."{NERDCTL_NAME}"=={name}'):
                return f"there is one in the namespace {namespace!r}: use --namespace {namespace}"
    return ""
