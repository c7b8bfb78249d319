"""A registry that misbehaves: takes some requests as a real one does, then answers all with one status."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.node.bed import HUB_ADDRESS, Bed


@contextmanager
def failing_registry(bed: Bed, status: int, after_bytes: int = 0) -> Iterator[str]:
    """host:port, on the hub, of a registry that fails once more than `after_bytes` were uploaded to it."""
    received = 0
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200 if self.path == "/v2/" and after_bytes else 404)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self._read()
            self._answer(202)

        def do_PUT(self) -> None:
            self._read()
            self._answer(201)

        do_PATCH = do_POST

        def _read(self) -> None:
            if self.headers.get("Transfer-Encoding", "") == "chunked":
                while length := int(self.rfile.readline(), 16):
                    self._count(self.rfile.read(length))
                    self.rfile.readline()
                self.rfile.readline()
            else:
                self._count(self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def _count(self, body: bytes) -> None:
            nonlocal received
            with lock:
                received += len(body)

        def _answer(self, otherwise: int) -> None:
            answer = status if received > after_bytes or not after_bytes else otherwise
            self.send_response(answer)
            if answer == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="bed"')
            if answer == 202:
                self.send_header("Location", f"/v2/upload/{uuid.uuid4()}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with bed.hub.network():
        server = ThreadingHTTPServer((HUB_ADDRESS, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"{HUB_ADDRESS}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
