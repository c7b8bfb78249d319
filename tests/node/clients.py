"""Clients that stay connected while a container moves, and say what they saw."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType

from tests.node.bed import Machine


class RedisClient:
    """One connection to redis that increments a counter without pause, from a thread, once started."""

    def __init__(self, machine: Machine, host: str, key: str = "counter") -> None:
        self._socket = machine.connect(host, 6379)
        self._socket.settimeout(60)
        self._file = self._socket.makefile("rb")
        self._key = key
        self.local_port = int(self._socket.getsockname()[1])
        self.values: list[int] = []
        self.longest_gap_s = 0.0
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._increment, daemon=True)

    def __enter__(self) -> RedisClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()

    def command(self, *words: str) -> str:
        """One command on this connection; only while it does not increment."""
        self._send(*words)
        return self._receive()

    def start(self) -> RedisClient:
        """Begin to increment."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop incrementing, between two commands; raises what ended it early."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=70)
        if self.error is not None:
            raise AssertionError(
                f"the client lost its connection after {len(self.values)} values"
            ) from self.error

    def wait_for(self, count: int, timeout_s: float = 60) -> None:
        """Wait for `count` values more than there are now."""
        target, deadline = len(self.values) + count, time.monotonic() + timeout_s
        while len(self.values) < target:
            if self.error is not None:
                raise AssertionError("the client lost its connection") from self.error
            if time.monotonic() > deadline:
                raise AssertionError(f"redis gave {len(self.values)} of {target} values in {timeout_s} s")
            time.sleep(0.01)

    def _increment(self) -> None:
        last = time.monotonic()
        try:
            while not self._stop.is_set():
                self._send("INCR", self._key)
                self.values.append(int(self._receive()))
                now = time.monotonic()
                self.longest_gap_s, last = max(self.longest_gap_s, now - last), now
        except BaseException as error:
            self.error = error

    def _send(self, *words: str) -> None:
        parts = [f"${len(word)}\r\n{word}\r\n" for word in words]
        self._socket.sendall(f"*{len(words)}\r\n{''.join(parts)}".encode())

    def _receive(self) -> str:
        line = self._file.readline()
        if not line:
            raise ConnectionError("redis closed the connection")
        if line.startswith(b"$"):
            length = int(line[1:])
            return self._file.read(length + 2)[:-2].decode() if length >= 0 else ""
        if line.startswith(b"-"):
            raise RuntimeError(line.decode().strip())
        return line[1:].decode().strip()


class PostgresClient:
    """One session with PostgreSQL, in its own protocol: simple queries, answers as rows of text."""

    def __init__(self, machine: Machine, host: str, user: str = "postgres") -> None:
        body = struct.pack("!I", 196608) + b"user\0" + user.encode() + b"\0database\0postgres\0\0"
        deadline = time.monotonic() + 60
        while True:
            self._socket = machine.connect(host, 5432, timeout_s=60)
            self._file = self._socket.makefile("rb")
            self._socket.sendall(struct.pack("!I", len(body) + 4) + body)
            try:
                self._rows()
                return
            except (ConnectionError, RuntimeError):  # "the database system is starting up"
                self._socket.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def query(self, text: str) -> list[tuple[str, ...]]:
        body = text.encode() + b"\0"
        self._socket.sendall(b"Q" + struct.pack("!I", len(body) + 4) + body)
        return self._rows()

    def close(self) -> None:
        self._socket.close()

    def _rows(self) -> list[tuple[str, ...]]:
        rows, error = [], ""
        while True:
            head = self._file.read(5)
            if len(head) < 5:
                raise ConnectionError(error or "PostgreSQL closed the connection")
            kind, length = head[:1], struct.unpack("!I", head[1:])[0]
            body = self._file.read(length - 4)
            if kind == b"D":
                rows.append(self._row(body))
            elif kind == b"E":
                error = body.replace(b"\0", b" ").decode(errors="replace")
            elif kind == b"Z":
                if error:
                    raise RuntimeError(error)
                return rows

    @staticmethod
    def _row(body: bytes) -> tuple[str, ...]:
        fields, at = [], 2
        for _ in range(struct.unpack_from("!H", body)[0]):
            length = struct.unpack_from("!i", body, at)[0]
            fields.append(body[at + 4 : at + 4 + length].decode() if length >= 0 else "")
            at += 4 + max(length, 0)
        return tuple(fields)


class HttpClient:
    """One keep-alive connection to a web server."""

    def __init__(self, machine: Machine, host: str) -> None:
        self._socket: socket.socket = machine.connect(host, 80)
        self._socket.settimeout(60)
        self._file = self._socket.makefile("rb", buffering=4096)
        self.local_port = int(self._socket.getsockname()[1])

    def ask(self, path: str) -> int:
        """Send a request and read the answer's head; returns the length of its body."""
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: bed\r\n\r\n".encode())
        status = self._file.readline().decode()
        if " 200 " not in status:
            raise AssertionError(f"{path}: {status or 'the connection was closed'}")
        length = 0
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return length

    def read(self, length: int) -> bytes:
        body: bytes = self._file.read(length)
        if len(body) != length:
            raise AssertionError(f"the body ended after {len(body)} of {length} bytes")
        return body

    def close(self) -> None:
        self._socket.close()
