"""The ttrpc codec against recorded traffic, cut at every place, and against garbage."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shim import ttrpc
from shim.api import events_pb2, task_pb2
from shim.api.ttrpc_pb2 import KeyValue, Request, Response, Status
from shim.errors import Code
from shim.flags import parse
from shim.service import SERVICES
from tests.unit.shim import recordings

FORWARD = "containerd.services.events.ttrpc.v1.Events"
REQUESTS = {
    "Create": task_pb2.CreateTaskRequest,
    "Start": task_pb2.StartRequest,
    "State": task_pb2.StateRequest,
    "Delete": task_pb2.DeleteRequest,
    "Pids": task_pb2.PidsRequest,
    "Kill": task_pb2.KillRequest,
    "Exec": task_pb2.ExecProcessRequest,
    "CloseIO": task_pb2.CloseIORequest,
    "Update": task_pb2.UpdateTaskRequest,
    "Wait": task_pb2.WaitRequest,
    "Stats": task_pb2.StatsRequest,
    "Connect": task_pb2.ConnectRequest,
    "Shutdown": task_pb2.ShutdownRequest,
    "Forward": events_pb2.ForwardRequest,
}
RESPONSES = {
    "Create": task_pb2.CreateTaskResponse,
    "Start": task_pb2.StartResponse,
    "State": task_pb2.StateResponse,
    "Delete": task_pb2.DeleteResponse,
    "Pids": task_pb2.PidsResponse,
    "Wait": task_pb2.WaitResponse,
    "Stats": task_pb2.StatsResponse,
    "Connect": task_pb2.ConnectResponse,
}


def _request(frame: recordings.Frame) -> bytes:
    body = Request(
        service=frame.service,
        method=frame.method,
        payload=frame.payload,
        timeout_nano=frame.timeout_nano,
        metadata=[KeyValue.FromString(pair) for pair in frame.metadata],
    ).SerializeToString()
    assert len(body) == frame.length, "our Request encodes differently from containerd's"
    return ttrpc.encode(frame.stream_id, ttrpc.FrameType.REQUEST, body)


@pytest.mark.parametrize("name", recordings.NAMES)
def test_a_recorded_conversation_is_understood_call_by_call(name: str) -> None:
    flags = parse(next(recordings.calls(name))["call"])
    for frame in recordings.frames(name):
        if frame.channel == "task" and frame.sent_by_client:
            if frame.stream_id == 1:  # a connection begins
                server = ttrpc.Server()
            (call,) = server.receive(_request(frame))
            assert isinstance(call, ttrpc.Call)
            assert (call.service, call.method, call.payload) == (frame.service, frame.method, frame.payload)
            assert call.service in SERVICES
            assert call.metadata == {"containerd-namespace-ttrpc": flags.namespace}
            assert call.timeout_s == (frame.timeout_nano / 1e9 if frame.timeout_nano else None)


@pytest.mark.parametrize("name", recordings.NAMES)
def test_recorded_messages_survive_our_definitions_byte_for_byte(name: str) -> None:
    for frame in recordings.frames(name):
        kind = (REQUESTS if frame.sent_by_client else RESPONSES).get(frame.method)
        if kind is not None and not frame.status:
            assert kind.FromString(frame.payload).SerializeToString(deterministic=True) == frame.payload


def test_answers_have_the_recorded_form() -> None:
    server = ttrpc.Server()
    for name in recordings.NAMES:
        for frame in recordings.frames(name):
            if frame.sent_by_client:
                continue
            if frame.status:
                status = Status.FromString(frame.status)
                sent = server.fail(frame.stream_id, status.code, status.message)
                body = Response.FromString(sent[ttrpc.HEADER.size :])
                assert body.status == status
            else:
                sent = server.reply(frame.stream_id, frame.payload)
                assert len(sent) == ttrpc.HEADER.size + frame.length


@given(cuts=st.lists(st.integers(min_value=0, max_value=3000), max_size=12))
def test_frames_do_not_depend_on_how_the_stream_is_cut(cuts: list[int]) -> None:
    stream = b"".join(
        _request(frame)
        for frame in recordings.frames("TestContainerCloseIO")
        if frame.channel == "task" and frame.sent_by_client
    )
    whole = list(ttrpc.FrameReader().feed(stream))
    reader = ttrpc.FrameReader()
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    pieces = [frame for start, end in itertools.pairwise(edges) for frame in reader.feed(stream[start:end])]
    assert pieces == whole


@given(st.binary(max_size=300))
def test_garbage_never_breaks_the_server(data: bytes) -> None:
    for item in ttrpc.Server().receive(data):
        assert isinstance(item, bytes | ttrpc.Call)


@given(st.binary(max_size=300))
def test_garbage_never_breaks_the_client(data: bytes) -> None:
    for reply in ttrpc.Client().receive(data):
        assert isinstance(reply, ttrpc.Reply)


@given(
    service=st.text(), method=st.text(), payload=st.binary(), timeout_s=st.floats(min_value=0, max_value=1e6)
)
def test_a_call_arrives_as_it_was_made(service: str, method: str, payload: bytes, timeout_s: float) -> None:
    client, server = ttrpc.Client(), ttrpc.Server()
    stream_id, data = client.call(service, method, payload, timeout_s=timeout_s, metadata=[("key", "value")])
    (call,) = server.receive(data)
    assert isinstance(call, ttrpc.Call)
    assert (call.stream_id, call.service, call.method, call.payload) == (
        stream_id,
        service,
        method,
        payload,
    )
    assert call.metadata == {"key": "value"}
    (reply,) = client.receive(server.reply(stream_id, payload))
    assert reply == ttrpc.Reply(stream_id, 0, "", payload)


def _refused(*frames: bytes) -> tuple[int, str]:
    """The status of the last answer of a server that is sent `frames`."""
    server = ttrpc.Server()
    items = [item for frame in frames for item in server.receive(frame)]
    last = items[-1]
    assert isinstance(last, bytes)
    status = Response.FromString(last[ttrpc.HEADER.size :]).status
    return status.code, status.message


def test_even_stream_ids_are_refused() -> None:
    frame = ttrpc.encode(2, ttrpc.FrameType.REQUEST, b"")
    assert _refused(frame) == (3, "StreamID must be odd for client initiated streams")


def test_stream_ids_must_grow() -> None:
    frame = ttrpc.encode(3, ttrpc.FrameType.REQUEST, b"")
    assert _refused(frame, frame) == (3, "StreamID cannot be re-used and must increment")


def test_data_for_no_stream_is_refused() -> None:
    assert _refused(ttrpc.encode(1, ttrpc.FrameType.DATA, b"x"))[1] == "StreamID is no longer active"


def test_a_request_that_is_no_request_is_refused() -> None:
    code, message = _refused(ttrpc.encode(1, ttrpc.FrameType.REQUEST, b"\xff\xff"))
    assert code == 3
    assert message.startswith("unmarshal request error")


def test_an_oversized_frame_is_skipped_and_refused_and_the_next_is_served() -> None:
    server = ttrpc.Server()
    length = ttrpc.MAX_DATA + 1
    (refusal,) = server.receive(ttrpc.HEADER.pack(length, 1, 1, 0))
    assert isinstance(refusal, bytes)
    assert Response.FromString(refusal[ttrpc.HEADER.size :]).status.code == Code.RESOURCE_EXHAUSTED
    for _ in range(8):
        assert not list(server.receive(bytes(length // 8)))
    _, request = ttrpc.Client().call("s", "m", b"p")
    after = server.receive(bytes(length % 8) + ttrpc.encode(3, ttrpc.FrameType.REQUEST, request[10:]))
    assert [item.method for item in after if isinstance(item, ttrpc.Call)] == ["m"]


def test_frames_of_unknown_types_are_ignored() -> None:
    assert not list(ttrpc.Server().receive(ttrpc.HEADER.pack(0, 1, 9, 0)))


def test_an_answer_that_is_too_large_becomes_an_error() -> None:
    data = ttrpc.Server().reply(1, bytes(ttrpc.MAX_DATA))
    assert Response.FromString(data[ttrpc.HEADER.size :]).status.code == Code.RESOURCE_EXHAUSTED


def test_an_error_text_that_is_no_unicode_is_still_told() -> None:
    data = ttrpc.Server().fail(1, 2, "file \udcff")
    assert Response.FromString(data[ttrpc.HEADER.size :]).status.message == "file ?"
