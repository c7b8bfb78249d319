"""A terminal for one process: runc hands us the master of its pty over a unix socket.

OCI runtime-spec calls it the console socket: runc (or CRIU through runc) creates the pty inside the
container and sends the master's descriptor with SCM_RIGHTS.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import struct
import tempfile
import termios
from types import TracebackType

from shim.errors import TaskError
from shim.pump import readable

_RECEIVE_TIMEOUT_S = 30.0


class ConsoleSocket:
    """A context manager: the socket lives in a private directory, removed at the end."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="pty")
        self.path = os.path.join(self._directory, "pty.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        self._listener.listen(1)

    def __enter__(self) -> ConsoleSocket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def receive(self) -> int:
        """The master's descriptor, nonblocking. Called after runc succeeded: it is on its way."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_RECEIVE_TIMEOUT_S):
                connection, _ = await loop.sock_accept(self._listener)
                with connection:
                    await readable(connection.fileno())
                    _, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        except OSError as error:  # TimeoutError is one
            raise TaskError(f"failed to retrieve console master: {error or 'timed out'}") from error
        if len(fds) != 1:
            raise TaskError("failed to retrieve console master: the runtime sent no descriptor")
        os.set_blocking(fds[0], False)
        os.set_inheritable(fds[0], False)
        return fds[0]


def resize(master: int, width: int, height: int) -> None:
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", height & 0xFFFF, width & 0xFFFF, 0, 0))
