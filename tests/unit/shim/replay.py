"""Plays a recorded life (`recordings.py`) to our service, and notes where it answers otherwise.

The recording is walked from its beginning to its end. A request is sent when it was sent; an answer and an
event are waited for when they came, and compared. Processes are real, and end when the recording shows them
ended: at a Kill, or by a trigger of ours. What cannot be equal is compared by its identity: the first pid
seen on either side is `pid 1`, and so on, times alike, and paths of the recorded machine are ours on the way
in and theirs again on the way out.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from shim import ttrpc, wire
from shim.api import events_pb2, options_pb2
from shim.api import task_pb2 as api
from shim.events import TOPICS
from tests.unit.shim import harness
from tests.unit.shim.recordings import Frame

REQUESTS: Mapping[str, type[Message]] = {
    "Create": api.CreateTaskRequest,
    "Start": api.StartRequest,
    "State": api.StateRequest,
    "Delete": api.DeleteRequest,
    "Pids": api.PidsRequest,
    "Kill": api.KillRequest,
    "Exec": api.ExecProcessRequest,
    "ResizePty": api.ResizePtyRequest,
    "CloseIO": api.CloseIORequest,
    "Update": api.UpdateTaskRequest,
    "Wait": api.WaitRequest,
    "Stats": api.StatsRequest,
    "Connect": api.ConnectRequest,
    "Shutdown": api.ShutdownRequest,
}
EVENTS = {f"containerd.events.{kind.DESCRIPTOR.name}": kind for kind in TOPICS}
_PATIENCE_S = 60.0
_ZERO_TIME_S = -62135596800
_OCI = re.compile(r"OCI runtime (create|start|exec) failed: (.*)", re.DOTALL)

Process = tuple[str, str]
"""Container id, and exec id or ''."""


def process_of(message: Any) -> Process:
    return message.id, getattr(message, "exec_id", "")


class Seen:
    """Names for what differs from machine to machine, in the order it is first seen."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, object], str] = {}

    def name(self, kind: str, value: object) -> str:
        count = sum(1 for known, _ in self._names if known == kind)
        return self._names.setdefault((kind, value), f"{kind} {count + 1}")


