"""The participant `network` with real namespaces, links, nftables and TCP connections.

Each test plays a node: its thread lives in a network namespace of its own with the bridge `br0`. The
container is a process in another one, except where runc and CRIU move a real container.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from base.config import Config, load
from hooks import netconfig, netlock, netns, sockdiag, tcprepair
from hooks.netbuild import remove
from hooks.netns import NetworkError
from hooks.network import NetworkParticipant
from hooks.participant import CriuSettings, Source, Target
from tests.node.bed import Bed
from tests.node.bed import Node as BedNode
from tests.node.clients import RedisClient

BRIDGE_ADDRESS = "10.77.5.1"
ADDRESS = "10.77.5.2"
ADDRESS6 = "fd77::2"
MAC = "02:77:05:00:00:02"
PORT = 7000

ECHO = """
import os, selectors, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
selector = selectors.DefaultSelector()
selector.register(server, selectors.EVENT_READ)
count = 0
while True:
    for key, _ in selector.select():
        if key.fileobj is server:
            selector.register(server.accept()[0], selectors.EVENT_READ)
        elif data := key.fileobj.recv(65536):
            count += 1
            key.fileobj.sendall(b"%d %s" % (count, data))
        else:
            selector.unregister(key.fileobj)
"""


@dataclass
class Node:
    """The namespace the test runs in, and where containers' namespaces are named."""

    directory: Path
    config: Config
    stack: ExitStack

    def namespace(self, name: str, address: str = ADDRESS, mac: str = MAC) -> Path:
        """A namespace as CNI makes it: eth0 with an address, a link on the bridge, a default route."""
        path = self.directory / name
        netns.create(path)
        self.stack.callback(netns.delete, path)
        host_end = f"v{name[:10]}"
        ip(
            f"link add {host_end} mtu 1400 type veth peer name eth0 address {mac} mtu 1400 netns {path}",
            f"link set {host_end} master br0",
            f"link set {host_end} up",
        )
        fd = os.open(path, os.O_RDONLY)
        with netns.entered(fd):
            ip(
                "link set lo up",
                f"addr add {address}/24 dev eth0",
                f"addr add {ADDRESS6}/64 dev eth0 nodad",
                "link set eth0 up",
                f"route add default via {BRIDGE_ADDRESS}",
                f"route add 192.168.0.0/16 via {BRIDGE_ADDRESS} src {address} metric 50",
            )
            Path("/proc/sys/net/ipv4/tcp_keepalive_time").write_text("77")
        os.close(fd)
        return path

    def server(self, namespace: Path, address: str = "0.0.0.0", port: int = PORT) -> int:
        """The pid of an echo server in a namespace."""
        argv = ["nsenter", f"--net={namespace}", "/usr/bin/python3", "-c", ECHO, address, str(port)]
        process = subprocess.Popen(argv)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        fd = os.open(namespace, os.O_RDONLY)
        with netns.entered(fd), closing(socket.socket()) as probe:
            until(lambda: probe.connect_ex((ADDRESS, port)) == 0)
        os.close(fd)
        return process.pid

    def connect(self, address: str = ADDRESS, port: int = PORT) -> socket.socket:
        return self.stack.enter_context(closing(socket.create_connection((address, port), timeout=5)))

    def participant(self) -> NetworkParticipant:
        return NetworkParticipant(self.config)

    def source(self, pid: int, **options: Any) -> Source:
        return Source(
            "demo", pid, (pid,), {"linux": {"namespaces": [{"type": "network"}]}}, self.directory, options
        )

    def target(self, path: str = "", **options: Any) -> Target:
        entry = {"type": "network", "path": path} if path else {"type": "network"}
        bundle = self.directory / "bundle"
        return Target(
            "copy", {"linux": {"namespaces": [entry]}}, bundle, bundle / "rootfs", self.directory, options
        )


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    config = replace(load(), run_dir=tmp_path / "run")
    with ExitStack() as stack:
        home = tmp_path / "node"
        netns.create(home)
        stack.callback(netns.delete, home)
        fd = os.open(home, os.O_RDONLY)
        stack.callback(os.close, fd)
        stack.enter_context(netns.entered(fd))
        ip(
            "link set lo up",
            "link add br0 type bridge",
            f"addr add {BRIDGE_ADDRESS}/24 dev br0",
            "addr add fd77::1/64 dev br0 nodad",
            "link set br0 up",
        )
        yield Node(tmp_path, config, stack)


