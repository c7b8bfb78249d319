"""The look before the freeze: every process of a container, what it holds, and what CRIU needs for it.

Reads /proc only; touches nothing. What cannot be carried is said here, in a sentence, before any process
stops; what needs a CRIU option sets it, so that no user has to know one. The same record is written into
the artifact, shown by `cedana inspect`, and compared with the target before a restore.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hooks.participant import CriuSettings, Finding
from runtime import proc, rlimits
from runtime.container import Container
from runtime.criu import is_plain
from runtime.freezer import Freezer
from runtime.sockets import Socket, outside_peers, refused, sockets_of
from runtime.watches import paths_of, watched

_SECOND_LOOKS = 3
_GHOST_LIMIT_MIN = 1 << 20
"""CRIU's own default for the size of a deleted file it carries."""

_REFUSED = {
    "anon_inode:[io_uring]": ("an io_uring", "set the sysctl kernel.io_uring_disabled=2, or turn io_uring off"
                              " in the program, so that it falls back to ordinary system calls"),
    "anon_inode:[userfaultfd]": ("a userfaultfd", "stop what uses it (a hypervisor, a garbage collector)"),
    "anon_inode:[perf_event]": ("a perf event", "detach the profiler"),
    "anon_inode:bpf-map": ("a BPF map", "unload the BPF program"),
    "anon_inode:bpf-prog": ("a BPF program", "unload it"),
    "anon_inode:kvm-vm": ("a virtual machine", "checkpoint the guest instead"),
    "anon_inode:kvm-vcpu": ("a virtual machine's CPU", "checkpoint the guest instead"),
    "anon_inode:[landlock-ruleset]": ("a Landlock rule set", "close it after landlock_restrict_self()"),
    "/secretmem": ("secret memory (memfd_secret)", "it cannot be read from outside by design"),
    "/dev/fuse": ("an open FUSE device", "unmount the file system it serves"),
    "/dev/kvm": ("/dev/kvm", "checkpoint the guest instead"),
}  # fmt: skip
_PACKET_PIPE = (
    "a pipe in packet mode (O_DIRECT)",
    "let the program use a SOCK_SEQPACKET socket pair instead",
)
_SEMAPHORE = (
    "an eventfd in semaphore mode (EFD_SEMAPHORE)",
    "CRIU would bring it back in the other mode; let the program use a plain eventfd or a futex",
)


@dataclass(frozen=True)
class OpenFile:
    """A descriptor. `path` is as the process sees it; `size_bytes` is 0 unless it is a regular file."""

    fd: int
    path: str
    kind: str
    """file, directory, device, fifo, socket, pipe, memfd, or the anonymous inode's name."""
    size_bytes: int = 0
    links: int = 1
    deleted: bool = False


@dataclass(frozen=True)
class Process:
    """A process of the container; `pid` and `parent` are as seen inside it, `host_pid` from outside."""

    pid: int
    parent: int
    host_pid: int
    name: str
    command: tuple[str, ...]
    executable: str
    directory: str
    threads: int
    resident_bytes: int
    files: tuple[OpenFile, ...]


@dataclass(frozen=True)
class Report:
    processes: tuple[Process, ...]
    sockets: tuple[Socket, ...]
    findings: tuple[Finding, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.host_pid for process in self.processes)


def probe(container: Container, criu: CriuSettings) -> Report:
    """Look at `container`; adds what CRIU needs to `criu`."""
    findings: list[Finding] = []
    if _namespace(container.pid, "pid") == _namespace("self", "pid"):
        findings.append(
            Finding(
                "the container shares the host's pid namespace, where its process ids may be taken",
                hint="run it in a pid namespace of its own (without --pid=host)",
                fatal=True,
            )
        )
    pids = Freezer.of(container).pids()
    processes = [process for pid in pids if (process := read_process(pid)) is not None]
    processes.sort(key=lambda process: (process.host_pid != container.pid, process.pid))
    findings += _foreign(processes, container.pid)
    for process in processes:
        findings += _refused(process)
    _ask_criu(processes, criu)
    findings += _watches(processes, container.pid, criu)
    sockets = [sock for process in processes for sock in _sockets(process)]
    findings += refused(sockets)
    findings += outside_peers(sockets, container.pid)
    findings += rlimits.refused([process.host_pid for process in processes])
    return Report(tuple(processes), tuple(sockets), tuple(findings))


