"""Mounts a container's root filesystem as containerd describes it, and unmounts it again.

`Mount.options` are fstab words: flags of mount(2), propagation, `uidmap=`/`gidmap=` (id-mapped mounts), and
data for the filesystem. Overlay options too long for the one page the kernel takes are shortened by
naming lower directories relative to their common parent.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from runtime import syscalls
from runtime.container import Mount
from shim.errors import TaskError

_FLAGS = {
    "bind": syscalls.MS_BIND,
    "dirsync": syscalls.MS_DIRSYNC,
    "mand": syscalls.MS_MANDLOCK,
    "noatime": syscalls.MS_NOATIME,
    "nodev": syscalls.MS_NODEV,
    "nodiratime": syscalls.MS_NODIRATIME,
    "noexec": syscalls.MS_NOEXEC,
    "nosuid": syscalls.MS_NOSUID,
    "rbind": syscalls.MS_BIND | syscalls.MS_REC,
    "relatime": syscalls.MS_RELATIME,
    "remount": syscalls.MS_REMOUNT,
    "ro": syscalls.MS_RDONLY,
    "strictatime": syscalls.MS_STRICTATIME,
    "sync": syscalls.MS_SYNCHRONOUS,
}
_CLEARED = {
    "async": syscalls.MS_SYNCHRONOUS,
    "atime": syscalls.MS_NOATIME,
    "dev": syscalls.MS_NODEV,
    "diratime": syscalls.MS_NODIRATIME,
    "exec": syscalls.MS_NOEXEC,
    "nomand": syscalls.MS_MANDLOCK,
    "norelatime": syscalls.MS_RELATIME,
    "nostrictatime": syscalls.MS_STRICTATIME,
    "rw": syscalls.MS_RDONLY,
    "suid": syscalls.MS_NOSUID,
}
_PROPAGATION = {
    "shared": syscalls.MS_SHARED,
    "slave": syscalls.MS_SLAVE,
    "private": syscalls.MS_PRIVATE,
    "unbindable": syscalls.MS_UNBINDABLE,
}
_DATA_LIMIT = os.sysconf("SC_PAGESIZE") - 512


@dataclass(frozen=True)
class _Options:
    flags: int = 0
    propagation: int = 0
    data: tuple[str, ...] = ()
    uid_map: str = ""
    gid_map: str = ""


def mount_all(mounts: Sequence[Mount], rootfs: Path) -> None:
    """Mount each in turn; raises `TaskError` after unmounting what was done."""
    with ExitStack() as undo:
        for mount in mounts:
            target = _inside(rootfs, mount.target)
            try:
                _mount(mount, target)
            except OSError as error:
                raise TaskError(f"failed to mount rootfs component: {error}") from error
            undo.callback(unmount_recursive, target)
        undo.pop_all()


def unmount_recursive(target: Path) -> None:
    """Unmount everything at and below `target`, topmost first. Raises `OSError` if something stays: EBUSY
    for a moment after a container's end, while the kernel takes its mount namespace apart."""
    prefix = f"{target}/"
    below = [point for point in _mount_points() if point == str(target) or point.startswith(prefix)]
    for point in reversed(below):
        _unmount(point)


def _inside(rootfs: Path, target: str) -> Path:
    if ".." in Path(target).parts:
        raise TaskError(f"the mount target {target!r} leaves the root filesystem")
    return rootfs / target.lstrip("/")


def _mount(mount: Mount, target: Path) -> None:
    options = _parse(mount.options)
    with ExitStack() as cleanup:
        if options.uid_map and options.gid_map:
            userns = syscalls.user_namespace(_map(options.uid_map), _map(options.gid_map))
            cleanup.callback(os.close, userns)
            if mount.type == "overlay":
                # Overlay wants its lower directories mapped, not itself.
                options = replace(options, data=_idmapped_layers(options.data, userns, cleanup))
        else:
            userns = -1
        directory = ""
        if mount.type == "overlay" and sum(map(len, options.data)) >= _DATA_LIMIT:
            directory, options = _shorten(options)
        _mount_at(directory, mount.source, target, mount.type, options)
        if options.propagation:
            flags = options.propagation | (options.flags & syscalls.MS_REC)
            syscalls.mount("", str(target), "", flags)
        if options.flags & syscalls.MS_BIND and options.flags & syscalls.MS_RDONLY:
            # The kernel ignores every flag but these two at the first bind.
            syscalls.mount("", str(target), "", options.flags | syscalls.MS_REMOUNT)
        if userns >= 0 and mount.type != "overlay":
            syscalls.mount_idmapped(str(target), str(target), userns)


