"""Calls the engine: `python -m runtime VERB` as a subprocess, so that the event loop never blocks.

docs/architecture.md, section 10, lists the verbs and their fields.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from shim import log
from shim.errors import EngineFailure
from shim.reaper import Child, Reaper

_LINE_LIMIT = 1 << 20


class Engine:
    """The engine for one container: `base` are the fields every request has."""

    def __init__(self, base: Mapping[str, Any], reaper: Reaper, env: Mapping[str, str]) -> None:
        self._base = base
        self._reaper = reaper
        self._env = env
        self._running: Child | None = None

    async def call(self, verb: str, pass_fds: Sequence[int] = (), **fields: Any) -> dict[str, Any]:
        """Run one verb to its end; raises `EngineFailure`."""
        argv = [sys.executable, "-P", "-m", "runtime", verb]
        last: dict[str, Any] = {}
        async for line in self._lines(argv, json.dumps({**self._base, **fields}).encode(), pass_fds):
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if not isinstance(message, dict):
                continue
            if "step" in message:
                log.debug("engine step", verb=verb, step=message["step"], id=self._base.get("id", ""))
            last = message
        if isinstance(result := last.get("result"), dict):
            return result
        error = last.get("error")
        if not isinstance(error, dict):
            raise EngineFailure(
                f"the engine ended without an answer to {verb}", hint="containerd's log has its last words"
            )
        raise EngineFailure(
            str(error.get("message", "")),
            hint=str(error.get("hint", "")),
            details=str(error.get("details", "")),
            exit_code=int(error.get("code", 1)),
        )

    async def locate_image(self) -> dict[str, Any] | None:
        """Where the container's image is stored, if it is a checkpoint artifact."""
        argv = [sys.executable, "-P", "-m", "agent", "locate-image", str(self._base["id"])]
        output = b""
        async for line in self._lines(argv, b""):
            output += line
        try:
            found = json.loads(output)
        except ValueError:
            return None
        return found if isinstance(found, dict) and "manifest" in found else None

    def cancel(self) -> bool:
        """Ask the running verb to undo what it did and end; False if none runs."""
        if self._running is None or self._running.exited.done():
            return False
        self._running.signal(signal.SIGTERM)
        return True

    async def _lines(
        self, argv: Sequence[str], request: bytes, pass_fds: Sequence[int] = ()
    ) -> AsyncIterator[bytes]:
        """The lines a subprocess prints; its errors go to our log. It has ended when they have."""
        loop = asyncio.get_running_loop()
        stdin = os.memfd_create("request", os.MFD_CLOEXEC)
        output, stdout = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(stdin, request)
            os.lseek(stdin, 0, os.SEEK_SET)
            fds = {0: stdin, 1: stdout, 2: 2, **{fd: fd for fd in pass_fds}}
            child = self._reaper.spawn(argv, env=self._env, fds=fds)
        except OSError as error:
            os.close(output)
            raise EngineFailure(f"the engine could not be started: {error}") from error
        finally:
            os.close(stdin)
            os.close(stdout)
        self._running = child
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
        )
        try:
            async for line in reader:
                yield line
        finally:
            transport.close()
        await child.exited
