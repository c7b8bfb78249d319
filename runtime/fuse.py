"""A directory of read-only files whose contents this process makes when they are read (FUSE).

Just enough of the protocol (linux, include/uapi/linux/fuse.h, version 7.31) for somebody who opens a file by
name and reads it. When this process ends, however it ends, every read fails: the kernel sees to that.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from runtime import syscalls
from runtime.errors import RestoreError

_IN_HEADER = struct.Struct("<IIQQIIIHH")
"""length, opcode, unique, node, uid, gid, pid, extension length, padding"""
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_INIT_OUT = struct.Struct("<4I2H2I2HIIHH20x")
_READ_IN = struct.Struct("<QQI")
_ASYNC_READ, _PARALLEL_DIROPS, _MAX_PAGES = 1 << 0, 1 << 18, 1 << 22
_FOPEN_DIRECT_IO, _FOPEN_KEEP_CACHE = 1 << 0, 1 << 1
_MAX_READ_BYTES = 1 << 20
_BUFFER_BYTES = 16 << 10
"""For requests; more than FUSE_MIN_READ_BUFFER, since nobody writes."""
_ROOT_NODE = 1
_FOR_EVER_S = 1 << 31
_THREADS = 4


Buffer = bytes | bytearray | memoryview


class _Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


class Content(Protocol):
    def read(self, file: int, offset: int, size: int) -> Sequence[Buffer]:
        """The bytes [offset, offset + size) of file number `file`, in parts; fewer only at its end."""


@dataclass(frozen=True)
class ServedFile:
    name: str
    size_bytes: int
    direct: bool = True
    """Each read comes to us as it is, and nothing is kept; else the kernel reads ahead and caches."""


def mount(directory: Path) -> int:
    """Mount an empty-handed file system on `directory`; returns the descriptor a `FileServer` serves it by.

    Raises `RestoreError` where the kernel has no FUSE.
    """
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RestoreError(
            f"the kernel offers no FUSE: {error.strerror}",
            hint="load its module (modprobe fuse): CRIU is given the memory through it",
        ) from error
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    data = f"fd={device},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0"
    try:
        syscalls.mount("cedana", str(directory), "fuse", flags, data)
    except OSError as error:
        os.close(device)
        raise RestoreError(f"no file system can be mounted on {directory}", details=str(error)) from error
    return device


def unmount(directory: Path) -> None:
    """End what is mounted on `directory`, if anything is: also where another mount namespace has a copy."""
    with suppress(OSError):
        # MNT_FORCE ends the file system itself (linux, fs/fuse/inode.c: fuse_umount_begin).
        syscalls.unmount(str(directory), syscalls.MNT_FORCE | syscalls.MNT_DETACH)


class FileServer:
    """Serves `files` on the file system of `device`, until it is unmounted; takes the descriptor over.

    An error that `content` raises fails the read (EIO).
    """

    def __init__(self, device: int, files: Sequence[ServedFile], content: Content) -> None:
        self._device = device
        self._files = files
        self._content = content
        self._threads = [
            threading.Thread(target=self._serve, name=f"fuse-{number}", daemon=True)
            for number in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait until the file system is unmounted."""
        for thread in self._threads:
            thread.join()
        os.close(self._device)

    def _serve(self) -> None:
        buffer = bytearray(_BUFFER_BYTES)
        while True:
            try:
                os.readv(self._device, [buffer])
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EAGAIN):  # the request was taken back
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(buffer)
            body = memoryview(buffer)[_IN_HEADER.size :]
            try:
                answer = self._answer(opcode, node, body)
            except OSError as error:
                answer = error.errno or errno.EIO
            except Exception:
                answer = errno.EIO
            if answer is not None:
                self._reply(unique, answer)

    def _reply(self, unique: int, answer: Sequence[Buffer] | int) -> None:
        failed, parts = (answer, []) if isinstance(answer, int) else (0, [*answer])
        head = _OUT_HEADER.pack(_OUT_HEADER.size + sum(map(len, parts)), -failed, unique)
        try:
            os.writev(self._device, [head, *parts])
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits for it any more
                raise

    def _answer(self, opcode: int, node: int, body: memoryview) -> Sequence[Buffer] | int | None:
        """What to reply: parts, an error number, or nothing at all."""
        match opcode:
            case _Op.READ:
                _, offset, size = _READ_IN.unpack_from(body)
                return self._content.read(self._number(node), offset, size)
            case _Op.LOOKUP:
                name = bytes(body[: bytes(body).index(0)]).decode(errors="replace")
                for number, file in enumerate(self._files):
                    if file.name == name:
                        found = number + 2
                        times = struct.pack("<QQQQII", found, 0, _FOR_EVER_S, _FOR_EVER_S, 0, 0)
                        return [times, self._attributes(found)]
                return errno.ENOENT
            case _Op.GETATTR:
                return [struct.pack("<QII", _FOR_EVER_S, 0, 0), self._attributes(node)]
            case _Op.OPEN:
                direct = self._files[self._number(node)].direct
                return [struct.pack("<QII", 0, _FOPEN_DIRECT_IO if direct else _FOPEN_KEEP_CACHE, 0)]
            case _Op.RELEASE | _Op.FLUSH | _Op.DESTROY:
                return []
            case _Op.FORGET | _Op.BATCH_FORGET | _Op.INTERRUPT:
                return None
            case _Op.INIT:
                return [self._init(body)]
            case _:
                return errno.ENOSYS

    def _init(self, body: memoryview) -> bytes:
        major, minor, _, offered = struct.unpack_from("<4I", body)
        if major != 7 or minor < 31:
            raise OSError(errno.EPROTO, f"FUSE {major}.{minor}")
        flags = offered & (_ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES)
        pages = _MAX_READ_BYTES // os.sysconf("SC_PAGESIZE")
        # Nobody writes: the smallest max_write the kernel takes, so that requests are small.
        return _INIT_OUT.pack(7, 31, _MAX_READ_BYTES, flags, 16, 12, 4096, 1, pages, 0, 0, 0, 0, 0)

    def _number(self, node: int) -> int:
        if not 2 <= node < len(self._files) + 2:
            raise OSError(errno.EISDIR if node == _ROOT_NODE else errno.ESTALE, "no such file")
        return node - 2

    def _attributes(self, node: int) -> bytes:
        if node == _ROOT_NODE:
            size, mode = 0, stat.S_IFDIR | 0o500
        else:
            size, mode = self._files[self._number(node)].size_bytes, stat.S_IFREG | 0o400
        return _ATTR.pack(node, size, (size + 511) // 512, *(0,) * 6, mode, 1, 0, 0, 0, 4096, 0)