def ip(*commands: str) -> None:
    netns.run(["ip", "-batch", "-"], "".join(f"{command}\n" for command in commands))


def until(condition: Callable[[], bool], timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def ask(client: socket.socket, text: bytes, timeout_s: float = 5) -> bytes:
    client.settimeout(timeout_s)
    client.sendall(text)
    return client.recv(65536)


def inside(path: Path) -> Any:
    fd = os.open(path, os.O_RDONLY)
    stack = ExitStack()
    stack.callback(os.close, fd)
    stack.enter_context(netns.entered(fd))
    return stack


def tables() -> list[str]:
    return [line for line in netns.run(["nft", "list", "tables"]).splitlines() if "cedana" in line]


class Sniffer:
    """The flags of every TCP segment that comes from an address over the bridge."""

    def __init__(self, address: str = ADDRESS) -> None:
        self.source = socket.inet_aton(address)
        self.link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
        self.link.bind(("br0", 0x0800))
        self.link.setblocking(False)

    def flags(self) -> list[int]:
        seen = []
        with suppress(BlockingIOError):
            while frame := self.link.recv(65536):
                if frame[23] == socket.IPPROTO_TCP and frame[26:30] == self.source:
                    seen.append(frame[14 + (frame[14] & 15) * 4 + 13])
        return seen


def test_a_quiesced_container_is_silent_and_goes_on_when_resumed(node: Node) -> None:
    namespace = node.namespace("one")
    source = node.source(node.server(namespace))
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    network = node.participant()
    assert not [finding for finding in network.probe_source(source, CriuSettings()) if finding.fatal]

    network.quiesce(source)
    with pytest.raises(TimeoutError):
        ask(client, b"b", timeout_s=0.3)
    with closing(socket.socket()) as late:
        late.settimeout(0.2)
        assert late.connect_ex((ADDRESS, PORT)) != 0
    network.resume_source(source)

    client.settimeout(5)
    assert client.recv(100) == b"2 b"
    with inside(namespace):
        assert tables() == []


def test_aborting_lets_go_and_may_be_repeated(node: Node) -> None:
    namespace = node.namespace("one")
    source = node.source(node.server(namespace))
    client = node.connect()
    network = node.participant()
    network.abort_source(source)
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    network.abort_source(source)
    network.abort_source(source)
    assert ask(client, b"a") == b"1 a"
    with inside(namespace):
        assert tables() == []


def test_aborting_after_the_container_died_does_not_raise(node: Node) -> None:
    source = node.source(node.server(node.namespace("one")))
    network = node.participant()
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    os.kill(source.pid, signal.SIGKILL)
    network.abort_source(source)


def test_a_destroyed_container_says_nothing_and_frees_its_address(node: Node) -> None:
    namespace = node.namespace("one")
    source = node.source(node.server(namespace))
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    network = node.participant()
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    network.capture(source)
    sniffer = Sniffer()
    os.kill(source.pid, signal.SIGKILL)
    os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
    network.release_source(source)

    assert select.select([client], [], [], 0.5)[0] == []
    assert sniffer.flags() == []
    assert netlock.in_use("br0", [ip_address(ADDRESS)]) == {}
    with inside(namespace):
        assert [one for one in sockdiag.sockets()] == []
        assert tables() == []


def test_without_silence_the_destroyed_container_would_have_ended_the_connection(node: Node) -> None:
    source = node.source(node.server(node.namespace("one")))
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    sniffer = Sniffer()
    os.kill(source.pid, signal.SIGKILL)
    assert select.select([client], [], [], 5)[0] == [client]
    assert sniffer.flags() != []


def test_closed_connections_are_ended_for_the_other_side_too(node: Node) -> None:
    source = node.source(node.server(node.namespace("one")), tcp="close")
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    network = node.participant()
    criu = CriuSettings()
    network.probe_source(source, criu)
    assert "tcp-close" in criu.flags
    assert "tcp-established" not in criu.flags
    network.quiesce(source)
    assert network.capture(source)["connections"] == []
    os.kill(source.pid, signal.SIGKILL)
    os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
    network.release_source(source)
    client.settimeout(5)
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_only_the_containers_connections_fall_silent_in_a_shared_namespace(node: Node) -> None:
    namespace = node.namespace("pod")
    source = node.source(node.server(namespace))
    node.server(namespace, port=PORT + 1)
    mine, other = node.connect(), node.connect(port=PORT + 1)
    assert ask(mine, b"a") == b"1 a"
    network = node.participant()
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    assert ask(other, b"b") == b"1 b"
    with pytest.raises(TimeoutError):
        ask(mine, b"c", timeout_s=0.3)
    record = network.capture(source)
    assert [listener[2] for listener in record["listeners"]] == [PORT]
    sniffer = Sniffer()
    os.kill(source.pid, signal.SIGKILL)
    os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
    network.release_source(source)

    assert ask(other, b"d") == b"2 d"
    assert select.select([mine], [], [], 0.5)[0] == []
    with closing(socket.socket()) as late:
        assert late.connect_ex((ADDRESS, PORT)) != 0
    assert 4 not in sniffer.flags()  # a bare reset; what answers a new connection also acknowledges


def test_a_container_in_the_nodes_network_is_locked_connection_by_connection(node: Node) -> None:
    argv = ["/usr/bin/python3", "-c", ECHO, BRIDGE_ADDRESS, str(PORT)]
    process = subprocess.Popen(argv)
    node.stack.callback(process.wait)
    node.stack.callback(process.kill)
    outside = node.namespace("peer")
    with inside(outside):
        until(lambda: socket.socket().connect_ex((BRIDGE_ADDRESS, PORT)) == 0)
        client = node.connect(BRIDGE_ADDRESS)
        assert ask(client, b"a") == b"1 a"
    source = node.source(process.pid)
    network = node.participant()
    findings = network.probe_source(source, CriuSettings())
    assert ["node's own network" in finding.message for finding in findings] == [True]
    assert not findings[0].fatal
    network.quiesce(source)
    record = network.capture(source)
    assert record["private"] is False
    assert [BRIDGE_ADDRESS, PORT] in [connection[:2] for connection in record["connections"]]
    process.kill()
    process.wait()
    network.release_source(source)
    client.settimeout(0.4)
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert len(tables()) == 1
    Lock = netlock.Lock
    Lock(record["lock"], "nft").open()


def test_the_captured_network_is_made_again_on_a_bridge(node: Node) -> None:
    namespace = node.namespace("one")
    source = node.source(node.server(namespace))
    network = node.participant()
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    record = json.loads(json.dumps(network.capture(source)))
    with inside(namespace):
        before = interfaces()
    os.kill(source.pid, signal.SIGKILL)
    os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
    network.release_source(source)

    target = node.target()
    restoring = node.participant()
    assert restoring.probe_target(target, record, CriuSettings()) == ()
    restoring.prepare(target, record, CriuSettings())
    path = Path(target.spec["linux"]["namespaces"][0]["path"])
    with inside(path):
        assert interfaces() == before
        routes = netns.run(["ip", "route"])
        assert f"default via {BRIDGE_ADDRESS} dev eth0" in routes
        assert f"192.168.0.0/16 via {BRIDGE_ADDRESS} dev eth0 src {ADDRESS} metric 50" in routes
        assert Path("/proc/sys/net/ipv4/tcp_keepalive_time").read_text() == "77\n"
        assert len(tables()) == 1
    with closing(socket.socket()) as early:
        early.settimeout(0.2)
        assert early.connect_ex((ADDRESS, PORT)) != 0
    restoring.resume_target(target, record)
    with inside(path):
        assert tables() == []
    node.server(path)
    assert ask(node.connect(), b"a") == b"1 a"
    assert ask(node.connect(ADDRESS), b"b").endswith(b"b")
    remove("copy", node.config)
    assert not path.exists()
    assert links() == ["br0", "lo", "vone"]


def interfaces() -> list[Any]:
    return [(i.name, i.kind, i.mac, i.mtu, i.up, sorted(map(str, i.addresses)))
            for i in netconfig.read_interfaces("ip")]  # fmt: skip


def links() -> list[str]:
    return sorted(i.name for i in netconfig.read_interfaces("ip"))


def test_aborting_a_restore_leaves_nothing(node: Node) -> None:
    record = capture(node, node.namespace("one"))
    target = node.target()
    network = node.participant()
    network.probe_target(target, record, CriuSettings())
    network.prepare(target, record, CriuSettings())
    assert len(links()) == 4
    network.abort_target(target)
    network.abort_target(target)
    assert links() == ["br0", "lo", "vone"]
    assert list((node.config.run_dir / "netns").iterdir()) == []
    mounts = Path("/proc/self/mountinfo").read_text()
    assert str(node.config.run_dir) not in mounts


def capture(node: Node, namespace: Path, release: bool = True) -> dict[str, Any]:
    source = node.source(node.server(namespace))
    network = node.participant()
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    record = network.capture(source)
    if release:
        os.kill(source.pid, signal.SIGKILL)
        os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
        network.release_source(source)
    else:
        network.resume_source(source)
    return json.loads(json.dumps(record))  # type: ignore[no-any-return]


def test_an_address_that_is_in_use_is_refused(node: Node) -> None:
    record = capture(node, node.namespace("one"), release=False)
    (finding,) = node.participant().probe_target(node.target(), record, CriuSettings())
    assert finding.fatal
    assert f"{ADDRESS} is in use on br0 by {MAC}" in finding.message


def test_a_node_without_a_bridge_in_that_network_is_refused(node: Node) -> None:
    record = capture(node, node.namespace("one"))
    ip("addr flush dev br0")
    (finding,) = node.participant().probe_target(node.target(), record, CriuSettings())
    assert finding.fatal
    assert ADDRESS in finding.message
    assert node.participant().probe_target(node.target(bridge="br0"), record, CriuSettings()) == ()
    (finding,) = node.participant().probe_target(node.target(bridge="br9"), record, CriuSettings())
    assert "no bridge br9" in finding.message


def test_a_given_namespace_without_the_address_is_refused(node: Node) -> None:
    record = capture(node, node.namespace("one"))
    record["connections"] = [[ADDRESS, PORT, BRIDGE_ADDRESS, 40000]]
    other = node.namespace("two", address="10.77.5.9", mac="02:77:05:00:00:09")
    target = node.target(str(other))
    (finding,) = node.participant().probe_target(target, record, CriuSettings())
    assert finding.fatal
    assert ADDRESS in finding.message
    assert "10.77.5.9" in finding.message
    criu = CriuSettings({"tcp-established"})
    closing_target = node.target(str(other), tcp="close")
    assert node.participant().probe_target(closing_target, record, criu) == ()
    assert criu.flags == {"tcp-close"}


def test_the_namespace_the_container_left_is_used_again(node: Node) -> None:
    namespace = node.namespace("one")
    record = capture(node, namespace)
    target = node.target(str(namespace))
    network = node.participant()
    assert network.probe_target(target, record, CriuSettings()) == ()
    network.prepare(target, record, CriuSettings())
    network.resume_target(target, record)
    with inside(namespace):
        assert "default via" in netns.run(["ip", "route"])
        assert tables() == []
    node.server(namespace)
    assert ask(node.connect(), b"a") == b"1 a"


def test_aborting_in_a_given_namespace_puts_it_back(node: Node) -> None:
    namespace = node.namespace("one")
    record = capture(node, namespace)
    target = node.target(str(namespace))
    network = node.participant()
    network.prepare(target, record, CriuSettings())
    network.abort_target(target)
    with inside(namespace):
        assert not next(i for i in netconfig.read_interfaces("ip") if i.name == "eth0").up
        assert tables() == []


def test_network_and_no_network_of_its_own_do_not_mix(node: Node) -> None:
    record = capture(node, node.namespace("one"))
    target = node.target()
    target.spec["linux"]["namespaces"].clear()
    (finding,) = node.participant().probe_target(target, record, CriuSettings())
    assert finding.fatal
    (finding,) = node.participant().probe_target(node.target(), {**record, "private": False}, CriuSettings())
    assert finding.fatal


def test_nerdctl_is_asked_for_the_address_and_makes_the_rest(node: Node) -> None:
    record = capture(node, node.namespace("one"))
    record["connections"] = [[ADDRESS, PORT, BRIDGE_ADDRESS, 40000]]
    target = node.target()
    target.spec["annotations"] = {"nerdctl/networks": '["bridge"]'}
    target.spec["hooks"] = {
        "createRuntime": [{"path": "/x", "args": ["x", "internal", "oci-hook", "createRuntime"]}]
    }
    network = node.participant()
    assert network.probe_target(target, record, CriuSettings()) == ()
    network.prepare(target, record, CriuSettings())
    assert target.spec["annotations"]["nerdctl/ip"] == ADDRESS
    assert target.spec["annotations"]["nerdctl/mac-address"] == MAC
    path = Path(target.spec["linux"]["namespaces"][0]["path"])
    with inside(path):
        assert links() == ["lo"]
        assert len(tables()) == 1
    network.abort_target(target)
    assert not path.exists()


def test_a_new_address_is_announced(node: Node) -> None:
    record = capture(node, node.namespace("one"))
    target = node.target()
    network = node.participant()
    network.probe_target(target, record, CriuSettings())
    network.prepare(target, record, CriuSettings())
    ip(f"neigh replace {ADDRESS} lladdr 02:00:00:00:00:99 dev br0 nud stale")
    with closing(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x86DD))) as six:
        six.bind(("br0", 0x86DD))
        network.resume_target(target, record)
        until(lambda: MAC in netns.run(["ip", "neigh", "show", ADDRESS]))
        six.settimeout(2)
        seen = b""
        while not (
            len(seen) > 78 and seen[54] == 136 and seen[62:78] == socket.inet_pton(socket.AF_INET6, ADDRESS6)
        ):
            seen = six.recv(2048)
        total = sum(struct.unpack("!36H", seen[22:54] + struct.pack("!II", 32, 58) + seen[54:86]))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        assert total == 0xFFFF
    remove("copy", node.config)


