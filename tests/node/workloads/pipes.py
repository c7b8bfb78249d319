"""Pipes and FIFOs with bytes in them, of unusual sizes and modes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

import workload


def prepare() -> Callable[[], None]:
    reader, writer = os.pipe()
    os.write(writer, b"buffered")

    big_reader, big_writer = os.pipe()
    fcntl.fcntl(big_writer, fcntl.F_SETPIPE_SZ, 1 << 19)
    content = os.urandom(400_000)
    os.write(big_writer, content)

    full_reader, full_writer = os.pipe2(os.O_NONBLOCK)
    filled = 0
    try:
        while True:
            filled += os.write(full_writer, b"x" * 4096)
    except BlockingIOError:
        pass

    os.mkfifo("/run/fifo")
    fifo = os.open("/run/fifo", os.O_RDWR)
    os.write(fifo, b"in the fifo")

    broken_reader, broken_writer = os.pipe()
    os.close(broken_writer)

    def verify() -> None:
        workload.expect(os.read(reader, 100), b"buffered", "pipe")
        workload.expect(os.read(big_reader, 1 << 20), content, "large pipe")
        workload.expect(fcntl.fcntl(big_writer, fcntl.F_GETPIPE_SZ), 1 << 19, "size of the large pipe")
        try:
            os.write(full_writer, b"x" * 4096)
            raise AssertionError("the full pipe took more")
        except BlockingIOError:
            pass
        workload.expect(len(os.read(full_reader, 1 << 20)), filled, "bytes in the full pipe")
        workload.expect(os.read(fifo, 100), b"in the fifo", "FIFO")
        workload.expect(os.read(broken_reader, 100), b"", "end of a pipe without a writer")
        os.write(writer, b"again")
        workload.expect(os.read(reader, 100), b"again", "pipe, after the move")

    return verify


workload.run(prepare)
