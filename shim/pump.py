"""Descriptors in the event loop: waiting for one, and copying from one to another."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable

from shim import log

_CHUNK = 64 << 10
_HANGUP_RETRY_S = 0.05


async def readable(fd: int) -> None:
    """Wait until `fd` has something to read, or its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(fd, resolve)
    try:
        await future
    finally:
        loop.remove_reader(fd)


class Pump:
    """Copies nonblocking `source` to `sink` until the source ends, then calls `finished` once.

    A terminal whose last user closed it reads as EIO until another opens it: with `hangs_up` that is a
    pause, and `end_of_source` says when it is the end. A sink that fails (a full disk) ends the copy, or,
    with `lossy`, loses what it could not take, so that the process never waits for it. Owns no
    descriptor: `finished` closes them.
    """

    def __init__(
        self,
        source: int,
        sink: int,
        finished: Callable[[], None],
        *,
        hangs_up: bool = False,
        lossy: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._source = source
        self._sink = sink
        self._finished = finished
        self._hangs_up = hangs_up
        self._lossy = lossy
        self._losing = False
        self._ending = False
        self._pending = memoryview(b"")
        self._retry: asyncio.TimerHandle | None = None
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(source, self._readable)

    def end_of_source(self) -> None:
        """Nothing more will be written to the source: take what it holds, then finish."""
        self._ending = True
        if not self.done.done() and not self._pending:
            self._readable()

    def stop(self) -> None:
        """Finish now, whatever is left."""
        if self.done.done():
            return
        self._loop.remove_reader(self._source)
        if self._pending:
            self._loop.remove_writer(self._sink)
            self._pending = memoryview(b"")
        if self._retry is not None:
            self._retry.cancel()
        self.done.set_result(None)
        self._finished()

    def _readable(self) -> None:
        if self.done.done():
            return
        try:
            data = os.read(self._source, _CHUNK)
        except BlockingIOError:
            if self._ending:
                self.stop()
            return
        except OSError as error:
            if error.errno == errno.EIO and self._hangs_up and not self._ending:
                self._loop.remove_reader(self._source)
                self._retry = self._loop.call_later(_HANGUP_RETRY_S, self._read_again)
            else:
                self.stop()
            return
        if not data:
            self.stop()
            return
        self._pending = memoryview(data)
        self._write()

    def _read_again(self) -> None:
        self._retry = None
        if not self.done.done():
            self._loop.add_reader(self._source, self._readable)

    def _write(self) -> None:
        try:
            written = os.write(self._sink, self._pending)
        except BlockingIOError:
            written = 0
        except OSError as error:
            if not self._lossy:
                self.stop()
                return
            if not self._losing:
                log.warning("output of the container is being lost", error=error)
            self._losing = True
            written = len(self._pending)
        else:
            self._losing = False
        self._pending = self._pending[written:]
        if self._pending:
            # Wait for the sink, and leave the source alone meanwhile.
            self._loop.remove_reader(self._source)
            self._loop.add_writer(self._sink, self._writable)
        elif self._ending:
            self._loop.call_soon(self._readable)

    def _writable(self) -> None:
        self._loop.remove_writer(self._sink)
        self._loop.add_reader(self._source, self._readable)
        self._write()