@pytest.mark.parametrize("shared", [False, True])
def test_another_process_lets_go_of_what_a_killed_one_held(node: Node, shared: bool) -> None:
    namespace = node.namespace("one")
    source = node.source(node.server(namespace))
    if shared:
        node.server(namespace, port=PORT + 1)
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    killed = node.participant()
    killed.probe_source(source, CriuSettings())
    killed.quiesce(source)

    network, known = node.participant(), replace(source, pids=(), spec={})
    network.adopt_source(known)
    network.abort_source(known)
    assert ask(client, b"b") == b"2 b"
    with inside(namespace):
        assert tables() == []


@pytest.mark.parametrize("shared", [False, True])
def test_another_process_finishes_the_end_of_a_container(node: Node, shared: bool) -> None:
    namespace = node.namespace("one")
    source = node.source(node.server(namespace))
    if shared:
        node.server(namespace, port=PORT + 1)
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    killed = node.participant()
    killed.probe_source(source, CriuSettings())
    killed.quiesce(source)
    sniffer = Sniffer()
    os.kill(source.pid, signal.SIGKILL)
    os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)

    network, known = node.participant(), replace(source, pids=(), spec={})
    network.adopt_source(known)
    network.release_source(known)
    assert select.select([client], [], [], 0.5)[0] == []
    assert sniffer.flags() == []
    with inside(namespace):
        assert [one for one in sockdiag.sockets() if one.local_port == PORT] == []


