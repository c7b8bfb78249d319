"""Brings a checkpoint to this node: from a store to verified CRIU images, ready for `runtime.restore`.

The images wait in the container's `runtime.staging`, all but the memory: that comes while CRIU reads it,
through a file system of ours (`runtime.fuse`). The command line begins to fetch before it creates the
container, and the engine hands it the file system's descriptor; where nobody waits for that, the engine
fetches the memory itself. Everything is verified on the way.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from base.config import Config
from base.errors import UsageError
from base.trace import Trace
from oci import open_store
from oci.artifact import Artifact
from oci.content import ContentDirectory
from oci.page_stream import PageStream
from oci.reference import LayoutReference, parse
from runtime import fuse, layer, rootfs
from runtime.container import Mount
from runtime.errors import IncompatibleError, RestoreError
from runtime.fuse import FileServer
from runtime.memory import PageImages, leave_out_zeros
from runtime.node import this_node
from runtime.staging import Source, Staging, restored_from

_END_TIMEOUT_S = 5.0


def prefetch(
    where: str,
    artifact: Artifact,
    namespace: str,
    container_id: str,
    config: Config,
    trace: Trace,
) -> Path:
    """Fetch, verify and lay out the CRIU images of `artifact`; returns their directory.

    `where` is its store: a reference, or the directory of containerd's content.

    Does nothing if that was done before. Raises `IncompatibleError` if this node cannot run it, a store's
    error if it cannot be read or is not what its digests say; nothing is left behind then.
    """
    compatible(artifact)
    staging = Staging.of(config, namespace, container_id)
    if (source := staging.source) and source.digest == artifact.manifest.digest:
        return staging.images
    staging.discard()
    try:
        staging.make()
        with trace.step("images"):
            artifact.extract_criu_images(staging.images)
            leave_out_zeros(staging.images, artifact.pages())
        for served in PageImages.of(staging.images).files:
            (staging.images / served.name).symlink_to(Path("..", staging.pages.name, served.name))
        staging.note(Source(artifact.manifest.digest, where))
    except OSError as error:
        staging.discard()
        raise RestoreError(
            f"the checkpoint could not be laid out below {config.run_dir}: {error.strerror}",
            hint="free space there (run_dir in /etc/cedana/config.toml)",
            details=str(error),
        ) from error
    except BaseException:
        staging.discard()
        raise
    return staging.images


@contextmanager
def memory_at_hand(
    artifact: Artifact, namespace: str, container_id: str, config: Config, trace: Trace
) -> Iterator[PageStream]:
    """Fetch ahead what the engine is about to ask for, and serve it once the engine says on which device."""
    staging = Staging.of(config, namespace, container_id)
    pages = PageImages.of(staging.images)
    with (
        trace.step("memory"),
        artifact.pages().stream(pages.images, trace, "memory") as stream,
        socket.socket(socket.AF_UNIX) as listener,
        staging.socket_path() as path,
    ):
        Path(path).unlink(missing_ok=True)
        listener.bind(path)
        listener.listen(1)
        waiting = threading.Thread(target=_serve_when_asked, args=(listener, pages, stream), daemon=True)
        waiting.start()
        try:
            yield stream
        finally:
            Path(path).unlink(missing_ok=True)
            listener.shutdown(socket.SHUT_RDWR)
            fuse.unmount(staging.pages)
            waiting.join(_END_TIMEOUT_S)


def _serve_when_asked(listener: socket.socket, pages: PageImages, stream: PageStream) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:
        return  # nobody asked
    with connection:
        _, devices, _, _ = socket.recv_fds(connection, 1, 1)
    if devices:
        FileServer(devices[0], pages.files, stream).join()


@contextmanager
def serving(device: int, staging: Staging, config: Config, trace: Trace) -> Iterator[None]:
    """Fetch the memory and serve it by `device`; an error of the store replaces that of the reader."""
    pages = PageImages.of(staging.images)
    with _artifact_in(staging, config).pages().stream(pages.images, trace, "memory") as stream:
        server = FileServer(device, pages.files, stream)
        try:
            yield
        except RestoreError as error:
            raise stream.error or error from error
        finally:
            fuse.unmount(staging.pages)
            server.join()


def _artifact_in(staging: Staging, config: Config) -> Artifact:
    source = staging.source
    if source is None:
        raise RestoreError(f"nothing was fetched into {staging.path}")
    directory = Path(source.store)
    store = (
        ContentDirectory(directory) if directory.is_absolute() else open_store(parse(source.store), config)
    )
    return Artifact.open(store, source.digest)


def compatible(artifact: Artifact) -> None:
    """Raise `IncompatibleError` unless this node's processor can run what the artifact holds."""
    here, there = this_node(), artifact.record.node
    if here.arch != there.architecture:
        raise IncompatibleError(
            f"the checkpoint was taken on {there.architecture}, this node is {here.arch}",
            hint="restore it on a node of the same architecture",
        )
    missing = sorted(set(there.cpu_features) - here.cpu_flags)
    if missing:
        raise IncompatibleError(
            f"this node's CPU lacks what the source had: {', '.join(missing[:12])}",
            hint="restore it on a node with the same CPU generation or a newer one",
        )


