"""A program on a pseudo-terminal, driven as a person drives it: type, and wait for what appears."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType


class Terminal:
    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.screen = ""
        try:
            self.process = subprocess.Popen(
                ["setsid", "--ctty", "--wait", *argv], stdin=slave, stdout=slave, stderr=slave, env=dict(env)
            )
        finally:
            os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str, timeout_s: float = 20) -> re.Match[str]:
        """Wait until `pattern` appears; what was on the screen up to it is taken off."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.screen)):
            left = deadline - time.monotonic()
            if left <= 0 or not self._read(left):
                raise AssertionError(f"{pattern!r} did not appear on the terminal:\n{self.screen}")
        self.screen = self.screen[match.end() :]
        return match

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._master)
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self, timeout_s: float) -> bool:
        readable, _, _ = select.select([self._master], [], [], timeout_s)
        if not readable:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)
