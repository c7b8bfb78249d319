"""Brings a checkpoint to this node: from a store to verified CRIU images, ready for `runtime.restore`.

The images wait in `run_dir/restore/NAMESPACE/ID`, all but the memory: that comes while CRIU reads it, through
a file system of ours (`runtime.fuse`). The command line begins to fetch before it creates the container, and
the engine hands it the file system's descriptor; where nobody waits for that, the engine fetches the memory
itself. Everything is verified on the way.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from base.config import Config
from base.errors import CedanaError, UsageError
from base.trace import Trace
from oci import open_store
from oci.artifact import Artifact
from oci.content import ContentDirectory
from oci.page_stream import PageStream
from oci.reference import LayoutReference, parse
from runtime import fuse, layer, memory, rootfs
from runtime.container import Container, Mount
from runtime.errors import IncompatibleError, RestoreError
from runtime.fuse import FileServer
from runtime.memory import PageImages
from runtime.node import this_node

_SOURCE = "source.json"
_PAGES = "pages"
"""Where the page images are served."""
_SOCKET = "pages.sock"
"""Whoever fetches the memory listens here for the descriptor to serve it by."""
_END_TIMEOUT_S = 5.0
_DOOMED = ".doomed-"
_RESTORED = "trusted.cedana.restored"
"""On an upper directory: the digest of the checkpoint it was restored from."""


def directory(config: Config, namespace: str, container_id: str) -> Path:
    """Where everything of the restore of one container waits."""
    return config.run_dir / "restore" / namespace / container_id


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
    target = directory(config, namespace, container_id)
    if _fetched(target) == artifact.manifest.digest:
        return target / "images"
    discard(config, namespace, container_id)
    images = target / "images"
    images.mkdir(mode=0o700, parents=True)
    for parent in (target, target.parent, target.parent.parent):
        parent.chmod(0o700)
    try:
        with trace.step("images"):
            artifact.extract_criu_images(images)
        for served in memory.PageImages.of(images).files:
            (images / served.name).symlink_to(Path("..", _PAGES, served.name))
        (target / _PAGES).mkdir(mode=0o700)
        source = {"digest": artifact.manifest.digest, "store": where}
        with open(os.open(target / _SOURCE, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(source, file)
    except OSError as error:
        discard(config, namespace, container_id)
        raise RestoreError(
            f"the checkpoint could not be laid out below {config.run_dir}: {error.strerror}",
            hint="free space there: it needs as much as the container had memory (run_dir in"
            " /etc/cedana/config.toml)",
            details=str(error),
        ) from error
    except BaseException:
        discard(config, namespace, container_id)
        raise
    return images


@contextmanager
def memory_at_hand(
    artifact: Artifact, namespace: str, container_id: str, config: Config, trace: Trace
) -> Iterator[PageStream]:
    """Fetch ahead what the engine is about to ask for, and serve it once the engine says on which device."""
    target = directory(config, namespace, container_id)
    pages = memory.PageImages.of(target / "images")
    with (
        trace.step("memory"),
        artifact.pages().stream(pages.images, trace, "memory") as stream,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        (target / _SOCKET).unlink(missing_ok=True)
        with _short_path(target) as path:
            listener.bind(f"{path}/{_SOCKET}")
        listener.listen(1)
        waiting = threading.Thread(target=_serve_when_asked, args=(listener, pages, stream), daemon=True)
        waiting.start()
        try:
            yield stream
        finally:
            (target / _SOCKET).unlink(missing_ok=True)
            listener.shutdown(socket.SHUT_RDWR)
            fuse.unmount(target / _PAGES)
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
def memory_mounted(images: Path, config: Config, trace: Trace) -> Iterator[None]:
    """The page images readable beside the others, if `images` is a directory of `prefetch`.

    An error of whoever fetches replaces that of the reader.
    """
    target = images.parent
    if not (images.is_relative_to(config.run_dir / "restore") and (target / _PAGES).is_dir()):
        yield
        return
    device = fuse.mount(target / _PAGES)
    try:
        with socket.socket(socket.AF_UNIX) as elsewhere:
            try:
                with _short_path(target) as path:
                    elsewhere.connect(f"{path}/{_SOCKET}")
            except (FileNotFoundError, ConnectionRefusedError):
                pass
            else:
                socket.send_fds(elsewhere, [b"\0"], [device])
                os.close(device)
                yield
                return
        pages = memory.PageImages.of(images)
        with _artifact_of(target, config).pages().stream(pages.images, trace, "memory") as stream:
            server = FileServer(device, pages.files, stream)
            try:
                yield
            except RestoreError as error:
                raise stream.error or error from error
            finally:
                fuse.unmount(target / _PAGES)
                server.join()
    finally:
        fuse.unmount(target / _PAGES)


@contextmanager
def _short_path(target: Path) -> Iterator[str]:
    """Another name for a directory: a socket's address has 108 bytes at most."""
    fd = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _artifact_of(target: Path, config: Config) -> Artifact:
    source = json.loads((target / _SOURCE).read_text())
    where = str(source["store"])
    store = ContentDirectory(Path(where)) if where.startswith("/") else open_store(parse(where), config)
    return Artifact.open(store, str(source["digest"]))


