"""The sockets of a container, looked at from outside without disturbing them.

A duplicate of each descriptor is taken with pidfd_getfd(2) and asked for its family, type and addresses:
that knows families the diagnostic tools do not, in the network namespace it really belongs to.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hooks.participant import Finding
from runtime import syscalls

_IPPROTO_MPTCP = 262
_IPPROTO_UDPLITE = 136
_CARRIED_INET = {socket.IPPROTO_IP, socket.IPPROTO_TCP, socket.IPPROTO_UDP, _IPPROTO_UDPLITE}
_INET = {socket.AF_INET, socket.AF_INET6}
_CARRIED = {*_INET, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET}
"""What CRIU 4.2 can dump (criu/sockets.c, criu/sk-inet.c: can_dump_ipproto)."""

_FAMILIES = {1: "unix", 2: "inet", 10: "inet6", 16: "netlink", 17: "packet", 40: "vsock", 44: "xdp"}
_TCP_STATES = (
    "", "established", "syn-sent", "syn-recv", "fin-wait-1", "fin-wait-2", "time-wait", "close", "close-wait",
    "last-ack", "listen", "closing", "new-syn-recv",
)  # fmt: skip
"""linux/include/net/tcp_states.h, the first byte of `struct tcp_info`."""


@dataclass(frozen=True)
class Socket:
    """One descriptor of one process: `process` is its pid inside the container."""

    process: int
    process_name: str
    fd: int
    inode: str
    family: str
    """inet, inet6, unix, netlink, packet, or the number of any other."""
    kind: str
    """tcp, udp, stream, dgram, seqpacket, raw, or the number of any other."""
    state: str
    """A TCP state, 'listen', 'connected' or ''."""
    local: str
    remote: str
    carried: bool
    """Whether CRIU can dump this family and protocol at all."""


def sockets_of(host_pid: int, process: int, name: str, fds: Mapping[int, str]) -> Iterator[Socket]:
    """The sockets among `fds` ({descriptor: inode}) of a process; skips what closes meanwhile."""
    if not fds:
        return
    try:
        pidfd = os.pidfd_open(host_pid)
    except OSError:
        return
    try:
        for fd, inode in fds.items():
            try:
                sock = socket.socket(fileno=syscalls.pidfd_getfd(pidfd, fd))
            except OSError:
                continue
            with sock:
                yield _describe(sock, process, name, fd, inode)
    finally:
        os.close(pidfd)


def _describe(sock: socket.socket, process: int, name: str, fd: int, inode: str) -> Socket:
    family, kind, protocol = int(sock.family), int(sock.type), sock.proto
    listening = bool(_option(sock, socket.SO_ACCEPTCONN))
    remote = _address(sock.getpeername) if kind != socket.SOCK_RAW else ""
    state = "listen" if listening else "connected" if remote or family == socket.AF_UNIX else ""
    label = {1: "stream", 2: "dgram", 3: "raw", 5: "seqpacket"}.get(kind, str(kind))
    carried = family in _CARRIED
    if family in _INET:
        carried = kind == socket.SOCK_RAW or protocol in _CARRIED_INET
        if kind == socket.SOCK_STREAM and protocol in (0, socket.IPPROTO_TCP):
            label, state = "tcp", _tcp_state(sock)
        elif kind == socket.SOCK_DGRAM and protocol in (0, socket.IPPROTO_UDP, _IPPROTO_UDPLITE):
            label = "udp"
        elif protocol == _IPPROTO_MPTCP:
            label = "mptcp"
    return Socket(
        process=process,
        process_name=name,
        fd=fd,
        inode=inode,
        family=_FAMILIES.get(family, str(family)),
        kind=label,
        state=state,
        local=_address(sock.getsockname) if family in _CARRIED else "",
        remote=remote,
        carried=carried,
    )


def _option(sock: socket.socket, option: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, option)
    except OSError:
        return 0


def _tcp_state(sock: socket.socket) -> str:
    try:
        number = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return ""
    return _TCP_STATES[number] if number < len(_TCP_STATES) else str(number)


def _address(get: object) -> str:
    try:
        value = get()  # type: ignore[operator]
    except (OSError, ValueError):
        return ""
    if isinstance(value, bytes):
        return value.replace(b"\0", b"@").decode(errors="replace")
    if isinstance(value, tuple) and len(value) >= 2:
        host = str(value[0])
        return f"[{host}]:{value[1]}" if ":" in host else f"{host}:{value[1]}"
    return str(value)


def refused(sockets: Iterable[Socket]) -> Iterator[Finding]:
    """Sockets of a kind that CRIU has no way to dump."""
    for sock in sockets:
        if not sock.carried:
            yield Finding(
                f"process {sock.process} ({sock.process_name}) holds a {sock.family} {sock.kind} socket"
                f" (descriptor {sock.fd}), which cannot be checkpointed",
                hint="close it, or let the program use TCP, UDP or unix sockets",
                fatal=True,
            )


def outside_peers(sockets: Iterable[Socket], init: int) -> Iterator[Finding]:
    """Connected unix sockets whose other end is outside the container: half a connection cannot move."""
    held = {sock.inode: sock for sock in sockets if sock.family == "unix"}
    if not held:
        return
    peers = _unix_peers(init)
    for inode, sock in held.items():
        peer = peers.get(inode)
        if peer is None or peer.inode == "0" or peer.inode in held or sock.kind == "dgram":
            continue
        where = peers[peer.inode].path if peer.inode in peers else "?"
        yield Finding(
            f"process {sock.process} ({sock.process_name}) is connected to the unix socket"
            f" {where if where != '*' else sock.remote or '(unnamed)'} of a process outside the container",
            hint="close the connection before the checkpoint; its other half cannot move",
            fatal=True,
        )


@dataclass(frozen=True)
class _Peer:
    path: str
    inode: str


def _unix_peers(init: int) -> dict[str, _Peer]:
    """Connected unix sockets of the network namespace of `init`: {inode: own path, peer's inode}."""
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{init}/ns/net", "ss", "-xnH"], capture_output=True, text=True, check=False
    )
    peers = {}
    for line in done.stdout.splitlines():
        # Netid State Recv-Q Send-Q local inode peer peer-inode
        fields = re.split(r"\s+", line.strip())
        if len(fields) >= 8 and fields[1] == "ESTAB":
            peers[fields[5]] = _Peer(fields[4], fields[7])
    return peers