class Replay:
    def __init__(self, frames: Iterable[Frame], shim: harness.Shim) -> None:
        self.differences: list[str] = []
        self.compared = 0
        self._frames = list(frames)
        self._shim = shim
        self._answers = self._recorded_answers()
        self._endings = self._recorded_endings()
        self._started: set[Process] = set()
        self._killed: set[Process] = set()
        """A Kill that ends it was sent."""
        self._calls: dict[int, asyncio.Task[ttrpc.Reply]] = {}
        self._targets: dict[int, Process] = {}
        """Stream of a Wait or State → whom it asks about."""
        self._due: dict[int, asyncio.Event] = {}
        self._events = 0
        self._theirs, self._ours = Seen(), Seen()
        self._paths: dict[str, str] = {}
        """Recorded path → ours."""

    async def run(self) -> None:
        for index, frame in enumerate(self._frames):
            if frame.channel == "event":
                if frame.sent_by_client:
                    await self._event(frame)
            elif frame.sent_by_client:
                await self._request(frame, self._answers.get(index))
            else:
                await self._answer(frame)
        for event in self._shim.events[self._events :]:
            # The last may have come when the recorded connection was closed already.
            if not isinstance(event, events_pb2.TaskDelete):
                self.differences.append(f"the event {type(event).__name__} was not recorded")
        for call in self._calls.values():
            call.cancel()

    # What the recording says beforehand

    def _recorded_answers(self) -> dict[int, Frame]:
        """Index of a request → its answer."""
        waiting: dict[int, int] = {}
        answers = {}
        for index, frame in enumerate(self._frames):
            if frame.channel == "task":
                if frame.sent_by_client:
                    waiting[frame.stream_id] = index
                else:
                    answers[waiting.pop(frame.stream_id)] = frame
        return answers

    def _recorded_endings(self) -> dict[Process, int]:
        """Exit status of each process that ended."""
        endings = {}
        for frame in self._frames:
            if frame.channel == "event" and frame.sent_by_client:
                event = _event(frame.payload)
                if isinstance(event, events_pb2.TaskExit):
                    exec_id = "" if event.id == event.container_id else event.id
                    endings[(event.container_id, exec_id)] = event.exit_status
        return endings

    # The walk

    async def _request(self, frame: Frame, answer: Frame | None) -> None:
        request: Any = REQUESTS[frame.method].FromString(frame.payload)
        if frame.method == "State":
            self._due[frame.stream_id] = asyncio.Event()
        elif answer is not None:
            await self._prepare(frame.method, request, answer)
        if isinstance(request, api.CreateTaskRequest):
            self._localise_create(request)
        elif isinstance(request, api.ExecProcessRequest):
            self._localise_exec(request)
        if frame.method in ("Wait", "State"):
            self._targets[frame.stream_id] = process_of(request)
        elif frame.method == "Start":
            self._started.add(process_of(request))
        elif frame.method == "Kill" and self._endings.get(process_of(request)) == 128 + request.signal:
            self._killed.add(process_of(request))
        self._calls[frame.stream_id] = asyncio.create_task(self._asked(frame, request))
        await asyncio.sleep(0.001)  # it is written before the next

    async def _asked(self, frame: Frame, request: Message) -> ttrpc.Reply:
        """A question about the state may be answered before or after what goes on: as late as recorded."""
        if frame.method == "State":
            await self._due[frame.stream_id].wait()
        return await self._shim.ask(frame.method, request)

    async def _prepare(self, method: str, request: Any, answer: Frame) -> None:
        """Bring about what the recorded answer tells of: a process has ended, or runc fails."""
        code, message = _status(answer)
        failure = _OCI.match(message)
        if failure and "runc-" not in failure[2].split("exec: ")[-1]:
            self._shim.runc_fails(failure[1], failure[2])
        elif "no such container" in message:
            self._shim.runc_fails("kill", "container does not exist")
        else:
            for verb in ("create", "start", "exec", "kill"):
                (self._shim.runc_root / f"{verb}.fails").unlink(missing_ok=True)
        if (method == "Kill" and code) or (method == "Delete" and not code):
            await self._end(process_of(request))

    async def _answer(self, frame: Frame) -> None:
        if frame.method == "Wait":
            recorded = api.WaitResponse.FromString(frame.payload)
            if recorded.HasField("exited_at"):
                await self._end(self._targets[frame.stream_id])
        elif frame.method == "State" and not frame.status:
            state = api.StateResponse.FromString(frame.payload)
            process = self._targets[frame.stream_id]
            if state.status == api.STOPPED:
                await self._end(process)
            elif state.status == api.RUNNING:
                await _until(lambda: getattr(self._shim.process(*process), "status", "") == "running")
        if frame.method == "State":
            self._due[frame.stream_id].set()
        reply = await asyncio.wait_for(self._calls.pop(frame.stream_id), _PATIENCE_S)
        kind = harness.RESPONSES.get(frame.method, Empty)
        code, message = _status(frame)
        self._compare(
            f"{frame.method} (stream {frame.stream_id})",
            (code, message, self._shown(kind.FromString(frame.payload), self._theirs)),
            (reply.code, self._back(reply.message), self._shown(kind.FromString(reply.payload), self._ours)),
        )

    async def _event(self, frame: Frame) -> None:
        recorded = _event(frame.payload)
        if isinstance(recorded, events_pb2.TaskExit):
            exec_id = "" if recorded.id == recorded.container_id else recorded.id
            await self._end((recorded.container_id, exec_id))
        if isinstance(recorded, events_pb2.TaskCreate):
            del recorded.rootfs[:]
        await _until(lambda: len(self._shim.events) > self._events)
        ours = self._shim.events[self._events]
        self._events += 1
        self._compare(
            f"event {self._events}",
            (type(recorded).__name__, self._shown(recorded, self._theirs)),
            (type(ours).__name__, self._shown(ours, self._ours)),
        )

    def _compare(self, where: str, recorded: object, ours: object) -> None:
        self.compared += 1
        if recorded != ours:
            self.differences.append(f"{where}: recorded {recorded}, ours {ours}")

    async def _end(self, process: Process) -> None:
        """A process has ended: by the Kill that was sent, or else let it end now."""
        status = self._endings.get(process)
        ours = self._shim.process(*process)
        if status is None or ours is None:
            return
        await _until(lambda: ours.pid)
        trigger = self._trigger(process)
        if process in self._started - self._killed and ours.exited_at is None:
            descriptor = os.open(trigger, os.O_RDWR | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"end\n")
                await _until(lambda: ours.exited_at is not None)
            finally:
                os.close(descriptor)
        await _until(lambda: ours.exited_at is not None)

    # Ours for theirs, and back

    def _localise_create(self, request: api.CreateTaskRequest) -> None:
        sent = options_pb2.Options.FromString(request.options.value)
        if "runc-" not in sent.binary_name:
            sent.binary_name = str(harness.FAKE_RUNC)
        sent.root = str(self._shim.runc_root.parent)
        request.options.CopyFrom(
            AnyMessage(type_url="containerd.runc.v1.Options", value=sent.SerializeToString())
        )
        bundle = self._shim.bundle(request.id, ["/bin/sh", "-c", self._script((request.id, ""))])
        self._paths[request.bundle] = str(bundle)
        request.bundle = str(bundle)
        del request.rootfs[:]
        self._localise_streams(request)

    def _localise_exec(self, request: api.ExecProcessRequest) -> None:
        spec = json.loads(request.spec.value)
        spec["args"] = ["/bin/sh", "-c", self._script(process_of(request))]
        request.spec.value = json.dumps(spec).encode()
        self._localise_streams(request)

    def _localise_streams(self, request: Any) -> None:
        for name in ("stdin", "stdout", "stderr"):
            if recorded := getattr(request, name):
                ours = self._paths.setdefault(
                    recorded, str(self._shim.directory / f"fifo-{len(self._paths):05}")
                )
                if not os.path.exists(ours):
                    os.mkfifo(ours)
                setattr(request, name, ours)

    def _script(self, process: Process) -> str:
        """Wait, then end with the recorded status."""
        trigger = self._trigger(process)
        if not trigger.exists():
            os.mkfifo(trigger)
        status = self._endings.get(process, 0)
        end = f"kill -{status - 128} $$" if status > 128 else f"exit {status}"
        children = "" if process[1] else "sleep 60 & " * (self._most_processes() - 1)
        return f"{children}read line < {trigger}; {end}"

    def _most_processes(self) -> int:
        counts = [
            len(api.PidsResponse.FromString(frame.payload).processes)
            for frame in self._frames
            if frame.method == "Pids" and not frame.sent_by_client
        ]
        return max(counts, default=1)

    def _trigger(self, process: Process) -> Path:
        return self._shim.directory / ".".join(("end", *process))

    def _back(self, text: str) -> str:
        for recorded, ours in self._paths.items():
            text = text.replace(ours, recorded)
        return text

    def _shown(self, message: Message, seen: Seen) -> dict[str, object]:
        """`message` as comparable values."""
        shown: dict[str, object] = {}
        for field, value in message.ListFields():
            if isinstance(value, Timestamp):
                is_zero = value.seconds == _ZERO_TIME_S
                shown[field.name] = "never" if is_zero else seen.name("time", value.SerializeToString())
            elif isinstance(value, AnyMessage):
                shown[field.name] = re.sub(r"\.v[12]\.", ".v?.", value.type_url)
            elif isinstance(value, Message):
                shown[field.name] = self._shown(value, seen)
            elif field.name == "shim_pid":
                shown[field.name] = value > 0
            elif field.name in ("pid", "task_pid"):
                shown[field.name] = seen.name("pid", value)
            elif field.is_repeated:
                shown[field.name] = [
                    self._shown(item, seen) if isinstance(item, Message) else item for item in value
                ]
            else:
                shown[field.name] = self._back(value) if isinstance(value, str) else value
        return shown


def _event(payload: bytes) -> Message:
    envelope = events_pb2.ForwardRequest.FromString(payload).envelope
    return EVENTS[envelope.event.type_url].FromString(envelope.event.value)


def _status(frame: Frame) -> tuple[int, str]:
    """(code, message) of an answer; (0, '') when it is none of an error."""
    fields = dict(wire.decode(frame.status))
    message = fields.get(2, b"")
    assert isinstance(message, bytes)
    return int(fields.get(1, 0)), message.decode()


async def _until(condition: Any) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
