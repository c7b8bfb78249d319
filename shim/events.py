"""Tells containerd what happens to containers, in the order it happened.

Events queue here and go out one by one over one connection to containerd's ttrpc socket
(`containerd.services.events.ttrpc.v1.Events/Forward`). One that cannot be delivered is retried, containerd
may be restarting, before the next is tried; after `_ATTEMPTS` it is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from shim import log
from shim.api import events_pb2
from shim.client import Connection

_SERVICE = "containerd.services.events.ttrpc.v1.Events"
_TIMEOUT_S = 5.0
_ATTEMPTS = 6
_QUEUE_LIMIT = 2048

TOPICS: Mapping[type[Message], str] = {
    events_pb2.TaskCreate: "/tasks/create",
    events_pb2.TaskStart: "/tasks/start",
    events_pb2.TaskOOM: "/tasks/oom",
    events_pb2.TaskExit: "/tasks/exit",
    events_pb2.TaskDelete: "/tasks/delete",
    events_pb2.TaskExecAdded: "/tasks/exec-added",
    events_pb2.TaskExecStarted: "/tasks/exec-started",
    events_pb2.TaskPaused: "/tasks/paused",
    events_pb2.TaskResumed: "/tasks/resumed",
    events_pb2.TaskCheckpointed: "/tasks/checkpointed",
}


class EventSink(Protocol):
    def send(self, event: Message) -> None:
        """Queue one of the messages in `TOPICS`; never blocks."""


class Publisher:
    """Made in the running event loop."""

    def __init__(self, address: str, namespace: str) -> None:
        self._address = address.removeprefix("unix://")
        self._namespace = namespace
        self._queue: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._connection: Connection | None = None
        self._task = asyncio.create_task(self._forward())

    def send(self, event: Message) -> None:
        if len(self._queue) >= _QUEUE_LIMIT:
            log.error("dropping an event: containerd does not take them", topic=TOPICS[type(event)])
            return
        self._queue.append(self._envelope(event).SerializeToString())
        self._idle.clear()
        # Not before the answer to the call that it comes from: a client waits for that.
        asyncio.get_running_loop().call_soon(self._wake.set)

    async def close(self, timeout_s: float = _TIMEOUT_S) -> None:
        """Deliver what is queued, but take no longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            log.error("events were not delivered", count=len(self._queue))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    def _envelope(self, event: Message) -> events_pb2.ForwardRequest:
        now = time.time_ns()
        return events_pb2.ForwardRequest(
            envelope=events_pb2.Envelope(
                timestamp=Timestamp(seconds=now // 10**9, nanos=now % 10**9),
                namespace=self._namespace,
                topic=TOPICS[type(event)],
                event=Any(
                    type_url=f"containerd.events.{event.DESCRIPTOR.name}", value=event.SerializeToString()
                ),
            )
        )

    async def _forward(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._deliver(self._queue[0])
                self._queue.popleft()
            self._idle.set()

    async def _deliver(self, request: bytes) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await self._call(request)
            except (OSError, EOFError) as error:
                log.error("forward event", attempt=attempt, error=error)
                if attempt < _ATTEMPTS:
                    await asyncio.sleep(attempt)
            else:
                return
        log.error("an event was dropped after its last attempt")

    async def _call(self, request: bytes) -> None:
        if self._connection is None or self._connection.closed:
            self._connection = await Connection.open(self._address)
        reply = await self._connection.call(
            _SERVICE,
            "Forward",
            request,
            timeout_s=_TIMEOUT_S,
            metadata=(("containerd-namespace-ttrpc", self._namespace),),
        )
        if reply.code:
            raise OSError(f"containerd answered {reply.code}: {reply.message}")