def test_aborting_wakes_connections_that_criu_left_in_repair_mode(node: Node) -> None:
    source = node.source(node.server(node.namespace("one")))
    client = node.connect()
    assert ask(client, b"a") == b"1 a"
    network = node.participant()
    network.probe_source(source, CriuSettings())
    network.quiesce(source)
    for one in tcprepair._sockets(source.pid):
        with closing(one), suppress(OSError):
            one.setsockopt(socket.IPPROTO_TCP, tcprepair._TCP_REPAIR, 1)
    network.abort_source(source)
    assert ask(client, b"b") == b"2 b"


def test_nothing_is_taken_over_where_nothing_was_held(node: Node) -> None:
    source = node.source(node.server(node.namespace("one")))
    network = node.participant()
    network.adopt_source(source)
    network.abort_source(source)
    network.release_source(source)


def test_a_container_id_that_is_a_path_is_refused(node: Node) -> None:
    with pytest.raises(NetworkError):
        remove("../../etc", node.config)


class Container:
    """An echo server under runc, in the root file system of this machine (an overlay over it)."""

    def __init__(self, node: Node, name: str) -> None:
        self.node, self.name = node, f"cedana-test-{name}-{os.urandom(3).hex()}"
        self.bundle = node.directory / self.name
        self.runc_root = node.directory / "runc"
        for directory in ("upper", "work", "rootfs"):
            (self.bundle / directory).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={self.bundle}/upper,workdir={self.bundle}/work"
        rootfs = self.bundle / "rootfs"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(rootfs)], check=True)
        node.stack.callback(subprocess.run, ["umount", "-l", str(rootfs)], check=False)

    def spec(self, namespace: str = "") -> dict[str, Any]:
        entry = {"type": "network", "path": namespace} if namespace else {"type": "network"}
        (self.bundle / "config.json").unlink(missing_ok=True)
        self.runc("spec", "--bundle", str(self.bundle))
        path = self.bundle / "config.json"
        spec = json.loads(path.read_text())
        spec["process"]["terminal"] = False
        spec["process"]["args"] = ["/usr/bin/python3", "-c", ECHO, "0.0.0.0", str(PORT)]
        spec["root"]["readonly"] = False
        spec["hostname"] = "demo"
        spec["mounts"] = [m for m in spec["mounts"] if m["type"] in ("proc", "tmpfs")]
        namespaces = [n for n in spec["linux"]["namespaces"] if n["type"] not in ("network", "cgroup")]
        spec["linux"]["namespaces"] = [*namespaces, entry]
        spec["linux"]["cgroupsPath"] = f"/{self.name}"
        spec["annotations"] = {"org.criu.config": str(self.bundle / "criu.conf")}
        return spec  # type: ignore[no-any-return]

    def write(self, spec: dict[str, Any], criu: CriuSettings) -> None:
        settings = [*sorted(criu.flags), *(" ".join(pair) for pair in criu.values)]
        settings += ["network-lock skip", "manage-cgroups ignore"]
        (self.bundle / "criu.conf").write_text("".join(f"{line}\n" for line in settings))
        (self.bundle / "config.json").write_text(json.dumps(spec))

    def start(self, *command: str) -> int:
        pid_file = self.bundle / "pid"
        argv = [*command, "--bundle", str(self.bundle), "--detach", "--pid-file", str(pid_file), self.name]
        self.node.stack.callback(self.runc, "delete", "--force", self.name, check=False)
        self.runc(*argv)
        return int(pid_file.read_text())

    def runc(self, *argv: str, check: bool = True) -> None:
        environment = {"PATH": self.node.config.tool_path()}
        log = self.node.directory / "runc.log"
        runc = [self.node.config.tool("runc"), "--log", str(log), "--root", str(self.runc_root)]
        null = subprocess.DEVNULL  # what it starts keeps these open
        done = subprocess.run(
            [*runc, *argv], stdin=null, stdout=null, stderr=null, env=environment, check=False
        )
        if check and done.returncode != 0:
            logs = [log, *self.node.directory.glob("criu*/*.log")]
            pytest.fail("\n".join(path.read_text()[-3000:] for path in logs if path.exists()))