def prepare(
    container_id: str,
    namespace: str,
    source: str | Mapping[str, Any],
    mounts: Sequence[Mount],
    config: Config,
    trace: Trace,
) -> Path | None:
    """What the shim's Create asks for: the images laid out, the root filesystem's difference applied.

    None if the container's writable layer has been restored from this checkpoint before: it has gone on
    since, and a later start is a start like any other.

    `source` is the annotation's reference, or where containerd keeps an image that is a checkpoint:
    {"content": directory, "manifest": digest}. Only registries, layouts below `state_dir`, and what root's
    `prefetch` has put there are accepted.
    """
    if isinstance(source, str):
        reference = parse(source)
        if isinstance(reference, LayoutReference):
            _refuse_foreign_layout(reference, config, namespace, container_id)
        store = open_store(reference, config)
        with trace.step("open"):
            artifact = Artifact.open(store, reference.digest or reference.tag or "latest")
        if restored_from(mounts) == artifact.manifest.digest:
            return None
        images = prefetch(str(reference), artifact, namespace, container_id, config, trace)
        apply_difference(artifact, namespace, container_id, mounts, config, trace)
        return images
    content = ContentDirectory(Path(str(source["content"])))
    artifact = Artifact.open(content, str(source["manifest"]))
    if restored_from(mounts) == artifact.manifest.digest:
        return None
    return prefetch(str(source["content"]), artifact, namespace, container_id, config, trace)


def apply_difference(
    artifact: Artifact,
    namespace: str,
    container_id: str,
    mounts: Sequence[Mount],
    config: Config,
    trace: Trace,
) -> None:
    """Apply the root filesystem's difference to the writable layer of `mounts`, and note that."""
    layers = rootfs.overlay_dirs(mounts)
    try:
        with trace.step("rootfs"), artifact.rootfs_diff() as stream:
            layer.apply(stream, layers.upper, layers.lower, user_xattr=layers.user_xattr)
    except OSError as error:
        raise RestoreError(
            "the root filesystem's difference could not be written",
            hint="check the free space of the snapshotter's directory",
            details=str(error),
        ) from error
    staging = Staging.of(config, namespace, container_id)
    if source := staging.source:
        staging.note(replace(source, upper=str(layers.upper)))


def _refuse_foreign_layout(
    reference: LayoutReference, config: Config, namespace: str, container_id: str
) -> None:
    real = Path(os.path.realpath(reference.directory))
    if real.is_relative_to(os.path.realpath(config.state_dir)):
        return
    source = Staging.of(config, namespace, container_id).source
    if source and reference.digest == source.digest:
        return
    raise UsageError(
        f"a container may not name the layout {reference.directory} as its checkpoint",
        hint=f"push the checkpoint to a registry, or keep it below {config.state_dir}",
    )
