"""System calls that Python's standard library lacks, in one place, through ctypes."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_PIDFD_GETFD = 438
"""The same number on every architecture (linux, include/uapi/asm-generic/unistd.h)."""


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A duplicate of descriptor `fd` of the process `pidfd` (pidfd_getfd(2)); raises `OSError`."""
    return _check(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0), "pidfd_getfd")


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
