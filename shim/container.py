"""One container of this shim: its bundle, its init and exec'd processes, its cgroup.

`Container.create` decides what a container begins as. Three things ask for a restore, in this order: the
`checkpoint` directory in containerd's request, the annotation `ai.cedana.restore-from`, and the
environment marker that says its image is itself a checkpoint artifact.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from base.annotations import COLD_START, ENV_MARKER, ON_INCOMPATIBLE, RESTORE_FROM
from base.config import Config
from runtime import cgroups
from runtime.container import Mount
from runtime.criu import environment
from runtime.runc import Runc
from shim import group, log, mounts
from shim.engine import Engine
from shim.errors import (
    AlreadyExists,
    EngineFailure,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TaskError,
)
from shim.execs import Exec
from shim.init import Checkpoint, Deleted, Init
from shim.oci import OciRuntime
from shim.options import RESTORE_MARK, RuncOptions
from shim.reaper import Reaper
from shim.stdio import Owner, ProcessIO, Stdio

_IDENTIFIER = re.compile(r"[A-Za-z0-9]+(?:[._-](?:[A-Za-z0-9]+))*")
_UNMOUNT_RETRIES = 50
_UNMOUNT_PAUSE_S = 0.02
_EXIT_AFTER_DELETE_S = 5.0


@dataclass(frozen=True)
class Host:
    """What all containers of this shim share."""

    namespace: str
    load_config: Callable[[], Config]
    """Read anew for every container: a mistake in the file is the answer, its repair needs no restart."""
    reaper: Reaper
    engine_env: Mapping[str, str]


@dataclass(frozen=True)
class CreateRequest:
    id: str
    bundle: Path
    rootfs: Sequence[Mount]
    stdio: Stdio
    options: RuncOptions
    checkpoint: str = ""


class Container:
    def __init__(
        self, request: CreateRequest, spec: Mapping[str, Any], init: Init, engine: Engine, host: Host
    ) -> None:
        self.id = request.id
        self.bundle = request.bundle
        self.init = init
        self.execs: dict[str, Exec] = {}
        self.cgroup: cgroups.Cgroup | None = None
        self.init_reaped = False
        """Init has ended; no further process can be started, though its exit may not be told yet."""
        self.init_watch: asyncio.Task[None] | None = None
        self.kills_all_on_exit = not _has_own_pid_namespace(spec)
        self._host = host
        self._engine = engine
        self._options = request.options
        self._rootfs = request.bundle / "rootfs"
        self._live_execs: set[Exec] = set()
        self._no_live_execs = asyncio.Event()
        self._no_live_execs.set()

    @classmethod
    async def create(cls, request: CreateRequest, host: Host) -> Container:
        """Make it, or be ready to restore it. What was done is undone when that fails."""
        check_identifier(request.id)
        spec = _load_spec(request.bundle)
        request.options.write(request.bundle)
        group.note(request.bundle)
        config = host.load_config()
        binary = config.tool(request.options.binary_name or "runc")
        root = request.options.runc_root(host.namespace)
        runc = Runc(binary, root, request.bundle / "log.json", request.options.systemd_cgroup)
        runtime = OciRuntime(runc, request.bundle, host.reaper, environment(config))
        engine = Engine(
            {
                "id": request.id,
                "namespace": host.namespace,
                "bundle": str(request.bundle),
                "runc": request.options.binary_name or "runc",
                "runc_root": str(root),
                "systemd_cgroup": request.options.systemd_cgroup,
            },
            host.reaper,
            host.engine_env,
        )
        init = Init(
            request.id,
            request.bundle,
            request.stdio,
            request.options,
            runtime,
            engine,
            ProcessIO(
                request.stdio, _owner(request.options), host.reaper, _logger_env(request.id, host.namespace)
            ),
        )
        container = cls(request, spec, init, engine, host)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(container._discard)
            checkpoint = await container._checkpoint(request, spec)
            if request.rootfs:
                container._rootfs.mkdir(mode=0o711, exist_ok=True)
                mounts.mount_all(request.rootfs, container._rootfs)
                undo.push_async_callback(container._unmount)
            undo.push_async_callback(init.io.close)
            await (init.create_from(checkpoint) if checkpoint else init.create())
            undo.pop_all()
        container.find_cgroup()
        return container

    def find_cgroup(self) -> None:
        if self.init.pid:
            self.cgroup = cgroups.of(self.init.pid)

    def process(self, exec_id: str) -> Init | Exec:
        if not exec_id:
            return self.init
        if (process := self.execs.get(exec_id)) is None:
            raise NotFound(f"process does not exist {exec_id}")
        return process

    def add_exec(self, exec_id: str, stdio: Stdio, spec: bytes) -> Exec:
        check_identifier(exec_id)
        if exec_id in self.execs:
            raise AlreadyExists(f"id {exec_id}")
        self.init.state.require("exec")
        try:
            process = json.loads(spec)
        except ValueError as error:
            raise InvalidArgument(f"the spec of process {exec_id} is no JSON: {error}") from error
        if not isinstance(process, dict):
            raise InvalidArgument(f"the spec of process {exec_id} is no object")
        io = ProcessIO(
            stdio,
            _owner(self._options),
            self._host.reaper,
            _logger_env(exec_id, self._host.namespace),
        )
        self.execs[exec_id] = Exec(exec_id, self.bundle, stdio, process, self.init, io)
        return self.execs[exec_id]

    def exec_begins(self, process: Exec) -> None:
        """Raises `FailedPrecondition` when init has ended."""
        if self.init_reaped:
            raise FailedPrecondition(f"container {self.id} init process is not running")
        self._live_execs.add(process)
        self._no_live_execs.clear()

    def exec_gone(self, process: Exec) -> None:
        self._live_execs.discard(process)
        if not self._live_execs:
            self._no_live_execs.set()

    async def execs_gone(self) -> None:
        """Until the exit of every exec'd process has been told."""
        await self._no_live_execs.wait()

    async def delete(self) -> None:
        """Remove what runc, the engine and we made for it."""
        async with self.init.lock:
            if not isinstance(self.init.state, Deleted):  # else what follows failed before
                await self.init.delete()
        if self.init_watch is not None:
            # Deleting a container that was never started ends its init.
            await asyncio.wait([self.init_watch], timeout=_EXIT_AFTER_DELETE_S)
        await self._unmount()
        await self._discard()

    async def _checkpoint(self, request: CreateRequest, spec: Mapping[str, Any]) -> Checkpoint | None:
        annotations = spec.get("annotations") or {}
        cold_start = annotations.get(ON_INCOMPATIBLE) == COLD_START
        if request.checkpoint:
            self._mark_restore()
            return Checkpoint(Path(request.checkpoint), cold_start)
        source: str | dict[str, Any] | None = annotations.get(RESTORE_FROM)
        if not source and _has_marker(spec):
            source = await self._engine.locate_image()
        if not source:
            return None
        self._mark_restore()
        try:
            prepared = await self._engine.call(
                "prepare", source=source, rootfs=[asdict(mount) for mount in request.rootfs]
            )
        except EngineFailure as error:
            if not (error.incompatible and cold_start):
                raise
            log.warning("cannot restore here, starting cold", id=self.id, error=error)
            return None
        if not prepared["images"]:
            log.info("restored before, starting anew", id=self.id)
            return None
        return Checkpoint(Path(str(prepared["images"])), cold_start)

    def _mark_restore(self) -> None:
        (self.bundle / RESTORE_MARK).touch(mode=0o600)

    async def _unmount(self) -> None:
        for _ in range(_UNMOUNT_RETRIES):
            try:
                mounts.unmount_recursive(self._rootfs)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise TaskError(f"failed rootfs umount: {error}") from error
                await asyncio.sleep(_UNMOUNT_PAUSE_S)
            else:
                return
        raise TaskError(f"failed rootfs umount: {self._rootfs} stays busy")

    async def _discard(self) -> None:
        """Let the engine remove what a restore made besides the container (netns, images)."""
        if not (self.bundle / RESTORE_MARK).exists():
            return
        try:
            await self._engine.call("discard")
        except EngineFailure as error:
            log.error("the engine could not clean up", id=self.id, error=error)
        else:
            # `delete` follows, when a new container of this name may already be getting prepared.
            (self.bundle / RESTORE_MARK).unlink()


