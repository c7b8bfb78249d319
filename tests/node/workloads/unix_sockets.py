"""Unix sockets of every kind, with bytes on their way."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import workload


def prepare() -> Callable[[], None]:
    pairs = {
        "stream": socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM),
        "dgram": socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        "seqpacket": socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    }
    for left, right in pairs.values():
        left.send(b"first")
        left.send(b"second")
        right.send(b"backwards")

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("/run/listener.sock")
    listener.listen()
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect("/run/listener.sock")
    server, _ = listener.accept()
    client.sendall(b"request")

    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    abstract.bind("\0abstract")
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect("\0abstract")
    sender.send(b"to an abstract name")

    parent, child = socket.socketpair()
    if os.fork() == 0:
        parent.close()
        while data := child.recv(100):
            child.sendall(data.upper())
        os._exit(0)
    child.close()

    def verify() -> None:
        stream = pairs["stream"]
        workload.expect(stream[1].recv(100), b"firstsecond", "stream")
        for kind in ("dgram", "seqpacket"):
            workload.expect([pairs[kind][1].recv(100) for _ in "12"], [b"first", b"second"], kind)
        for kind, (left, right) in pairs.items():
            workload.expect(left.recv(100), b"backwards", f"{kind}, backwards")
            left.send(b"after")
            workload.expect(right.recv(100), b"after", f"{kind}, after the move")
        workload.expect(server.recv(100), b"request", "bytes to the accepted connection")
        server.sendall(b"answer")
        workload.expect(client.recv(100), b"answer", "bytes from the accepted connection")
        workload.expect(abstract.recv(100), b"to an abstract name", "abstract name")
        sender.send(b"again")
        workload.expect(abstract.recv(100), b"again", "abstract name, after the move")
        second = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        second.connect("/run/listener.sock")
        accepted, _ = listener.accept()
        accepted.sendall(b"new")
        workload.expect(second.recv(100), b"new", "a new connection to the listener")
        parent.sendall(b"to a child")
        workload.expect(parent.recv(100), b"TO A CHILD", "the child's answer")

    return verify


workload.run(prepare)
