"""Bad input on a shim's socket: ours answers with the code that containerd's own does, and both live on.

Each case plays the same bytes to a shim of either kind, each with a running container.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from shim import wire
from shim.api import options_pb2
from shim.api import task_pb2 as api
from tests.node.containerds import IMAGE, Containerd, containerd

OURS, STOCK = "io.containerd.cedana.v1", "io.containerd.runc.v2"
TASK = "containerd.task.v3.Task"
HEADER = struct.Struct(">IIBB")
REQUEST, RESPONSE, DATA = 1, 2, 3
LIMIT = 4 << 20
PATIENCE_S = 60.0
SILENCE_S = 1.0

Outcome = int | str
"""A gRPC code (0: it was done), or what else became of the connection."""


@dataclass(frozen=True)
class Victim:
    address: str
    id: str
    pid: int
    scratch: Path

    def connect(self) -> Connection:
        return Connection(self.address)

    def state(self) -> tuple[int, int]:
        with contextlib.closing(self.connect()) as connection:
            payload = connection.answer(connection.call("State", api.StateRequest(id=self.id)))
            assert isinstance(payload, bytes)
            found = api.StateResponse.FromString(payload)
            return found.pid, found.status


class Connection:
    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)  # waits while the shim has many to accept
        self._socket.settimeout(PATIENCE_S)
        self._stream = -1

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self, stream: int, body: bytes, *, kind: int = REQUEST, length: int | None = None) -> None:
        self.send(HEADER.pack(len(body) if length is None else length, stream, kind, 0) + body)

    def call(self, method: str, request: Message | bytes, service: str = TASK) -> int:
        """Send a request; returns its stream."""
        self._stream += 2
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        self.frame(self._stream, wire.field(1, service) + wire.field(2, method) + wire.field(3, payload))
        return self._stream

    def answer(self, stream: int, patience_s: float = PATIENCE_S) -> Outcome | bytes:
        """The payload of the answer on a stream, its code if it is an error's; or what else came."""
        self._socket.settimeout(patience_s)
        try:
            while True:
                length, found, kind, _ = HEADER.unpack(self._read(HEADER.size))
                body = self._read(length)
                if found == stream and kind == RESPONSE:
                    return _outcome(body)
        except TimeoutError:
            return "silence"
        except (EOFError, ConnectionError):
            return "closed"

    def outcome(self, stream: int, patience_s: float = PATIENCE_S) -> Outcome:
        found = self.answer(stream, patience_s)
        return 0 if isinstance(found, bytes) else found

    def ask(self, method: str, request: Message | bytes, service: str = TASK) -> Outcome:
        return self.outcome(self.call(method, request, service))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


def _outcome(body: bytes) -> Outcome | bytes:
    fields = dict(wire.decode(body))
    status = fields.get(1, b"")
    assert isinstance(status, bytes)
    code = dict(wire.decode(status)).get(1, 0)
    payload = fields.get(2, b"")
    assert isinstance(code, int)
    assert isinstance(payload, bytes)
    return code or payload


@pytest.fixture(scope="module")
def daemon() -> Iterator[Containerd]:
    with containerd("2.x") as made:
        yield made


@pytest.fixture(scope="module")
def victims(daemon: Containerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Victim]]:
    found = {}
    for runtime, name in ((OURS, "ours"), (STOCK, "stock")):
        done = daemon.ctr("run", "--detach", "--runtime", runtime, IMAGE, name, "sleep", "100000")
        assert done.status == 0, done.err
        bundle = daemon.state / "io.containerd.runtime.v2.task" / daemon.namespace / name
        address = json.loads((bundle / "bootstrap.json").read_text())["address"].removeprefix("unix://")
        found[runtime] = Victim(address, name, daemon.task(name)[0], tmp_path_factory.mktemp(name))
    yield found
    for name in ("ours", "stock"):
        daemon.remove(name)


def _asked(method: str, request: Message | bytes, service: str = TASK) -> Callable[[Victim], Outcome]:
    def play(victim: Victim) -> Outcome:
        with contextlib.closing(victim.connect()) as connection:
            return connection.ask(method, _of(victim, request), service)

    return play


def _of(victim: Victim, request: Message | bytes) -> Message | bytes:
    """The request, about the victim's own container if it names none."""
    if isinstance(request, bytes) or request.id:  # type: ignore[attr-defined]
        return request
    return type(request).FromString(request.SerializeToString() + wire.field(1, victim.id))


def _streams(*streams: int) -> Callable[[Victim], Outcome]:
    """The same request on these streams; the outcome of the last."""

    def play(victim: Victim) -> Outcome:
        body = wire.field(1, TASK) + wire.field(2, "State")
        body += wire.field(3, api.StateRequest(id=victim.id).SerializeToString())
        with contextlib.closing(victim.connect()) as connection:
            for stream in streams:
                connection.frame(stream, body)
                last = connection.outcome(stream, SILENCE_S)
            return last

    return play


