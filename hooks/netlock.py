"""Silence on the wire: nftables tables that drop a container's packets while its sockets are taken apart
or put together, and the announcement that its address has moved."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from hooks import netns
from hooks.netconfig import Connection, Interface
from hooks.sockdiag import Address

_PRIORITY = -400
"""Before connection tracking (-200): nothing is to learn of a dropped packet."""
_KEPT_FOR = "1h"
"""How long the connections of a container that left stay silent on a node's own addresses."""
_ARP, _IPV6 = 0x0806, 0x86DD


@dataclass(frozen=True)
class Lock:
    """The nftables table `table` of the thread's namespace."""

    table: str
    nft: str

    def close_all(self) -> None:
        """Drop every packet, loopback included."""
        self._load(
            "".join(
                f"chain {hook} {{ type filter hook {hook} priority {_PRIORITY}; policy drop; }}\n"
                for hook in ("input", "output", "forward")
            )
        )

    def close(self, connections: Iterable[Connection], ports: Iterable[int] = ()) -> None:
        """Drop the packets of these TCP connections, and new connections to these ports."""
        sets, inward, outward = [], [], []
        for version, keyword in ((4, "ip"), (6, "ip6")):
            elements = ", ".join(
                f"{c.local} . {c.local_port} . {c.remote} . {c.remote_port}"
                for c in dict.fromkeys(connections)
                if c.local.version == version
            )
            if elements:
                kind = f"ipv{version}_addr . inet_service"
                sets.append(
                    f"set connections{version} {{ type {kind} . {kind}; flags timeout;"
                    f" timeout {_KEPT_FOR}; elements = {{ {elements} }}; }}\n"
                )
                fields = [f"{keyword} saddr . tcp sport", f"{keyword} daddr . tcp dport"]
                outward.append(f"{fields[0]} . {fields[1]} @connections{version} drop;")
                inward.append(f"{fields[1]} . {fields[0]} @connections{version} drop;")
        if listed := ", ".join(str(port) for port in sorted(set(ports))):
            inward.append(f"tcp dport {{ {listed} }} tcp flags & (syn | ack) == syn drop;")
        chains = [
            f"chain {hook} {{ type filter hook {hook} priority {_PRIORITY}; policy accept;"
            f" {' '.join(rules)} }}\n"
            for hook, rules in (("input", inward), ("output", outward))
        ]
        self._load("".join(sets + chains))

    def open(self) -> None:
        """Let everything through again; nothing happens when nothing was closed."""
        netns.run([self.nft, "-f", "-"], f"add table inet {self.table}\ndelete table inet {self.table}\n")

    def _load(self, body: str) -> None:
        fresh = f"add table inet {self.table}\ndelete table inet {self.table}\n"
        netns.run([self.nft, "-f", "-"], f"{fresh}table inet {self.table} {{\n{body}}}\n")


def announce(interfaces: Sequence[Interface]) -> None:
    """Tell the links of the thread's namespace where its addresses now are (RFC 5227, RFC 4861 7.2.6)."""
    for interface in interfaces:
        if interface.loopback or not interface.up or not interface.mac:
            continue
        mac = bytes.fromhex(interface.mac.replace(":", ""))
        with (
            suppress(OSError),
            socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as link,
        ):
            link.bind((interface.name, 0))
            for address in interface.addresses:
                if isinstance(address.ip, IPv4Address):
                    link.send(_arp(1, mac, address.ip, bytes(6), address.ip))
                    link.send(_arp(2, mac, address.ip, mac, address.ip))
                else:
                    link.send(_neighbour_advertisement(mac, address.ip))


def in_use(bridge: str, addresses: Sequence[Address], wait_s: float = 0.02) -> dict[Address, str]:
    """Which of the addresses somebody on the bridge's link answers for, and their hardware address.

    Asks for IPv4 addresses only, once, as an ARP probe: on one link an answer takes well under a
    millisecond.
    """
    wanted = [address for address in addresses if isinstance(address, IPv4Address)]
    found: dict[Address, str] = {}
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_PACKET, kind, socket.htons(_ARP)) as link:
        link.bind((bridge, _ARP))
        asker = link.getsockname()[4]
        for address in wanted:
            link.send(_arp(1, asker, IPv4Address(0), bytes(6), address))
        deadline = time.monotonic() + wait_s
        while len(found) < len(wanted) and (left := deadline - time.monotonic()) > 0:
            link.settimeout(left)
            try:
                frame = link.recv(2048)
            except TimeoutError:
                break
            if len(frame) >= 42 and frame[20:22] == b"\0\2" and IPv4Address(frame[28:32]) in wanted:
                found[IPv4Address(frame[28:32])] = frame[22:28].hex(":")
    return found


def _arp(operation: int, sender: bytes, source: IPv4Address, target: bytes, address: IPv4Address) -> bytes:
    body = (
        struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + sender + source.packed + target + address.packed
    )
    return b"\xff" * 6 + sender + struct.pack("!H", _ARP) + body


def _neighbour_advertisement(mac: bytes, address: IPv6Address) -> bytes:
    everyone = IPv6Address("ff02::1").packed
    body = struct.pack("!BBHI", 136, 0, 0, 0x20000000) + address.packed + b"\2\1" + mac
    pseudo = address.packed + everyone + struct.pack("!II", len(body), socket.IPPROTO_ICMPV6)
    body = body[:2] + struct.pack("!H", _checksum(pseudo + body)) + body[4:]
    header = struct.pack("!IHBB", 6 << 28, len(body), socket.IPPROTO_ICMPV6, 255) + address.packed + everyone
    return b"\x33\x33\0\0\0\1" + mac + struct.pack("!H", _IPV6) + header + body


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