def discard(config: Config, namespace: str, container_id: str) -> None:
    """Forget what was fetched for a container."""
    fuse.unmount(directory(config, namespace, container_id) / _PAGES)
    shutil.rmtree(directory(config, namespace, container_id), ignore_errors=True)


def discard_behind(config: Config, namespace: str, container_id: str) -> None:
    """`discard`, in a process of its own: freeing gigabytes of images takes a while that nobody waits for."""
    fuse.unmount(directory(config, namespace, container_id) / _PAGES)
    doomed = config.run_dir / "restore" / f"{_DOOMED}{os.urandom(8).hex()}"
    try:
        directory(config, namespace, container_id).rename(doomed)
    except FileNotFoundError:
        return
    _remove_behind([doomed])


def sweep(config: Config) -> None:
    """Finish what a `discard_behind` began that was killed."""
    if doomed := list((config.run_dir / "restore").glob(f"{_DOOMED}*")):
        _remove_behind(doomed)


def _remove_behind(doomed: Sequence[Path]) -> None:
    os.posix_spawn(
        "/bin/rm",
        ["rm", "-rf", "--", *map(str, doomed)],
        {},
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)],
        setsid=True,
    )


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
        if _restored_from(mounts) == artifact.manifest.digest:
            return None
        images = prefetch(str(reference), artifact, namespace, container_id, config, trace)
        with trace.step("rootfs"):
            _apply_difference(artifact, mounts)
        return images
    content = ContentDirectory(Path(str(source["content"])))
    artifact = Artifact.open(content, str(source["manifest"]))
    if _restored_from(mounts) == artifact.manifest.digest:
        return None
    return prefetch(str(source["content"]), artifact, namespace, container_id, config, trace)


def mark_restored(container: Container, config: Config) -> None:
    """Note on the writable layer of a container that now runs which checkpoint it was restored from."""
    digest = _fetched(directory(config, container.namespace, container.id))
    if digest:
        with suppress(OSError, CedanaError):
            upper = rootfs.overlay_dirs(container.bundle / "rootfs").upper
            os.setxattr(upper, _RESTORED, digest.encode())


def _restored_from(mounts: Sequence[Mount]) -> str:
    with suppress(OSError, CedanaError):
        return os.getxattr(rootfs.overlay_dirs(mounts).upper, _RESTORED).decode()
    return ""


def _apply_difference(artifact: Artifact, mounts: Sequence[Mount]) -> None:
    layers = rootfs.overlay_dirs(mounts)
    try:
        with artifact.rootfs_diff() as stream:
            layer.apply(stream, layers.upper, layers.lower, user_xattr=layers.user_xattr)
    except OSError as error:
        raise RestoreError(
            "the root filesystem's difference could not be written",
            hint="check the free space of the snapshotter's directory",
            details=str(error),
        ) from error


def _refuse_foreign_layout(
    reference: LayoutReference, config: Config, namespace: str, container_id: str
) -> None:
    real = Path(os.path.realpath(reference.directory))
    if real.is_relative_to(os.path.realpath(config.state_dir)):
        return
    if reference.digest and _fetched(directory(config, namespace, container_id)) == reference.digest:
        return
    raise UsageError(
        f"a container may not name the layout {reference.directory} as its checkpoint",
        hint=f"push the checkpoint to a registry, or keep it below {config.state_dir}",
    )


def _fetched(target: Path) -> str:
    """The digest of what was completely fetched into `target`; '' if nothing was."""
    try:
        return str(json.loads((target / _SOURCE).read_text())["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
