"""The record of a container's network: it survives the trip, and a hostile one reaches no command."""

from __future__ import annotations

import copy
import json
import re
from ipaddress import ip_address, ip_interface, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hooks import netconfig
from hooks.netconfig import Connection, Interface, Listener, NetworkRecord, Route
from hooks.netns import NetworkError

RECORD = NetworkRecord(
    private=True,
    interfaces=(
        Interface("lo", "loopback", "00:00:00:00:00:00", 65536, True, ()),
        Interface(
            "eth0",
            "veth",
            "02:77:05:00:00:02",
            1400,
            True,
            (ip_interface("10.0.0.2/24"), ip_interface("fd00::2/64"), ip_interface("fe80::77:5ff:fe00:2/64")),
        ),
    ),
    routes=(
        Route(ip_network("0.0.0.0/0"), "eth0", gateway=ip_address("10.0.0.1")),
        Route(ip_network("10.9.0.0/16"), "eth0", source=ip_address("10.0.0.2"), metric=5, link_scope=True),
        Route(ip_network("::/0"), "eth0", gateway=ip_address("fe80::1"), onlink=True),
    ),
    sysctls={"net/ipv4/ip_local_port_range": "32768\t60999"},
    listeners=(Listener("tcp", ip_address("0.0.0.0"), 80), Listener("udp", ip_address("10.0.0.2"), 53)),
    connections=(Connection(ip_address("10.0.0.2"), 80, ip_address("10.0.0.1"), 40000),),
    lock="cedana_demo_012abc",
)


def test_a_record_survives_the_trip() -> None:
    assert NetworkRecord.parse(json.loads(json.dumps(RECORD.to_json()))) == RECORD


def test_commands_make_what_was_recorded() -> None:
    assert list(netconfig.address_commands(RECORD.interfaces[1])) == [
        "addr replace 10.0.0.2/24 dev eth0",
        "addr replace fd00::2/64 dev eth0 nodad",
        "addr replace fe80::77:5ff:fe00:2/64 dev eth0 nodad",
        "link set eth0 up",
    ]
    assert list(netconfig.route_commands(RECORD.routes)) == [
        "route replace 10.9.0.0/16 dev eth0 src 10.0.0.2 metric 5 scope link",
        "route replace 0.0.0.0/0 via 10.0.0.1 dev eth0",
        "route replace ::/0 via fe80::1 dev eth0 onlink",
    ]


def test_only_what_sockets_are_bound_to_is_needed() -> None:
    assert RECORD.needed_addresses(connections=True) == {ip_address("10.0.0.2")}
    quiet = NetworkRecord(private=True, listeners=RECORD.listeners[:1], connections=RECORD.connections)
    assert quiet.needed_addresses(connections=True) == {ip_address("10.0.0.2")}
    assert quiet.needed_addresses(connections=False) == set()


def changed(*path: str | int, value: Any) -> dict[str, Any]:
    record = copy.deepcopy(RECORD.to_json())
    place: Any = record
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return record


@pytest.mark.parametrize(
    "record",
    [
        {},
        changed("private", value=1),
        changed("interfaces", value={}),
        changed("interfaces", value=[RECORD.to_json()["interfaces"][0]] * 65),
        changed("interfaces", 0, "name", value="eth0"),
        changed("interfaces", 1, "name", value="e\nlink delete br0"),
        changed("interfaces", 1, "name", value="e up; reboot"),
        changed("interfaces", 1, "name", value="-batch"),
        changed("interfaces", 1, "name", value="a" * 16),
        changed("interfaces", 1, "name", value="../x"),
        changed("interfaces", 1, "name", value=""),
        changed("interfaces", 1, "kind", value="veth peer name x"),
        changed("interfaces", 1, "mac", value="02:77:05:00:00:02 up"),
        changed("interfaces", 1, "mac", value="03:77:05:00:00:02"),
        changed("interfaces", 1, "mac", value=""),
        changed("interfaces", 1, "mtu", value=0),
        changed("interfaces", 1, "mtu", value=True),
        changed("interfaces", 1, "mtu", value="1500"),
        changed("interfaces", 1, "addresses", value=["10.0.0.2/24 dev br0"]),
        changed("interfaces", 1, "addresses", value=["224.0.0.1/4"]),
        changed("interfaces", 1, "addresses", value=["0.0.0.0/0"]),
        changed("interfaces", 1, "addresses", value=["fe80::1%eth0 dev x/64"]),
        changed("interfaces", 1, "addresses", value=[3]),
        changed("interfaces", 1, "addresses", value=["10.0.0.2/24"] * 257),
        changed("routes", 0, "device", value="eth9"),
        changed("routes", 0, "gateway", value="10.0.0.1 dev br0"),
        changed("routes", 0, "destination", value="default"),
        changed("routes", 0, "destination", value="10.0.0.1/8"),
        changed("routes", 0, "metric", value=-1),
        changed("routes", value=RECORD.to_json()["routes"][:1] * 1025),
        changed("sysctls", "net/ipv4/ip_local_port_range", value="1\n2"),
        changed("sysctls", "net/ipv4/ip_local_port_range", value=1),
        changed("listeners", 0, value=["tcp", "0.0.0.0", 0]),
        changed("listeners", 0, value=["sctp", "0.0.0.0", 80]),
        changed("listeners", 0, value=["tcp", "0.0.0.0"]),
        changed("connections", 0, value=["10.0.0.2", 80, "10.0.0.1 } ; flush ruleset", 1]),
        changed("connections", 0, value=["10.0.0.2", 80, "fe80::1%x", 1]),
        changed("connections", 0, value=["10.0.0.2", 1 << 16, "10.0.0.1", 1]),
        changed("connections", value=[["10.0.0.2", 80, "10.0.0.1", 1]] * 16385),
        changed("lock", value="filter"),
        changed("lock", value="cedana_x { } ; flush ruleset"),
        changed("lock", value=None) | {"lock": 5},
    ],
)
def test_a_hostile_record_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(NetworkError, match="record of its network"):
        NetworkRecord.parse(record)


def test_settings_nobody_needs_are_dropped() -> None:
    record = changed("sysctls", value={"kernel/core_pattern": "|/bin/sh", "net/../kernel/modprobe": "/x"})
    assert NetworkRecord.parse(record).sysctls == {}


noise = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
WORDS = re.compile(r"[A-Za-z0-9_.:/@+ -]*")


@given(st.lists(st.tuples(st.randoms(), noise), min_size=1, max_size=4))
def test_no_noise_reaches_a_command(changes: list[tuple[Any, Any]]) -> None:
    record = copy.deepcopy(RECORD.to_json())
    for chance, value in changes:
        place: Any = record
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = chance.choice(list(keys)) if keys else None
            if key is None:
                break
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.3:
                place[key] = value
                break
            place = place[key]
    try:
        parsed = NetworkRecord.parse(record)
    except NetworkError:
        return
    commands = [*netconfig.route_commands(parsed.routes)]
    for interface in parsed.interfaces:
        commands += netconfig.address_commands(interface)
    assert all(WORDS.fullmatch(command) for command in commands)