def checkpoint(node: Node, container: Container, source: Source) -> tuple[dict[str, Any], CriuSettings]:
    """Stop the container, save it, and end it, as the engine does."""
    criu = CriuSettings()
    network = node.participant()
    assert not [finding for finding in network.probe_source(source, criu) if finding.fatal]
    container.write(json.loads((container.bundle / "config.json").read_text()), criu)
    container.runc("pause", container.name)
    network.quiesce(source)
    container.runc(
        "checkpoint", "--leave-running", "--image-path", str(node.directory / "images"),
        "--work-path", str(node.directory / "criu"), container.name,
    )  # fmt: skip
    record = json.loads(json.dumps(network.capture(source)))
    container.runc("kill", container.name, "KILL")
    container.runc("resume", container.name, check=False)
    until(lambda: not Path(f"/proc/{source.pid}/ns/net").exists() or zombie(source.pid))
    network.release_source(source)
    container.runc("delete", "--force", container.name)
    return record, CriuSettings(criu.flags)


def zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def restore(
    node: Node, container: Container, record: dict[str, Any], criu: CriuSettings, **options: Any
) -> Path:
    path = options.pop("path", "")
    target = replace(node.target(path, **options), spec=container.spec(path))
    network = node.participant()
    assert network.probe_target(target, record, criu) == ()
    network.prepare(target, record, criu)
    node.stack.callback(remove, target.container_id, node.config)
    container.write(target.spec, criu)
    images, work = str(node.directory / "images"), str(node.directory / "criu-restore")
    container.start("restore", "--image-path", images, "--work-path", work)
    network.resume_target(target, record)
    return Path(next(n["path"] for n in target.spec["linux"]["namespaces"] if n["type"] == "network"))


