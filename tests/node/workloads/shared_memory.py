"""Memory shared between processes in every way there is: SysV, POSIX, memfd, anonymous, a file."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from collections.abc import Callable

import workload

SIZE = 1 << 20


def prepare() -> Callable[[], None]:
    segment = workload.call("shmget", 0x5EED, SIZE, 0o1600)
    workload.libc.shmat.restype = ctypes.c_void_p
    address = workload.libc.shmat(segment, None, 0)
    semaphores = workload.call("semget", 0x5EED, 2, 0o1600)
    workload.call("semctl", semaphores, 1, 16, 42)  # SETVAL

    memfd = os.memfd_create("shared", os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, SIZE)
    by_memfd = mmap.mmap(memfd, SIZE)

    posix = os.open("/dev/shm/segment", os.O_RDWR | os.O_CREAT)
    os.ftruncate(posix, SIZE)
    by_posix = mmap.mmap(posix, SIZE)
    os.close(posix)

    anonymous = mmap.mmap(-1, SIZE)
    with open("/mapped", "wb+") as file:
        file.truncate(SIZE)
        by_file = mmap.mmap(file.fileno(), SIZE)

    def sysv(offset: int, data: bytes | None = None, length: int = 16) -> bytes:
        if data is not None:
            ctypes.memmove(address + offset, data, len(data))
        return ctypes.string_at(address + offset, length)

    sysv(4096, b"sysv".ljust(16, b"\0"))
    maps = {"memfd": by_memfd, "posix": by_posix, "anonymous": anonymous, "file": by_file}
    for name, view in maps.items():
        view[4096 : 4096 + len(name)] = name.encode()

    parent, child = socket.socketpair()
    if os.fork() == 0:
        while child.recv(1):
            for name, view in maps.items():
                view[: len(name) + 6] = f"child-{name}".encode()
            sysv(0, b"child-sysv".ljust(16, b"\0"))
            child.sendall(b".")
        os._exit(0)
    child.close()

    def verify() -> None:
        for name, view in maps.items():
            workload.expect(view[4096 : 4096 + len(name)], name.encode(), f"{name} memory")
        workload.expect(sysv(4096).rstrip(b"\0"), b"sysv", "SysV memory")
        workload.expect(workload.call("shmget", 0x5EED, SIZE, 0o600), segment, "id of the SysV segment")
        workload.expect(workload.call("semctl", semaphores, 1, 12), 42, "SysV semaphore")  # GETVAL
        parent.sendall(b"go")
        parent.recv(1)
        for name, view in maps.items():
            workload.expect(
                view[: len(name) + 6], f"child-{name}".encode(), f"{name} memory written by the child"
            )
        workload.expect(sysv(0).rstrip(b"\0"), b"child-sysv", "SysV memory written by the child")
        with open("/mapped", "rb") as file:
            workload.expect(file.read(10), b"child-file", "the mapped file")
        with open("/dev/shm/segment", "rb") as file:
            workload.expect(file.read(11), b"child-posix", "the POSIX segment's file")

    return verify


workload.run(prepare)
