"""A container's root file system: the overlay it is, and its files as entries of an OCI layer.

`runtime.difference` makes a layer of what the container changed over its image, `runtime.layer` puts one
back; both know from here what overlayfs means by its marks, and open files so that no link misleads them.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runtime import syscalls, tar
from runtime.container import Mount
from runtime.errors import IncompatibleError
from runtime.tar import Entry, Kind

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
WHITEOUT_DEVICE = os.makedev(0, 0)
"""What overlayfs has in the place of a deleted file."""

TRUSTED = "trusted.overlay."
USER = "user.overlay."
"""What the names of overlayfs's marks begin with."""
_ESCAPES = (TRUSTED + "overlay.", USER + "overlay.")
"""How overlayfs stores attributes of that name which the container itself has set."""
_CARRIED_XATTRS = ("user.", "trusted.", "system.posix_acl_", "security.capability")
"""Everything else (labels of security modules, signatures bound to a node) belongs to the node."""

CHUNK_BYTES = 1 << 20
HOLE_BYTES = 64 << 10
"""Zeros are written as holes in pieces of this size; smaller holes are stored as zeros."""

_KINDS = {
    stat.S_IFREG: Kind.REGULAR,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHARACTER_DEVICE,
    stat.S_IFBLK: Kind.BLOCK_DEVICE,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFIFO: Kind.FIFO,
}


@dataclass(frozen=True)
class OverlayDirs:
    upper: Path
    lower: tuple[Path, ...]
    """Topmost first."""
    work: Path
    user_xattr: bool = False
    """Mounted with `userxattr`: overlayfs keeps its marks in `user.overlay.*`."""
    merged: Path | None = None
    """Where it is mounted; None when it is not."""

    @property
    def marks(self) -> str:
        return USER if self.user_xattr else TRUSTED


def overlay_dirs(
    where: Path | Sequence[Mount], mountinfo: Path = Path("/proc/self/mountinfo")
) -> OverlayDirs:
    """The directories of the overlay mounted at `where`, or that the mounts `where` would make.

    Raises `IncompatibleError` when it is not a writable overlay: then nothing tells the container's
    changes from its image.
    """
    if isinstance(where, Path):
        kind, options = _mounted(where, mountinfo)
        merged = where
    else:
        if len(where) != 1:
            raise IncompatibleError(
                f"the container's root file system is made of {len(where)} mounts",
                hint="use the overlayfs snapshotter",
            )
        kind, options = where[0].type, where[0].options
        merged = None
    if kind != "overlay":
        raise IncompatibleError(
            f"the container's root file system is of type {kind}, not overlay: what the container changed"
            " cannot be told from its image",
            hint="use the overlayfs snapshotter (`ctr run --snapshotter overlayfs`, `nerdctl --snapshotter"
            " overlayfs`)",
        )
    return _from_options(options, merged)


def described(
    path: str,
    info: os.stat_result,
    xattrs: Mapping[str, bytes],
    *,
    kind: Kind | None = None,
    link: str = "",
    segments: Sequence[tar.Segment] | None = None,
) -> Entry:
    """A file as an entry of a layer."""
    kind = kind or _KINDS[stat.S_IFMT(info.st_mode)]
    return Entry(
        path=path,
        kind=kind,
        mode=stat.S_IMODE(info.st_mode),
        uid=info.st_uid,
        gid=info.st_gid,
        size_bytes=info.st_size if kind is Kind.REGULAR else 0,
        mtime_ns=info.st_mtime_ns,
        link=link,
        device=(os.major(info.st_rdev), os.minor(info.st_rdev)),
        xattrs=xattrs,
        segments=segments,
    )


def xattrs_of(file: int | str, marks: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The extended attributes that travel, and overlayfs's own marks without their prefix."""
    follow = isinstance(file, int)
    carried: dict[str, bytes] = {}
    found: dict[str, bytes] = {}
    try:
        names = os.listxattr(file, follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return {}, {}
        raise
    for name in names:
        if name.startswith(marks) and not name.startswith(_ESCAPES):
            found[name.removeprefix(marks)] = os.getxattr(file, name, follow_symlinks=follow)
        elif is_carried(name):
            carried[name] = os.getxattr(file, name, follow_symlinks=follow)
    return carried, found


def is_carried(name: str) -> bool:
    if name.startswith((TRUSTED, USER)):
        return name.startswith(_ESCAPES)
    return name.startswith(_CARRIED_XATTRS)


@contextmanager
def closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        yield fd


@contextmanager
def open_beneath(root: int, path: str, flags: int) -> Iterator[int]:
    """`path` opened beneath `root`, as `syscalls.open_beneath` does it."""
    with closing(syscalls.open_beneath(root, path, flags)) as fd:
        yield fd


def _mounted(where: Path, mountinfo: Path) -> tuple[str, Sequence[str]]:
    """Type and options of the topmost mount at `where`."""
    point = os.path.realpath(where)
    found: tuple[str, Sequence[str]] | None = None
    for line in mountinfo.read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if _octal_unescaped(before.split(" ")[4]) == point:
            found = kind, [_octal_unescaped(option) for option in options.split(",")]
    if found is None:
        raise IncompatibleError(
            f"no file system is mounted at {where}", hint="the container must be running on this node"
        )
    return found


def _octal_unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _from_options(options: Sequence[str], merged: Path | None) -> OverlayDirs:
    values: dict[str, str] = {}
    lower: list[str] = []
    for option in options:
        key, _, value = option.partition("=")
        if key == "lowerdir+":  # of fsconfig(2): one directory, nothing in it is escaped
            lower.append(value)
        elif key == "lowerdir":
            layers = value.split("::", 1)[0]  # after it come layers that hold only data
            lower += [_unescaped(part) for part in re.split(r"(?<!\\):", layers) if part]
        else:
            values[key] = value
    if "upperdir" not in values:
        raise IncompatibleError(
            "the container's root file system is a read-only overlay without an upper directory",
            hint="make the snapshot writable (`ctr run` without `--read-only` views)",
        )
    upper = Path(_unescaped(values["upperdir"]))
    return OverlayDirs(
        upper=upper,
        lower=_absolute(lower, upper),
        work=Path(_unescaped(values.get("workdir", ""))),
        user_xattr="userxattr" in options,
        merged=merged,
    )


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _absolute(lower: Sequence[str], upper: Path) -> tuple[Path, ...]:
    """containerd makes a long list fit by mounting from the snapshots' common directory: find that."""
    relative = [directory for directory in lower if not directory.startswith("/")]
    if not relative:
        return tuple(Path(directory) for directory in lower)
    for base in upper.parents:
        if all((base / directory).is_dir() for directory in relative):
            return tuple(base / directory for directory in lower)
    raise IncompatibleError(
        "the lower directories of the container's overlay cannot be found",
        details=f"relative to no parent of {upper}: {relative[0]}",
    )
