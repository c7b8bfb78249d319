"""The participant `network`: a container's addresses, and the TCP connections that live on them.

At the checkpoint the container falls silent (nothing enters or leaves), so that its connections can be
taken apart while the other ends merely wait; after it was destroyed, what is left of its sockets goes
without a word, and the address is free. At the restore the place is made: the network namespace the
target's spec names, or one of ours with the same addresses on a bridge of this node, silent until the
sockets are back, and then announced.

The namespace is external to CRIU (`external net[INODE]:extRootNetNS`, the key runc uses): CRIU carries the
sockets, this module the rest.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base import config as base_config
from base.config import Config
from hooks import netbuild, netconfig, netlock, netns, netspec, sockdiag, tcprepair
from hooks.netconfig import Interface, NetworkRecord, Route
from hooks.netlock import Lock
from hooks.netns import NetworkError
from hooks.participant import CriuSettings, Finding, Source, Target
from hooks.sockdiag import Address, Socket

_CRIU_KEY = "extRootNetNS"
_NOTE = "network.json"
"""In the scratch directory of a checkpoint: the lock it holds."""
_TRIES = 3
"""How often an abort tries to open a lock that it closed: one failure must not silence a container."""


@dataclass(frozen=True)
class _Seen:
    """What the probe read of a container's namespace: nothing of it changes in the moment until the
    freeze, and what is read before costs no frozen time."""

    apart: bool
    """It is not the node's."""
    private: bool
    """No process of anybody else lives in it."""
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    sysctls: Mapping[str, str] = field(default_factory=dict)


@dataclass
class _Held:
    """The namespace of a container being checkpointed, kept open past the end of its processes."""

    fd: int
    seen: _Seen
    lock: Lock
    sockets: tuple[Socket, ...] = ()
    """The container's own, where others have some too."""


@dataclass
class _Place:
    """Where a container is restored to."""

    kind: str
    """host: the node's namespace; path: one the spec names; new: to be made; hooked: to be made bare, and
    given its addresses by the OCI hook that the spec names."""
    path: Path | None = None


@dataclass
class _Made:
    """What `prepare` did."""

    place: _Place
    lock: Lock
    record: NetworkRecord
    private: bool = False
    """Nobody else lives there."""
    lifted: list[str] = field(default_factory=list)
    """Interfaces that were down."""
    created: bool = False


