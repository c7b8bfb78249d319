"""Holds what cannot be checkpointed (`stubborn.py KIND`, one of those in `prepare`), and counts."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable

import workload

PTRACE_SEIZE = 0x4206
MNT_DETACH = 2


def prepare() -> Callable[[], None]:
    held = {
        "io_uring": io_uring,
        "vsock": vsock,
        "unix": unix,
        "traced": traced,
        "packets": packets,
        "semaphore": lambda: os.eventfd(3, os.EFD_SEMAPHORE),
        "detached": detached,
    }[sys.argv[1]]()
    return lambda: workload.expect(held is None, False, "what is held")


def io_uring() -> int:
    return workload.call("syscall", 425, 8, ctypes.create_string_buffer(120))


def vsock() -> socket.socket:
    return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)


def unix() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("/outside/server.sock")
    return connection


def traced() -> int:
    """A child under a debugger: a process has one tracer at a time, and CRIU would be the second."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    workload.call("ptrace", PTRACE_SEIZE, pid, None, None)
    return pid


def packets() -> tuple[int, int]:
    """A pipe in packet mode, with packets in it."""
    reader, writer = os.pipe2(os.O_DIRECT)
    os.write(writer, b"one")
    os.write(writer, b"two")
    return reader, writer


def detached() -> int:
    """A file on a mount that is no longer in the tree."""
    os.mkdir("/detached")
    workload.call("mount", b"tmpfs", b"/detached", b"tmpfs", 0, None)
    file = os.open("/detached/file", os.O_RDWR | os.O_CREAT)
    workload.call("umount2", b"/detached", MNT_DETACH)
    return file


workload.run(prepare)
