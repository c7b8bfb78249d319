"""`make bench BENCH=fuzz`: a million bad messages against the shim's frame parser and message handling.

Each input is a recorded request of containerd's (tests/unit/shim/traces), cut, damaged, repeated or mixed,
fed to a connection of the server in pieces of any size. The shim must not fail by any exception of its own;
what it sends must be whole answers; and it must not grow. The seed is printed: the same one plays the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from base.config import Config
from bench.figures import Figure, at_least, at_most, finish
from runtime import proc
from shim import log, server, ttrpc
from shim.api.ttrpc_pb2 import KeyValue, Request, Response
from shim.container import Host
from shim.reaper import Reaper
from shim.service import TaskService
from tests.unit.shim import recordings

_CONNECTION_INPUTS = 8
"""Inputs of one connection. Few: a length that is a lie swallows all that follow."""


@dataclass
class Found:
    inputs: int = 0
    answers: int = 0
    failures: list[str] = field(default_factory=list)
    grown_kib: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    began = time.monotonic()
    found = fuzz(arguments.inputs, arguments.seed)
    took = time.monotonic() - began
    for failure in found.failures[:20]:
        print(failure)
    finish("fuzz", {
        "inputs": at_least(found.inputs, "", 1_000_000),
        "failures": at_most(len(found.failures), "", 0),
        "answers": Figure(found.answers, ""),
        "rate": Figure(found.inputs / took, "1/s"),
        "growth": at_most(found.grown_kib / 1024, "MiB", 16),
    })  # fmt: skip


def fuzz(count: int, seed: int) -> Found:
    """Play `count` inputs; the working directory is an empty one meanwhile."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            return asyncio.run(_fuzz(count, random.Random(seed)))
        finally:
            os.chdir(before)


async def _fuzz(count: int, source: random.Random) -> Found:
    found, frames, messages = Found(), *_seeds()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: found.failures.append(f"{context.get('exception') or context['message']!r}")
    )
    logged = log.error
    log.error = lambda message, **fields: found.failures.append(f"{message}: {fields}")
    reaper = Reaper()
    services = TaskService(Host("fuzz", Config, reaper, {}), _Nowhere()).services()
    memory = 0
    while found.inputs < count:
        await _connection(services, source, frames, messages, found)
        if not memory and found.inputs > count // 10:
            memory = _memory_kib()
    found.grown_kib = _memory_kib() - memory
    reaper.close()
    log.error = logged
    return found


async def _connection(
    services: server.Services,
    source: random.Random,
    frames: Sequence[bytes],
    messages: Sequence[bytes],
    found: Found,
) -> None:
    transport = _Transport()
    connection = server._Connection(services, set())
    connection._transport = transport  # type: ignore[assignment]
    for _ in range(_CONNECTION_INPUTS):
        data = _input(source, frames, messages)
        found.inputs += 1
        try:
            for piece in _pieces(source, data):
                connection.data_received(piece)
        except Exception as error:
            found.failures.append(f"{error!r} for {data[:200].hex()}")
            break
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    try:
        for frame in ttrpc.FrameReader().feed(bytes(transport.written)):
            Response.FromString(frame.data)
            found.answers += 1
            if frame.type != ttrpc.FrameType.RESPONSE:
                found.failures.append(f"a frame of type {frame.type} was sent")
    except Exception as error:
        found.failures.append(f"what was sent is no answer: {error!r}")


def _input(source: random.Random, frames: Sequence[bytes], messages: Sequence[bytes]) -> bytes:
    kind = source.randrange(6)
    if kind == 0:
        return source.randbytes(source.randrange(64))
    if kind == 1:  # a whole frame around a damaged message
        body = _damaged(source, source.choice(messages))
        stream = source.choice((1, 3, 2, source.getrandbits(32)))
        return (
            ttrpc.HEADER.pack(len(body), stream, source.choice((1, 1, 1, 2, 3, source.getrandbits(8))), 0)
            + body
        )
    if kind == 2:  # a length that is not that of what follows
        frame = bytearray(source.choice(frames))
        frame[:4] = source.choice((0, 1, len(frame), 4 << 20, (4 << 20) + 1, 2**32 - 1)).to_bytes(4)
        return bytes(frame)
    if kind == 3:
        return b"".join(source.choices(frames, k=source.randrange(1, 4)))
    return _damaged(source, source.choice(frames))


def _damaged(source: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(source.randrange(1, 6)):
        if not changed:
            break
        at = source.randrange(len(changed))
        what = source.randrange(4)
        if what == 0:
            changed[at] = source.getrandbits(8)
        elif what == 1:
            del changed[at : at + source.randrange(1, 20)]
        elif what == 2:
            changed[at:at] = source.randbytes(source.randrange(1, 20))
        else:
            changed[at] ^= 1 << source.randrange(8)
    return bytes(changed)


def _pieces(source: random.Random, data: bytes) -> Iterator[bytes]:
    if len(data) < 2 or source.randrange(4):
        yield data
        return
    cut = source.randrange(1, len(data))
    yield data[:cut]
    yield data[cut:]


def _seeds() -> tuple[list[bytes], list[bytes]]:
    """Recorded requests, as frames and as the messages in them."""
    frames, messages = [], []
    for name in recordings.NAMES:
        for frame in list(recordings.frames(name))[:60]:
            if frame.channel == "task" and frame.sent_by_client:
                message = Request(
                    service=frame.service, method=frame.method, payload=frame.payload,
                    metadata=[KeyValue.FromString(pair) for pair in frame.metadata],
                ).SerializeToString()  # fmt: skip
                messages.append(message)
                frames.append(ttrpc.encode(frame.stream_id, ttrpc.FrameType.REQUEST, message))
    return frames, messages


class _Nowhere:
    def send(self, event: object) -> None:
        return


class _Transport:
    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        return


def _memory_kib() -> int:
    return int(proc.status("self")["VmRSS"].split()[0])


if __name__ == "__main__":
    main()