def _sockets(process: Process) -> Iterator[Socket]:
    fds = {file.fd: file.path[8:-1] for file in process.files if file.path.startswith("socket:[")}
    return sockets_of(process.host_pid, process.pid, process.name, fds)


def read_process(pid: int) -> Process | None:
    """The process `pid`; None if it is gone or a zombie's descriptors cannot be read."""
    root = Path(f"/proc/{pid}")
    try:
        status = proc.status(pid)
        command = (root / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")
        return Process(
            pid=int(status["NSpid"].split()[-1]),
            parent=_inner_pid(int(status["PPid"])),
            host_pid=pid,
            name=status["Name"],
            command=tuple(command.split("\0")) if command else (),
            executable=_readlink(root / "exe"),
            directory=_readlink(root / "cwd"),
            threads=int(status["Threads"]),
            resident_bytes=_kib(status.get("VmRSS", "0 kB")),
            files=tuple(_open_files(root)),
        )
    except (OSError, KeyError):
        return None


def _open_files(root: Path) -> Iterator[OpenFile]:
    try:
        names = sorted(os.listdir(root / "fd"), key=int)
    except OSError:
        return
    for name in names:
        link = root / "fd" / name
        try:
            path, info = os.readlink(link), link.stat()
        except OSError:
            continue
        deleted = path.endswith(" (deleted)")
        yield OpenFile(
            fd=int(name),
            path=path.removesuffix(" (deleted)"),
            kind=_kind(path, info.st_mode),
            size_bytes=info.st_size if stat.S_ISREG(info.st_mode) else 0,
            links=info.st_nlink,
            deleted=deleted,
        )


def _kind(path: str, mode: int) -> str:
    if path.startswith("anon_inode:"):
        return path.removeprefix("anon_inode:").strip("[]")
    if path.startswith("/memfd:"):
        return "memfd"
    if path.startswith("pipe:"):
        return "pipe"
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "directory"), (stat.S_ISSOCK, "socket"))
    for test, kind in kinds:
        if test(mode):
            return kind
    return "fifo" if stat.S_ISFIFO(mode) else "device"


def _foreign(processes: Sequence[Process], init: int) -> Iterator[Finding]:
    """Processes that entered from outside (`exec`) and what they started: not init's descendants.

    Looks again before it says so: a parent may have died, and its child gone to another, in between.
    """
    suspects = [process for process in processes if not _descends(process.host_pid, init)]
    for _ in range(_SECOND_LOOKS):
        if not suspects:
            return
        time.sleep(0.005)
        suspects = [process for process in suspects if not _descends(process.host_pid, init)]
    for process in suspects:
        yield Finding(
            f"process {process.pid} ({' '.join(process.command)[:60] or process.name}) was started by an"
            " exec from outside and is tied to it",
            hint="end the exec session first; only the container's own process tree can move",
            fatal=True,
        )


def _descends(pid: int, init: int) -> bool:
    """Whether `pid` is `init` or one of its descendants, or gone."""
    ancestor = pid
    while ancestor not in (0, init):
        ancestor = _parent(ancestor)
    return ancestor == init or not os.path.exists(f"/proc/{pid}")


def _refused(process: Process) -> Iterator[Finding]:
    for file in process.files:
        found = _REFUSED.get(file.path)
        if file.kind == "pipe" and _packetized(process.host_pid, file.fd):
            found = _PACKET_PIPE
        elif file.kind == "eventfd" and _is_semaphore(process.host_pid, file.fd):
            found = _SEMAPHORE
        if found:
            what, hint = found
            yield Finding(
                f"process {process.pid} ({process.name}) holds {what} (descriptor {file.fd}), which cannot be"
                " checkpointed",
                hint=hint,
                fatal=True,
            )


def _packetized(host_pid: int, fd: int) -> bool:
    """Whether a pipe keeps its writes apart (pipe(2), O_DIRECT)."""
    return bool(int(_fdinfo(host_pid, fd).get("flags", "0"), 8) & os.O_DIRECT)


def _is_semaphore(host_pid: int, fd: int) -> bool:
    """Whether an eventfd counts down by one (eventfd(2), EFD_SEMAPHORE); shown from Linux 6.5 on."""
    return _fdinfo(host_pid, fd).get("eventfd-semaphore", "0") != "0"


