"""Lets CRIU read the resource limits of other users' processes where root may not.

Reading them with prlimit(2) takes CAP_SYS_RESOURCE, which root lacks in many virtual machines and nested
containers, though /proc/PID/limits shows the same to everyone. There, runc and CRIU run under a seccomp
filter that hands just that call to us (seccomp_unotify(2)), and we answer it from /proc. With the
capability nothing is filtered. A filtered CRIU may not suspend the filters of others (ptrace(2),
PTRACE_O_SUSPEND_SECCOMP), so a container that has both, other users and seccomp, needs the capability.
"""

from __future__ import annotations

import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hooks.participant import Finding
from runtime import proc, syscalls

_CAP_SYS_RESOURCE = 24
_RLIM_INFINITY = (1 << 64) - 1
_MACHINES = {"x86_64": (0xC000003E, 302), "aarch64": (0xC00000B7, 261)}
"""machine: (AUDIT_ARCH of linux/audit.h, number of prlimit64)."""

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_RESPONSE = struct.Struct("=QqiI")
_LIMIT = struct.Struct("=QQ")


def _iowr(number: int, size: int) -> int:
    return 3 << 30 | size << 16 | ord("!") << 8 | number


_RECEIVE = _iowr(0, _NOTIFICATION.size)
_SEND = _iowr(1, _RESPONSE.size)
"""linux/seccomp.h: SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND, and the structures they carry."""


def refused(pids: Sequence[int]) -> Iterator[Finding]:
    """What stops a dump of the processes `pids` for want of the capability."""
    if not _may_read_limits() and _of_other_users(pids) and _under_seccomp(pids):
        yield Finding(
            "root lacks CAP_SYS_RESOURCE on this node, which a container needs that has both processes of"
            " other users and a seccomp profile",
            hint="give the node the capability, or run the container without seccomp or as root",
            fatal=True,
        )


@dataclass(frozen=True)
class Launcher:
    """How to start a program whose reads we answer."""

    prefix: tuple[str, ...] = ()
    """Goes before its command line."""
    pass_fds: tuple[int, ...] = ()


@contextmanager
def answering(pids: Sequence[int]) -> Iterator[Launcher]:
    """While the block runs, what is started by the launcher can read the limits of `pids`."""
    machine = _MACHINES.get(platform.machine())
    if machine is None or _may_read_limits() or not _of_other_users(pids):
        yield Launcher()
        return
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=_serve, args=(ours,), name="rlimits")
    thread.start()
    try:
        fd = theirs.fileno()
        yield Launcher((sys.executable, "-P", "-m", "runtime.rlimits", str(fd)), (fd,))
    finally:
        theirs.close()
        thread.join()


def _launch(fd: int, argv: Sequence[str]) -> None:
    """Become `argv`, filtered; the listener goes to whoever holds the other end of the socket `fd`."""
    listener = syscalls.seccomp_listener(syscalls.bpf_program(_filter(*_MACHINES[platform.machine()])))
    with socket.socket(fileno=fd) as theirs:
        socket.send_fds(theirs, [b"."], [listener])
    os.execv(argv[0], list(argv))


def limits_of(pid: int) -> list[tuple[int, int]]:
    """(soft, hard) of every resource, in the order of their numbers, from /proc/PID/limits."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return [(_value(line[26:46]), _value(line[47:67])) for line in lines]


def _value(column: str) -> int:
    text = column.strip()
    return _RLIM_INFINITY if text == "unlimited" else int(text)


def _may_read_limits() -> bool:
    return bool(int(proc.status("self").get("CapEff", "0"), 16) >> _CAP_SYS_RESOURCE & 1)


def _of_other_users(pids: Sequence[int]) -> bool:
    """Whether any of `pids` has a user or group id that is not root's."""
    statuses = (proc.status(pid) for pid in pids)
    return any({*s.get("Uid", "").split()[:3], *s.get("Gid", "").split()[:3]} - {"0"} for s in statuses)


def _under_seccomp(pids: Sequence[int]) -> bool:
    return any(proc.status(pid).get("Seccomp", "0") != "0" for pid in pids)


def _filter(audit_arch: int, prlimit64: int) -> list[tuple[int, int, int, int]]:
    """BPF: notify of prlimit64(other pid, resource, NULL, …), allow everything else.

    Offsets are those of `struct seccomp_data`: nr 0, arch 4, args from 16, eight bytes each.
    """
    load, equal, give = 0x20, 0x15, 0x06
    allow, notify = 0x7FFF0000, 0x7FC00000
    return [
        (load, 0, 0, 4),
        (equal, 0, 8, audit_arch),
        (load, 0, 0, 0),
        (equal, 0, 6, prlimit64),
        (load, 0, 0, 16),
        (equal, 4, 0, 0),
        (load, 0, 0, 32),
        (equal, 0, 2, 0),
        (load, 0, 0, 36),
        (equal, 1, 0, 0),
        (give, 0, 0, allow),
        (give, 0, 0, notify),
    ]


def _serve(ours: socket.socket) -> None:
    """Answer until no filtered process is left."""
    with ours:
        message, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not message:
        return
    listener = descriptors[0]
    try:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        while not any(events & select.POLLHUP for _, events in poll.poll()):
            _answer(listener)
    finally:
        os.close(listener)


def _answer(listener: int) -> None:
    buffer = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, buffer)
        identity, caller, _, _, _, _, pid, resource, _, target, _, _ = _NOTIFICATION.unpack(buffer)
        error = 0
        try:
            limit = _LIMIT.pack(*limits_of(pid)[resource])
            with open(f"/proc/{caller}/mem", "r+b", buffering=0) as memory:
                memory.seek(target)
                memory.write(limit)
        except FileNotFoundError:
            error = -3  # ESRCH
        except (OSError, IndexError):
            error = -1  # EPERM
        fcntl.ioctl(listener, _SEND, _RESPONSE.pack(identity, 0, error, 0))
    except FileNotFoundError:
        return  # the caller was killed meanwhile (ENOENT)


if __name__ == "__main__":
    _launch(int(sys.argv[1]), sys.argv[2:])
