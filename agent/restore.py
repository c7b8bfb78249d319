"""`cedana restore`: from an artifact in a store to a running container in containerd.

The container is an ordinary one: our runtime restores it inside containerd's own Create and Start. On any
failure everything made here is gone again; the artifact and the base image stay.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2

from agent import images, references
from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.containers import ATTACHABLE_LABEL, CHECKPOINTED_LABEL, NERDCTL_NAME, check_name
from agent.errors import AlreadyExistsError, ContainerdError, FailedPreconditionError
from agent.home import Home, home
from agent.spec import target_spec
from base.annotations import BRIDGE, RESTORE_FROM, TCP
from base.config import Config
from base.errors import CedanaError
from base.trace import Trace
from oci import open_store
from oci.artifact import Artifact
from oci.page_stream import PageStream
from oci.record import CheckpointRecord
from runtime import fetch, rootfs
from runtime.container import Mount
from runtime.errors import IncompatibleError, RestoreError
from runtime.locks import exclusive
from runtime.staging import Staging
from shim.log import RUNTIME

_SPEC_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
_FIFO_ROOT = Path("/run/containerd/fifo")
"""Where containerd's clients make FIFOs, and whoever deletes the task removes them."""
_MAX_ID = 76
"""containerd's limit on the length of a container's id."""
_NERDCTL_ID = re.compile(r"[0-9a-f]{64}")
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class RestoreOptions:
    name: str = ""
    """The container's name here; the one it had if empty."""
    tcp: str = ""
    """What becomes of TCP connections: "established", "close", or '' for what the checkpoint says."""
    bridge: str = ""
    """The bridge of this node that the container's interface joins."""
    allow: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Restored:
    container_id: str
    name: str
    pid: int
    reference: references.AnyReference
    """By digest."""
    log: str
    """'' for a terminal to attach to."""


@dataclass(frozen=True)
class Identity:
    container_id: str
    name: str
    predecessor: api.Container | None = None
    """The container in an earlier life, ended by a checkpoint and still recorded here: it is replaced."""


def restore(reference_text: str, options: RestoreOptions, config: Config, trace: Trace) -> Restored:
    """Bring the checkpoint back as a container; returns once it runs."""
    reference = references.existing(reference_text, config)
    store = open_store(reference, config)
    with trace.step("open"):
        artifact = Artifact.open(store, reference.name)
        pinned = replace(reference, tag="", digest=artifact.manifest.digest)
        fetch.compatible(artifact)
        claimed = artifact.spec()
    snapshotter = os.environ.get("CONTAINERD_SNAPSHOTTER", "overlayfs")
    namespace = config.containerd_namespace
    with ExitStack() as held, ExitStack() as undo:
        client = held.enter_context(Client(config.containerd_address, namespace))
        identity = choose_identity(client, artifact.record, options.name)
        container_id = identity.container_id
        held.enter_context(exclusive(config, namespace, container_id))
        held.enter_context(client.lease())
        own = home(config, namespace, container_id, identity.name)
        spec = target_spec(
            claimed,
            namespace=namespace,
            container_id=container_id,
            files=own.files,
            allow=options.allow,
        )
        spec["annotations"] |= own.annotations(_on_host_network(spec)) | _annotations(pinned, options)

        undo.callback(Staging.of(config, namespace, container_id).discard)
        if artifact.base is not None:
            known = {known.name for known in client.images()}
            undo.callback(_quietly, images.remove_new, client, known, artifact.base.digest)
        with ThreadPoolExecutor(1) as beside:
            bringing = beside.submit(images.bring, client, artifact, store, snapshotter, trace)
            fetch.prefetch(str(pinned), artifact, namespace, container_id, config, trace)
            memory = held.enter_context(
                fetch.memory_at_hand(artifact, namespace, container_id, config, trace)
            )
            image, parent = bringing.result()

        undo.callback(own.remove)
        own.write(spec.get("hostname", ""), lambda owner: bool(client.containers(f"id=={owner}")))
        with trace.step("container"):
            if identity.predecessor is not None:
                _take_away(client, identity.predecessor, undo)
            snapshot = f"{container_id}-{artifact.record.id[:12]}-{secrets.token_hex(4)}"
            mounts = client.prepare_snapshot(snapshotter, snapshot, parent)
            undo.callback(_quietly, client.remove_snapshot, snapshotter, snapshot)
            fetch.apply_difference(artifact, namespace, container_id, _mounts(mounts), config, trace)
            hostname = spec.get("hostname", "")
            record = api.Container(
                id=container_id,
                labels=own.labels(artifact.record.container.labels, hostname, _on_host_network(spec)),
                image=image,
                runtime=api.Container.Runtime(name=RUNTIME),
                spec=_packed(spec),
                snapshotter=snapshotter,
                snapshot_key=snapshot,
            )
            client.create_container(record)
            undo.callback(_quietly, client.delete_container, container_id)
        with _explained(identity.name, memory):
            with trace.step("create"):
                stdio = _stdio(artifact.record, spec, own, undo)
                undo.callback(_end_task, client, container_id)
                client.create_task(
                    api.CreateTaskRequest(
                        container_id=container_id, rootfs=mounts, runtime_path=_shim(), **stdio
                    )
                )
            with trace.step("start"):
                pid = client.start_task(container_id)
        undo.pop_all()
        _settle(client, record, spec, own.restart_labels(artifact.record.container.labels))
        if identity.predecessor is not None:
            _quietly(client.remove_snapshot, snapshotter, identity.predecessor.snapshot_key)
    log = own.log_uri if stdio["stdout"] == own.log_uri else ""
    return Restored(container_id, identity.name, pid, pinned, log)


