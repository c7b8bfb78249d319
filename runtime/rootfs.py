"""A container's root file system: what it changed over its image, as an OCI layer and back.

`difference` streams the upper directory of a frozen container's overlay as an uncompressed layer tar
(image-spec, layer.md: whiteouts, opaque whiteouts). `apply` makes an upper directory from such a stream
before the overlay is mounted; the stream is untrusted, so every name is resolved beneath the directory,
following no symbolic link, and nothing that exists is ever written through.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from runtime import tar
from runtime.container import Mount
from runtime.errors import CheckpointError, IncompatibleError, RestoreError
from runtime.tar import Entry, Kind

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
_AUFS = ".wh..wh."
_WHITEOUT_DEVICE = os.makedev(0, 0)

_TRUSTED = "trusted.overlay."
_USER = "user.overlay."
_ESCAPES = (_TRUSTED + "overlay.", _USER + "overlay.")
"""How overlayfs stores attributes of that name which the container itself has set."""
_CARRIED_XATTRS = ("user.", "trusted.", "system.posix_acl_", "security.capability")
"""Everything else (labels of security modules, signatures bound to a node) belongs to the node."""

_KINDS = {
    stat.S_IFREG: Kind.REGULAR,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFCHR: Kind.CHARACTER_DEVICE,
    stat.S_IFBLK: Kind.BLOCK_DEVICE,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFIFO: Kind.FIFO,
}

_PATH_MAX = 4096
_NAME_MAX = 255
_CHUNK_BYTES = 1 << 20
_HOLE_BYTES = 64 << 10
"""Zeros are written as holes in pieces of this size; smaller holes are stored as zeros."""
_MIN_SPARED_BYTES = 1 << 20
"""A file is stored sparse only when this much is spared: image-spec discourages it otherwise."""
_MAX_SEGMENTS = 1 << 16
_MAX_ENTRIES = 10_000_000
_ZEROS = bytes(_HOLE_BYTES)

_SYS_OPENAT2 = 437
"""The same on every architecture; neither Python nor glibc wraps it."""
_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08
"""RESOLVE_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH (linux/openat2.h)."""
_libc = ctypes.CDLL(None, use_errno=True)


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
        return _USER if self.user_xattr else _TRUSTED


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


def difference(dirs: OverlayDirs, extra: Mapping[str, Path] | None = None) -> Iterator[bytes]:
    """The upper directory as an uncompressed OCI layer. The container must be frozen.

    `extra` adds files by their path in the root file system: what a process holds open although its name
    is gone (`/proc/PID/fd/N`). Sockets are left out: CRIU makes those anew. Raises `CheckpointError`.
    """
    return _Difference(dirs, dict(extra or {})).stream()


def apply(stream: tar.Readable, upper: Path, lower: Sequence[Path] = (), *, user_xattr: bool = False) -> None:
    """Make `upper` exactly what the layer `stream` says over `lower`; call before the overlay is mounted.

    What `upper` held before is removed. Raises `RestoreError` (or what `stream` raises), leaving it empty.
    """
    empty(upper)
    try:
        with _opened(upper) as root:
            _Applier(root, lower, _USER if user_xattr else _TRUSTED, _free_space(upper)).run(stream)
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


# Which directories


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


# Difference


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
            self._upper = stack.enter_context(_opened(self.dirs.upper))
            if self.dirs.merged is not None:
                self._merged = stack.enter_context(_opened(self.dirs.merged))
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
                    if len(self._buffer) >= _CHUNK_BYTES:
                        yield from self._flush()
            pending += reversed(below)

    @contextmanager
    def _directory(self, path: str, merged: bool) -> Iterator[tuple[int, bool, bool]]:
        """Describe a directory; yields it opened, whether through the mount, and whether it has whiteouts
        that are no devices."""
        with ExitStack() as stack:
            root = self._mounted(path) if merged else self._upper
            fd = stack.enter_context(_open_beneath(root, path or ".", os.O_RDONLY | os.O_DIRECTORY))
            xattrs, marks = _xattrs(fd, self.dirs.marks)
            redirected = not merged and "redirect" in marks
            if redirected:  # its content is at another place of the image: only the mount shows it here
                root = self._mounted(path)
                fd = stack.enter_context(_open_beneath(root, path, os.O_RDONLY | os.O_DIRECTORY))
            self._add(_described(path or ".", os.fstat(fd), xattrs))
            if redirected or marks.get("opaque") == b"y":
                self._add(Entry(_join(path, OPAQUE), Kind.REGULAR))
            yield fd, merged or redirected, marks.get("opaque") == b"x"

    def _file(
        self, directory: int, parent: str, name: str, info: os.stat_result, xattr_whiteouts: bool
    ) -> Iterator[bytes]:
        path = _join(parent, name)
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == _WHITEOUT_DEVICE:
            self._add(Entry(_join(parent, WHITEOUT + name), Kind.REGULAR))
            return
        _check_name(parent, name)
        if path in self.extra or stat.S_ISSOCK(info.st_mode):
            return
        xattrs, marks = _xattrs(f"/proc/self/fd/{directory}/{name}", self.dirs.marks)
        if xattr_whiteouts and "whiteout" in marks:
            self._add(Entry(_join(parent, WHITEOUT + name), Kind.REGULAR))
        elif first := self._other_name(path, info):
            self._add(_described(path, info, {}, kind=Kind.HARD_LINK, link=first))
        elif stat.S_ISLNK(info.st_mode):
            self._add(_described(path, info, xattrs, link=os.readlink(name, dir_fd=directory)))
        elif not stat.S_ISREG(info.st_mode):
            self._add(_described(path, info, xattrs))
        elif "metacopy" in marks:  # its content is still in the image
            with _open_beneath(self._mounted(path), path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
                yield from self._regular(path, fd, xattrs)
        else:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            with _closing(fd):
                yield from self._regular(path, fd, xattrs)

    def _extra_file(self, path: str, file: Path) -> Iterator[bytes]:
        with _closing(os.open(file, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise CheckpointError(f"{path}, which a process holds open, is no regular file")
            if first := self._held.get(_identity(info)):
                self._add(_described(path, info, {}, kind=Kind.HARD_LINK, link=first))
                return
            self._held[_identity(info)] = path
            yield from self._regular(path, fd, _xattrs(fd, self.dirs.marks)[0])

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
        self._add(_described(path, info, xattrs, segments=segments))
        stored = 0
        for offset, length in segments if segments is not None else ((0, info.st_size),):
            stored += length
            while length:
                piece = os.pread(fd, min(length, _CHUNK_BYTES), offset)
                if not piece:
                    raise CheckpointError(
                        f"{path} became shorter while it was read",
                        hint="nothing but the container may use it",
                    )
                offset += len(piece)
                length -= len(piece)
                if len(piece) > _CHUNK_BYTES // 4:
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


def _described(
    path: str,
    info: os.stat_result,
    xattrs: Mapping[str, bytes],
    *,
    kind: Kind | None = None,
    link: str = "",
    segments: Sequence[tar.Segment] | None = None,
) -> Entry:
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


def _segments(fd: int, info: os.stat_result) -> list[tar.Segment] | None:
    """Where the data of a file is when storing it sparse spares enough, else None."""
    size = info.st_size
    if size - info.st_blocks * 512 < _MIN_SPARED_BYTES:
        return None
    smallest_hole = max(_HOLE_BYTES, size // _MAX_SEGMENTS)
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


def _xattrs(file: int | str, marks: str) -> tuple[dict[str, bytes], dict[str, bytes]]:
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
        elif _is_carried(name):
            carried[name] = os.getxattr(file, name, follow_symlinks=follow)
    return carried, found


def _is_carried(name: str) -> bool:
    if name.startswith((_TRUSTED, _USER)):
        return name.startswith(_ESCAPES)
    return name.startswith(_CARRIED_XATTRS)


# Apply


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
            with _naming(path), _open_beneath(self.root, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
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
            with _closing(os.open(name, flags, 0o600, dir_fd=parent)) as fd:
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
            if entry.kind is Kind.CHARACTER_DEVICE and device == _WHITEOUT_DEVICE:
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
            with _open_beneath(parent, name, os.O_RDONLY | os.O_DIRECTORY) as fd:
                self._make_opaque(fd)
        self._describe_directory(parent, name, entry)

    def _describe_directory(self, parent: int, name: str, entry: Entry) -> None:
        _describe(parent, name, entry)
        self._times.append(("/".join(_parts(entry.path)) or ".", entry.mtime_ns))

    def _whiteout(self, parent: int, name: str) -> None:
        if name in ("", ".", ".."):
            raise _refused(WHITEOUT + name, "it deletes no name")
        try:
            os.mknod(name, stat.S_IFCHR | 0o600, _WHITEOUT_DEVICE, dir_fd=parent)
        except FileExistsError:
            # A layer's whiteouts hide what is below it, never what it brings itself.
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                with _open_beneath(parent, name, os.O_RDONLY | os.O_DIRECTORY) as fd:
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
                _open_beneath(base, path, os.O_RDONLY | os.O_NOFOLLOW) as source,
                _closing(os.open(parts[-1], flags, 0o600, dir_fd=directory)) as fd,
            ):
                offset = 0
                while piece := os.pread(source, _CHUNK_BYTES, offset):
                    self.free.take(size=len(piece))
                    _write(fd, offset, piece)
                    offset += len(piece)
                os.ftruncate(fd, offset)
                xattrs, _ = _xattrs(source, self.marks)
        _describe(directory, parts[-1], _described(path, info, xattrs))

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
        with _closing(self._open_directory(parts)) as fd:
            yield fd

    def _open_directory(self, parts: tuple[str, ...]) -> int:
        """Open a directory of the upper directory; one the layer does not describe is made as the image
        has it."""
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return _openat2(self.root, "/".join(parts) or ".", flags)
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            with _open_beneath(self.root, "/".join(parts[: depth - 1]) or ".", flags) as parent:
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
                    with _open_beneath(base, path, flags) as fd:
                        xattrs, _ = _xattrs(fd, self.marks)
                entry = _described(path, info, xattrs)
                self._describe_directory(parent, parts[depth - 1], entry)
        return _openat2(self.root, "/".join(parts), flags)

    @contextmanager
    def _below(self, parts: Sequence[str]) -> Iterator[tuple[int, os.stat_result | None]]:
        """The topmost lower directory that has a file of this path, and the file; (-1, None) if none has."""
        path = "/".join(parts)
        for directory in self.lower:
            with _opened(directory) as base:
                try:
                    with _open_beneath(base, path, os.O_PATH | os.O_NOFOLLOW) as fd:
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
        if _is_carried(key):
            os.setxattr(path, key, value, follow_symlinks=False)
    os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)


def _write(fd: int, offset: int, piece: bytes) -> None:
    """Write `piece`, leaving holes where it is zero."""
    start = 0
    for at in range(0, len(piece), _HOLE_BYTES):
        if piece[at] == 0 and piece[at : at + _HOLE_BYTES] == _ZEROS:
            _write_all(fd, offset + start, memoryview(piece)[start:at])
            start = at + _HOLE_BYTES
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
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == _WHITEOUT_DEVICE


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


# Descriptors


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _identity(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    with _closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        yield fd


@contextmanager
def _open_beneath(root: int, path: str, flags: int) -> Iterator[int]:
    with _closing(_openat2(root, path, flags)) as fd:
        yield fd


def _openat2(root: int, path: str, flags: int) -> int:
    """openat2(2) of `path` beneath `root`: no symbolic link on the way, no other mount, no way out."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE)
    fd = int(_libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how)))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return fd
