"""ttrpc without I/O: bytes in, calls and replies out (github.com/containerd/ttrpc, PROTOCOL.md).

A connection carries frames: a 10-byte header (data length, stream id, type, flags) and the data. Each
call is one stream: the client opens it with a Request frame, under an odd id greater than any before, and
the server ends it with one Response frame, in any order. `Server` and `Client` are the two ends of one
connection; whoever owns the socket feeds them what arrived and sends what they return. Only unary calls
exist here: the Task and Events services have no others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from google.protobuf.message import DecodeError

from shim.api.ttrpc_pb2 import KeyValue, Request, Response, Status
from shim.errors import Code

HEADER = struct.Struct(">IIBB")
MAX_DATA = 4 << 20


class FrameType(IntEnum):
    REQUEST = 1
    RESPONSE = 2
    DATA = 3


@dataclass(frozen=True)
class Frame:
    stream_id: int
    type: int
    flags: int
    data: bytes
    dropped: int = 0
    """The announced length when it was over `MAX_DATA`: the data was skipped."""


def encode(stream_id: int, frame_type: FrameType, data: bytes, flags: int = 0) -> bytes:
    return HEADER.pack(len(data), stream_id, frame_type, flags) + data


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame that is still incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._to_skip = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Every frame that `data` completes."""
        self._buffer += data
        while True:
            if self._to_skip:
                skipped = min(self._to_skip, len(self._buffer))
                del self._buffer[:skipped]
                self._to_skip -= skipped
                if self._to_skip:
                    return
            if len(self._buffer) < HEADER.size:
                return
            length, stream_id, frame_type, flags = HEADER.unpack_from(self._buffer)
            if length > MAX_DATA:
                del self._buffer[: HEADER.size]
                self._to_skip = length
                yield Frame(stream_id, frame_type, flags, b"", dropped=length)
                continue
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield Frame(stream_id, frame_type, flags, body)


@dataclass(frozen=True)
class Call:
    """A request the server has to answer, with `Server.reply` or `Server.fail`."""

    stream_id: int
    service: str
    method: str
    payload: bytes
    timeout_s: float | None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Server:
    """The server's end of one connection."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._last_stream_id = 0

    def receive(self, data: bytes) -> Iterator[Call | bytes]:
        """What `data` completes: calls to answer, and the bytes that refuse a malformed frame."""
        for frame in self._reader.feed(data):
            refusal = self._refusal(frame)
            if refusal:
                yield self.fail(frame.stream_id, *refusal)
            elif frame.type == FrameType.REQUEST:
                self._last_stream_id = frame.stream_id
                try:
                    yield self._call(frame)
                except DecodeError as error:
                    message = f"unmarshal request error: {error}"
                    yield self.fail(frame.stream_id, Code.INVALID_ARGUMENT, message)

    def reply(self, stream_id: int, payload: bytes) -> bytes:
        response = Response(payload=payload).SerializeToString()
        if len(response) > MAX_DATA:
            message = f"message length {len(response)} exceed maximum message size of {MAX_DATA}"
            return self.fail(stream_id, Code.RESOURCE_EXHAUSTED, message)
        return encode(stream_id, FrameType.RESPONSE, response)

    def fail(self, stream_id: int, code: int, message: str) -> bytes:
        # A lone surrogate (an undecodable file name, say) must not keep the error from being told.
        text = message[:65536].encode(errors="replace").decode()
        response = Response(status=Status(code=code, message=text))
        return encode(stream_id, FrameType.RESPONSE, response.SerializeToString())

    def _refusal(self, frame: Frame) -> tuple[Code, str] | None:
        if frame.dropped:
            message = f"message length {frame.dropped} exceed maximum message size of {MAX_DATA}"
            return Code.RESOURCE_EXHAUSTED, message
        if frame.stream_id % 2 != 1:
            return Code.INVALID_ARGUMENT, "StreamID must be odd for client initiated streams"
        if frame.type == FrameType.DATA:
            return Code.INVALID_ARGUMENT, "StreamID is no longer active"
        if frame.type == FrameType.REQUEST and frame.stream_id <= self._last_stream_id:
            return Code.INVALID_ARGUMENT, "StreamID cannot be re-used and must increment"
        return None

    @staticmethod
    def _call(frame: Frame) -> Call:
        request = Request.FromString(frame.data)
        return Call(
            stream_id=frame.stream_id,
            service=request.service,
            method=request.method,
            payload=request.payload,
            timeout_s=request.timeout_nano / 1e9 if request.timeout_nano > 0 else None,
            metadata={pair.key: pair.value for pair in request.metadata},
        )


@dataclass(frozen=True)
class Reply:
    stream_id: int
    code: int
    message: str
    payload: bytes


class Client:
    """The client's end of one connection."""

    def __init__(self) -> None:
        self._reader = FrameReader()
        self._next_stream_id = 1

    def call(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        timeout_s: float = 0,
        metadata: Iterable[tuple[str, str]] = (),
    ) -> tuple[int, bytes]:
        """The stream id of a new call, and the bytes that make it."""
        stream_id = self._next_stream_id
        self._next_stream_id += 2
        request = Request(
            service=service,
            method=method,
            payload=payload,
            timeout_nano=int(timeout_s * 1e9),
            metadata=[KeyValue(key=key, value=value) for key, value in metadata],
        )
        return stream_id, encode(stream_id, FrameType.REQUEST, request.SerializeToString())

    def receive(self, data: bytes) -> Iterator[Reply]:
        for frame in self._reader.feed(data):
            if frame.dropped:
                yield Reply(frame.stream_id, Code.RESOURCE_EXHAUSTED, "the reply is too large", b"")
            elif frame.type == FrameType.RESPONSE:
                yield self._reply(frame)

    @staticmethod
    def _reply(frame: Frame) -> Reply:
        try:
            response = Response.FromString(frame.data)
        except DecodeError as error:
            return Reply(frame.stream_id, Code.UNKNOWN, f"malformed reply: {error}", b"")
        return Reply(frame.stream_id, response.status.code, response.status.message, response.payload)
