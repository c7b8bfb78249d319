"""inotify watches: CRIU restores them by path, the kernel shows them by inode.

On overlayfs CRIU cannot open a file by its handle, and searching the whole root file system for the inode
is its only way (criu/irmap.c). The probe does that before the freeze, and tells CRIU the paths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_WATCH = re.compile(r"^inotify wd:\S+ ino:([0-9a-f]+) sdev:([0-9a-f]+) ", re.MULTILINE)
"""linux, Documentation/filesystems/proc.rst, "fdinfo": inode and device in hexadecimal."""


@dataclass(frozen=True)
class Inode:
    device: int
    """As `st_dev`."""
    number: int


def watched(host_pid: int, fd: int) -> frozenset[Inode]:
    """What the inotify descriptor `fd` watches; empty if it is gone."""
    try:
        text = Path(f"/proc/{host_pid}/fdinfo/{fd}").read_text()
    except OSError:
        return frozenset()
    return frozenset(
        Inode(_device(int(device, 16)), int(number, 16)) for number, device in _WATCH.findall(text)
    )


def paths_of(inodes: frozenset[Inode], host_pid: int) -> dict[Inode, str]:
    """Where the root file system of process `host_pid` has those of `inodes` that are on it."""
    root = f"/proc/{host_pid}/root"
    device = os.stat(root + "/.").st_dev
    wanted = {inode for inode in inodes if inode.device == device}
    found: dict[Inode, str] = {}
    for path, inode in _walk(root, device):
        if inode in wanted:
            found.setdefault(inode, path.removeprefix(root) or "/")
            if len(found) == len(wanted):
                break
    return found


def _walk(root: str, device: int) -> Iterator[tuple[str, Inode]]:
    """Every path of one file system, mounts left out, and its inode; directories before what is in them."""
    yield root, Inode(device, os.stat(root + "/.").st_ino)
    pending = [root + "/."]
    while pending:
        directory = pending.pop()
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if info.st_dev != device:
                continue
            path = entry.path.replace("/./", "/", 1)
            yield path, Inode(device, info.st_ino)
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)


def _device(kernel: int) -> int:
    """`st_dev` of a device number as the kernel prints it (linux/kdev_t.h: 12 bits major, 20 minor)."""
    return os.makedev(kernel >> 20, kernel & 0xFFFFF)
