"""`cedana checkpoint`: from a container in containerd to an artifact in a store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from agent import containers, images, references
from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.errors import ContainerdError, ContainerdNotFoundError
from base.config import Config
from base.trace import Trace
from oci import open_store
from runtime import checkpoint as engine
from runtime.locks import exclusive
from runtime.participants import participants

RESTART_LABEL = "containerd.io/restart.status"
_STOPPED = {RESTART_LABEL: "stopped", "containerd.io/restart.explicitly-stopped": "true"}
_EXIT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Checkpointed:
    container_id: str
    container: str
    """Its name."""
    reference: references.AnyReference
    result: engine.CheckpointResult
    warnings: tuple[str, ...] = ()


def checkpoint(
    name: str, target: str, options: engine.CheckpointOptions, config: Config, trace: Trace
) -> Checkpointed:
    """Save the container called `name` as `target` ('' for this node's own layout).

    The container is untouched if anything fails. Without `leave_running` it has ended at the end; its record
    stays in containerd.
    """
    with ExitStack() as held:
        client = held.enter_context(Client(config.containerd_address, config.containerd_namespace))
        record = containers.find(client, name)
        held.enter_context(exclusive(config, client.namespace, record.id))
        described = containers.describe(client, record)
        base = images.base_image(client, record)
        described = replace(described, image_digest=base.manifest.digest)
        reference = references.target(target, described.name, config)
        store = open_store(reference, config)
        with _no_restart(client, record, keep=options.leave_running):
            result = engine.checkpoint(
                described, store, reference.tag, base, options, participants(), config, trace
            )
        warnings = [*result.warnings]
        if not options.leave_running:
            with trace.step("remove task"):
                warnings += _remove_task(client, record.id, result.id)
    return Checkpointed(record.id, described.name, reference, result, tuple(warnings))


@contextmanager
def _no_restart(client: Client, container: api.Container, keep: bool) -> Iterator[None]:
    """Keep containerd's restart monitor from starting the container again where it has just ended.

    While the checkpoint runs the label is gone: "stopped" would make the monitor kill the container.
    """
    status = container.labels.get(RESTART_LABEL, "")
    if keep or not status:
        yield
        return
    client.update_labels(container.id, {RESTART_LABEL: ""})
    try:
        yield
    except BaseException:
        client.update_labels(container.id, {RESTART_LABEL: status})
        raise
    with suppress(ContainerdNotFoundError):
        client.update_labels(container.id, _STOPPED)


def _remove_task(client: Client, container_id: str, checkpoint_id: str) -> list[str]:
    """Remove what is left of the ended container but its record; returns what could not be done.

    Whoever started it in the foreground (`ctr run`) sees it end and removes the same things.
    """
    with suppress(ContainerdError):
        client.wait_task(container_id, _EXIT_TIMEOUT_S)
    with suppress(ContainerdNotFoundError):
        ended = f"{checkpoint_id} {time.time():.3f}"
        client.update_labels(container_id, {containers.CHECKPOINTED_LABEL: ended})
    try:
        client.delete_task(container_id)
    except ContainerdError as error:
        if client.task(container_id) is not None:
            return [f"the container has ended, but its task is still there: {error.details or error.message}"]
    return []
