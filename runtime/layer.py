"""Applies an OCI layer to the upper directory of an overlay that is not mounted yet.

The layer is untrusted: every name is resolved beneath the directory, following no symbolic link, and nothing
that exists is ever written through. Called by `runtime.fetch`.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime import syscalls, tar
from runtime.errors import RestoreError
from runtime.rootfs import (
    CHUNK_BYTES,
    HOLE_BYTES,
    OPAQUE,
    TRUSTED,
    USER,
    WHITEOUT,
    WHITEOUT_DEVICE,
    closing,
    described,
    is_carried,
    open_beneath,
    opened,
    xattrs_of,
)
from runtime.tar import Entry, Kind

_AUFS = ".wh..wh."
_NAME_MAX = 255
_MAX_ENTRIES = 10_000_000
_ZEROS = bytes(HOLE_BYTES)


def apply(stream: tar.Readable, upper: Path, lower: Sequence[Path] = (), *, user_xattr: bool = False) -> None:
    """Make `upper` exactly what the layer `stream` says over `lower`; call before the overlay is mounted.

    What `upper` held before is removed. Raises `RestoreError` (or what `stream` raises), leaving it empty.
    """
    empty(upper)
    try:
        with opened(upper) as root:
            _Applier(root, lower, USER if user_xattr else TRUSTED, _free_space(upper)).run(stream)
    except BaseException:
        with suppress(RestoreError):
            empty(upper)
        raise


def empty(directory: Path) -> None:
    """Remove everything in `directory`, however deep, following no link and crossing no mount."""
    try:
        if not os.listdir(directory):
            return
    except OSError as error:
        raise RestoreError(f"the upper directory {directory} cannot be used", details=str(error)) from error
    done = subprocess.run(
        ["find", str(directory), "-xdev", "-mindepth", "1", "-delete"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RestoreError(
            f"the upper directory {directory} cannot be emptied",
            hint="is the container's root file system still mounted?",
            details=done.stderr.strip()[-500:],
        )


@dataclass
class _Applier:
    root: int
    lower: Sequence[Path]
    marks: str
    free: _Free
    _parent_parts: tuple[str, ...] = ()
    _parent_fd: int = -1
    _times: list[tuple[str, int]] = field(default_factory=list)
    """Directories and their times, set last: what is made inside changes them."""

    def run(self, stream: tar.Readable) -> None:
        reader = tar.Reader(stream)
        try:
            for entry in reader:
                with _naming(entry.path):
                    self.free.take(entries=1)
                    self._put(entry, reader)
        finally:
            if self._parent_fd >= 0:
                os.close(self._parent_fd)
        for path, mtime_ns in reversed(self._times):
            with _naming(path), open_beneath(self.root, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                os.utime(fd, ns=(mtime_ns, mtime_ns))

    def _put(self, entry: Entry, reader: tar.Reader) -> None:
        parts = _parts(entry.path)
        if not parts:
            if entry.kind is not Kind.DIRECTORY:
                raise _refused(entry.path, "it stands for the root and is no directory")
            self._describe_directory(self.root, ".", entry)
            return
        if any(part.startswith(_AUFS) and part != OPAQUE for part in parts):
            return  # AUFS's own files: they say nothing to an overlay
        if any(part.startswith(WHITEOUT) for part in parts[:-1]):
            raise _refused(entry.path, "it is in a directory that the layer deletes")
        parent, name = self._parent(parts[:-1]), parts[-1]
        if name == OPAQUE:
            self._make_opaque(parent)
        elif name.startswith(WHITEOUT):
            self._whiteout(parent, name.removeprefix(WHITEOUT))
        elif entry.kind is Kind.DIRECTORY:
            self._directory(parent, name, entry)
        elif entry.kind is Kind.HARD_LINK:
            self._hard_link(parent, name, entry)
        else:
            if not self._is_new(parent, name):
                os.unlink(name, dir_fd=parent)
            self._file(parent, name, entry, reader)

    def _file(self, parent: int, name: str, entry: Entry, reader: tar.Reader) -> None:
        if entry.kind is Kind.REGULAR:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing(os.open(name, flags, 0o600, dir_fd=parent)) as fd:
                for offset, piece in reader.data():
                    self.free.take(size=len(piece))
                    _write(fd, offset, piece)
                os.ftruncate(fd, entry.size_bytes)
        elif entry.kind is Kind.SYMLINK:
            os.symlink(entry.link, name, dir_fd=parent)
        elif entry.kind is Kind.FIFO:
            os.mkfifo(name, 0o600, dir_fd=parent)
        else:
            device = os.makedev(*entry.device)
            if entry.kind is Kind.CHARACTER_DEVICE and device == WHITEOUT_DEVICE:
                raise _refused(entry.path, "the device 0:0 is overlayfs's whiteout")
            kind = stat.S_IFCHR if entry.kind is Kind.CHARACTER_DEVICE else stat.S_IFBLK
            os.mknod(name, kind | 0o600, device, dir_fd=parent)
        _describe(parent, name, entry)

    def _directory(self, parent: int, name: str, entry: Entry) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                self._describe_directory(parent, name, entry)
                return
            self._is_new(parent, name)
            os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o700, dir_fd=parent)
            with open_beneath(parent, name, os.O_RDONLY | os.O_DIRECTORY) as fd:
                self._make_opaque(fd)
        self._describe_directory(parent, name, entry)

    def _describe_directory(self, parent: int, name: str, entry: Entry) -> None:
        _describe(parent, name, entry)
        self._times.append(("/".join(_parts(entry.path)) or ".", entry.mtime_ns))

    def _whiteout(self, parent: int, name: str) -> None:
        if name in ("", ".", ".."):
            raise _refused(WHITEOUT + name, "it deletes no name")
        try:
            os.mknod(name, stat.S_IFCHR | 0o600, WHITEOUT_DEVICE, dir_fd=parent)
        except FileExistsError:
            # A layer's whiteouts hide what is below it, never what it brings itself.
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                with open_beneath(parent, name, os.O_RDONLY | os.O_DIRECTORY) as fd:
                    self._make_opaque(fd)

    def _make_opaque(self, directory: int) -> None:
        os.setxattr(directory, self.marks + "opaque", b"y")

    def _hard_link(self, parent: int, name: str, entry: Entry) -> None:
        target = _parts(entry.link)
        if not target:
            raise _refused(entry.path, "it is a hard link to the root")
        if not self._is_new(parent, name):
            os.unlink(name, dir_fd=parent)
        with self._opened_directory(target[:-1]) as directory:
            try:
                info = os.lstat(target[-1], dir_fd=directory)
            except FileNotFoundError:
                self._copy_up(directory, target)
                info = os.lstat(target[-1], dir_fd=directory)
            if stat.S_ISDIR(info.st_mode) or _is_whiteout(info):
                raise _refused(entry.path, f"it is a hard link to {entry.link}, which is no file")
            os.link(target[-1], name, src_dir_fd=directory, dst_dir_fd=parent, follow_symlinks=False)

    def _copy_up(self, directory: int, parts: Sequence[str]) -> None:
        """Copy a file of the image into the upper directory, as overlayfs does before it is changed."""
        path = "/".join(parts)
        with self._below(parts) as (base, info):
            if info is None or not stat.S_ISREG(info.st_mode):
                raise _refused(path, "a hard link needs it, and no layer has such a file")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with (
                open_beneath(base, path, os.O_RDONLY | os.O_NOFOLLOW) as source,
                closing(os.open(parts[-1], flags, 0o600, dir_fd=directory)) as fd,
            ):
                offset = 0
                while piece := os.pread(source, CHUNK_BYTES, offset):
                    self.free.take(size=len(piece))
                    _write(fd, offset, piece)
                    offset += len(piece)
                os.ftruncate(fd, offset)
                xattrs, _ = xattrs_of(source, self.marks)
        _describe(directory, parts[-1], described(path, info, xattrs))

    def _is_new(self, parent: int, name: str) -> bool:
        """Whether nothing is at `name`; False where a whiteout is, which what comes now replaces."""
        try:
            info = os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return True
        if not _is_whiteout(info):
            raise _refused(name, "the layer has it twice")
        return False

    def _parent(self, parts: tuple[str, ...]) -> int:
        if self._parent_fd < 0 or parts != self._parent_parts:
            fd = self._open_directory(parts)
            if self._parent_fd >= 0:
                os.close(self._parent_fd)
            self._parent_parts, self._parent_fd = parts, fd
        return self._parent_fd

    @contextmanager
    def _opened_directory(self, parts: tuple[str, ...]) -> Iterator[int]:
        with closing(self._open_directory(parts)) as fd:
            yield fd

    def _open_directory(self, parts: tuple[str, ...]) -> int:
        """Open a directory of the upper directory; one the layer does not describe is made as the image
        has it."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return syscalls.open_beneath(self.root, "/".join(parts) or ".", flags)
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            with open_beneath(self.root, "/".join(parts[: depth - 1]) or ".", flags) as parent:
                try:
                    os.mkdir(parts[depth - 1], 0o755, dir_fd=parent)
                except FileExistsError:
                    continue
                self.free.take(entries=1)
                with self._below(parts[:depth]) as (base, info):
                    if info is None or _is_whiteout(info):
                        continue
                    if not stat.S_ISDIR(info.st_mode):
                        raise _refused(
                            path, "the layer uses it as a directory, and the image has another file"
                        )
                    with open_beneath(base, path, flags) as fd:
                        xattrs, _ = xattrs_of(fd, self.marks)
                entry = described(path, info, xattrs)
                self._describe_directory(parent, parts[depth - 1], entry)
        return syscalls.open_beneath(self.root, "/".join(parts), flags)

    @contextmanager
    def _below(self, parts: Sequence[str]) -> Iterator[tuple[int, os.stat_result | None]]:
        """The topmost lower directory that has a file of this path, and the file; (-1, None) if none has."""
        path = "/".join(parts)
        for directory in self.lower:
            with opened(directory) as base:
                try:
                    with open_beneath(base, path, os.O_PATH | os.O_NOFOLLOW) as fd:
                        info = os.fstat(fd)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                yield base, info
                return
        yield -1, None


