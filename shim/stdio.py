"""Where a process's standard streams come from and go to.

The client names each stream: a FIFO it made, `file:///path` (appended to), or `binary:///path?args` (a log
driver that we start; core/runtime/v2/README.md, "Logging" in containerd). A process without a terminal
gets pipes, and `ProcessIO` copies between them and the named ends; one with a terminal has a pty, whose
master `attach_console` takes. FIFOs for output are opened for reading and writing: a client that comes and
goes then neither blocks the open nor breaks the pipe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from shim import console, log
from shim.errors import TaskError
from shim.pump import Pump, readable
from shim.reaper import Reaper

_DRAIN_TIMEOUT_S = 10.0
_LOGGER_FINISH_S = 1.0
_LOGGER_TIMEOUT_S = 12.0
_LOGGER_FDS = (3, 4, 5)
"""Standard output, standard error, and where the log driver says that it is ready."""


@dataclass(frozen=True)
class Stdio:
    """The streams as the client named them; '' for none."""

    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    terminal: bool = False


@dataclass(frozen=True)
class Owner:
    """Who the process's ends of the pipes belong to."""

    uid: int = 0
    gid: int = 0


class ProcessIO:
    """The streams of one process, from before it exists until it is deleted."""

    def __init__(self, stdio: Stdio, owner: Owner, reaper: Reaper, environment: dict[str, str]) -> None:
        """`environment` is what a log driver gets: CONTAINER_ID and CONTAINER_NAMESPACE."""
        self._stdio = stdio
        self._owner = owner
        self._reaper = reaper
        self._environment = environment
        self._child = ExitStack()
        """Closes the process's own ends."""
        self._closing = ExitStack()
        """Closes whatever is still open at the end."""
        self._stdin_writer = -1
        self._outputs: list[Pump] = []
        self._inputs: list[Pump] = []
        self._start: list[Callable[[], None]] = []
        self._logger: Logger | None = None
        self._master = -1
        self.child_fds: tuple[int, int, int] | None = None
        """What the process gets as 0, 1 and 2; None when it has a terminal."""

    async def open(self) -> None:
        """Make the process's ends. Raises `TaskError` for streams that cannot be."""
        try:
            if not self._stdio.terminal:
                self.child_fds = await self._open_pipes()
        except OSError as error:
            await self.close()
            raise TaskError(f"failed to create init process I/O: {error}") from error
        except BaseException:
            await self.close()
            raise

    def start_copies(self) -> None:
        """The process has its ends: close ours of them and start to copy."""
        self._child.close()
        try:
            for start in self._start:
                start()
        except OSError as error:
            raise TaskError(f"failed to start io pipe copy: {error}") from error

    async def attach_console(self, master: int) -> None:
        """Connect the terminal `master` (which is ours now) with the named streams."""
        self._master = master
        self._closing.callback(os.close, master)
        try:
            if self._stdio.stdin:
                self._pump_in(self._open_stdin(), master)
            if not self._stdio.stdout:
                sink = self._own(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            elif _scheme(self._stdio.stdout) in ("binary", "binary-v2"):
                sink = await self._start_logger_for_console()
            else:
                sink = self._own(_open_output(self._stdio.stdout))
            self._outputs.append(Pump(master, sink, lambda: None, hangs_up=True, lossy=True))
        except OSError as error:
            raise TaskError(f"failed to start console copy: {error}") from error

    def resize(self, width: int, height: int) -> None:
        if self._master >= 0:
            console.resize(self._master, width, height)

    def close_stdin(self) -> None:
        """Let the process see the end of its input once the client's end is closed too."""
        if self._stdin_writer >= 0:
            os.close(self._stdin_writer)
            self._stdin_writer = -1

    def process_ended(self) -> None:
        """The terminal will say no more than what it holds."""
        if self._master >= 0:
            for pump in self._outputs:
                pump.end_of_source()

    async def drain(self) -> bool:
        """Wait for the output to be copied, as long as containerd's own shim does; False if it was not."""
        copies = [pump.done for pump in self._outputs if not pump.done.done()]
        if not copies:
            return True
        _, pending = await asyncio.wait(copies, timeout=_DRAIN_TIMEOUT_S)
        return not pending

    async def close(self) -> None:
        """Close everything; a log driver gets the time to write what it has read."""
        self._child.close()
        for pump in (*self._inputs, *self._outputs):
            pump.stop()
        self.close_stdin()
        self._closing.close()
        if self._logger is not None:
            logger, self._logger = self._logger, None
            await logger.stop()

    async def _open_pipes(self) -> tuple[int, int, int]:
        stdio = self._stdio
        stdin = self._pipe_in() if stdio.stdin else self._null()
        if not (stdio.stdout or stdio.stderr):
            null = self._null()
            return stdin, null, null
        scheme = _scheme(stdio.stdout)
        if scheme in ("binary", "binary-v2"):
            stdout, stderr = await self._start_logger()
            return stdin, stdout, stderr
        if scheme not in ("", "fifo", "file"):
            raise TaskError(f"unknown STDIO scheme {scheme}")
        return stdin, self._pipe_out(stdio.stdout), self._pipe_out(stdio.stderr)

    def _null(self) -> int:
        return self._own_child(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))

    def _pipe_in(self) -> int:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._own_child(reader)
        self._give(reader)
        os.set_blocking(writer, False)
        closing = self._closing.enter_context(ExitStack())
        closing.callback(os.close, writer)
        self._start.append(lambda: self._pump_in(self._open_stdin(), writer, closing))
        return reader

    def _pipe_out(self, target: str) -> int:
        if not target:
            return self._null()
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._own_child(writer)
        self._give(writer)
        os.set_blocking(reader, False)
        closing = self._closing.enter_context(ExitStack())
        closing.callback(os.close, reader)
        if _scheme(target) == "file":
            Path(_path(target)).parent.mkdir(mode=0o755, parents=True, exist_ok=True)

        def start() -> None:
            sink = _open_output(target)
            closing.callback(os.close, sink)
            self._outputs.append(Pump(reader, sink, closing.close, lossy=True))

        self._start.append(start)
        return writer

    def _open_stdin(self) -> int:
        """The reading end of the client's FIFO. We keep a writer too, until CloseIO."""
        path = self._stdio.stdin
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._stdin_writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            os.close(reader)
            raise
        return reader

    def _pump_in(self, reader: int, sink: int, closing: ExitStack | None = None) -> None:
        closing = closing or self._closing.enter_context(ExitStack())
        closing.callback(os.close, reader)
        if stat.S_ISREG(os.fstat(reader).st_mode):
            raise TaskError(f"standard input {self._stdio.stdin} is not a FIFO")
        self._inputs.append(Pump(reader, sink, closing.close))

    async def _start_logger(self) -> tuple[int, int]:
        """Start the log driver; returns what the process writes to."""
        stdout_reader, stdout = os.pipe2(os.O_CLOEXEC)
        stderr_reader, stderr = os.pipe2(os.O_CLOEXEC)
        for fd in (stdout, stderr):
            self._own_child(fd)
            self._give(fd)
        try:
            await self._spawn_logger(stdout_reader, stderr_reader)
        finally:
            os.close(stdout_reader)
            os.close(stderr_reader)
        return stdout, stderr

    async def _start_logger_for_console(self) -> int:
        """A terminal has one output, but a log driver expects a pipe (which it may poll) for each."""
        reader, writer = os.pipe2(os.O_CLOEXEC)
        unused_reader, unused = os.pipe2(os.O_CLOEXEC)
        self._own(writer)
        self._own(unused)
        os.set_blocking(writer, False)
        try:
            await self._spawn_logger(reader, unused_reader)
        finally:
            os.close(reader)
            os.close(unused_reader)
        return writer

    async def _spawn_logger(self, stdout: int, stderr: int) -> None:
        self._logger = Logger(self._stdio.stdout, stdout, stderr, self._environment, self._reaper)
        await self._logger.ready()

    def _give(self, fd: int) -> None:
        os.fchown(fd, self._owner.uid, self._owner.gid)

    def _own(self, fd: int) -> int:
        self._closing.callback(os.close, fd)
        return fd

    def _own_child(self, fd: int) -> int:
        self._child.callback(os.close, fd)
        return fd


