"""The inet sockets of a network namespace, listed and destroyed through sock_diag(7)."""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

TIME_WAIT, CLOSE, LISTEN = 6, 7, 10
"""States of a TCP socket (net/tcp_states.h); an unconnected UDP socket is in CLOSE."""
_ALL_STATES = 0xFFF & ~(1 << TIME_WAIT)

_NETLINK_SOCK_DIAG = 4
_BY_FAMILY, _DESTROY = 20, 21
_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST_BODY = struct.Struct("=BBBxI48s")
_MESSAGE = struct.Struct("=BBBB48sIIIII")
_ID = struct.Struct("!HH16s16s")


@dataclass(frozen=True)
class Socket:
    family: int
    protocol: int
    state: int
    local: Address
    local_port: int
    remote: Address
    remote_port: int
    inode: int
    """0 when no descriptor refers to it: in an accept queue, or left by a process that ended."""
    identity: bytes
    """The kernel's own name of it (addresses and cookie): a request names no other socket."""

    @property
    def connected(self) -> bool:
        return self.remote_port != 0 and self.state not in (LISTEN, CLOSE)

    @property
    def listening(self) -> bool:
        return self.remote_port == 0 and self.local_port != 0


def sockets(protocols: Sequence[int] = (socket.IPPROTO_TCP,)) -> list[Socket]:
    """The inet sockets of the calling thread's network namespace."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
        return [
            found
            for protocol in protocols
            for family in (socket.AF_INET, socket.AF_INET6)
            for found in _dump(link, family, protocol)
        ]


def destroy(found: Iterable[Socket]) -> None:
    """Close sockets as tcp_abort() does, which sends a reset; those already gone are passed over."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
        for one in found:
            body = _REQUEST_BODY.pack(one.family, one.protocol, 0, _ALL_STATES, one.identity)
            link.send(_HEADER.pack(_HEADER.size + len(body), _DESTROY, _REQUEST | _ACK, 1, 0) + body)
            for kind, answer in _messages(link.recv(1 << 16)):
                code = -struct.unpack_from("=i", answer)[0] if kind == _ERROR else 0
                if code not in (0, errno.ENOENT):
                    raise OSError(code, os.strerror(code))


def owned_inodes(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that descriptors of these processes refer to."""
    inodes = set()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                match = re.fullmatch(r"socket:\[([0-9]+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
            except OSError:
                continue
            if match:
                inodes.add(int(match[1]))
    return inodes


def _dump(link: socket.socket, family: int, protocol: int) -> Iterator[Socket]:
    body = _REQUEST_BODY.pack(family, protocol, 0, _ALL_STATES, bytes(48))
    link.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _REQUEST | _DUMP, 1, 0) + body)
    while True:
        for kind, message in _messages(link.recv(1 << 17)):
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", message)[0]
                raise OSError(code, os.strerror(code))
            yield _socket(protocol, message)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        length, kind, *_ = _HEADER.unpack_from(data)
        yield kind, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _socket(protocol: int, message: bytes) -> Socket:
    family, state, _, _, identity, _, _, _, _, inode = _MESSAGE.unpack_from(message)
    local_port, remote_port, local, remote = _ID.unpack_from(identity)
    return Socket(
        family=family,
        protocol=protocol,
        state=state,
        local=_address(family, local),
        local_port=local_port,
        remote=_address(family, remote),
        remote_port=remote_port,
        inode=inode,
        identity=identity,
    )


def _address(family: int, packed: bytes) -> Address:
    if family == socket.AF_INET:
        return IPv4Address(packed[:4])
    address = IPv6Address(packed)
    return address.ipv4_mapped or address
