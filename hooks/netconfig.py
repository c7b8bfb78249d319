"""What a container's network looks like: read from its namespace, carried as JSON, checked, made again.

The record travels in the artifact, so that `NetworkRecord.parse` trusts nothing: every name, address and
number is checked before it can reach a command, and the counts are bounded.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import (
    IPv4Interface,
    IPv4Network,
    IPv6Interface,
    IPv6Network,
    ip_address,
    ip_interface,
    ip_network,
)
from pathlib import Path
from typing import Any, TypeVar

from hooks import netns, sockdiag
from hooks.netns import NetworkError
from hooks.sockdiag import Address

IpInterface = IPv4Interface | IPv6Interface
IpNetwork = IPv4Network | IPv6Network

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,14}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
_KIND = re.compile(r"[a-z0-9_-]{1,16}")
_SYSCTL_VALUE = re.compile(r"[0-9A-Za-z_.,\t -]{0,512}")
_TABLE = re.compile(r"cedana_[A-Za-z0-9_.-]{1,120}")
_MAX_INTERFACES = 64
_MAX_ADDRESSES = 256
_MAX_ROUTES = 1024
_MAX_CONNECTIONS = 16384
_MAX_LISTENERS = 16384

_SYSCTL_NAMES = """
    core/somaxconn
    ipv4/ip_default_ttl ipv4/ip_forward ipv4/ip_local_port_range ipv4/ip_local_reserved_ports
    ipv4/ip_no_pmtu_disc ipv4/ip_nonlocal_bind ipv4/ip_unprivileged_port_start ipv4/ping_group_range
    ipv4/icmp_echo_ignore_all ipv4/conf/all/arp_announce ipv4/conf/all/arp_ignore ipv4/conf/all/rp_filter
    ipv4/conf/default/rp_filter ipv4/conf/all/accept_local ipv4/conf/all/route_localnet
    ipv4/tcp_congestion_control ipv4/tcp_ecn ipv4/tcp_fastopen ipv4/tcp_fin_timeout
    ipv4/tcp_keepalive_intvl ipv4/tcp_keepalive_probes ipv4/tcp_keepalive_time ipv4/tcp_l3mdev_accept
    ipv4/tcp_max_syn_backlog ipv4/tcp_max_tw_buckets ipv4/tcp_mtu_probing ipv4/tcp_no_metrics_save
    ipv4/tcp_notsent_lowat ipv4/tcp_orphan_retries ipv4/tcp_retries1 ipv4/tcp_retries2 ipv4/tcp_rmem
    ipv4/tcp_sack ipv4/tcp_slow_start_after_idle ipv4/tcp_syn_retries ipv4/tcp_synack_retries
    ipv4/tcp_syncookies ipv4/tcp_timestamps ipv4/tcp_tw_reuse ipv4/tcp_window_scaling ipv4/tcp_wmem
    ipv4/udp_rmem_min ipv4/udp_wmem_min
    ipv6/bindv6only ipv6/conf/all/disable_ipv6 ipv6/conf/default/disable_ipv6 ipv6/conf/all/forwarding
"""
SYSCTLS = frozenset(f"net/{name}" for name in _SYSCTL_NAMES.split())
"""Settings of a network namespace that a program can notice, below /proc/sys."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Interface:
    name: str
    kind: str
    """loopback, veth, dummy…: `ip link`'s type; "physical" when it has none."""
    mac: str
    mtu: int
    up: bool
    addresses: tuple[IpInterface, ...]

    @property
    def loopback(self) -> bool:
        return self.kind == "loopback"


@dataclass(frozen=True)
class Route:
    destination: IpNetwork
    device: str
    gateway: Address | None = None
    source: Address | None = None
    metric: int = 0
    link_scope: bool = False
    onlink: bool = False


@dataclass(frozen=True)
class Connection:
    """A TCP connection as the container sees it."""

    local: Address
    local_port: int
    remote: Address
    remote_port: int


@dataclass(frozen=True)
class Listener:
    protocol: str
    address: Address
    port: int