class Logger:
    """A log driver: a program that reads the two streams on descriptors 3 and 4 and stores them."""

    def __init__(
        self, uri: str, stdout: int, stderr: int, environment: dict[str, str], reaper: Reaper
    ) -> None:
        arguments = [word for pair in parse_qsl(urlsplit(uri).query, keep_blank_values=True) for word in pair]
        argv = [_path(uri), *arguments]
        self._must_say = _scheme(uri) == "binary-v2"
        self._ready, says_ready = os.pipe2(os.O_CLOEXEC)
        fds = dict(zip(_LOGGER_FDS, (stdout, stderr, says_ready), strict=True))
        try:
            self._child = reaper.spawn(argv, env=environment, fds=fds, own_group=True)
        except OSError as error:
            os.close(self._ready)
            raise TaskError(f"failed to start binary process: {error}") from error
        finally:
            os.close(says_ready)

    async def ready(self) -> None:
        """Wait until it says so: a byte, or (before `binary-v2`) just closing the pipe."""
        said = await _read_byte(self._ready)
        if self._must_say and not said:
            raise TaskError("logging binary did not call ready (it may have crashed or exited prematurely)")

    async def stop(self) -> None:
        """Its streams have ended: let it finish by itself, then ask, then insist."""
        await asyncio.wait([self._child.exited], timeout=_LOGGER_FINISH_S)
        for number, timeout_s in ((signal.SIGTERM, _LOGGER_TIMEOUT_S), (signal.SIGKILL, None)):
            if self._child.exited.done():
                return
            if number == signal.SIGKILL:
                log.warning("the log driver does not end, killing it", pid=self._child.pid)
            self._child.signal(number)
            await asyncio.wait([self._child.exited], timeout=timeout_s)


def _scheme(target: str) -> str:
    return urlsplit(target).scheme


def _path(uri: str) -> str:
    return unquote(urlsplit(uri).path)


def _open_output(target: str) -> int:
    """The client's end of an output stream: its FIFO, or a file to append to."""
    if _scheme(target) == "file":
        return os.open(_path(target), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    path = _path(target) if _scheme(target) == "fifo" else target
    if stat.S_ISFIFO(os.stat(path).st_mode):
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


async def _read_byte(fd: int) -> bytes:
    """One byte from the pipe `fd`, which is closed then; b'' at its end."""
    try:
        await readable(fd)
        return os.read(fd, 1)
    finally:
        os.close(fd)
