"""The Task API (containerd.task.v2.Task and .v3.Task): calls in, events out.

Each method translates one request for a `Container`, and says in which order its events are published:
create, start, exit, delete; of an exec'd process added, started, exit; the exit of init after every
other. Everything runs in one event loop, so only the order of awaits matters: a verb and the event that
announces it happen under the process's lock, and an exit waits for that lock.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine, Mapping
from datetime import datetime
from pathlib import Path

from google.protobuf.any_pb2 import Any
from google.protobuf.empty_pb2 import Empty
from google.protobuf.timestamp_pb2 import Timestamp

from runtime.cgroups import OomWatch
from runtime.container import Mount
from shim import log, options
from shim.api import events_pb2, metrics_v1_pb2, metrics_v2_pb2, options_pb2
from shim.api import task_pb2 as api
from shim.container import Container, CreateRequest, Host, process_info
from shim.errors import AlreadyExists, NotFound, TaskError
from shim.events import EventSink
from shim.execs import Exec
from shim.reaper import Exit
from shim.server import Method, Services
from shim.stdio import Stdio

SERVICES = ("containerd.task.v2.Task", "containerd.task.v3.Task")
_ZERO_TIME_S = -62135596800
"""Go's zero time, which containerd's clients take for "has not ended"."""

_STATUS: Mapping[str, api.Status.ValueType] = {
    "created": api.CREATED,
    "running": api.RUNNING,
    "stopped": api.STOPPED,
    "paused": api.PAUSED,
    "pausing": api.PAUSING,
}


class TaskService:
    def __init__(self, host: Host, events: EventSink) -> None:
        self.shutdown = asyncio.Event()
        """Set when containerd asks for it and no container is left."""
        self._host = host
        self._events = events
        self._containers: dict[str, Container] = {}
        self._creating: set[str] = set()
        self._oom_watches: dict[str, OomWatch] = {}
        self._exits: set[asyncio.Task[None]] = set()

    def services(self) -> Services:
        """What `server.Server` serves."""
        methods = {
            "Create": Method(api.CreateTaskRequest, self.create),
            "Start": Method(api.StartRequest, self.start),
            "State": Method(api.StateRequest, self.state),
            "Delete": Method(api.DeleteRequest, self.delete),
            "Pids": Method(api.PidsRequest, self.pids),
            "Pause": Method(api.PauseRequest, self.pause),
            "Resume": Method(api.ResumeRequest, self.resume),
            "Checkpoint": Method(api.CheckpointTaskRequest, self.checkpoint),
            "Kill": Method(api.KillRequest, self.kill),
            "Exec": Method(api.ExecProcessRequest, self.exec),
            "ResizePty": Method(api.ResizePtyRequest, self.resize_pty),
            "CloseIO": Method(api.CloseIORequest, self.close_io),
            "Update": Method(api.UpdateTaskRequest, self.update),
            "Wait": Method(api.WaitRequest, self.wait, only_waits=True),
            "Stats": Method(api.StatsRequest, self.stats),
            "Connect": Method(api.ConnectRequest, self.connect),
            "Shutdown": Method(api.ShutdownRequest, self.request_shutdown),
        }
        return dict.fromkeys(SERVICES, methods)

    async def create(self, request: api.CreateTaskRequest) -> api.CreateTaskResponse:
        if request.id in self._containers or request.id in self._creating:
            raise AlreadyExists(f"container {request.id}")
        create = CreateRequest(
            id=request.id,
            bundle=Path(request.bundle),
            rootfs=[Mount(m.type, m.source, m.target, tuple(m.options)) for m in request.rootfs],
            stdio=Stdio(request.stdin, request.stdout, request.stderr, request.terminal),
            options=options.decode(request.options),
            checkpoint=request.checkpoint,
        )
        self._creating.add(request.id)
        try:
            with self._host.reaper.expecting():
                container = await Container.create(create, self._host)
                self._containers[request.id] = container
                self._events.send(
                    events_pb2.TaskCreate(
                        container_id=request.id,
                        bundle=request.bundle,
                        rootfs=request.rootfs,
                        io=events_pb2.TaskIO(
                            stdin=request.stdin,
                            stdout=request.stdout,
                            stderr=request.stderr,
                            terminal=request.terminal,
                        ),
                        checkpoint=request.checkpoint,
                        pid=container.init.pid,
                    )
                )
                if container.init.pid:
                    self._watch_init(container)
        finally:
            self._creating.discard(request.id)
        return api.CreateTaskResponse(pid=container.init.pid)

    async def start(self, request: api.StartRequest) -> api.StartResponse:
        container = self._container(request.id)
        process = container.process(request.exec_id)
        with self._host.reaper.expecting():
            if isinstance(process, Exec):
                await self._start_exec(container, process)
            else:
                await self._start_init(container)
        return api.StartResponse(pid=process.pid)

    def state(self, request: api.StateRequest) -> api.StateResponse:
        container = self._container(request.id)
        process = container.process(request.exec_id)
        return api.StateResponse(
            id=process.id,
            bundle=str(container.bundle),
            pid=process.pid,
            status=_STATUS[process.status],
            stdin=process.stdio.stdin,
            stdout=process.stdio.stdout,
            stderr=process.stdio.stderr,
            terminal=process.stdio.terminal,
            exit_status=process.exit_status,
            exited_at=_timestamp(process.exited_at),
        )

    async def delete(self, request: api.DeleteRequest) -> api.DeleteResponse:
        container = self._container(request.id)
        process = container.process(request.exec_id)
        if isinstance(process, Exec):
            async with process.lock:
                await process.delete()
            container.execs.pop(request.exec_id, None)
        else:
            await container.delete()
            self._stop_oom_watch(container)
            if self._containers.pop(request.id, None) is not None:
                self._events.send(
                    events_pb2.TaskDelete(
                        container_id=container.id,
                        pid=process.pid,
                        exit_status=process.exit_status,
                        exited_at=_timestamp(process.exited_at),
                    )
                )
        return api.DeleteResponse(
            pid=process.pid,
            exit_status=process.exit_status,
            exited_at=_timestamp(process.exited_at),
        )

    async def pids(self, request: api.PidsRequest) -> api.PidsResponse:
        container = self._container(request.id)
        response = api.PidsResponse()
        for pid in await container.init.runtime.processes(container.id):
            info = response.processes.add(pid=pid)
            if exec_id := process_info(container, pid):
                details = options_pb2.ProcessDetails(exec_id=exec_id)
                info.info.CopyFrom(Any(type_url=options.PROCESS_DETAILS, value=details.SerializeToString()))
        return response

    async def pause(self, request: api.PauseRequest) -> Empty:
        container = self._container(request.id)
        async with container.init.lock:
            await container.init.pause()
            self._events.send(events_pb2.TaskPaused(container_id=container.id))
        return Empty()

    async def resume(self, request: api.ResumeRequest) -> Empty:
        container = self._container(request.id)
        async with container.init.lock:
            await container.init.resume()
            self._events.send(events_pb2.TaskResumed(container_id=container.id))
        return Empty()

    async def checkpoint(self, request: api.CheckpointTaskRequest) -> Empty:
        container = self._container(request.id)
        wishes = options.decode_checkpoint(request.options)
        async with container.init.lock:
            try:
                await container.init.checkpoint(Path(request.path), wishes)
            finally:
                if not wishes.work_path:
                    shutil.rmtree(container.bundle / "work" / "criu-work", ignore_errors=True)
            self._events.send(events_pb2.TaskCheckpointed(container_id=container.id, checkpoint=request.path))
        return Empty()

    async def kill(self, request: api.KillRequest) -> Empty:
        process = self._container(request.id).process(request.exec_id)
        await process.kill(request.signal, every_process=request.all)
        return Empty()

    def exec(self, request: api.ExecProcessRequest) -> Empty:
        container = self._container(request.id)
        stdio = Stdio(request.stdin, request.stdout, request.stderr, request.terminal)
        container.add_exec(request.exec_id, stdio, request.spec.value)
        self._events.send(events_pb2.TaskExecAdded(container_id=container.id, exec_id=request.exec_id))
        return Empty()

    def resize_pty(self, request: api.ResizePtyRequest) -> Empty:
        process = self._container(request.id).process(request.exec_id)
        try:
            process.resize(request.width, request.height)
        except OSError as error:
            raise TaskError(f"cannot resize the terminal: {error}") from error
        return Empty()

    def close_io(self, request: api.CloseIORequest) -> Empty:
        self._container(request.id).process(request.exec_id).close_stdin()
        return Empty()

    async def update(self, request: api.UpdateTaskRequest) -> Empty:
        container = self._container(request.id)
        async with container.init.lock:
            await container.init.update(request.resources.value)
        return Empty()

    async def wait(self, request: api.WaitRequest) -> api.WaitResponse:
        process = self._container(request.id).process(request.exec_id)
        await process.wait()
        return api.WaitResponse(exit_status=process.exit_status, exited_at=_timestamp(process.exited_at))

    def stats(self, request: api.StatsRequest) -> api.StatsResponse:
        cgroup = self._container(request.id).cgroup
        if cgroup is None:
            raise NotFound("cgroup does not exist")
        if cgroup.unified:
            kind, value = "v2", metrics_v2_pb2.Metrics(**cgroup.stats()).SerializeToString()
        else:
            kind, value = "v1", metrics_v1_pb2.Metrics(**cgroup.stats()).SerializeToString()
        return api.StatsResponse(stats=Any(type_url=f"io.containerd.cgroups.{kind}.Metrics", value=value))

    def connect(self, request: api.ConnectRequest) -> api.ConnectResponse:
        container = self._containers.get(request.id)
        return api.ConnectResponse(shim_pid=os.getpid(), task_pid=container.init.pid if container else 0)

    def request_shutdown(self, request: api.ShutdownRequest) -> Empty:
        if not self._containers and not self._creating:
            self.shutdown.set()
        return Empty()

    async def _start_init(self, container: Container) -> None:
        init = container.init
        async with init.lock:
            await init.start()
            self._events.send(events_pb2.TaskStart(container_id=container.id, pid=init.pid))
            if container.init_watch is None:  # restored, or started cold instead
                container.find_cgroup()
                self._watch_init(container)

    async def _start_exec(self, container: Container, process: Exec) -> None:
        async with process.lock:
            process.state.require("start")
            container.exec_begins(process)
            try:
                await process.start()
            except BaseException:
                container.exec_gone(process)
                raise
            self._events.send(
                events_pb2.TaskExecStarted(container_id=container.id, exec_id=process.id, pid=process.pid)
            )
            exited = self._host.reaper.watch(process.pid)
            self._in_background(self._exec_ended(container, process, exited))

    def _watch_init(self, container: Container) -> None:
        self._watch_oom(container)
        exited = self._host.reaper.watch(container.init.pid)
        container.init_watch = self._in_background(self._init_ended(container, exited))

    async def _init_ended(self, container: Container, exited: asyncio.Future[Exit]) -> None:
        init, end = container.init, await exited
        container.init_reaped = True
        if container.kills_all_on_exit:
            try:
                await init.kill_all()
            except TaskError as error:
                log.error("failed to kill init's children", id=container.id, error=error)
        await container.execs_gone()
        async with init.lock:
            await init.exited(end)
            self._stop_oom_watch(container)
            self._send_exit(container, init.id, end)

    async def _exec_ended(self, container: Container, process: Exec, exited: asyncio.Future[Exit]) -> None:
        end = await exited
        async with process.lock:
            await process.exited(end)
            self._send_exit(container, process.id, end)
        container.exec_gone(process)

    def _send_exit(self, container: Container, process_id: str, end: Exit) -> None:
        self._events.send(
            events_pb2.TaskExit(
                container_id=container.id,
                id=process_id,
                pid=end.pid,
                exit_status=end.status,
                exited_at=_timestamp(end.at),
            )
        )

    def _watch_oom(self, container: Container) -> None:
        if container.cgroup is None:
            return
        try:
            watch = container.cgroup.watch_oom()
        except OSError as error:
            log.error("cannot watch for out-of-memory kills", id=container.id, error=error)
            return
        self._oom_watches[container.id] = watch
        asyncio.get_running_loop().add_reader(watch.fd, self._oom_news, container, watch)

    def _oom_news(self, container: Container, watch: OomWatch) -> None:
        killed = watch.read()
        if killed:
            self._events.send(events_pb2.TaskOOM(container_id=container.id))
        elif killed is None:
            self._stop_oom_watch(container)

    def _stop_oom_watch(self, container: Container) -> None:
        if (watch := self._oom_watches.pop(container.id, None)) is not None:
            asyncio.get_running_loop().remove_reader(watch.fd)
            watch.close()

    def _in_background(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._exits.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._exits.discard)
        return task

    def _container(self, container_id: str) -> Container:
        if (container := self._containers.get(container_id)) is None:
            raise NotFound("container not created")
        return container


def _timestamp(at: datetime | None) -> Timestamp:
    if at is None:
        return Timestamp(seconds=_ZERO_TIME_S)
    stamp = Timestamp()
    stamp.FromDatetime(at)
    return stamp
