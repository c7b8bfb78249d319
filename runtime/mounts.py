"""The mounts a dump asks CRIU to make, checked before CRIU sees them.

CRIU mounts what `mountpoints-*.img` says (criu, images/mnt.proto), with source and options as given there:
an artifact could name a disk of the host. A checkpoint may bring file systems that are its own (tmpfs, proc
and the like); everything else must be a mount of the target's own spec, which runc hands to CRIU by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime import images
from runtime.errors import RestoreError

_MNTS_MAGIC = 0x55563928
"""criu/include/magic.h, MNTS_MAGIC."""
_OWN = {1: "proc", 2: "sysfs", 5: "tmpfs", 6: "devpts", 12: "cgroup", 14: "mqueue", 23: "cgroup2"}
"""enum fstype of the file systems a container has for itself."""
_ROOT = "/"


@dataclass(frozen=True)
class DumpedMount:
    point: str
    external: str
    """The name under which the target's runc gives it; '' if CRIU makes it."""
    kind: int
    """enum fstype."""


def dumped_mounts(directory: Path) -> Iterator[DumpedMount]:
    """Every mount of the dump in `directory`; raises `EngineError` on a malformed image."""
    for path in sorted(directory.glob("mountpoints-*.img")):
        for message in images.messages(path, _MNTS_MAGIC):
            point = "/" + _text(message, 7).lstrip("./")
            external = _text(message, 18) or (point if images.number(message, 13) else "")
            yield DumpedMount(point, external, images.number(message, 1))


def check(directory: Path) -> frozenset[str]:
    """The names of the mounts that the target must give; raises `RestoreError` when the dump asks CRIU to
    make one that no checkpoint may bring."""
    needed = set()
    for mount in dumped_mounts(directory):
        if mount.external:
            needed.add(mount.external)
        elif mount.point != _ROOT and mount.kind not in _OWN:
            raise RestoreError(
                f"the checkpoint asks for a mount at {mount.point} that a checkpoint may not bring",
                hint=f"only {', '.join(sorted(_OWN.values()))} and the container's own mounts are restored",
                details=f"CRIU file system type {mount.kind}",
            )
    return frozenset(needed)


def _text(message: images.Fields, field: int) -> str:
    value = message.get(field, [b""])[-1]
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
