"""The whole shim in this process, behind its socket, with a runc and an engine that need no containers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message

from base.config import Config
from runtime import syscalls
from shim import ttrpc
from shim.api import options_pb2
from shim.api import task_pb2 as api
from shim.client import Connection
from shim.container import Host
from shim.process import Process
from shim.reaper import Reaper
from shim.server import Server
from shim.service import SERVICES, TaskService

HERE = Path(__file__).parent
FAKE_RUNC = HERE / "fake_runc.py"
RESPONSES: Mapping[str, type[Message]] = {
    "Create": api.CreateTaskResponse,
    "Start": api.StartResponse,
    "State": api.StateResponse,
    "Delete": api.DeleteResponse,
    "Pids": api.PidsResponse,
    "Wait": api.WaitResponse,
    "Stats": api.StatsResponse,
    "Connect": api.ConnectResponse,
}


class CallFailed(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class Shim:
    """What a test talks to. `events` is what containerd would have been told."""

    def __init__(
        self, directory: Path, service: TaskService, connection: Connection, events: list[Message]
    ) -> None:
        self.directory = directory
        self.runc_root = directory / "runc" / "ns"
        self.engine = directory / "engine"
        self.events = events
        self.service = service
        self._connection = connection

    async def ask(self, method: str, request: Message, *, timeout_s: float = 0) -> ttrpc.Reply:
        return await self._connection.call(
            SERVICES[1], method, request.SerializeToString(), timeout_s=timeout_s
        )

    def process(self, container_id: str, exec_id: str) -> Process | None:
        """The service's own record of a process."""
        container = self.service._containers.get(container_id)
        return None if container is None else container.execs.get(exec_id) if exec_id else container.init

    async def call(self, method: str, request: Message, *, timeout_s: float = 0) -> Any:
        reply = await asyncio.wait_for(self.ask(method, request, timeout_s=timeout_s), 30)
        if reply.code:
            raise CallFailed(reply.code, reply.message)
        return RESPONSES[method].FromString(reply.payload) if method in RESPONSES else None

    def bundle(self, container_id: str, argv: Sequence[str], **spec: Any) -> Path:
        bundle = self.directory / "bundles" / container_id
        (bundle / "rootfs").mkdir(parents=True, exist_ok=True)
        own = {"namespaces": [{"type": "pid"}]}
        body = {"process": {"args": list(argv), "env": []}, "linux": own, **spec}
        (bundle / "config.json").write_text(json.dumps(body))
        return bundle

    async def create(
        self,
        container_id: str,
        script: str = "exec sleep 60",
        *,
        spec: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> api.CreateTaskResponse:
        bundle = self.bundle(container_id, ["/bin/sh", "-c", script], **(spec or {}))
        options = options_pb2.Options(binary_name=str(FAKE_RUNC), root=str(self.runc_root.parent))
        request = api.CreateTaskRequest(
            id=container_id,
            bundle=str(bundle),
            options=AnyMessage(type_url="containerd.runc.v1.Options", value=options.SerializeToString()),
            **fields,
        )
        response = await self.call("Create", request)
        assert isinstance(response, api.CreateTaskResponse)
        return response

    async def start(self, container_id: str, exec_id: str = "") -> int:
        response = await self.call("Start", api.StartRequest(id=container_id, exec_id=exec_id))
        return int(response.pid)

    async def run(self, container_id: str, script: str = "exec sleep 60", **options: Any) -> int:
        """Create and start; returns the pid."""
        await self.create(container_id, script, **options)
        return await self.start(container_id)

    async def exec(self, container_id: str, exec_id: str, script: str, **fields: Any) -> int:
        await self.add_exec(container_id, exec_id, ["/bin/sh", "-c", script], **fields)
        return await self.start(container_id, exec_id)

    async def add_exec(self, container_id: str, exec_id: str, argv: Sequence[str], **fields: Any) -> None:
        spec = AnyMessage(
            type_url="types.containerd.io/opencontainers/runtime-spec/1/Process",
            value=json.dumps({"args": list(argv), "cwd": "/"}).encode(),
        )
        await self.call("Exec", api.ExecProcessRequest(id=container_id, exec_id=exec_id, spec=spec, **fields))

    async def state(self, container_id: str, exec_id: str = "") -> api.StateResponse:
        response = await self.call("State", api.StateRequest(id=container_id, exec_id=exec_id))
        assert isinstance(response, api.StateResponse)
        return response

    async def kill(self, container_id: str, signal: int = 9, **fields: Any) -> None:
        await self.call("Kill", api.KillRequest(id=container_id, signal=signal, **fields))

    async def wait(self, container_id: str, exec_id: str = "") -> int:
        response = await self.call("Wait", api.WaitRequest(id=container_id, exec_id=exec_id))
        return int(response.exit_status)

    async def delete(self, container_id: str, exec_id: str = "") -> api.DeleteResponse:
        response = await self.call("Delete", api.DeleteRequest(id=container_id, exec_id=exec_id))
        assert isinstance(response, api.DeleteResponse)
        return response

    async def remove(self, container_id: str) -> api.DeleteResponse:
        await self.kill(container_id)
        await self.wait(container_id)
        return await self.delete(container_id)

    def told(self, container_id: str) -> list[str]:
        """The events of one container, by name, in their order (`TaskExit:exec-1`)."""
        names = []
        for event in self.events:
            if getattr(event, "container_id", "") == container_id:
                process = getattr(event, "exec_id", "") or getattr(event, "id", "")
                suffix = f":{process}" if process and process != container_id else ""
                names.append(f"{event.DESCRIPTOR.name}{suffix}")
        return names

    def runc_calls(self) -> list[str]:
        path = self.runc_root / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def runc_fails(self, verb: str, message: str) -> None:
        self.runc_root.mkdir(parents=True, exist_ok=True)
        (self.runc_root / f"{verb}.fails").write_text(message)

    def engine_fails(self, verb: str, message: str, code: int = 1, **fields: str) -> None:
        error = {"message": message, "hint": "", "details": "", "code": code, **fields}
        (self.engine / f"{verb}.error").write_text(json.dumps(error))

    def engine_calls(self) -> list[dict[str, Any]]:
        path = self.engine / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@asynccontextmanager
async def shim(directory: Path) -> AsyncIterator[Shim]:
    syscalls.set_child_subreaper()
    engine = directory / "engine"
    (engine / "images").mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "fake_engine"),
        "FAKE_ENGINE": str(engine),
    }
    events: list[Message] = []
    reaper = Reaper()
    config = replace(Config(), run_dir=directory / "run", tools_dir=directory)
    host = Host("ns", lambda: config, reaper, environment)

    class Sink:
        def send(self, event: Message) -> None:
            events.append(event)

    service = TaskService(host, Sink())
    server = Server(service.services())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "s"))
    listener.listen()
    await server.listen(listener)
    connection = await Connection.open(str(directory / "s"))
    made = Shim(directory, service, connection, events)
    try:
        yield made
    finally:
        for pid_file in directory.glob("bundles/*/*.pid"):
            _kill(int(pid_file.read_text() or 0))
        connection.close()
        server.close()
        await asyncio.sleep(0.05)
        reaper.close()


def run(directory: Path, test: Callable[[Shim], Coroutine[Any, Any, None]]) -> None:
    """Run one test against a shim of its own."""

    async def body() -> None:
        async with shim(directory) as made:
            await test(made)

    asyncio.run(body())


def _kill(pid: int) -> None:
    try:
        if pid > 1 and pid != os.getpid():
            os.killpg(pid, 9)
    except ProcessLookupError:
        return