class NetworkParticipant:
    name = "network"

    def __init__(self, config: Config | None = None) -> None:
        self._config = config or base_config.load()
        self._seen: dict[str, _Seen] = {}
        self._held: dict[str, _Held] = {}
        self._bridges: dict[str, dict[str, str]] = {}
        """By container: the bridge each interface goes on."""
        self._made: dict[str, _Made] = {}

    # Source

    def probe_source(self, source: Source, criu: CriuSettings) -> Sequence[Finding]:
        findings = []
        inside = _namespace(source.pid)
        apart = inside != _namespace("thread-self")
        nested = [pid for pid in source.pids if _namespace(pid) not in (inside, None)]
        if nested:
            findings.append(
                Finding(
                    f"process {nested[0]} runs in a network namespace of its own inside the container",
                    hint="end what made it (a container engine inside the container, `ip netns`)",
                    fatal=True,
                )
            )
        if not os.access(self._tool("nft"), os.X_OK):
            findings.append(Finding("nft is not installed on this node", hint="install nftables", fatal=True))
        criu.flags |= {"tcp-close" if _closes(source.options) else "tcp-established", "skip-in-flight"}
        if apart and inside is not None and netspec.namespace(source.spec) != inside:
            criu.values.append(("external", f"net[{inside[1]}]:{_CRIU_KEY}"))
        private = apart and inside is not None and not netns.processes(inside, source.pids)
        with netns.inside(source.pid):
            mine = _own(sockdiag.sockets(), sockdiag.owned_inodes(source.pids))
            seen = self._look(private) if apart else _Seen(apart=False, private=False)
        self._seen[source.container_id] = seen
        count = sum(one.connected and not one.local.is_loopback for one in mine)
        if not apart and count and not _closes(source.options):
            findings.append(
                Finding(
                    f"the container uses the node's own network: its {count} TCP connections live on only"
                    " if it is restored where the node's addresses are",
                    hint="to restore it elsewhere, use `--tcp close`",
                )
            )
        for interface in seen.interfaces:
            if interface.kind not in netbuild.REBUILT and interface.up:
                findings.append(
                    Finding(
                        f"the interface {interface.name} is of type {interface.kind}, which is not made"
                        " again",
                        hint="restore into a network namespace that has it",
                    )
                )
        return findings

    def _look(self, private: bool) -> _Seen:
        ip = self._tool("ip")
        interfaces = netconfig.read_interfaces(ip)
        return _Seen(
            apart=True,
            private=private,
            interfaces=interfaces,
            routes=netconfig.read_routes(ip, interfaces),
            sysctls=netconfig.read_sysctls(),
        )

    def quiesce(self, source: Source) -> None:
        fd = netns.open_of(source.pid)
        held = _Held(
            fd=fd,
            seen=self._seen[source.container_id],
            lock=self._lock(source.container_id),
        )
        self._held[source.container_id] = held
        with netns.entered(fd):
            if held.seen.private:
                _note(held, source.scratch)
                held.lock.close_all()
                return
            inodes = sockdiag.owned_inodes(source.pids)
            while (found := _own(sockdiag.sockets(), inodes)) != list(held.sockets):
                # A connection that came to be before its port was closed shows in the next look.
                held.sockets = tuple(found)
                _note(held, source.scratch)
                held.lock.close(
                    netconfig.read_connections(found), [one.local_port for one in found if one.listening]
                )

    def capture(self, source: Source) -> dict[str, Any]:
        held = self._held[source.container_id]
        seen = held.seen
        with netns.entered(held.fd):
            found = _own(
                sockdiag.sockets((socket.IPPROTO_TCP, socket.IPPROTO_UDP)), sockdiag.owned_inodes(source.pids)
            )
        record = NetworkRecord(
            private=seen.apart,
            interfaces=seen.interfaces,
            routes=seen.routes,
            sysctls=seen.sysctls,
            listeners=netconfig.read_listeners(found),
            connections=() if _closes(source.options) else netconfig.read_connections(found),
            lock="" if seen.private else held.lock.table,
        )
        return record.to_json()

    def resume_source(self, source: Source) -> None:
        if (held := self._held.get(source.container_id)) is None:
            return
        with netns.entered(held.fd):
            held.lock.open()  # if that fails, `abort_source` tries again
        del self._held[source.container_id]
        os.close(held.fd)

    def release_source(self, source: Source) -> None:
        """The processes are gone: their sockets follow, and the address becomes free for another node."""
        if (held := self._held.pop(source.container_id, None)) is None:
            return
        try:
            with netns.entered(held.fd):
                if _closes(source.options):
                    held.lock.open()  # the other ends are to learn that it is over
                self._destroy_sockets(held)
                if held.seen.private:
                    self._take_down()
                    held.lock.open()
                elif not _closes(source.options):
                    held.lock.close(netconfig.read_connections(held.sockets))
        except (OSError, NetworkError) as error:
            raise NetworkError(
                f"container {source.container_id} is checkpointed and gone, but its network on this node is"
                f" not: {error}",
                hint="remove the container (`nerdctl rm`, `ctr containers delete`) before restoring it"
                " elsewhere",
            ) from error
        finally:
            os.close(held.fd)

    def abort_source(self, source: Source) -> None:
        if source.container_id in self._held:
            with suppress(Exception):
                tcprepair.leave(source.pids)
        for _ in range(_TRIES):
            with suppress(Exception):
                self.resume_source(source)
                return

    def adopt_source(self, source: Source) -> None:
        try:
            noted = json.loads((source.scratch / _NOTE).read_text())
        except FileNotFoundError:
            return
        if (fd := netns.find((noted["device"], noted["inode"]))) is None:
            return
        with netns.entered(fd):
            sockets = [one for one in sockdiag.sockets() if one.identity.hex() in noted["sockets"]]
        self._held[source.container_id] = _Held(
            fd=fd,
            seen=_Seen(apart=noted["private"], private=noted["private"]),
            lock=Lock(noted["table"], self._tool("nft")),
            sockets=tuple(sockets),
        )

    def _destroy_sockets(self, held: _Held) -> None:
        """Under the lock no reset leaves: the connections end here and nowhere else."""
        mine = {one.identity for one in held.sockets}
        sockdiag.destroy(
            one for one in sockdiag.sockets() if held.seen.private or (one.identity in mine and not one.inode)
        )

    def _take_down(self) -> None:
        ip = self._tool("ip")
        commands = [f"link set {i.name} down" for i in netconfig.read_interfaces(ip) if not i.loopback]
        netconfig.run_commands(ip, commands)

    # Target

    def probe_target(
        self, target: Target, captured: Mapping[str, Any], criu: CriuSettings
    ) -> Sequence[Finding]:
        if not captured:
            return ()
        record = NetworkRecord.parse(captured)
        closes = _closes(target.options)
        if closes:
            criu.flags -= {"tcp-established"}
            criu.flags |= {"tcp-close"}
        needed = record.needed_addresses(connections=not closes and "tcp-close" not in criu.flags)
        place = self._place(target.spec)
        if record.private == (place.kind == "host"):
            return (_other_kind(record),)
        match place.kind:
            case "host":
                return tuple(self._probe_addresses(needed, None))
            case "path":
                return tuple(self._probe_addresses(needed, place.path))
            case "hooked":
                return tuple(netspec.probe_hooked(target.spec, needed))
            case _:
                return tuple(self._probe_links(target, record))

    def _probe_addresses(self, needed: set[Address], path: Path | None) -> Iterator[Finding]:
        try:
            with netns.inside(path or "thread-self"):
                interfaces = netconfig.read_interfaces(self._tool("ip"))
        except OSError as error:
            yield Finding(
                f"the network namespace {path} cannot be entered: {os.strerror(error.errno or 0)}", fatal=True
            )
            return
        present = {address.ip for interface in interfaces for address in interface.addresses}
        if missing := needed - present:
            where = f"the network namespace {path}" if path else "this node"
            yield Finding(
                f"sockets of the container are bound to {netbuild.listed(missing)}, which {where} does not"
                f" have (it has {netbuild.listed({a for a in present if not a.is_link_local}) or 'none'})",
                hint="give it the address, or restore with `--tcp close` if only connections use it",
                fatal=True,
            )

    def _probe_links(self, target: Target, record: NetworkRecord) -> Iterator[Finding]:
        wanted = str(target.options.get("bridge") or "")
        bridges = [i for i in netconfig.read_interfaces(self._tool("ip")) if i.kind == "bridge"]
        chosen = self._bridges[target.container_id] = {}
        for interface in record.interfaces:
            if interface.kind not in netbuild.REBUILT:
                if interface.up:
                    yield Finding(
                        f"the container's interface {interface.name} is of type {interface.kind}, which is"
                        " not made again",
                        hint="restore into a network namespace that has it",
                        fatal=True,
                    )
            elif interface.kind == "veth":
                bridge = netbuild.bridge_for(interface, bridges, wanted)
                if bridge is None:
                    yield netbuild.no_bridge(interface, bridges, wanted)
                    continue
                chosen[interface.name] = bridge.name
                yield from netbuild.probe_conflicts(interface, bridge, bridges)

    def prepare(self, target: Target, captured: Mapping[str, Any], criu: CriuSettings) -> None:
        if not captured:
            return
        record = NetworkRecord.parse(captured)
        made = _Made(self._place(target.spec), self._lock(target.container_id), record)
        match made.place.kind:
            case "host":
                made.place.path = Path("/proc/thread-self/ns/net")
                self._made[target.container_id] = made
                if record.connections:
                    made.lock.close(record.connections)
            case "path":
                self._made[target.container_id] = made
                self._prepare_given(made)
            case _:
                made.place.path = netbuild.path_of(target.container_id, self._config)
                self._prepare_new(target, made)

    def _prepare_given(self, made: _Made) -> None:
        assert made.place.path is not None
        record = made.record
        made.private = not netns.processes(netns.identity(str(made.place.path)))
        ip = self._tool("ip")
        with netns.inside(made.place.path):
            if made.private:
                made.lock.close_all()
            elif record.connections:
                made.lock.close(record.connections)
            # Taken down when the container left this very namespace; its routes went with that.
            known = {interface.name for interface in record.interfaces if interface.up}
            present = netconfig.read_interfaces(ip)
            made.lifted += [i.name for i in present if i.name in known and not i.up]
            if made.lifted:
                routes = [route for route in record.routes if route.device in made.lifted]
                commands = [f"link set {name} up" for name in made.lifted]
                netconfig.run_commands(ip, [*commands, *netconfig.route_commands(routes)])

    def _prepare_new(self, target: Target, made: _Made) -> None:
        path, record = made.place.path, made.record
        assert path is not None
        if path.exists() and netns.processes(netns.identity(str(path))):
            raise NetworkError(
                f"the network namespace of a container {target.container_id} is still in use on this node",
                hint="give the restored container another name",
                details=str(path),
            )
        netbuild.remove(target.container_id, self._config)
        self._made[target.container_id] = made
        made.created = True
        netns.create(path)
        with netns.inside(path):
            made.lock.close_all()
            netconfig.write_sysctls({**record.sysctls, **netspec.sysctls(target.spec)})
            if made.place.kind == "hooked":
                netconfig.run_commands(self._tool("ip"), ["link set lo up"])
        if made.place.kind == "hooked":
            needed = record.needed_addresses(connections=not _closes(target.options))
            netspec.ask_nerdctl(target.spec, record, needed)
        else:
            bridges = self._bridges.get(target.container_id, {})
            # Nothing can be heard of the interfaces yet: the lock is closed.
            netbuild.build(target.container_id, path, record, bridges, self._config)
        netspec.network_entry(target.spec)["path"] = str(path)

    def resume_target(self, target: Target, captured: Mapping[str, Any]) -> None:
        if (made := self._made.get(target.container_id)) is None or made.place.path is None:
            return
        with netns.inside(made.place.path):
            made.lock.open()
            if made.record.lock:  # it left this very namespace, perhaps, and is back
                Lock(made.record.lock, self._tool("nft")).open()
            if made.place.kind == "new":
                netlock.announce(made.record.interfaces)
            elif made.place.kind != "host":
                netlock.announce(netconfig.read_interfaces(self._tool("ip")))
        del self._made[target.container_id]

    def abort_target(self, target: Target) -> None:
        with suppress(Exception):
            made = self._made.pop(target.container_id, None)
            if made is None or made.place.path is None:
                return
            if made.created:
                netbuild.remove(target.container_id, self._config)
                return
            with netns.inside(made.place.path):
                mine = set(made.record.connections)
                with suppress(OSError, NetworkError):
                    sockdiag.destroy(  # what a failed restore leaves must not end the connection elsewhere
                        one
                        for one in sockdiag.sockets()
                        if made.private or (not one.inode and netconfig.connection(one) in mine)
                    )
                with suppress(NetworkError):
                    commands = [f"link set {name} down" for name in made.lifted]
                    netconfig.run_commands(self._tool("ip"), commands)
                made.lock.open()

    # Both

    def _place(self, spec: Mapping[str, Any]) -> _Place:
        entry = netspec.network_entry(spec)
        if entry is None:
            return _Place("host")
        if path := entry.get("path"):
            given = Path(str(path))
            with suppress(OSError):
                if netns.identity(str(given)) == _namespace("thread-self"):
                    return _Place("host")
            return _Place("path", given)
        return _Place("hooked" if netspec.hook_gives_addresses(spec) else "new")

    def _lock(self, container_id: str) -> Lock:
        return Lock(f"cedana_{netbuild.checked_id(container_id)}_{os.urandom(3).hex()}", self._tool("nft"))

    def _tool(self, name: str) -> str:
        return self._config.tool(name)