@dataclass
class _Free:
    """What a layer may still take of the file system."""

    size_bytes: int
    entries: int

    def take(self, *, size: int = 0, entries: int = 0) -> None:
        self.size_bytes -= size
        self.entries -= entries
        if self.size_bytes < 0 or self.entries < 0:
            raise RestoreError(
                "the checkpoint's root file system difference does not fit on this node",
                hint="free space where containerd keeps its snapshots",
            )


def _free_space(directory: Path) -> _Free:
    """All that is free but a reserve for the rest of the node."""
    info = os.statvfs(directory)
    reserve = min(info.f_blocks * info.f_frsize // 20, 1 << 30)
    entries = info.f_favail if info.f_files else _MAX_ENTRIES  # btrfs counts none
    return _Free(max(0, info.f_bavail * info.f_frsize - reserve), min(entries, _MAX_ENTRIES))


def _describe(parent: int, name: str, entry: Entry) -> None:
    """Give a file just made its owner, mode, attributes and time, in the order that loses none of them."""
    os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
    if entry.kind is not Kind.SYMLINK:
        os.chmod(name, entry.mode, dir_fd=parent)
    path = f"/proc/self/fd/{parent}/{name}"
    for key, value in entry.xattrs.items():
        if is_carried(key):
            os.setxattr(path, key, value, follow_symlinks=False)
    os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)


def _write(fd: int, offset: int, piece: bytes) -> None:
    """Write `piece`, leaving holes where it is zero."""
    start = 0
    for at in range(0, len(piece), HOLE_BYTES):
        if piece[at] == 0 and piece[at : at + HOLE_BYTES] == _ZEROS:
            _write_all(fd, offset + start, memoryview(piece)[start:at])
            start = at + HOLE_BYTES
    _write_all(fd, offset + start, memoryview(piece)[start:])


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data = data[written:]
        offset += written


def _parts(path: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts or any(len(os.fsencode(part)) > _NAME_MAX for part in parts):
        raise _refused(path, "it is not a path inside the container")
    return parts


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == WHITEOUT_DEVICE


def _refused(path: str, why: str) -> RestoreError:
    return RestoreError(
        f"the checkpoint's root file system difference has an impossible entry: {path[:200]!r}: {why}",
        hint="the artifact is damaged or was not made by cedana",
    )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Say which entry it was that the kernel refused."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise RestoreError(
            f"{path[:200]!r} of the checkpoint's root file system difference cannot be restored:"
            f" {os.strerror(error.errno) if error.errno else error}",
            hint="free space where containerd keeps its snapshots"
            if full
            else "a layer may only hold files below directories of its own",
        ) from error
