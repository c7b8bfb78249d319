"""A ttrpc client on a unix socket, for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from shim import ttrpc


class Connection(asyncio.Protocol):
    """One connection; calls may overlap. A connection that broke stays `closed`."""

    def __init__(self) -> None:
        self._client = ttrpc.Client()
        self._calls: dict[int, asyncio.Future[ttrpc.Reply]] = {}
        self._transport: asyncio.Transport | None = None
        self.closed = False

    @classmethod
    async def open(cls, path: str) -> Connection:
        """Raises `OSError`."""
        _, connection = await asyncio.get_running_loop().create_unix_connection(cls, path)
        return connection

    async def call(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        timeout_s: float = 0,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> ttrpc.Reply:
        """Raises `EOFError` when the connection ends first, `TimeoutError` after `timeout_s` (0: never)."""
        if self.closed or self._transport is None:
            raise EOFError("the ttrpc connection is closed")
        stream_id, data = self._client.call(service, method, payload, timeout_s=timeout_s, metadata=metadata)
        future: asyncio.Future[ttrpc.Reply] = asyncio.get_running_loop().create_future()
        self._calls[stream_id] = future
        self._transport.write(data)
        try:
            async with asyncio.timeout(timeout_s or None):
                return await future
        finally:
            self._calls.pop(stream_id, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for reply in self._client.receive(data):
            future = self._calls.get(reply.stream_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EOFError("the ttrpc connection ended"))