def _note(held: _Held, scratch: Path) -> None:
    """Write down, before the lock is closed, what another process needs to open it."""
    device, inode = netns.identity(held.fd)
    note = {
        "device": device,
        "inode": inode,
        "table": held.lock.table,
        "private": held.seen.private,
        "sockets": [one.identity.hex() for one in held.sockets],
    }
    fresh = scratch / f"{_NOTE}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(note, file)
    fresh.rename(scratch / _NOTE)


def _namespace(pid: int | str) -> tuple[int, int] | None:
    try:
        return netns.identity(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def _closes(options: Mapping[str, Any]) -> bool:
    return options.get("tcp") == "close"


def _own(found: Sequence[Socket], inodes: set[int]) -> list[Socket]:
    """The sockets of the container's processes, and those that wait in their accept queues."""
    ports = {one.local_port for one in found if one.inode in inodes and one.listening}
    return [one for one in found if one.inode in inodes or (not one.inode and one.local_port in ports)]


def _other_kind(record: NetworkRecord) -> Finding:
    if record.private:
        return Finding(
            "the container had a network namespace of its own and is to share this node's",
            hint="restore it with a network of its own (without `--net-host`, `--net=host`)",
            fatal=True,
        )
    return Finding(
        "the container shared its node's network and is to have one of its own",
        hint="restore it with `--net-host` (ctr) or `--net=host` (nerdctl)",
        fatal=True,
    )
