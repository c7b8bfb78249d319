"""A container's first process, and through it the container: one class per state of its life.

    created ──start──▶ running ◀─pause/resume─▶ paused
    created from a checkpoint ──start (restore)──▶ running
    any of them ──exit──▶ stopped ──delete──▶ deleted

`Init` has the actions; each state says which verbs it allows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shim import log
from shim.console import ConsoleSocket
from shim.engine import Engine
from shim.errors import EngineFailure, NotFound, TaskError
from shim.oci import OciRuntime
from shim.options import CheckpointOptions, RuncOptions
from shim.process import Process, State
from shim.reaper import Exit
from shim.stdio import ProcessIO, Stdio


class Created(State):
    status = "created"
    refusals: ClassVar[Mapping[str, str]] = {
        "pause": "cannot pause task in created state",
        "resume": "cannot resume task in created state",
        "checkpoint": "cannot checkpoint a task in created state",
    }


class CreatedCheckpoint(State):
    """Created to be restored: nothing runs until Start."""

    status = "created"
    refusals: ClassVar[Mapping[str, str]] = {
        **Created.refusals,
        "exec": "cannot exec in a created state",
    }


class Running(State):
    status = "running"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a running process",
        "delete": "cannot delete a running process",
        "resume": "cannot resume a running process",
    }


class Paused(State):
    status = "paused"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a paused process",
        "delete": "cannot delete a paused process",
        "pause": "cannot pause a paused container",
        "exec": "cannot exec in a paused state",
    }


class Stopped(State):
    status = "stopped"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a stopped process",
        "pause": "cannot pause a stopped container",
        "resume": "cannot resume a stopped container",
        "update": "cannot update a stopped container",
        "checkpoint": "cannot checkpoint a stopped container",
        "exec": "cannot exec in a stopped state",
    }


class Deleted(State):
    status = "stopped"
    refusals: ClassVar[Mapping[str, str]] = {
        "start": "cannot start a deleted process",
        "delete": "cannot delete a deleted process",
        "pause": "cannot pause a deleted process",
        "resume": "cannot resume a deleted process",
        "update": "cannot update a deleted process",
        "checkpoint": "cannot checkpoint a deleted process",
        "exec": "cannot exec in a deleted state",
        "kill": "cannot kill a deleted process",
        "resize": "cannot resize a deleted process",
    }
    missing = frozenset({"delete", "kill"})


@dataclass(frozen=True)
class Checkpoint:
    """What a container is restored from."""

    images: Path
    cold_start: bool = False
    """Start it normally when this node cannot run the checkpoint."""


class Init(Process):
    def __init__(
        self,
        container_id: str,
        bundle: Path,
        stdio: Stdio,
        options: RuncOptions,
        runtime: OciRuntime,
        engine: Engine,
        io: ProcessIO,
    ) -> None:
        super().__init__(container_id, stdio, Created())
        self.runtime = runtime
        self.io: ProcessIO = io
        self.options = options
        self._bundle = bundle
        self._engine = engine
        self._checkpoint: Checkpoint | None = None
        self._pausing = False

    @property
    def status(self) -> str:
        return "pausing" if self._pausing else super().status

    async def create(self) -> None:
        """Let runc make the container, its init waiting to be started."""
        await self.io.open()
        await self._create()

    async def create_from(self, checkpoint: Checkpoint) -> None:
        """Be ready for a restore: nothing runs before `start`, and the pid is 0 until then."""
        await self.io.open()
        self._checkpoint = checkpoint
        self.state = CreatedCheckpoint()

    async def start(self) -> None:
        self.state.require("start")
        if self._checkpoint is None:
            await self.runtime.start(self.id)
        else:
            await self._restore_or_start(self._checkpoint)
        self.state = Running()

    async def pause(self) -> None:
        self.state.require("pause")
        self._pausing = True
        try:
            await self.runtime.pause(self.id)
        finally:
            self._pausing = False
        self.state = Paused()

    async def resume(self) -> None:
        self.state.require("resume")
        await self.runtime.resume(self.id)
        self.state = Running()

    async def update(self, resources: bytes) -> None:
        self.state.require("update")
        await self.runtime.update(self.id, resources)

    async def kill(self, signal: int, *, every_process: bool) -> None:
        self.state.require("kill")
        if self.pid == 0 and self._engine.cancel():
            return  # a restore under way: Start fails, and undoes what it did
        await self.runtime.kill(self.id, signal, every_process=every_process)

    async def checkpoint(self, path: Path, options: CheckpointOptions) -> None:
        """Have the engine write CRIU images to `path`."""
        self.state.require("checkpoint")
        await self._engine.call(
            "dump",
            pid=self.pid,
            image_path=str(path),
            work_path=options.work_path or str(self._bundle / "work" / "criu-work"),
            leave_running=not options.exit,
            options={
                "open_tcp": options.open_tcp,
                "external_unix_sockets": options.external_unix_sockets,
                "terminal": options.terminal,
                "file_locks": options.file_locks,
                "empty_namespaces": list(options.empty_namespaces),
                "cgroups_mode": options.cgroups_mode,
            },
        )

    async def exited(self, exited: Exit) -> None:
        """It has ended, whatever it was doing."""
        paused = isinstance(self.state, Paused)
        if not isinstance(self.state, Deleted):
            self.state = Stopped()
        if paused:
            # A frozen cgroup would keep the other processes from dying, and runc from deleting it.
            try:
                await self.runtime.resume(self.id)
            except TaskError as error:
                log.warning("resuming an exited container from its paused state", id=self.id, error=error)
        self._set_exited(exited)

    async def delete(self) -> None:
        self.state.require("delete")
        if not await self.io.drain():
            log.error("failed to drain init process io", id=self.id)
        await self.runtime.delete(self.id)
        await self.io.close()
        self.state = Deleted()
        self.never_began()

    def resize(self, width: int, height: int) -> None:
        self.state.require("resize")
        self.io.resize(width, height)

    async def kill_all(self) -> None:
        try:
            await self.runtime.kill(self.id, 9, every_process=True)
        except NotFound:
            return

    async def _create(self) -> None:
        if not self.stdio.terminal:
            self.pid = await self._runc_create("")
            async with self._deleted_on_failure():
                self.io.start_copies()
            return
        with ConsoleSocket() as socket:
            self.pid = await self._runc_create(socket.path)
            async with self._deleted_on_failure():
                await self.io.attach_console(await socket.receive())

    @asynccontextmanager
    async def _deleted_on_failure(self) -> AsyncIterator[None]:
        """A process whose streams cannot be connected must not stay."""
        try:
            yield
        except BaseException:
            with suppress(TaskError):
                await self.runtime.delete(self.id, force=True)
            raise

    async def _runc_create(self, console_socket: str) -> int:
        return await self.runtime.create(
            self.id,
            self.io.child_fds,
            console_socket=console_socket,
            no_pivot=self.options.no_pivot_root,
            no_new_keyring=self.options.no_new_keyring,
        )

    async def _restore_or_start(self, checkpoint: Checkpoint) -> None:
        try:
            await self._restore(checkpoint)
        except EngineFailure as error:
            if not (error.incompatible and checkpoint.cold_start):
                with suppress(TaskError):  # an engine killed at its very end leaves what runs
                    await self.runtime.delete(self.id, force=True)
                raise
            log.warning("cannot restore here, starting cold", id=self.id, error=error)
            await self._create()
            await self.runtime.start(self.id)

    async def _restore(self, checkpoint: Checkpoint) -> None:
        if not self.stdio.terminal:
            fds = self.io.child_fds or ()
            self.pid = await self._engine_restore(checkpoint, "", fds)
            async with self._deleted_on_failure():
                self.io.start_copies()
            return
        with ConsoleSocket() as socket:
            self.pid = await self._engine_restore(checkpoint, socket.path, ())
            async with self._deleted_on_failure():
                await self.io.attach_console(await socket.receive())

    async def _engine_restore(
        self, checkpoint: Checkpoint, console_socket: str, stdio: tuple[int, ...]
    ) -> int:
        result = await self._engine.call(
            "restore",
            pass_fds=sorted(set(stdio)),
            images=str(checkpoint.images),
            work_path=self.options.criu_work_path or str(self._bundle / "work"),
            console_socket=console_socket,
            no_pivot=self.options.no_pivot_root,
            stdio=list(stdio) or [0, 1, 2],
        )
        pid = result.get("pid")
        if not isinstance(pid, int) or pid <= 0:
            raise TaskError(f"the engine restored container {self.id} without saying its pid")
        return pid