def started(node: Node, container: Container, namespace: str) -> Source:
    spec = container.spec(namespace)
    container.write(spec, CriuSettings())
    pid = container.start("run")
    source = replace(node.source(pid), spec=spec)
    until(lambda: socket.socket().connect_ex((ADDRESS, PORT)) == 0)
    return source


class Client(threading.Thread):
    """Asks on one connection without pause, and counts: every answer has its number."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(daemon=True)
        self.connection, self.answers, self.longest_gap_s = connection, 0, 0.0
        self.error: BaseException | None = None
        self.done = False
        connection.settimeout(20)

    def run(self) -> None:
        try:
            while not self.done:
                began = time.monotonic()
                self.connection.sendall(b"x")
                self.answers += 1
                assert self.connection.recv(100) == b"%d x" % self.answers
                self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - began)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.done = True
        self.join(timeout=30)


@pytest.mark.parametrize("given", [True, False], ids=["into_a_given_namespace", "into_a_new_namespace"])
def test_a_connection_outlives_the_move_of_its_container(node: Node, given: bool) -> None:
    namespace = node.namespace("one")
    container = Container(node, "a")
    source = started(node, container, str(namespace))
    client = Client(node.connect())
    client.start()
    until(lambda: client.answers > 100)

    record, criu = checkpoint(node, container, source)
    path = restore(node, container, record, criu, path=str(namespace) if given else "")
    assert (path == namespace) is given
    at_restore = client.answers
    until(lambda: client.answers > at_restore + 100, timeout_s=20)
    client.stop()
    assert client.error is None
    print(f"longest gap {client.longest_gap_s:.3f} s")
    with inside(path):
        assert tables() == []


def test_a_namespace_that_runc_made_is_external_too(node: Node) -> None:
    container = Container(node, "b")
    spec = container.spec()
    container.write(spec, CriuSettings())
    pid = container.start("run")
    ip(
        f"link add vrunc type veth peer name eth0 address {MAC} netns {pid}",
        "link set vrunc master br0",
        "link set vrunc up",
    )
    with inside(Path(f"/proc/{pid}/ns/net")):
        ip(f"addr add {ADDRESS}/24 dev eth0", "link set eth0 up")
    until(lambda: socket.socket().connect_ex((ADDRESS, PORT)) == 0)
    source = replace(node.source(pid), spec=spec)
    client = Client(node.connect())
    client.start()
    until(lambda: client.answers > 100)
    record, criu = checkpoint(node, container, source)
    restore(node, container, record, criu)
    at_restore = client.answers
    until(lambda: client.answers > at_restore + 100, timeout_s=20)
    client.stop()
    assert client.error is None


def test_closed_connections_need_no_address(node: Node) -> None:
    container = Container(node, "c")
    source = replace(started(node, container, str(node.namespace("one"))), options={"tcp": "close"})
    client = node.connect()
    assert ask(client, b"a").endswith(b"a")
    record, criu = checkpoint(node, container, source)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    other = node.namespace("two", address="10.77.5.9", mac="02:77:05:00:00:09")
    restore(node, container, record, criu, path=str(other), tcp="close")
    assert ask(node.connect("10.77.5.9"), b"b").endswith(b"b")


def test_a_failed_restore_leaves_the_connection_to_be_restored_again(node: Node) -> None:
    container = Container(node, "d")
    source = started(node, container, str(node.namespace("one")))
    client = Client(node.connect())
    client.start()
    until(lambda: client.answers > 10)
    record, criu = checkpoint(node, container, source)
    broken = shutil.copytree(node.directory / "images", node.directory / "broken")
    next(broken.glob("core-*.img")).write_bytes(b"broken")
    target = replace(node.target(), spec=container.spec())
    network = node.participant()
    network.probe_target(target, record, criu)
    network.prepare(target, record, criu)
    container.write(target.spec, criu)
    work = str(node.directory / "criu-broken")
    container.runc("restore", "--bundle", str(container.bundle), "--detach", "--image-path", str(broken),
                   "--work-path", work, container.name, check=False)  # fmt: skip
    container.runc("delete", "--force", container.name, check=False)
    network.abort_target(target)

    restore(node, container, record, criu)
    at_restore = client.answers
    until(lambda: client.answers > at_restore + 10, timeout_s=20)
    client.stop()
    assert client.error is None


@pytest.fixture
def redis(bed: Bed, name: str) -> Iterator[Callable[[str], str]]:
    """Starts redis under nerdctl on node A with a network of nerdctl's, and says its address."""
    machine = bed.node_a

    def start(network: str) -> str:
        machine.nerdctl(
            "run", "--detach", "--pull", "never", "--name", name, "--net", network,
            "--runtime", "io.containerd.cedana.v1", bed.image("redis"),
        )  # fmt: skip
        return machine.address if network == "host" else address_of(machine, name)

    yield start
    machine.nerdctl("rm", "--force", name, check=False)


