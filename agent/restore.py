"""`cedana restore`: from an artifact in a store to a running container in containerd.

The container is an ordinary one: our runtime restores it inside containerd's own Create and Start. On any
failure everything made here is gone again; the artifact and the base image stay.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace

from agent import images, references
from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.home import home
from agent.spec import target_spec
from base.config import Config
from base.trace import Trace
from oci import open_store
from oci.artifact import Artifact
from runtime import fetch

RESTORE_ANNOTATION = "ai.cedana.restore-from"
TCP_ANNOTATION = "ai.cedana.tcp"
BRIDGE_ANNOTATION = "ai.cedana.bridge"
_SPEC_TYPE = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
_CONTAINER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,75}")
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


@dataclass(frozen=True)
class Identity:
    container_id: str
    name: str
    predecessor: api.Container | None = None
    """The very container that ended with this checkpoint, still recorded here: it is replaced."""


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
    with (
        Client(config.containerd_address, namespace) as client,
        client.lease(),
        ExitStack() as undo,
    ):
        identity = choose_identity(client, artifact.record, options.name)
        container_id = identity.container_id
        own = home(config, namespace, container_id, identity.name)
        spec = target_spec(
            claimed,
            namespace=namespace,
            container_id=container_id,
            files=own.files,
            allow=options.allow,
        )
        spec["annotations"] |= _annotations(pinned, options)

        undo.callback(fetch.discard, config, namespace, container_id)
        fetch.prefetch(store, pinned, artifact, namespace, container_id, config, trace)
        image, parent = images.bring(client, artifact, store, snapshotter, trace)

        undo.callback(own.remove)
        own.write(spec.get("hostname", ""))
        with trace.step("container"):
            undo.enter_context(_replaced(client, identity.predecessor))
            snapshot = f"{container_id}-{artifact.record.id[:12]}-{secrets.token_hex(4)}"
            mounts = client.prepare_snapshot(snapshotter, snapshot, parent)
            undo.callback(_quietly, client.remove_snapshot, snapshotter, snapshot)
            labels = own.labels(
                artifact.record.container.labels, spec.get("hostname", ""), not _has_own_network(spec)
            )
            record = _record(container_id, labels, image, spec, snapshotter, snapshot)
            client.create_container(record)
            undo.callback(_quietly, client.delete_container, container_id)
        with trace.step("create"):
            undo.callback(_end_task, client, container_id)
            client.create_task(_task(container_id, mounts, own, spec))
        with trace.step("start"), _explained(identity.name):
            pid = client.start_task(container_id)
        _settle(client, record, own.restart_labels(artifact.record.container.labels))
        undo.pop_all()
        _forget(client, identity.predecessor)
    return Restored(container_id, identity.name, pid, pinned, own.log_uri)
