"""What a directory tree is, so that two can be compared: everything a layer carries, and nothing else."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

WHITEOUT = ("whiteout",)


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Every file below `root` by its path; sockets, which no layer carries, are left out."""
    found: dict[str, tuple[object, ...]] = {}
    links: dict[tuple[int, int], str] = {}
    for directory, names, files in os.walk(root):
        names.sort()
        for name in [".", *names, *sorted(files)]:
            path = os.path.join(directory, name)
            info = os.lstat(path)
            relative = os.path.relpath(path, root)
            if stat.S_ISSOCK(info.st_mode):
                continue
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                found[relative] = WHITEOUT
                continue
            content = ""
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            same_file = ""
            if info.st_nlink > 1 and not stat.S_ISDIR(info.st_mode):
                same_file = links.setdefault((info.st_dev, info.st_ino), relative)
            found[relative] = (
                oct(info.st_mode),
                info.st_uid,
                info.st_gid,
                info.st_size if stat.S_ISREG(info.st_mode) else 0,
                info.st_mtime_ns,
                info.st_rdev,
                same_file,
                _xattrs(path),
                content,
            )
    return found


def _xattrs(path: str) -> Mapping[str, bytes]:
    own = "trusted.overlay."
    return {
        name: os.getxattr(path, name, follow_symlinks=False)
        for name in sorted(os.listxattr(path, follow_symlinks=False))
        if not name.startswith(own) or name == own + "opaque" or name.startswith(own + "overlay.")
    }