def address_of(machine: BedNode, name: str) -> str:
    return machine.container_address(machine.nerdctl("inspect", "--format", "{{.ID}}", name).strip())


def test_nerdctls_network_gives_the_address_and_the_connection_goes_on(
    bed: Bed, name: str, redis: Callable[[str], str]
) -> None:
    machine, address, reference = bed.node_a, redis("bed"), bed.reference(name)
    with RedisClient(bed.hub, address) as client:
        client.start().wait_for(100)
        machine.cedana("checkpoint", name, "--to", reference)
        machine.nerdctl("rm", "--force", name)
        machine.nerdctl(
            "run", "--detach", "--pull", "never", "--name", name, "--net", "bed",
            "--runtime", "io.containerd.cedana.v1",
            "--annotation", f"ai.cedana.restore-from={reference}", bed.image("redis"),
        )  # fmt: skip
        client.wait_for(100)
        client.stop()
        assert client.values == list(range(1, len(client.values) + 1))
    assert address_of(machine, name) == address
    machine.nerdctl("rm", "--force", name)
    assert machine.ns_exec(["ls", "/run/cedana/netns"]) == ""


def test_connections_to_the_nodes_own_address_go_on_where_that_address_is(
    bed: Bed, name: str, redis: Callable[[str], str]
) -> None:
    machine, address, reference = bed.node_a, redis("host"), bed.reference(name)
    with RedisClient(bed.hub, address) as client:
        client.start().wait_for(100)
        machine.cedana("checkpoint", name, "--to", reference)
        machine.nerdctl("rm", "--force", name)
        assert "cedana_" in machine.ns_exec(["nft", "list", "tables"])
        cedana = Path(sys.executable).with_name("cedana")
        refused = bed.node_b.run([cedana, "restore", reference, "--allow", "host-network"], check=False)
        assert refused.returncode == 4
        assert f"bound to {address}, which this node does not have" in refused.stderr
        machine.cedana("restore", reference, "--allow", "host-network")
        client.wait_for(100)
        client.stop()
        assert client.values == list(range(1, len(client.values) + 1))
    assert "cedana_" not in machine.ns_exec(["nft", "list", "tables"])
