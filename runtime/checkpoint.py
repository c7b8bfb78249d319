"""The checkpoint sequence: from a running container to an artifact, read from top to bottom.

`checkpoint` is what `cedana checkpoint` does: the container becomes an artifact in a store. `dump` is the
Task API's Checkpoint: CRIU images in a directory, for an orchestrator that stores them itself. Both leave
the container running untouched when they fail.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.config import Config
from base.trace import Step, Trace
from hooks.participant import Participant
from oci.artifact import ArtifactWriter, BaseImage
from oci.store import Descriptor, Store
from runtime import criu, memory, record, rootfs
from runtime.container import Container
from runtime.difference import difference
from runtime.manifest import DumpManifest
from runtime.probe import Report
from runtime.recover import recover
from runtime.scratch import private_directory
from runtime.stop import StoppedContainer
from runtime.unlinked import link_remaps

_LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class CheckpointOptions:
    leave_running: bool = False
    tcp: str = "established"
    """What becomes of TCP connections: "established" (they live on) or "close"."""

    @property
    def wishes(self) -> dict[str, Any]:
        return {"tcp": self.tcp}


@dataclass(frozen=True)
class CheckpointResult:
    id: str
    manifest: Descriptor
    tag: str
    memory_bytes: int
    stored_bytes: int
    frozen_s: float
    """From the freeze to the thaw, or to the end of the container."""
    steps: Sequence[Step]
    warnings: tuple[str, ...] = ()
    """What the probe found that stops nothing but should be known."""


def checkpoint(
    container: Container,
    store: Store,
    tag: str,
    base: BaseImage | None,
    options: CheckpointOptions,
    participants: Sequence[Participant],
    config: Config,
    trace: Trace,
) -> CheckpointResult:
    """Save `container` as the artifact `tag` in `store`.

    Raises `IncompatibleError` before anything is touched, `CheckpointError` or a store's error after
    everything was undone: the container runs on. Without `leave_running` it is destroyed only after the
    store has the whole artifact.
    """
    with ExitStack() as cleanup:
        recover(config, container)
        name = f"checkpoint-{container.namespace}-{container.id}"
        scratch = cleanup.enter_context(private_directory(config, name))
        images = scratch / "images"
        stopped = StoppedContainer(container, participants, options.wishes, scratch, config, trace)
        with trace.step("probe"):
            stopped.probe()
            where = record.here(container, config)
            layers = rootfs.overlay_dirs(container.bundle / "rootfs")
        writer = cleanup.enter_context(ArtifactWriter(store, base, trace))
        cleanup.enter_context(stopped)
        frozen_at = next(step.start_s for step in reversed(trace.steps) if step.name == "freeze")
        with trace.step("dump"):
            stopped.dump(images, scratch / "criu", leave_memory=_leaves_memory(stopped.report, options))
        with trace.step("capture"):
            captured = stopped.capture()
            processes = stopped.report.processes
            DumpManifest.of(stopped.criu, options.wishes, captured, processes).write(images)
        with trace.step("rootfs"):
            writer.add_rootfs_diff(difference(layers, link_remaps(images, processes)))
        if options.leave_running:
            with trace.step("resume"):
                stopped.resume()
            frozen_s = trace.elapsed_s() - frozen_at
        with trace.step("images"):
            page_maps = memory.claim(images)
            writer.add_criu_images(images)
            writer.add_spec(json.dumps(container.spec).encode())
        with trace.step("memory"):
            pids = {process.pid: process.host_pid for process in processes}
            memory.store(images, page_maps, writer.pages, pids)
            stopped.finish_dump()
        with trace.step("commit"):
            description = record.describe(
                writer.id,
                where,
                container,
                stopped.report,
                captured,
                options.wishes,
                criu.settings_json(stopped.criu),
                writer.pages,
                trace,
            )
            manifest = writer.finish(description, tag)
        if not options.leave_running:
            with trace.step("destroy"):
                stopped.destroy()
            frozen_s = trace.elapsed_s() - frozen_at
    return CheckpointResult(
        id=writer.id,
        manifest=manifest,
        tag=tag,
        memory_bytes=writer.pages.total_bytes,
        stored_bytes=writer.stored_bytes,
        frozen_s=frozen_s,
        steps=tuple(trace.steps),
        warnings=stopped.warnings,
    )


def _leaves_memory(report: Report, options: CheckpointOptions) -> bool:
    """Whether the memory is read from the stopped processes themselves.

    That spares a copy of all of it, but keeps the container stopped until it is all read: right for one that
    ends anyway. For a small one it is not worth the trouble.
    """
    resident = sum(process.resident_bytes for process in report.processes)
    return not options.leave_running and resident >= _LARGE_BYTES


def dump(
    container: Container,
    images: Path,
    work: Path,
    options: CheckpointOptions,
    participants: Sequence[Participant],
    config: Config,
    trace: Trace,
) -> None:
    """Write CRIU images of `container` into `images`, with what a restore needs beside them.

    Raises what `checkpoint` raises.
    """
    with ExitStack() as cleanup:
        recover(config, container)
        name = f"dump-{container.namespace}-{container.id}"
        scratch = cleanup.enter_context(private_directory(config, name))
        stopped = StoppedContainer(container, participants, options.wishes, scratch, config, trace)
        stopped.probe()
        cleanup.enter_context(stopped)
        with trace.step("dump"):
            stopped.dump(images, work)
        with trace.step("capture"):
            DumpManifest.of(
                stopped.criu,
                options.wishes,
                stopped.capture(),
                stopped.report.processes,
            ).write(images)
        if options.leave_running:
            stopped.resume()
        else:
            stopped.destroy()
