"""The checkpoint sequence: from a running container to an artifact, read from top to bottom.

`checkpoint` is what `cedana checkpoint` does: the container becomes an artifact in a store. `dump` is the
Task API's Checkpoint: CRIU images in a directory, for an orchestrator that stores them itself. Both leave
the container running untouched when they fail.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.config import Config
from base.trace import Step, Trace
from hooks.participant import Participant
from oci.artifact import ArtifactWriter, BaseImage
from oci.pages import PageWriter, Run
from oci.store import Descriptor, Store
from runtime import images, record, rootfs
from runtime.container import Container
from runtime.errors import CheckpointError
from runtime.manifest import DumpManifest
from runtime.stop import StoppedContainer, make_scratch, remove_tree


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
    steps: Sequence[Step] = field(default_factory=tuple)


def checkpoint(
    container: Container,
    store: Store,
    tag: str,
    base: BaseImage,
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
        scratch = make_scratch(config, f"checkpoint-{container.namespace}-{container.id}")
        cleanup.callback(remove_tree, scratch)
        dump_dir = scratch / "images"
        writer = cleanup.enter_context(ArtifactWriter(store, base, trace))
        stopped = cleanup.enter_context(
            StoppedContainer(container, participants, options.wishes, scratch, config, trace)
        )
        began = trace.elapsed_s()
        with trace.step("dump"):
            stopped.dump(dump_dir, scratch / "criu")
        with trace.step("capture"):
            captured = stopped.capture()
            _manifest(stopped, captured, options).write(dump_dir)
        with trace.step("rootfs"):
            writer.add_rootfs_diff(_rootfs_difference(container))
        if options.leave_running:
            with trace.step("resume"):
                stopped.resume()
            thawed = trace.elapsed_s()
        with trace.step("memory"):
            memory_bytes = _write_memory(dump_dir, writer)
        with trace.step("commit"):
            writer.add_criu_images(dump_dir)
            writer.add_spec(json.dumps(container.spec).encode())
            config_record = record.describe(container, stopped, captured, config, trace)
            manifest = writer.finish(config_record, tag)
        if not options.leave_running:
            with trace.step("destroy"):
                stopped.destroy()
            thawed = trace.elapsed_s()
    return CheckpointResult(
        id=config_record.id,
        manifest=manifest,
        tag=tag,
        memory_bytes=memory_bytes,
        stored_bytes=writer.stored_bytes,
        frozen_s=thawed - began,
        steps=tuple(trace.steps),
    )