def _fdinfo(host_pid: int, fd: int) -> dict[str, str]:
    """What the kernel shows of a descriptor; empty if it is gone."""
    try:
        lines = Path(f"/proc/{host_pid}/fdinfo/{fd}").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _ask_criu(processes: Sequence[Process], criu: CriuSettings) -> None:
    criu.flags |= {"file-locks", "link-remap", "ext-unix-sk"}
    files = [file for process in processes for file in process.files]
    largest = max((file.size_bytes for file in files if file.deleted), default=0)
    if largest > _GHOST_LIMIT_MIN:
        criu.values.append(("ghost-limit", str(largest * 2)))


def _watches(processes: Sequence[Process], init: int, criu: CriuSettings) -> Iterator[Finding]:
    """Tell CRIU the paths of what inotify watches on the root file system."""
    watches = {
        inode: process
        for process in processes
        for file in process.files
        if file.kind == "inotify"
        for inode in watched(process.host_pid, file.fd)
    }
    if not watches:
        return
    paths = paths_of(frozenset(watches), init)
    criu.flags.add("force-irmap")
    for inode, path in sorted(paths.items(), key=lambda item: item[1]):
        if is_plain(path):
            criu.values.append(("irmap-scan-path", path))
            continue
        process = watches[inode]
        yield Finding(
            f"process {process.pid} ({process.name}) watches {path!r}, a name CRIU cannot be told",
            hint="watch a path of letters, digits and ./_-:@=+, only",
            fatal=True,
        )
    root_device = os.stat(f"/proc/{init}/root/.").st_dev
    for inode, process in watches.items():
        if inode.device == root_device and inode not in paths:
            yield Finding(
                f"process {process.pid} ({process.name}) watches a file that has no name any more (inode"
                f" {inode.number})",
                hint="let the program end the inotify watch of the deleted file",
                fatal=True,
            )


def changed_files(
    processes: Sequence[Mapping[str, Any]], rootfs: Path, spec: Mapping[str, Any]
) -> dict[str, str]:
    """Files open at the checkpoint that are missing or different now, each with a sentence about it.

    `processes` is the artifact's record (as written from `Process`), `rootfs` the mounted root.
    Files on the container's own tmpfs and proc mounts travel inside the checkpoint and are not looked at.
    """
    binds = {m["destination"]: m["source"] for m in spec.get("mounts", []) if "bind" in m.get("type", "")
             or {"bind", "rbind"} & set(m.get("options", []))}  # fmt: skip
    carried = [m["destination"] for m in spec.get("mounts", []) if m["destination"] not in binds]
    changed: dict[str, str] = {}
    seen = set()
    for process in processes:
        for file in process.get("files", []):
            path = file.get("path", "")
            if file.get("kind") != "file" or file.get("deleted") or path in seen:
                continue
            seen.add(path)
            if any(path == c or path.startswith(c.rstrip("/") + "/") for c in carried):
                continue
            mount = max((d for d in binds if path == d or path.startswith(d.rstrip("/") + "/")),
                        key=len, default=None)  # fmt: skip
            base, rest = (rootfs, path) if mount is None else (Path(binds[mount]), path[len(mount) :])
            size = _size_beneath(base, rest)
            if size is None:
                changed[path] = f"{path} was open at the checkpoint and is missing here"
            elif size != file.get("size_bytes"):
                changed[path] = (
                    f"{path} had {file.get('size_bytes')} bytes at the checkpoint and has {size} here"
                )
    return changed


def _size_beneath(base: Path, path: str) -> int | None:
    """Size of the regular file `path` beneath `base`, no link followed out of it; None if absent."""
    try:
        real = os.path.realpath(f"{base}/{path}") if path else str(base)
        if path and not Path(real).is_relative_to(os.path.realpath(base)):
            return None
        info = os.stat(real)
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _parent(pid: int) -> int:
    try:
        return int(proc.stat(pid)[1])
    except OSError:
        return 0


def _inner_pid(pid: int) -> int:
    """`pid` as its own innermost pid namespace numbers it; 0 for a process outside every inner one."""
    numbers = proc.status(pid).get("NSpid", "").split()
    return int(numbers[-1]) if len(numbers) > 1 else 0


def _namespace(pid: int | str, kind: str) -> str:
    return _readlink(Path(f"/proc/{pid}/ns/{kind}"))


def _readlink(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024
