"""What the commands print: for each result its text for people and its JSON for machines (docs/cli.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from base.trace import Step
from cli.text import duration, fields, printable, size, table, tree, waterfall

if TYPE_CHECKING:
    from agent.checkpoint import Checkpointed
    from agent.node import Copied, Entry, Inspection
    from agent.references import AnyReference
    from agent.restore import Restored
    from oci.record import CheckpointRecord, ProcessRecord
    from runtime.features import Feature

Json = dict[str, Any]
_MAX_LINES = 40
"""Of a list in `inspect`; the JSON has all."""


def checkpointed(done: Checkpointed, steps: Sequence[Step], trace: bool) -> str:
    result = done.result
    return _join(
        f"{printable(done.container)} → {done.reference}",
        fields(
            [
                ("id", result.id),
                ("digest", result.manifest.digest),
                ("memory", f"{size(result.memory_bytes)} ({size(result.stored_bytes)} stored)"),
                ("frozen", f"{duration(result.frozen_s)} of {duration(_total(steps))}"),
            ]
        ),
        waterfall(steps) if trace else "",
    )


def checkpointed_json(done: Checkpointed, steps: Sequence[Step]) -> Json:
    result = done.result
    return {
        "container": {"id": done.container_id, "name": done.container},
        "reference": str(done.reference),
        "id": result.id,
        "digest": result.manifest.digest,
        "memory_bytes": result.memory_bytes,
        "stored_bytes": result.stored_bytes,
        "frozen_s": result.frozen_s,
        "warnings": list(done.warnings),
        **_timings(steps),
    }


def restored(done: Restored, steps: Sequence[Step], trace: bool) -> str:
    return _join(
        f"{printable(done.name)} runs, pid {done.pid}",
        fields(
            [
                ("id", done.container_id),
                ("checkpoint", str(done.reference)),
                ("log", done.log or f"none: a terminal (nerdctl attach {done.name})"),
                ("restored", f"{duration(_span(steps, 'create', 'start'))} of {duration(_total(steps))}"),
            ]
        ),
        waterfall(steps) if trace else "",
    )


def restored_json(done: Restored, steps: Sequence[Step]) -> Json:
    return {
        "container": {"id": done.container_id, "name": done.name, "pid": done.pid},
        "reference": str(done.reference),
        "log": done.log,
        "restore_s": _span(steps, "create", "start"),
        **_timings(steps),
    }


def copied(done: Copied, steps: Sequence[Step], trace: bool) -> str:
    return _join(
        f"{done.source} → {done.target}",
        fields([("digest", done.manifest.digest), ("took", duration(_total(steps)))]),
        waterfall(steps) if trace else "",
    )


def copied_json(done: Copied, steps: Sequence[Step]) -> Json:
    return {
        "source": str(done.source),
        "target": str(done.target),
        "digest": done.manifest.digest,
        **_timings(steps),
    }


def entries(where: AnyReference, found: Sequence[Entry]) -> str:
    if not found:
        return f"no checkpoints in {where}"
    rows = []
    for entry in found:
        if entry.artifact is None:
            rows.append((entry.tag, "-", entry.error, "", "", ""))
            continue
        record = entry.artifact.record
        rows.append(
            (
                entry.tag,
                record.id[:12],
                record.container.name,
                record.container.image,
                record.created[:19].replace("T", " "),
                size(entry.artifact.total_bytes),
            )
        )
    return table(("TAG", "ID", "CONTAINER", "IMAGE", "CREATED (UTC)", "SIZE"), rows)


def entries_json(where: AnyReference, found: Sequence[Entry]) -> Json:
    return {
        "store": str(where),
        "checkpoints": [
            {"tag": entry.tag, "error": entry.error}
            if entry.artifact is None
            else {
                "tag": entry.tag,
                "id": entry.artifact.record.id,
                "digest": entry.artifact.manifest.digest,
                "container": entry.artifact.record.container.name,
                "image": entry.artifact.record.container.image,
                "created": entry.artifact.record.created,
                "size_bytes": entry.artifact.total_bytes,
                "memory_bytes": entry.artifact.record.memory.total,
            }
            for entry in found
        ],
    }


def inspection(found: Inspection) -> str:
    artifact = found.artifact
    record = artifact.record
    container, memory = record.container, record.memory
    head = fields(
        [
            ("checkpoint", record.id),
            ("digest", artifact.manifest.digest),
            ("created", record.created),
            ("container", f"{container.name} ({container.id[:12]}, namespace {container.namespace})"),
            ("image", f"{container.image} {container.image_digest[:19]}"),
            ("node", f"{record.node.hostname}, Linux {record.node.kernel}, {record.node.architecture}"),
            ("tools", ", ".join(f"{name} {version}" for name, version in record.tools.items())),
            (
                "memory",
                f"{size(memory.total)}: {size(memory.zero)} zero, {size(memory.stored)} stored",
            ),
        ]
    )
    return _join(
        str(found.reference),
        head,
        _section("processes", _process_lines(record)),
        _section("sockets", [_socket_line(record, number) for number in range(len(record.sockets))]),
        _section(
            "files",
            [
                f"{file.process}:{file.fd}  {file.path}{'  (deleted)' if file.deleted else ''}"
                for file in record.files
            ],
        ),
        _section("mounts", record.mounts),
        _section("sizes", [f"{name}  {size(count)}" for name, count in _sizes(found).items()]),
        _section("timings", []),
        waterfall([Step(step.name, step.start_s, step.duration_s) for step in record.steps[:_MAX_LINES]]),
    )


def inspection_json(found: Inspection) -> Json:
    return {
        "reference": str(found.reference),
        "digest": found.artifact.manifest.digest,
        "sizes": _sizes(found),
        "checkpoint": found.artifact.record.to_json(),
    }


def features(found: Sequence[Feature]) -> str:
    lines = []
    width = max((len(feature.name) for feature in found), default=0)
    for feature in found:
        lines.append(
            f"{'yes' if feature.ok else 'no ':<3}  {feature.name.ljust(width)}  {printable(feature.value)}"
        )
        if not feature.ok:
            lines += [f"       {printable(text)}" for text in (feature.consequence, feature.remedy) if text]
    return "\n".join(lines)


def features_json(found: Sequence[Feature]) -> Json:
    return {"features": [asdict(feature) for feature in found]}


def _process_lines(record: CheckpointRecord) -> list[str]:
    children: Mapping[int, list[ProcessRecord]] = defaultdict(list)
    known = {process.pid for process in record.processes}
    roots = []
    for process in record.processes:
        if process.parent in known and process.parent != process.pid:
            children[process.parent].append(process)
        else:
            roots.append(process)
    return tree(roots, lambda process: children.get(process.pid, []), _process_label)


def _process_label(process: ProcessRecord) -> str:
    threads = f", {process.threads} threads" if process.threads > 1 else ""
    command = " ".join(process.argv) or f"[{process.name}]"
    command = command if len(command) <= 100 else command[:99] + "…"
    return f"{process.pid}  {command}  ({size(process.memory)}{threads})"


def _socket_line(record: CheckpointRecord, number: int) -> str:
    socket = record.sockets[number]
    ends = " → ".join(end for end in (socket.local, socket.remote) if end)
    return " ".join(
        part for part in (f"{socket.process}:", socket.family, socket.kind, socket.state, ends) if part
    )


def _sizes(found: Inspection) -> dict[str, int]:
    artifact = found.artifact
    return {
        "criu images": artifact.criu_layer.size,
        "memory": sum(pack.size for pack in artifact.packs) + artifact.index_layer.size,
        "root filesystem": artifact.rootfs_layer.size if artifact.rootfs_layer else 0,
        "total": artifact.total_bytes,
        "base image": sum(layer.size for layer in artifact.base_layers),
    }


def _section(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return f"\n{title}" if title == "timings" else ""
    shown = [f"  {printable(line)}" for line in lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        shown.append(f"  … and {len(lines) - _MAX_LINES} more (--json has all)")
    return f"\n{title} ({len(lines)})\n" + "\n".join(shown)


def _timings(steps: Sequence[Step]) -> Json:
    return {
        "total_s": _total(steps),
        "steps": [
            {"name": step.name, "start_s": step.start_s, "duration_s": step.duration_s} for step in steps
        ],
    }


def _total(steps: Sequence[Step]) -> float:
    return max((step.start_s + step.duration_s for step in steps), default=0.0)


def _span(steps: Sequence[Step], *names: str) -> float:
    """Seconds from the start of the first to the end of the last of these steps."""
    meant = [step for step in steps if step.name in names]
    return _total(meant) - min((step.start_s for step in meant), default=0.0)


def _join(*parts: str) -> str:
    return "\n".join(part for part in parts if part)
