"""The ttrpc server on the shim's socket: connections in, one asyncio task per call."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError, Message

from shim import log, ttrpc
from shim.errors import Code, describe

_PEER_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True)
class Method:
    request: type[Message]
    handler: Callable[[Any], Awaitable[Message]]
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


class _Connection(asyncio.Protocol):
    def __init__(self, services: Services, connections: set[_Connection]) -> None:
        self._services = services
        self._connections = connections
        self._protocol = ttrpc.Server()
        self._transport: asyncio.Transport | None = None
        self._calls: dict[asyncio.Task[None], bool] = {}

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
        for task, only_waits in self._calls.items():
            if only_waits:
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
        task = asyncio.create_task(self._answer(call, method, request))
        self._calls[task] = method.only_waits
        task.add_done_callback(lambda done: self._calls.pop(done, None))

    async def _answer(self, call: ttrpc.Call, method: Method, request: Message) -> None:
        """Answer within the client's patience; what was begun is finished in any case."""
        work = asyncio.ensure_future(method.handler(request))
        try:
            done, _ = await asyncio.wait([work], timeout=call.timeout_s)
        except asyncio.CancelledError:
            work.cancel()
            raise
        if not done:
            self._fail(call, Code.DEADLINE_EXCEEDED, "context deadline exceeded")
            if method.only_waits:
                work.cancel()
                return
        try:
            reply = await work
        except Exception as error:
            code, message = describe(error)
            log.debug("call failed", method=call.method, code=code, error=message)
            if code == Code.UNKNOWN and not hasattr(error, "code"):
                log.error("call failed unexpectedly", method=call.method, error=repr(error))
            if done:
                self._fail(call, code, message)
        else:
            if done:
                self._send(self._protocol.reply(call.stream_id, reply.SerializeToString()))

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
