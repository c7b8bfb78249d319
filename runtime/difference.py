"""What a container changed over its image, as an uncompressed OCI layer (image-spec, layer.md).

Read from the upper directory of the frozen container's overlay, and through the mount where only that shows a
file's content. Called by the checkpoint sequence.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime import tar
from runtime.errors import CheckpointError
from runtime.rootfs import (
    CHUNK_BYTES,
    HOLE_BYTES,
    OPAQUE,
    WHITEOUT,
    WHITEOUT_DEVICE,
    OverlayDirs,
    closing,
    described,
    open_beneath,
    opened,
    xattrs_of,
)
from runtime.tar import Entry, Kind

_PATH_MAX = 4096
_MIN_SPARED_BYTES = 1 << 20
"""A file is stored sparse only when this much is spared: image-spec discourages it otherwise."""
_MAX_SEGMENTS = 1 << 16


def difference(dirs: OverlayDirs, extra: Mapping[str, Path] | None = None) -> Iterator[bytes]:
    """The upper directory as an uncompressed OCI layer. The container must be frozen.

    `extra` adds files by their path in the root file system: what a process holds open although its name
    is gone (`/proc/PID/fd/N`). Sockets are left out: CRIU makes those anew. Raises `CheckpointError`.
    """
    return _Difference(dirs, dict(extra or {})).stream()


@dataclass
class _Difference:
    dirs: OverlayDirs
    extra: dict[str, Path]
    _upper: int = -1
    _merged: int = -1
    _links: dict[tuple[int, int], str] = field(default_factory=dict)
    """First path of each file with several names, by its identity."""
    _held: dict[tuple[int, int], str] = field(default_factory=dict)
    """Path of each file in `extra` that is also in the upper directory, by its identity in the overlay."""
    _looks: set[tuple[int, int]] = field(default_factory=set)
    """Size and time of the files in `extra`: only what looks like one is compared with it."""
    _buffer: bytearray = field(default_factory=bytearray)

    def stream(self) -> Iterator[bytes]:
        try:
            yield from self._entries()
        except OSError as error:
            raise CheckpointError(
                f"the container's changes to its root file system cannot be read: {error}"
            ) from error

    def _entries(self) -> Iterator[bytes]:
        self.extra = {path.strip("/"): file for path, file in self.extra.items()}
        for file in self.extra.values():
            info = file.stat()
            self._looks.add((info.st_size, info.st_mtime_ns))
        with ExitStack() as stack:
            self._upper = stack.enter_context(opened(self.dirs.upper))
            if self.dirs.merged is not None:
                self._merged = stack.enter_context(opened(self.dirs.merged))
            yield from self._walk()
        for path, file in sorted(self.extra.items()):
            yield from self._extra_file(path, file)
        self._buffer += tar.END
        yield from self._flush()

    def _walk(self) -> Iterator[bytes]:
        pending = [("", False)]
        while pending:
            path, merged = pending.pop()
            with self._directory(path, merged) as (fd, merged, xattr_whiteouts):
                below = []
                for name in sorted(os.listdir(fd)):
                    info = os.lstat(name, dir_fd=fd)
                    if stat.S_ISDIR(info.st_mode):
                        _check_name(path, name)
                        below.append((_join(path, name), merged))
                    else:
                        yield from self._file(fd, path, name, info, xattr_whiteouts)
                    if len(self._buffer) >= CHUNK_BYTES:
                        yield from self._flush()
            pending += reversed(below)

    @contextmanager
    def _directory(self, path: str, merged: bool) -> Iterator[tuple[int, bool, bool]]:
        """Describe a directory; yields it opened, whether through the mount, and whether it has whiteouts
        that are no devices."""
        with ExitStack() as stack:
            root = self._mounted(path) if merged else self._upper
            fd = stack.enter_context(open_beneath(root, path or ".", os.O_RDONLY | os.O_DIRECTORY))
            xattrs, marks = xattrs_of(fd, self.dirs.marks)
            redirected = not merged and "redirect" in marks
            if redirected:  # its content is at another place of the image: only the mount shows it here
                root = self._mounted(path)
                fd = stack.enter_context(open_beneath(root, path, os.O_RDONLY | os.O_DIRECTORY))
            self._add(described(path or ".", os.fstat(fd), xattrs))
            if redirected or marks.get("opaque") == b"y":
                self._add(Entry(_join(path, OPAQUE), Kind.REGULAR))
            yield fd, merged or redirected, marks.get("opaque") == b"x"

    def _file(
        self, directory: int, parent: str, name: str, info: os.stat_result, xattr_whiteouts: bool
    ) -> Iterator[bytes]:
        path = _join(parent, name)
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == WHITEOUT_DEVICE:
            self._add(Entry(_join(parent, WHITEOUT + name), Kind.REGULAR))
            return
        _check_name(parent, name)
        if path in self.extra or stat.S_ISSOCK(info.st_mode):
            return
        xattrs, marks = xattrs_of(f"/proc/self/fd/{directory}/{name}", self.dirs.marks)
        if xattr_whiteouts and "whiteout" in marks:
            self._add(Entry(_join(parent, WHITEOUT + name), Kind.REGULAR))
        elif first := self._other_name(path, info):
            self._add(described(path, info, {}, kind=Kind.HARD_LINK, link=first))
        elif stat.S_ISLNK(info.st_mode):
            self._add(described(path, info, xattrs, link=os.readlink(name, dir_fd=directory)))
        elif not stat.S_ISREG(info.st_mode):
            self._add(described(path, info, xattrs))
        elif "metacopy" in marks:  # its content is still in the image
            with open_beneath(self._mounted(path), path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
                yield from self._regular(path, fd, xattrs)
        else:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            with closing(fd):
                yield from self._regular(path, fd, xattrs)

    def _extra_file(self, path: str, file: Path) -> Iterator[bytes]:
        with closing(os.open(file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(f"{path}, which a process holds open, is no regular file")
            if first := self._held.get(_identity(info)):
                self._add(described(path, info, {}, kind=Kind.HARD_LINK, link=first))
                return
            self._held[_identity(info)] = path
            yield from self._regular(path, fd, xattrs_of(fd, self.dirs.marks)[0])

    def _other_name(self, path: str, info: os.stat_result) -> str | None:
        """The path already written of the same file; remembers this one."""
        if (info.st_size, info.st_mtime_ns) in self._looks and self._merged >= 0:
            with suppress(FileNotFoundError):
                seen = os.stat(path, dir_fd=self._merged, follow_symlinks=False)
                self._held.setdefault(_identity(seen), path)
        if info.st_nlink < 2:
            return None
        first = self._links.setdefault(_identity(info), path)
        return None if first == path else first

    def _regular(self, path: str, fd: int, xattrs: Mapping[str, bytes]) -> Iterator[bytes]:
        info = os.fstat(fd)
        segments = _segments(fd, info)
        self._add(described(path, info, xattrs, segments=segments))
        stored = 0
        for offset, length in segments if segments is not None else ((0, info.st_size),):
            stored += length
            while length:
                piece = os.pread(fd, min(length, CHUNK_BYTES), offset)
                if not piece:
                    raise CheckpointError(
                        f"{path} became shorter while it was read",
                        hint="nothing but the container may use it",
                    )
                offset += len(piece)
                length -= len(piece)
                if len(piece) > CHUNK_BYTES // 4:
                    yield from self._flush()
                    yield piece
                else:
                    self._buffer += piece
        self._buffer += tar.padding(stored)

    def _add(self, entry: Entry) -> None:
        if len(os.fsencode(entry.path)) >= _PATH_MAX:
            raise CheckpointError(f"the path {entry.path[:60]}… is longer than {_PATH_MAX - 1} bytes")
        self._buffer += tar.header(entry)

    def _flush(self) -> Iterator[bytes]:
        if self._buffer:
            yield bytes(self._buffer)
            self._buffer.clear()

    def _mounted(self, path: str) -> int:
        if self._merged < 0:
            raise CheckpointError(
                f"{path} was renamed or changed in a way that only the mounted root file system shows",
                hint="checkpoint it while it is mounted, or mount overlays with redirect_dir=off",
            )
        return self._merged


def _check_name(parent: str, name: str) -> None:
    if name.startswith(WHITEOUT):
        raise CheckpointError(
            f"{_join(parent, name)} has a name that means a deletion in an OCI layer",
            hint=f"rename it in the container: no name may begin with {WHITEOUT}",
        )


def _segments(fd: int, info: os.stat_result) -> list[tar.Segment] | None:
    """Where the data of a file is when storing it sparse spares enough, else None."""
    size = info.st_size
    if size - info.st_blocks * 512 < _MIN_SPARED_BYTES:
        return None
    smallest_hole = max(HOLE_BYTES, size // _MAX_SEGMENTS)
    segments: list[tar.Segment] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        end = os.lseek(fd, start, os.SEEK_HOLE)
        if segments and start - sum(segments[-1]) < smallest_hole:
            start = segments.pop()[0]
        segments.append((start, end - start))
    if size - sum(length for _, length in segments) < _MIN_SPARED_BYTES:
        return None
    if not segments or sum(segments[-1]) < size:
        segments.append((size, 0))  # as GNU tar marks a hole at the end
    return segments


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
