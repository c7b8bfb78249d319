"""The ttrpc server on the shim's socket: connections in, one asyncio task per call that has to wait."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from shim import log, ttrpc
from shim.errors import Code, describe

_PEER_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True)
class Method:
    request: type[Message]
    handler: Callable[[Any], Message | Coroutine[Any, Any, Message]]
    """A plain function is answered at once: a task would cost more than what it does."""
    only_waits: bool = False
    """It changes nothing: it may be dropped when its client gives up."""


Services = Mapping[str, Mapping[str, Method]]
"""Full service name → method name → method."""


class Server:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._connections: set[_Connection] = set()
        self._server: asyncio.AbstractServer | None = None

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connection, sock=listener)

    def close(self) -> None:
        """Accept nothing more, and close what is open once its last answer is written."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.close()

    def _connection(self) -> _Connection:
        return _Connection(self._services, self._connections)


@dataclass
class _Running:
    """A call that is being worked on."""

    call: ttrpc.Call
    only_waits: bool
    patience: asyncio.TimerHandle | None = None
    told: bool = False
    """Its client has its answer: that it took too long."""


class _Connection(asyncio.Protocol):
    def __init__(self, services: Services, connections: set[_Connection]) -> None:
        self._services = services
        self._connections = connections
        self._protocol = ttrpc.Server()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[asyncio.Task[Message], _Running] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not _is_ours(transport.get_extra_info("socket")):
            log.warning("refused a connection of another user")
            transport.abort()
            return
        self._transport = transport
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._connections.discard(self)
        for task, running in self._calls.items():
            if running.only_waits:
                task.cancel()

    def data_received(self, data: bytes) -> None:
        for item in self._protocol.receive(data):
            if isinstance(item, bytes):
                self._send(item)
            else:
                self._begin(item)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _begin(self, call: ttrpc.Call) -> None:
        method = self._services.get(call.service, {}).get(call.method)
        if method is None:
            what = (
                f"service {call.service}" if call.service not in self._services else f"method {call.method}"
            )
            self._fail(call, Code.UNIMPLEMENTED, f"{what} not found")
            return
        try:
            request = method.request.FromString(call.payload)
        except DecodeError as error:
            self._fail(call, Code.INTERNAL, f"unmarshal {call.method} request: {error}")
            return
        try:
            answer = method.handler(request)
        except Exception as error:
            self._refuse(call, error)
            return
        if isinstance(answer, Message):
            self._reply(call, answer)
            return
        task = asyncio.create_task(answer)
        running = self._calls[task] = _Running(call, method.only_waits)
        if call.timeout_s is not None:
            loop = asyncio.get_running_loop()
            running.patience = loop.call_later(call.timeout_s, self._give_up, task, running)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[Message]) -> None:
        running = self._calls.pop(task)
        if running.patience is not None:
            running.patience.cancel()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._refuse(running.call, error, told=running.told)
        elif not running.told:
            self._reply(running.call, task.result())

    def _give_up(self, task: asyncio.Task[Message], running: _Running) -> None:
        """The client's patience is at its end. What was begun is finished in any case."""
        running.told = True
        self._fail(running.call, Code.DEADLINE_EXCEEDED, "context deadline exceeded")
        if running.only_waits:
            task.cancel()

    def _reply(self, call: ttrpc.Call, answer: Message) -> None:
        self._send(self._protocol.reply(call.stream_id, answer.SerializeToString()))

    def _refuse(self, call: ttrpc.Call, error: BaseException, *, told: bool = False) -> None:
        code, message = describe(error)
        log.debug("call failed", method=call.method, code=code, error=message)
        if code == Code.UNKNOWN and not hasattr(error, "code"):
            log.error("call failed unexpectedly", method=call.method, error=repr(error))
        if not told:
            self._fail(call, code, message)

    def _fail(self, call: ttrpc.Call, code: int, message: str) -> None:
        self._send(self._protocol.fail(call.stream_id, code, message))

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _is_ours(connection: socket.socket) -> bool:
    size = _PEER_CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, gid = _PEER_CREDENTIALS.unpack(credentials)
    return (uid, gid) == (os.geteuid(), os.getegid())