def choose_identity(client: Client, record: CheckpointRecord, wanted_name: str) -> Identity:
    """The name and id the container gets here; raises `AlreadyExistsError` if the name is taken.

    The container that a checkpoint ended here makes way, unless it has run since.
    """
    original = record.container
    name = check_name(wanted_name or original.name)
    for taken in client.containers(f"id=={name}", f'labels."{NERDCTL_NAME}"=={name}'):
        if _ended(client, taken, record):
            return Identity(taken.id, name, taken)
        raise AlreadyExistsError(
            f"there is a container {name!r} already in the namespace {client.namespace!r}",
            hint=f"remove it (nerdctl rm {name}), or give another name: --name",
            details=f"id {taken.id[:64]}",
        )
    if original.id == original.name:
        return Identity(name[:_MAX_ID], name)
    if _NERDCTL_ID.fullmatch(original.id) and not client.containers(f"id=={original.id}"):
        return Identity(original.id, name)
    return Identity(secrets.token_hex(32), name)


def _ended(client: Client, container: api.Container, record: CheckpointRecord) -> bool:
    """Whether `container` is this one in an earlier life, and nothing became of it since its checkpoint."""
    checkpoint_id, _, when = container.labels.get(CHECKPOINTED_LABEL, "").partition(" ")
    if not checkpoint_id or (checkpoint_id != record.id and container.id != record.container.id):
        return False
    task = client.task(container.id)
    if task is not None and task.status != api.STOPPED:
        return False
    mounts = client.snapshot_mounts(container.snapshotter, container.snapshot_key)
    upper = rootfs.overlay_dirs(_mounts(mounts)).upper
    try:
        return all(path.lstat().st_ctime <= float(when) for path in (upper, *upper.rglob("*")))
    except (OSError, ValueError):
        return False


def _mounts(described: Iterable[api.Mount]) -> list[Mount]:
    return [Mount(m.type, m.source, m.target, tuple(m.options)) for m in described]


def _take_away(client: Client, predecessor: api.Container, undo: ExitStack) -> None:
    """Remove the predecessor's record, but not its snapshot; `undo` puts it back."""
    client.keep(f"snapshots/{predecessor.snapshotter}", predecessor.snapshot_key)
    if client.task(predecessor.id) is not None:
        client.delete_task(predecessor.id)
    client.delete_container(predecessor.id)
    undo.callback(client.create_container, predecessor)


def _annotations(reference: references.AnyReference, options: RestoreOptions) -> dict[str, str]:
    """What our runtime reads from the container's spec."""
    wishes = {TCP: options.tcp, BRIDGE: options.bridge}
    return {RESTORE_FROM: str(reference)} | {key: value for key, value in wishes.items() if value}


def _settle(client: Client, record: api.Container, spec: dict[str, Any], labels: dict[str, str]) -> None:
    """Make the running container an ordinary one: a later start runs its program anew."""
    ours = (RESTORE_FROM, TCP, BRIDGE)
    kept = {key: value for key, value in spec["annotations"].items() if key not in ours}
    changed = api.Container(id=record.id, labels=labels, spec=_packed({**spec, "annotations": kept}))
    client.update_container(changed, "spec", *(f"labels.{name}" for name in labels))


def _stdio(record: CheckpointRecord, spec: dict[str, Any], own: Home, undo: ExitStack) -> dict[str, Any]:
    """Where the task's streams go: to the log, or for a terminal one could attach to, to FIFOs again."""
    terminal = spec["process"]["terminal"]
    if not terminal or ATTACHABLE_LABEL not in record.container.labels:
        return {"stdout": own.log_uri, "stderr": own.log_uri, "terminal": terminal}
    _FIFO_ROOT.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = tempfile.mkdtemp(dir=_FIFO_ROOT)
    undo.callback(shutil.rmtree, directory, ignore_errors=True)
    paths = {name: os.path.join(directory, f"{own.container_id}-{name}") for name in ("stdin", "stdout")}
    for path in paths.values():
        os.mkfifo(path, 0o700)
    return {**paths, "terminal": True}


def _shim() -> str:
    """Our shim's path, so that containerd need not have it on its own PATH; '' to let containerd look."""
    beside = os.path.join(os.path.dirname(sys.executable), "containerd-shim-cedana-v1")
    return beside if os.access(beside, os.X_OK) else ""


def _packed(spec: dict[str, Any]) -> any_pb2.Any:
    return any_pb2.Any(type_url=_SPEC_TYPE, value=json.dumps(spec).encode())


def _on_host_network(spec: dict[str, Any]) -> bool:
    return not any(namespace["type"] == "network" for namespace in spec["linux"]["namespaces"])


@contextmanager
def _explained(name: str, memory: PageStream) -> Iterator[None]:
    """Say a failed create or start in terms of the restore: containerd only passes our runtime's words on."""
    try:
        yield
    except ContainerdError as error:
        if memory.error is not None:
            raise memory.error from error
        kind = IncompatibleError if isinstance(error, FailedPreconditionError) else RestoreError
        raise kind(
            f"container {name} could not be restored",
            hint=error.hint or "nothing of it is left here",
            details=(error.details or error.message).removeprefix("failed to create shim task: "),
        ) from error


def _end_task(client: Client, container_id: str) -> None:
    _quietly(client.kill_task, container_id, signal.SIGKILL)
    try:
        client.delete_task(container_id)  # of one that never ran nobody tells the end
    except CedanaError:
        _quietly(client.wait_task, container_id, _END_TIMEOUT_S)
        _quietly(client.delete_task, container_id)


def _quietly(function: Callable[..., object], *arguments: object) -> None:
    with suppress(CedanaError):
        function(*arguments)
