"""File locks: flock, POSIX records, and open-file-description locks."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable

import workload

F_OFD_SETLK = 37


def prepare() -> Callable[[], None]:
    os.makedirs("/locks", exist_ok=True)
    whole = open("/locks/flock", "w")  # noqa: SIM115
    fcntl.flock(whole, fcntl.LOCK_EX)
    shared = open("/locks/shared", "w+")  # noqa: SIM115
    fcntl.flock(shared, fcntl.LOCK_SH)
    records = open("/locks/posix", "w+")  # noqa: SIM115
    records.write("x" * 100)
    records.flush()
    fcntl.lockf(records, fcntl.LOCK_EX, 10, 20)
    described = open("/locks/ofd", "w+")  # noqa: SIM115
    described.write("x" * 100)
    described.flush()
    fcntl.fcntl(described, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 50, 0))

    def verify() -> None:
        pid = os.fork()
        if pid == 0:
            try:
                look_from_outside()
            except BaseException as error:
                workload.write("/locks/error", repr(error))
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            with open("/locks/error") as file:
                raise AssertionError(file.read())
        for held in (whole, shared, records, described):
            held.close()
        with open("/locks/flock", "w") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def look_from_outside() -> None:
        with open("/locks/flock", "r+") as file:
            refused(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB), "flock")
        with open("/locks/shared", "r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            refused(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB), "shared flock")
        with open("/locks/posix", "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 0)
            refused(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 25), "POSIX record lock")
        with open("/locks/ofd", "r+") as file:
            refused(lambda: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0), "description lock")

    return verify


def refused(lock: Callable[[], object], what: str) -> None:
    try:
        lock()
    except BlockingIOError:
        return
    raise AssertionError(f"the {what} is no longer held")


workload.run(prepare)
