"""What the artifact says about the container: the engine's findings as `oci.artifact` records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from base import __version__
from base.config import Config
from base.trace import Trace
from oci.artifact import (
    CheckpointRecord,
    ContainerRecord,
    FileRecord,
    MemoryRecord,
    NodeRecord,
    ProcessRecord,
    SocketRecord,
    StepRecord,
)
from oci.pages import PageWriter
from runtime import criu
from runtime.container import Container
from runtime.node import this_node
from runtime.probe import Report


@dataclass(frozen=True)
class Here:
    """This node and the tools on it."""

    node: NodeRecord
    tools: Mapping[str, str]


def here(container: Container, config: Config) -> Here:
    """Looked at before the freeze, for it starts programs; raises `EngineError` when CRIU will not do."""
    node = this_node()
    return Here(
        NodeRecord(node.hostname, node.kernel, node.arch, tuple(sorted(node.cpu_flags))),
        {
            "cedana": __version__,
            "criu": criu.version(config),
            "runc": criu.tool_version(config, container.runc_binary).partition("\n")[0],
        },
    )


def describe(
    identity: str,
    where: Here,
    container: Container,
    report: Report,
    captured: Mapping[str, Any],
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    pages: PageWriter,
    trace: Trace,
) -> CheckpointRecord:
    """The record of the checkpoint `identity`, made while the container is stopped or just after."""
    return CheckpointRecord(
        id=identity,
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        parent="",
        node=where.node,
        tools=where.tools,
        container=ContainerRecord(
            id=container.id,
            name=container.name or container.id,
            namespace=container.namespace,
            image=container.image,
            image_digest=container.image_digest,
            runtime=container.runtime,
            labels=dict(container.labels),
            annotations=dict(container.spec.get("annotations", {})),
        ),
        processes=tuple(
            ProcessRecord(
                pid=process.pid,
                parent=process.parent,
                name=process.name,
                threads=process.threads,
                memory=process.resident_bytes,
                argv=process.command,
            )
            for process in report.processes
        ),
        memory=MemoryRecord(total=pages.total_bytes, zero=pages.zero_bytes, stored=pages.stored_bytes),
        sockets=tuple(
            SocketRecord(
                process=sock.process,
                family=sock.family,
                kind=sock.kind,
                state=sock.state,
                local=sock.local,
                remote=sock.remote,
            )
            for sock in report.sockets
        ),
        files=tuple(
            FileRecord(process=process.pid, fd=file.fd, path=file.path, deleted=file.deleted)
            for process in report.processes
            for file in process.files
            if file.kind in ("file", "directory", "device", "fifo", "memfd")
        ),
        mounts=tuple(mount["destination"] for mount in container.spec.get("mounts", [])),
        participants=captured,
        criu=settings,
        options=options,
        steps=tuple(StepRecord(step.name, step.start_s, step.duration_s) for step in trace.steps),
    )
