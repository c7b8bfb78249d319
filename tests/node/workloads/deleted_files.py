"""Files that are open and deleted: small, large, on the root, on tmpfs, with another name left or not."""

from __future__ import annotations

import os
from collections.abc import Callable

import workload

LARGE = os.urandom(1 << 16) * 96  # 6 MiB, more than CRIU carries unless told


def prepare() -> Callable[[], None]:
    os.makedirs("/data", exist_ok=True)

    small = os.open("/data/small", os.O_RDWR | os.O_CREAT)
    os.write(small, b"0123456789")
    os.lseek(small, 4, os.SEEK_SET)
    os.unlink("/data/small")

    large = os.open("/data/large", os.O_RDWR | os.O_CREAT)
    os.write(large, LARGE)
    os.unlink("/data/large")

    tmpfs = os.open("/dev/shm/gone", os.O_RDWR | os.O_CREAT)
    os.write(tmpfs, b"on tmpfs")
    os.unlink("/dev/shm/gone")

    linked = os.open("/data/linked", os.O_RDWR | os.O_CREAT)
    os.write(linked, b"two names")
    os.link("/data/linked", "/data/other-name")
    os.unlink("/data/linked")

    replaced = os.open("/data/replaced", os.O_RDWR | os.O_CREAT)
    os.write(replaced, b"old")
    workload.write("/data/replaced", "new content")

    log = os.open("/data/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(log, b"line 1\n")

    os.mkdir("/data/gone")
    in_gone = os.open("/data/gone/file", os.O_RDWR | os.O_CREAT)
    os.write(in_gone, b"in a directory that is gone")
    os.unlink("/data/gone/file")
    os.rmdir("/data/gone")

    def verify() -> None:
        workload.expect(os.read(small, 100), b"456789", "small file from its offset")
        workload.expect(os.fstat(small).st_nlink, 0, "links of the small file")
        workload.expect(os.pread(large, 1 << 24, 0) == LARGE, True, "large file")
        workload.expect(os.pread(tmpfs, 100, 0), b"on tmpfs", "file on tmpfs")
        workload.expect(os.pread(linked, 100, 0), b"two names", "file with another name")
        os.pwrite(linked, b"TWO", 0)
        workload.expect(read("/data/other-name"), b"TWO names", "the other name, after a write")
        workload.expect(os.pread(replaced, 100, 0), b"old", "replaced file")
        workload.expect(read("/data/replaced"), b"new content", "its replacement")
        os.write(log, b"line 2\n")
        workload.expect(read("/data/log"), b"line 1\nline 2\n", "appended log")
        workload.expect(
            os.pread(in_gone, 100, 0), b"in a directory that is gone", "file in a removed directory"
        )
        workload.expect(sorted(os.listdir("/data")), ["log", "other-name", "replaced"], "names in /data")
        workload.expect("gone" in os.listdir("/dev/shm"), False, "the deleted name on tmpfs")

    return verify


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


workload.run(prepare)
