"""TCP sockets that CRIU left in repair mode: it takes them there while it dumps them, and back at its end.

If it is killed between, nobody does, and the connection neither takes nor gives anything any more.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress

_TCP_REPAIR = 19
"""linux/tcp.h; needs CAP_NET_ADMIN."""
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def leave(pids: Iterable[int]) -> None:
    """Take every TCP socket of these processes out of repair mode; the others are not touched."""
    for pid in pids:
        with suppress(OSError):
            for one in _sockets(pid):
                with closing(one), suppress(OSError):
                    if one.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR):
                        one.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)


def _sockets(pid: int) -> Iterator[socket.socket]:
    """The process's own TCP sockets, through descriptors of ours."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                fd = _libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
                if fd < 0:
                    continue
                found = socket.socket(fileno=fd)
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    yield found
                else:
                    found.close()
    finally:
        os.close(pidfd)