def _mount_at(directory: str, source: str, target: Path, kind: str, options: _Options) -> None:
    """Mount with `directory` as the current one: nothing else runs in between, the process has one thread."""
    before = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) if directory else -1
    try:
        if directory:
            os.chdir(directory)
        syscalls.mount(source, str(target), kind, options.flags, ",".join(options.data))
    finally:
        if directory:
            os.fchdir(before)
            os.close(before)


def _parse(words: Sequence[str]) -> _Options:
    options = _Options()
    for word in words:
        if word in _FLAGS:
            options = replace(options, flags=options.flags | _FLAGS[word])
        elif word in _CLEARED:
            options = replace(options, flags=options.flags & ~_CLEARED[word])
        elif word.removeprefix("r") in _PROPAGATION and word not in ("r",):
            recursive = syscalls.MS_REC if word.startswith("r") else 0
            options = replace(options, propagation=_PROPAGATION[word.removeprefix("r")] | recursive)
        elif word.startswith("uidmap="):
            options = replace(options, uid_map=word.removeprefix("uidmap="))
        elif word.startswith("gidmap="):
            options = replace(options, gid_map=word.removeprefix("gidmap="))
        elif word == "loop" or word.startswith("X-containerd."):
            raise TaskError(f"the mount option {word!r} is not supported")
        elif word not in ("defaults", ""):
            options = replace(options, data=(*options.data, word))
    return options


def _shorten(options: _Options) -> tuple[str, _Options]:
    """The common parent of the lower directories, and options that name them relative to it."""
    others, lower = _lower_directories(options.data)
    if len(lower) < 2:
        return "", options
    common = os.path.commonpath(lower)
    if common == "/" or common in lower:
        return "", options
    relative = ":".join(os.path.relpath(path, common) for path in lower)
    return common, replace(options, data=(*others, f"lowerdir={relative}"))


def _idmapped_layers(data: tuple[str, ...], userns: int, cleanup: ExitStack) -> tuple[str, ...]:
    """`data` with its lower directories seen through a temporary id-mapped mount of their parent."""
    others, lower = _lower_directories(data)
    if not lower:
        return data
    common = os.path.commonpath([os.path.dirname(path) for path in lower])
    mapped = tempfile.mkdtemp(prefix="ovl-idmapped")
    cleanup.callback(os.rmdir, mapped)
    syscalls.mount_idmapped(common, mapped, userns, syscalls.MOUNT_ATTR_RDONLY)
    cleanup.callback(_unmount, mapped)
    paths = ":".join(os.path.join(mapped, os.path.relpath(path, common)) for path in lower)
    return (*others, f"lowerdir={paths}")


def _lower_directories(data: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """The other options, and the paths of `lowerdir=`."""
    prefix = "lowerdir="
    lower = next((word.removeprefix(prefix) for word in data if word.startswith(prefix)), "")
    others = tuple(word for word in data if not word.startswith(prefix))
    return others, lower.split(":") if lower else []


def _map(text: str) -> str:
    """`container:host:size[,…]` as /proc/PID/uid_map wants it."""
    return "\n".join(" ".join(part.split(":")) for part in text.split(","))


def _unmount(point: str) -> None:
    try:
        syscalls.unmount(point)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: no longer a mount point
            raise


def _mount_points() -> list[str]:
    """Every mount point of this mount namespace, in the order of their mounting."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return [_unescape(line.split(" ", 5)[4]) for line in lines]


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