@dataclass(frozen=True)
class NetworkRecord:
    private: bool
    """The container has a network namespace apart from its node's."""
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)
    listeners: tuple[Listener, ...] = ()
    connections: tuple[Connection, ...] = ()
    lock: str = ""
    """The nftables table that keeps the connections silent on the node the container left."""

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address others reach the container by."""
        return tuple(
            address.ip
            for interface in self.interfaces
            if not interface.loopback
            for address in interface.addresses
            if not address.ip.is_link_local
        )

    def needed_addresses(self, *, connections: bool) -> set[Address]:
        """Addresses that sockets are bound to, which a restore cannot do without."""
        bound = {listener.address for listener in self.listeners if not listener.address.is_unspecified}
        if connections:
            bound |= {connection.local for connection in self.connections}
        return {address for address in bound if not address.is_loopback}

    def to_json(self) -> dict[str, Any]:
        return {
            "private": self.private,
            "interfaces": [
                {
                    "name": i.name,
                    "kind": i.kind,
                    "mac": i.mac,
                    "mtu": i.mtu,
                    "up": i.up,
                    "addresses": [str(address) for address in i.addresses],
                }
                for i in self.interfaces
            ],
            "routes": [
                {
                    "destination": str(r.destination),
                    "device": r.device,
                    "gateway": str(r.gateway or ""),
                    "source": str(r.source or ""),
                    "metric": r.metric,
                    "link_scope": r.link_scope,
                    "onlink": r.onlink,
                }
                for r in self.routes
            ],
            "sysctls": dict(self.sysctls),
            "listeners": [[x.protocol, str(x.address), x.port] for x in self.listeners],
            "connections": [
                [str(c.local), c.local_port, str(c.remote), c.remote_port] for c in self.connections
            ],
            "lock": self.lock,
        }

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> NetworkRecord:
        """Check a record out of an artifact; raises `NetworkError`."""
        try:
            record = cls(
                private=_checked(value["private"], bool),
                interfaces=_list(value["interfaces"], _MAX_INTERFACES, _interface),
                routes=_list(value["routes"], _MAX_ROUTES, _route),
                sysctls=_sysctls(value["sysctls"]),
                listeners=_list(value["listeners"], _MAX_LISTENERS, _listener),
                connections=_list(value["connections"], _MAX_CONNECTIONS, _connection),
                lock=_matching(_TABLE, value["lock"]) if value["lock"] else "",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise NetworkError(
                "the checkpoint's record of its network is malformed",
                hint="the artifact is damaged or was not made by cedana",
                details=repr(error)[:300],
            ) from error
        names = [interface.name for interface in record.interfaces]
        if len(set(names)) != len(names) or any(route.device not in names for route in record.routes):
            raise NetworkError(
                "the checkpoint's record of its network names an interface twice, or one it lacks",
                hint="the artifact is damaged or was not made by cedana",
            )
        return record


# Reading the thread's namespace


def read_interfaces(ip: str) -> tuple[Interface, ...]:
    return tuple(_shown_interface(link) for link in json.loads(netns.run([ip, "-j", "-d", "addr"]) or "[]"))


def read_routes(ip: str, interfaces: Sequence[Interface]) -> tuple[Route, ...]:
    """Routes somebody set; those that come with an address are left to the kernel."""
    names = {interface.name for interface in interfaces}
    families = {address.version for interface in interfaces for address in interface.addresses
                if not interface.loopback}  # fmt: skip
    routes = []
    for family in sorted(families):
        for shown in json.loads(netns.run([ip, "-j", "-d", f"-{family}", "route"]) or "[]"):
            if (
                shown.get("protocol") != "kernel"
                and shown.get("type", "unicast") == "unicast"
                and shown.get("dev") in names
                and "via" not in shown
                and not shown["dst"].startswith("fe80:")
            ):
                routes.append(_shown_route(shown, family))
    return tuple(routes)


def read_sysctls() -> dict[str, str]:
    values = {}
    for name in SYSCTLS:
        try:
            values[name] = Path("/proc/sys", name).read_text().strip()
        except OSError:
            continue  # another kernel has another set of them
    return values


def read_listeners(found: Sequence[sockdiag.Socket]) -> tuple[Listener, ...]:
    names = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp"}
    listeners = {
        Listener(names[one.protocol], one.local, one.local_port)
        for one in found
        if one.listening and one.protocol in names
    }
    return tuple(sorted(listeners, key=lambda x: (x.protocol, x.port, str(x.address))))[:_MAX_LISTENERS]


def read_connections(found: Sequence[sockdiag.Socket]) -> tuple[Connection, ...]:
    connections = [connection(one) for one in found if one.connected and one.protocol == socket.IPPROTO_TCP]
    if len(connections) > _MAX_CONNECTIONS:
        raise NetworkError(
            f"the container has {len(connections)} TCP connections; {_MAX_CONNECTIONS} can be carried",
            hint="close some, or checkpoint with `--tcp close`",
        )
    return tuple(connections)


def connection(one: sockdiag.Socket) -> Connection:
    return Connection(one.local, one.local_port, one.remote, one.remote_port)


def _shown_interface(link: Mapping[str, Any]) -> Interface:
    loopback = "LOOPBACK" in link["flags"]
    return Interface(
        name=link["ifname"],
        kind="loopback" if loopback else link.get("linkinfo", {}).get("info_kind", "physical"),
        mac=link.get("address", ""),
        mtu=link["mtu"],
        up="UP" in link["flags"],
        addresses=tuple(
            ip_interface(f"{shown['local']}/{shown['prefixlen']}")
            for shown in link["addr_info"]
            if "local" in shown and not (loopback and shown["local"] in ("127.0.0.1", "::1"))
        ),
    )


def _shown_route(shown: Mapping[str, Any], family: int) -> Route:
    anywhere = "0.0.0.0/0" if family == 4 else "::/0"
    return Route(
        destination=ip_network(anywhere if shown["dst"] == "default" else shown["dst"]),
        device=shown["dev"],
        gateway=ip_address(shown["gateway"]) if "gateway" in shown else None,
        source=ip_address(shown["prefsrc"]) if "prefsrc" in shown else None,
        metric=shown.get("metric", 0),
        link_scope=shown.get("scope") == "link",
        onlink="onlink" in shown.get("flags", []),
    )


# Commands that make it again, lines of `ip -batch`


def address_commands(interface: Interface) -> Iterator[str]:
    name = interface.name
    for address in interface.addresses:
        # Whether an address is free is known before; duplicate address detection would take a second.
        yield f"addr replace {address} dev {name}{' nodad' if address.version == 6 else ''}"
    if interface.up:
        yield f"link set {name} up"


def route_commands(routes: Sequence[Route]) -> Iterator[str]:
    """Routes to a network before those that need it to reach their gateway."""
    for route in sorted(routes, key=lambda route: route.gateway is not None):
        words = [f"route replace {route.destination}"]
        if route.gateway is not None:
            words.append(f"via {route.gateway}")
        words.append(f"dev {route.device}")
        if route.source is not None:
            words.append(f"src {route.source}")
        if route.metric:
            words.append(f"metric {route.metric}")
        if route.link_scope:
            words.append("scope link")
        if route.onlink:
            words.append("onlink")
        yield " ".join(words)


def run_commands(ip: str, commands: Sequence[str]) -> None:
    """Have `ip -batch` run them in the thread's namespace."""
    if commands:
        netns.run([ip, "-batch", "-"], "".join(f"{command}\n" for command in commands))


