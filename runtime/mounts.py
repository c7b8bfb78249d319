"""The mounts a dump asks CRIU to make, checked before CRIU sees them.

CRIU mounts what `mountpoints-*.img` says (criu, images/mnt.proto), with source, flags and options as given
there: an artifact could name a disk of the host, or leave out what masks a kernel file. A checkpoint may
bring file systems that are its own (tmpfs and the like), and those of the kernel where the target's spec has
them, as read-only and as masked; everything else must be a mount of that spec, which runc gives CRIU by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import images
from runtime.errors import RestoreError

_MNTS_MAGIC = 0x55563928
"""criu/include/magic.h, MNTS_MAGIC."""
_OWN = {1: "proc", 2: "sysfs", 5: "tmpfs", 6: "devpts", 12: "cgroup", 14: "mqueue", 23: "cgroup2"}
"""enum fstype of the file systems a container has for itself."""
_KERNEL = {1: "proc", 2: "sysfs", 12: "cgroup", 23: "cgroup"}
"""Those of them through which the host could be changed, as a spec calls them."""
_TMPFS = 5
_MS_RDONLY = 1
_MASK = "/dev/null"
"""runc's name for what it masks files with."""
_ROOT = "/"


@dataclass(frozen=True)
class DumpedMount:
    point: str
    external: str
    """The name under which the target's runc gives it; '' if CRIU makes it."""
    kind: int
    """enum fstype."""
    read_only: bool = False


def dumped_mounts(directory: Path) -> Iterator[DumpedMount]:
    """Every mount of the dump in `directory`; raises `EngineError` on a malformed image."""
    for path in sorted(directory.glob("mountpoints-*.img")):
        for message in images.messages(path, _MNTS_MAGIC):
            point = "/" + _text(message, 7).lstrip("./")
            external = _text(message, 18) or (point if images.number(message, 13) else "")
            read_only = bool(images.number(message, 5) & _MS_RDONLY)
            yield DumpedMount(point, external, images.number(message, 1), read_only)


def check(directory: Path, spec: Mapping[str, Any]) -> frozenset[str]:
    """The names of the mounts that the target must give; raises `RestoreError` when the dump asks CRIU to
    make one that no checkpoint may bring, or not to make one that keeps the container from the host."""
    mounts = list(dumped_mounts(directory))
    for mount in mounts:
        if not mount.external and mount.point != _ROOT:
            _check_own(mount, mounts, spec)
    if mounts:
        _check_covers(mounts, spec.get("linux") or {})
    return frozenset(mount.external for mount in mounts if mount.external)


def _check_own(mount: DumpedMount, mounts: Sequence[DumpedMount], spec: Mapping[str, Any]) -> None:
    """A mount that CRIU makes by itself."""
    if mount.kind not in _OWN or ".." in mount.point.split("/"):
        raise _refused(mount, f"a mount at {mount.point} that a checkpoint may not bring")
    if mount.kind not in _KERNEL:
        return
    given = [m for m in spec.get("mounts", []) if m.get("type") == _KERNEL[mount.kind]]
    here = next((m for m in given if m["destination"] == mount.point), None)
    if here is not None:
        if "ro" in here.get("options", []) and not mount.read_only:
            raise _refused(mount, f"{mount.point} writable, which is read-only in this container")
        if sum(other.point == mount.point for other in mounts) > 1:
            raise _refused(mount, f"two mounts at {mount.point}")
    elif not mount.read_only or not any(mount.point.startswith(m["destination"] + "/") for m in given):
        raise _refused(mount, f"{_OWN[mount.kind]} at {mount.point}, where this container has none")


def _check_covers(mounts: Sequence[DumpedMount], linux: Mapping[str, Any]) -> None:
    """What the spec masks or makes read-only, of the files this kernel has, must be so."""
    for path in linux.get("readonlyPaths") or ():
        there = [mount for mount in mounts if mount.point == path]
        if os.path.lexists(path) and not (there and all(mount.read_only for mount in there)):
            raise _refused(None, f"{path} writable, which is read-only in this container")
    for path in linux.get("maskedPaths") or ():
        there = [mount for mount in mounts if mount.point == path]
        masks = [mount for mount in there if mount.external == _MASK or mount.kind == _TMPFS]
        if os.path.lexists(path) and not (there and masks == there):
            raise _refused(None, f"{path} visible, which is masked in this container")


def _refused(mount: DumpedMount | None, what: str) -> RestoreError:
    return RestoreError(
        f"the checkpoint asks for {what}",
        hint="restore it only if you trust it, into a container with the mounts that the original had",
        details=f"CRIU file system type {mount.kind}" if mount else "",
    )


def _text(message: images.Fields, field: int) -> str:
    value = message.get(field, [b""])[-1]
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
