"""The event publisher against a containerd that answers, is away, and comes back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.empty_pb2 import Empty

from shim import events
from shim.api import events_pb2
from shim.errors import TaskError
from shim.events import Publisher
from shim.server import Method, Server
from tests.unit.shim import recordings

SERVICE = "containerd.services.events.ttrpc.v1.Events"


class Containerd:
    """The Events service on a socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.received: list[events_pb2.Envelope] = []
        self.refuse = 0
        self._server: Server | None = None

    async def start(self) -> None:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen()
        self._server = Server({SERVICE: {"Forward": Method(events_pb2.ForwardRequest, self._forward)}})
        await self._server.listen(listener)

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._path.unlink()

    async def _forward(self, request: events_pb2.ForwardRequest) -> Empty:
        if self.refuse:
            self.refuse -= 1
            raise TaskError("not now")
        self.received.append(request.envelope)
        return Empty()

    def ids(self) -> list[str]:
        return [events_pb2.TaskStart.FromString(e.event.value).container_id for e in self.received]


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_events_arrive_in_order_with_topic_type_and_namespace(tmp_path: Path) -> None:
    async def body() -> None:
        containerd = Containerd(tmp_path / "s")
        await containerd.start()
        publisher = Publisher(f"unix://{tmp_path / 's'}", "ns")
        for number in range(50):
            publisher.send(events_pb2.TaskStart(container_id=str(number), pid=number))
        await publisher.close()
        assert containerd.ids() == [str(number) for number in range(50)]
        envelope = containerd.received[0]
        assert (envelope.topic, envelope.namespace) == ("/tasks/start", "ns")
        assert envelope.event.type_url == "containerd.events.TaskStart"
        assert envelope.timestamp.seconds > 0

    asyncio.run(body())


def test_a_containerd_that_restarts_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        containerd = Containerd(tmp_path / "s")
        await containerd.start()
        publisher = Publisher(str(tmp_path / "s"), "ns")
        publisher.send(events_pb2.TaskStart(container_id="before"))
        await _until(lambda: containerd.received)
        containerd.stop()
        publisher.send(events_pb2.TaskStart(container_id="during"))
        publisher.send(events_pb2.TaskStart(container_id="after"))
        await asyncio.sleep(0.3)
        await containerd.start()
        await _until(lambda: len(containerd.received) == 3)
        assert containerd.ids() == ["before", "during", "after"]
        await publisher.close()

    asyncio.run(body())


def test_an_event_that_is_refused_for_good_does_not_hold_up_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_ATTEMPTS", 2)

    async def body() -> None:
        containerd = Containerd(tmp_path / "s")
        containerd.refuse = 2
        await containerd.start()
        publisher = Publisher(str(tmp_path / "s"), "ns")
        publisher.send(events_pb2.TaskStart(container_id="dropped"))
        publisher.send(events_pb2.TaskStart(container_id="kept"))
        await publisher.close()
        assert containerd.ids() == ["kept"]

    asyncio.run(body())


def test_closing_gives_up_in_time(tmp_path: Path) -> None:
    async def body() -> None:
        publisher = Publisher(str(tmp_path / "nobody"), "ns")
        publisher.send(events_pb2.TaskStart(container_id="x"))
        async with asyncio.timeout(2):
            await publisher.close(timeout_s=0.1)

    asyncio.run(body())


@pytest.mark.parametrize("name", recordings.NAMES)
def test_topics_and_types_are_the_recorded_ones(name: str) -> None:
    topics = {f"containerd.events.{kind.DESCRIPTOR.name}": topic for kind, topic in events.TOPICS.items()}
    for frame in recordings.frames(name):
        if frame.channel == "event" and frame.sent_by_client:
            envelope = events_pb2.ForwardRequest.FromString(frame.payload).envelope
            assert topics[envelope.event.type_url] == envelope.topic
