"""A process executed in a running container: registered by Exec, begun by Start."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from shim import log
from shim.console import ConsoleSocket
from shim.errors import FailedPrecondition, NotFound, TaskError
from shim.init import Init
from shim.process import Process, State
from shim.reaper import Exit
from shim.stdio import ProcessIO, Stdio


class Created(State):
    status = "created"


class Running(State):
    status = "running"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a running process",
        "delete": "cannot delete a running process",
    }


class Stopped(State):
    status = "stopped"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a stopped process",
        "resize": "cannot resize a stopped container",
    }


class Deleted(State):
    status = "stopped"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a deleted process",
        "delete": "cannot delete a deleted process",
        "kill": "cannot kill a deleted process",
        "resize": "cannot resize a deleted process",
    }
    missing = frozenset({"delete", "kill"})


class Exec(Process):
    def __init__(
        self, exec_id: str, bundle: Path, stdio: Stdio, spec: Mapping[str, Any], init: Init, io: ProcessIO
    ) -> None:
        super().__init__(exec_id, stdio, Created())
        self.io: ProcessIO = io
        self._init = init
        self._pid_file = bundle / f"{exec_id}.pid"
        self._spec = json.dumps({**spec, "terminal": stdio.terminal}).encode()

    @property
    def status(self) -> str:
        whole = self._init.status
        return whole if whole in ("paused", "pausing") else super().status

    async def start(self) -> None:
        self.state.require("start")
        try:
            await self.io.open()
            await self._start()
        except BaseException:
            if self.pid:  # it runs, but its streams cannot be connected
                with suppress(ProcessLookupError):
                    os.kill(self.pid, 9)
                self.pid = 0
            await self.io.close()
            self.never_began()
            raise
        self.state = Running()

    async def kill(self, signal: int, *, every_process: bool) -> None:
        self.state.require("kill")
        if self.pid == 0:
            raise FailedPrecondition("process not created")
        if self.exited_at is not None:
            raise NotFound("process already finished")
        try:
            os.kill(self.pid, signal)
        except ProcessLookupError as error:
            raise NotFound("exec kill error: process already finished") from error
        except OSError as error:
            raise TaskError(f"exec kill error: unknown error after kill: {error.strerror}") from error

    async def exited(self, exited: Exit) -> None:
        if not isinstance(self.state, Deleted):
            self.state = Stopped()
        self._set_exited(exited)

    async def delete(self) -> None:
        self.state.require("delete")
        if not await self.io.drain():
            log.error("failed to drain exec process io", id=self.id)
        await self.io.close()
        self._pid_file.unlink(missing_ok=True)
        self.state = Deleted()
        self.never_began()

    def resize(self, width: int, height: int) -> None:
        self.state.require("resize")
        self.io.resize(width, height)

    async def _start(self) -> None:
        if not self.stdio.terminal:
            self.pid = await self._runc_exec("")
            self.io.start_copies()
            return
        with ConsoleSocket() as socket:
            self.pid = await self._runc_exec(socket.path)
            await self.io.attach_console(await socket.receive())

    async def _runc_exec(self, console_socket: str) -> int:
        return await self._init.runtime.exec(
            self._init.id, self._spec, self._pid_file, self.io.child_fds, console_socket=console_socket
        )
