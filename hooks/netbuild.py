"""The network namespace that a restore makes for a container, its interfaces on bridges of this node."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from base.config import Config
from hooks import netconfig, netlock, netns
from hooks.netconfig import Interface, NetworkRecord
from hooks.netns import NetworkError
from hooks.participant import Finding
from hooks.sockdiag import Address

REBUILT = frozenset({"loopback", "veth", "dummy"})
"""Kinds of interface that can be made again without knowing more of the node."""


def build(
    container_id: str, path: Path, record: NetworkRecord, bridges: Mapping[str, str], config: Config
) -> None:
    """Make the interfaces in the namespace at `path` as they were, each on its bridge."""
    ip = config.tool("ip")
    outside, inside = [], []
    for number, interface in enumerate(record.interfaces):
        name, mtu = interface.name, interface.mtu
        if interface.kind == "veth":
            outer = f"{_veth_prefix(container_id)}{number:02x}"
            bridge = bridges.get(name)
            if bridge is None:
                raise NetworkError(f"no bridge was chosen for the interface {name}")
            outside += [
                f"link add {outer} mtu {mtu} type veth peer name {name} address {interface.mac}"
                f" mtu {mtu} netns {path}",
                f"link set {outer} master {bridge}",
                f"link set {outer} up",
            ]
        elif interface.kind == "dummy":
            inside.append(f"link add {name} mtu {mtu} address {interface.mac} type dummy")
        if interface.kind in REBUILT:
            inside += netconfig.address_commands(interface)
    inside += netconfig.route_commands(record.routes)
    netconfig.run_commands(ip, outside)
    with netns.inside(path):
        netconfig.run_commands(ip, inside)


def remove(container_id: str, config: Config) -> None:
    """Remove the namespace and the links that a restore of this container made, if it made any."""
    path = path_of(container_id, config)
    if not path.exists():
        return
    ip = config.tool("ip")
    prefix = _veth_prefix(container_id)
    links = [i.name for i in netconfig.read_interfaces(ip) if i.name.startswith(prefix)]
    # With one end the other goes, at once; the namespace itself lives as long as its processes.
    netconfig.run_commands(ip, [f"link delete {name}" for name in links])
    netns.delete(path)


def path_of(container_id: str, config: Config) -> Path:
    return config.run_dir / "netns" / checked_id(container_id)


def bridge_for(interface: Interface, bridges: Sequence[Interface], wanted: str) -> Interface | None:
    """The bridge that was asked for, else the one whose network the interface's addresses are in."""
    if wanted:
        return next((bridge for bridge in bridges if bridge.name == wanted), None)
    mine = [address.ip for address in interface.addresses if not address.ip.is_link_local]
    for bridge in bridges:
        networks = [a.network for a in bridge.addresses if not a.ip.is_link_local]
        if bridge.up and any(ip in network for network in networks for ip in mine):
            return bridge
    return None


def no_bridge(interface: Interface, bridges: Sequence[Interface], wanted: str) -> Finding:
    if wanted:
        names = ", ".join(bridge.name for bridge in bridges) or "none"
        return Finding(f"there is no bridge {wanted} on this node (bridges: {names})", fatal=True)
    mine = {address.ip for address in interface.addresses if not address.ip.is_link_local}
    return Finding(
        f"no bridge of this node is in the network of the container's {interface.name}"
        f" ({listed(mine) or 'no address'})",
        hint="name one with `--bridge`, or give the container a network namespace (CNI)",
        fatal=True,
    )


def probe_conflicts(
    interface: Interface, bridge: Interface, bridges: Sequence[Interface]
) -> Iterator[Finding]:
    mine = [address.ip for address in interface.addresses if not address.ip.is_link_local]
    taken = {address.ip: other.mac for other in bridges for address in other.addresses if address.ip in mine}
    for address, mac in {**netlock.in_use(bridge.name, mine), **taken}.items():
        yield Finding(
            f"the container's address {address} is in use on {bridge.name} by {mac}",
            hint="stop the container that has it: two cannot share one address",
            fatal=True,
        )


def listed(addresses: set[Address]) -> str:
    return ", ".join(sorted(str(address) for address in addresses))


def _veth_prefix(container_id: str) -> str:
    return f"ced{hashlib.sha256(container_id.encode()).hexdigest()[:8]}"


def checked_id(container_id: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,159}", container_id):
        raise NetworkError(f"{container_id!r} is no container id")
    return container_id