def _oversized(victim: Victim) -> Outcome:
    """A message over the limit is refused alone: its connection goes on."""
    with contextlib.closing(victim.connect()) as connection:
        connection.frame(1, bytes(LIMIT + 1))
        refused = connection.outcome(1)
        connection._stream = 1
        assert connection.ask("State", api.StateRequest(id=victim.id)) == 0
        return refused


def _raw(data: bytes) -> Callable[[Victim], Outcome]:
    def play(victim: Victim) -> Outcome:
        with contextlib.closing(victim.connect()) as connection:
            connection.send(data)
            return connection.outcome(1, SILENCE_S)

    return play


def _create(prepare: Callable[[Path], None], **options: str) -> Callable[[Victim], Outcome]:
    """Create a container from a bad bundle: refused, and nothing of it known afterwards."""

    def play(victim: Victim) -> Outcome:
        bundle = victim.scratch / f"bundle-{os.urandom(3).hex()}"
        (bundle / "rootfs").mkdir(parents=True)
        prepare(bundle)
        chosen = options_pb2.Options(**options)  # type: ignore[arg-type]
        request = api.CreateTaskRequest(
            id=f"{victim.id}-bad", bundle=str(bundle),
            options=AnyMessage(type_url="containerd.runc.v1.Options", value=chosen.SerializeToString()),
        )  # fmt: skip
        with contextlib.closing(victim.connect()) as connection:
            refused = connection.ask("Create", request)
            assert connection.ask("State", api.StateRequest(id=request.id)) == 5
            return refused

    return play


def _broken_config(bundle: Path) -> None:
    (bundle / "config.json").write_text('{"ociVersion": "1.0", "process"')


def _whole_config(bundle: Path) -> None:
    (bundle / "config.json").write_text('{"ociVersion": "1.0.2", "process": {"args": ["true"], "cwd": "/"}}')


CASES: Mapping[str, Callable[[Victim], Outcome]] = {
    "unknown method": _asked("Dance", b""),
    "unknown service": _asked("State", b"", "containerd.task.v9.Task"),
    "unknown container": _asked("State", api.StateRequest(id="nobody")),
    "unknown process": _asked("State", api.StateRequest(exec_id="nobody")),
    "unknown process to kill": _asked("Kill", api.KillRequest(exec_id="nobody", signal=9)),
    "unknown process to start": _asked("Start", api.StartRequest(exec_id="nobody")),
    "unknown process to wait for": _asked("Wait", api.WaitRequest(exec_id="nobody")),
    "unknown container to wait for": _asked("Wait", api.WaitRequest(id="nobody")),
    "unknown container to delete": _asked("Delete", api.DeleteRequest(id="nobody")),
    "unknown container's numbers": _asked("Stats", api.StatsRequest(id="nobody")),
    "start of a running one": _asked("Start", api.StartRequest()),
    "resume of a running one": _asked("Resume", api.ResumeRequest()),
    "delete of a running one": _asked("Delete", api.DeleteRequest()),
    "create of one that is there": _asked("Create", api.CreateTaskRequest()),
    "shutdown while one runs": _asked("Shutdown", api.ShutdownRequest()),
    "payload that is no message": _asked("State", b"\xff\xff\xff"),
    "request that is no message": _raw(HEADER.pack(3, 1, REQUEST, 0) + b"\xff\xff\xff"),
    "empty request": _raw(HEADER.pack(0, 1, REQUEST, 0)),
    "even stream": _streams(2),
    "stream used again": _streams(1, 1),
    "stream that goes back": _streams(5, 3),
    "message over the limit": _oversized,
    "header cut short": _raw(b"\0\0\0"),
    "message cut short": _raw(HEADER.pack(100, 1, REQUEST, 0) + b"x"),
    "config.json is missing": _create(lambda bundle: None),
    "config.json is broken": _create(_broken_config),
    "runc is missing": _create(_whole_config, binary_name="no-such-runc"),
}
BETTER: Mapping[str, Outcome] = {
    "create of one that is there": 6,  # ALREADY_EXISTS; the stock shim asks runc, and says UNKNOWN
}
"""What ours answers where it knows more than containerd's own."""


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_as_containerds_own_shim_does(victims: Mapping[str, Victim], case: str) -> None:
    outcomes = {runtime: CASES[case](victim) for runtime, victim in victims.items()}
    assert outcomes[OURS] == BETTER.get(case, outcomes[STOCK])
    for victim in victims.values():
        assert victim.state() == (victim.pid, api.RUNNING)


@pytest.mark.parametrize("data", [os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 4096])
def test_noise_harms_nobody(victims: Mapping[str, Victim], data: bytes) -> None:
    victim = victims[OURS]
    with contextlib.suppress(ConnectionError):
        _raw(data)(victim)
    assert victim.state() == (victim.pid, api.RUNNING)


def test_hundreds_of_connections_that_say_nothing_hold_up_nobody(victims: Mapping[str, Victim]) -> None:
    victim = victims[OURS]
    with contextlib.ExitStack() as silent:
        for _ in range(300):
            silent.enter_context(contextlib.closing(victim.connect()))
        assert victim.state() == (victim.pid, api.RUNNING)