def write_sysctls(wanted: Mapping[str, str]) -> None:
    """Set what differs in the thread's namespace; what this kernel does not let be set stays."""
    for name, value in wanted.items():
        path = Path("/proc/sys", name)
        try:
            if path.read_text().strip() != value:
                path.write_text(value)
        except OSError:
            continue


# Checking


def _checked(value: Any, kind: type[Item]) -> Item:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.60} is no {kind.__name__}")
    return value


def _matching(pattern: re.Pattern[str], value: Any) -> str:
    if not pattern.fullmatch(_checked(value, str)):
        raise ValueError(f"{value!r:.60}")
    return str(value)


def _list(value: Any, limit: int, parse: Callable[[Any], Item]) -> tuple[Item, ...]:
    if len(_checked(value, list)) > limit:
        raise ValueError(f"more than {limit} entries")
    return tuple(parse(item) for item in value)


def _number(value: Any, low: int, high: int) -> int:
    if not low <= _checked(value, int) <= high:
        raise ValueError(f"{value} is not in {low}..{high}")
    return int(value)


def _interface(value: Any) -> Interface:
    kind = _matching(_KIND, value["kind"])
    mac = _matching(_MAC, value["mac"]) if value["mac"] else ""
    if kind == "veth" and (not mac or int(mac[:2], 16) & 1):
        raise ValueError(f"the address {mac!r} of a veth")
    return Interface(
        name=_matching(_NAME, value["name"]),
        kind=kind,
        mac=mac,
        mtu=_number(value["mtu"], 68, 65536),
        up=_checked(value["up"], bool),
        addresses=_list(value["addresses"], _MAX_ADDRESSES, _unicast),
    )


def _unicast(value: Any) -> IpInterface:
    address = ip_interface(_checked(value, str))
    if address.ip.is_multicast or address.ip.is_unspecified or "%" in value:
        raise ValueError(f"the address {value!r:.60}")
    return address


def _address(value: Any) -> Address:
    if "%" in _checked(value, str):
        raise ValueError(f"the address {value!r:.60}")
    return ip_address(value)


def _route(value: Any) -> Route:
    return Route(
        destination=ip_network(_checked(value["destination"], str)),
        device=_matching(_NAME, value["device"]),
        gateway=_address(value["gateway"]) if value["gateway"] else None,
        source=_address(value["source"]) if value["source"] else None,
        metric=_number(value["metric"], 0, (1 << 32) - 1),
        link_scope=_checked(value["link_scope"], bool),
        onlink=_checked(value["onlink"], bool),
    )


def _sysctls(value: Any) -> dict[str, str]:
    return {
        str(name): _matching(_SYSCTL_VALUE, text)
        for name, text in _checked(value, dict).items()
        if name in SYSCTLS
    }


def _listener(value: Any) -> Listener:
    protocol, address, port = value
    if protocol not in ("tcp", "udp"):
        raise ValueError(f"the protocol {protocol!r:.60}")
    return Listener(protocol, _address(address), _number(port, 1, 65535))


def _connection(value: Any) -> Connection:
    local, local_port, remote, remote_port = value
    return Connection(
        _address(local), _number(local_port, 1, 65535), _address(remote), _number(remote_port, 1, 65535)
    )
