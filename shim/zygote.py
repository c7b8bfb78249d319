"""The zygote: holds the shim's modules loaded, and has a process ready to become the next shim command.

An interpreter that starts and imports what a shim needs takes longer than runc takes for a container, and
every shim would have all of it to itself. A fork of the zygote is there in milliseconds, and shares the
zygote's memory until one of them writes to it.

One fork, the spare, always waits for a connection. When one comes, it makes itself what the client is
(descriptors, directory, environment, limits, cgroups), runs the client's command, and answers with the exit
status; a `start` that became a shim stays. What the kernel lets nobody take over (namespaces, capabilities,
seccomp filters …: `Standing`) must be equal, else the client is left to do it itself. So the zygote is never
needed: it may be missing, restarted or killed at any time, and shims that it started live on.

    containerd-shim-cedana-v1 zygote

listens on the socket that systemd passes (sd_listen_fds(3)), or makes its own.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from base.errors import CedanaError
from runtime import proc, syscalls
from runtime.cgroups import hierarchies
from shim import launch, log
from shim.__main__ import main
from shim.bootstrap import Zygote, listen

_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
_PEER_CREDENTIALS = struct.Struct("iII")
_BACKLOG = 512
_DESCRIPTORS = 4
"""A client's 0, 1, 2 and its working directory."""
_FIRST_PASSED = 3
"""SD_LISTEN_FDS_START."""
_RETRY_S = 1.0
"""Between spares when the last one died before anybody came."""


def run() -> int:
    """Serve until a signal ends this process. There is nothing to undo: a socket left behind is replaced."""
    with _listener() as listener:
        _preload()
        gc.collect()
        gc.freeze()
        syscalls.merge_memory()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a shim: the kernel reaps it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        syscalls.set_name("cedana-zygote")
        while True:
            if not _spare_taken(listener):
                time.sleep(_RETRY_S)


def _preload() -> None:
    """Import what a shim or `delete` will, and do once what costs memory the first time."""
    from shim import daemon, delete, info  # noqa: F401


def _listener() -> socket.socket:
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        os.set_inheritable(_FIRST_PASSED, False)
        return socket.socket(fileno=_FIRST_PASSED)
    path = os.fsdecode(launch.socket_path())
    listener = listen(path, socket.SOCK_SEQPACKET, _BACKLOG)
    if listener is None:
        raise CedanaError(f"a zygote listens at {path} already")
    return listener


def _spare_taken(listener: socket.socket) -> bool:
    """Fork a spare and wait until a client has it; False if it died before."""
    reader, writer = os.pipe()
    zygote = os.getpid()
    if os.fork() == 0:
        os.close(reader)
        try:
            status = _be_spare(listener, writer, zygote)
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException as error:
            log.error("the zygote's process failed", error=repr(error))
            status = 1
        os._exit(status)
    os.close(writer)
    try:
        return bool(os.read(reader, 1))
    finally:
        os.close(reader)


def _be_spare(listener: socket.socket, taken: int, zygote: int) -> int:
    """In the fork: wait for a client, be it, run its command. Its exit status is also ours."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    syscalls.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != zygote:
        return 1
    standing = Standing.of(os.getpid())
    connection, _ = listener.accept()
    syscalls.set_parent_death_signal(0)
    os.write(taken, b"+")
    os.close(taken)
    listener.close()
    pid, uid, _ = _PEER_CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    )
    if uid != os.geteuid() or (differs := Standing.of(pid).differs(standing)):
        log.info("a command is left to its own process", pid=pid, reason=differs or "another user's")
        return 1
    try:
        connection.send(launch.IDENTITY)
    except BrokenPipeError:
        return 1  # its patience was at an end
    message, fds, _, _ = socket.recv_fds(connection, launch.MESSAGE_LIMIT, _DESCRIPTORS)
    if len(fds) != _DESCRIPTORS:
        return 1  # of another version: it has turned away
    os.setpgid(0, 0)
    argv = _become(pid, message, fds)

    def answer(status: int) -> None:
        connection.send(bytes([status & 0xFF]))
        connection.close()

    status = main(argv, Zygote(containerd=int(proc.stat(pid)[1]), detach=lambda: answer(0)))
    sys.stdout.flush()
    if connection.fileno() >= 0:
        answer(status)
    return status


def _become(pid: int, message: bytes, fds: list[int]) -> list[str]:
    """Take over what process `pid` sent of itself and what can be read of it; returns its command line."""
    count, *words = message.split(b"\0")[:-1]
    argv = [word.decode(errors="surrogateescape") for word in words[: int(count)]]
    *streams, directory = fds
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.fchdir(directory)
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    for variable in words[int(count) :]:
        name, _, value = variable.partition(b"=")
        os.environ[os.fsdecode(name)] = os.fsdecode(value)
    sys.argv = argv
    os.umask(int(proc.status(pid)["Umask"], 8))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, pid))
    if (cpus := os.sched_getaffinity(pid)) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, cpus)
    _take_limits(pid)
    _take_cgroups(pid)
    _take_oom_score(pid)
    syscalls.set_command_line([sys.executable, "-IS", *argv])
    return argv


def _take_limits(pid: int) -> None:
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            number = getattr(resource, name)
            limits = resource.prlimit(pid, number)
            if limits != resource.getrlimit(number):
                resource.setrlimit(number, limits)


def _take_cgroups(pid: int) -> None:
    own, mounts = _cgroups(os.getpid()), hierarchies()
    for controllers, path in _cgroups(pid).items():
        if path != own.get(controllers):
            mount = mounts[controllers.split(",")[0]]
            with open(mount / path.lstrip("/") / "cgroup.procs", "w") as file:
                file.write("0")


def _cgroups(pid: int) -> dict[str, str]:
    """Path by controllers ('' for v2), of the hierarchies that a process is in."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}


def _take_oom_score(pid: int) -> None:
    score = Path(f"/proc/{pid}/oom_score_adj").read_text()
    if score != Path("/proc/self/oom_score_adj").read_text():
        Path("/proc/self/oom_score_adj").write_text(score)


@dataclass(frozen=True)
class Standing:
    """What a process cannot take over from another."""

    namespaces: tuple[str, ...]
    root: tuple[int, int]
    status: tuple[str, ...]
    label: str
    """Of the security module."""

    @classmethod
    def of(cls, pid: int) -> Standing:
        root = os.stat(f"/proc/{pid}/root/")
        status = proc.status(pid)
        return cls(
            tuple(_link(f"/proc/{pid}/ns/{name}") for name in _NAMESPACES),
            (root.st_dev, root.st_ino),
            tuple(status.get(name, "") for name in _STATUS),
            _label(pid),
        )

    def differs(self, other: Standing) -> str:
        """The name of what is not equal; '' if everything is."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) != getattr(other, name):
                return name
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""  # a kernel without this kind of namespace


def _label(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/attr/current").read_text()
    except OSError:
        return ""  # no security module