def check_identifier(text: str) -> None:
    """Identifiers become file names: refuse what containerd itself would not allow."""
    if len(text) > 76 or not _IDENTIFIER.fullmatch(text):
        raise InvalidArgument(f"identifier {text[:80]!r} must match {_IDENTIFIER.pattern}")


def process_info(container: Container, pid: int) -> str:
    """The id of the exec'd process with this pid; '' for any other."""
    return next((process.id for process in container.execs.values() if process.pid == pid), "")


def _load_spec(bundle: Path) -> dict[str, Any]:
    try:
        spec = json.loads((bundle / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise TaskError(f"the bundle {bundle} has no readable config.json: {error}") from error
    if not isinstance(spec, dict):
        raise TaskError(f"the config.json of {bundle} is no object")
    return spec


def _has_own_pid_namespace(spec: Mapping[str, Any]) -> bool:
    namespaces = (spec.get("linux") or {}).get("namespaces") or []
    return any(entry.get("type") == "pid" and not entry.get("path") for entry in namespaces)


def _has_marker(spec: Mapping[str, Any]) -> bool:
    variables = (spec.get("process") or {}).get("env") or []
    return any(str(variable).startswith(f"{ENV_MARKER}=") for variable in variables)


def _owner(options: RuncOptions) -> Owner:
    return Owner(options.io_uid, options.io_gid)


def _logger_env(process_id: str, namespace: str) -> dict[str, str]:
    return {"CONTAINER_ID": process_id, "CONTAINER_NAMESPACE": namespace}
