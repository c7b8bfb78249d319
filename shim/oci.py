"""Runs runc for one container and says, in runc's own words, what went wrong.

Each call has its own log, so that two calls at once (an exec and a kill) never read each other's error. All
that runc reads and writes here, besides the pid file, are files in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from runtime.runc import Runc, last_error
from shim.errors import NotFound, TaskError
from shim.reaper import Reaper


class RuncFailure(TaskError):
    """runc ended with an error; `text` is what it said."""

    def __init__(self, what: str, text: str) -> None:
        super().__init__(f"{what}: {text}")
        self.text = text


class OciRuntime:
    """The OCI runtime of one container: `runc` names its binary and state directory."""

    def __init__(self, runc: Runc, bundle: Path, reaper: Reaper, env: Mapping[str, str]) -> None:
        self.runc = runc
        self._bundle = bundle
        self._reaper = reaper
        self._env = env

    async def create(
        self,
        container_id: str,
        stdio: tuple[int, int, int] | None,
        *,
        console_socket: str,
        no_pivot: bool,
        no_new_keyring: bool,
    ) -> int:
        """Create the container; returns init's pid. `stdio` None: it has a terminal."""
        pid_file = self._bundle / "init.pid"
        await self._run(
            "OCI runtime create failed",
            lambda runc: runc.create(
                container_id,
                self._bundle,
                pid_file,
                console_socket=console_socket,
                no_pivot=no_pivot,
                no_new_keyring=no_new_keyring,
            ),
            stdio=stdio,
        )
        return read_pid(pid_file, "container")

    async def start(self, container_id: str) -> None:
        await self._run("OCI runtime start failed", lambda runc: runc.start(container_id))

    async def exec(
        self,
        container_id: str,
        process: bytes,
        pid_file: Path,
        stdio: tuple[int, int, int] | None,
        *,
        console_socket: str,
    ) -> int:
        """Run `process` (OCI runtime-spec, process, as JSON) in the container; returns its pid."""
        with _memory_file("process", process) as spec:
            await self._run(
                "OCI runtime exec failed",
                lambda runc: runc.exec(container_id, _path(spec), pid_file, console_socket=console_socket),
                stdio=stdio,
                pass_fds=(spec,),
            )
        return read_pid(pid_file, "exec")

    async def kill(self, container_id: str, signal: int, *, every_process: bool) -> None:
        """Send `signal`; raises `NotFound` when nothing of the container is left to get it."""
        try:
            await self._run(
                "unknown error after kill",
                lambda runc: runc.kill(container_id, signal, every_process=every_process),
            )
        except RuncFailure as error:
            text = error.text.lower()
            finished = ("process already finished", "container not running", "no such process")
            if any(words in text for words in finished):
                raise NotFound("process already finished") from error
            if "does not exist" in text:
                raise NotFound("no such container") from error
            raise

    async def pause(self, container_id: str) -> None:
        await self._run("OCI runtime pause failed", lambda runc: runc.pause(container_id))

    async def resume(self, container_id: str) -> None:
        await self._run("OCI runtime resume failed", lambda runc: runc.resume(container_id))

    async def processes(self, container_id: str) -> list[int]:
        """The host pids of every process in the container."""
        output = await self._run("OCI runtime ps failed", lambda runc: runc.processes(container_id))
        try:
            return [int(pid) for pid in json.loads(output) or []]
        except (ValueError, TypeError) as error:
            raise TaskError(f"the process list of container {container_id} is unreadable: {error}") from error

    async def update(self, container_id: str, resources: bytes) -> None:
        await self._run("OCI runtime update failed", lambda runc: runc.update(container_id), stdin=resources)

    async def delete(self, container_id: str, *, force: bool = False) -> None:
        """Remove the container. One that runc no longer knows (after a checkpoint) is no error."""
        try:
            await self._run("failed to delete task", lambda runc: runc.delete(container_id, force=force))
        except RuncFailure as error:
            if "does not exist" not in error.text:
                raise

    async def _run(
        self,
        what: str,
        command: Callable[[Runc], Sequence[str]],
        *,
        stdio: tuple[int, int, int] | None = None,
        stdin: bytes = b"",
        pass_fds: Sequence[int] = (),
    ) -> str:
        """Run one command line to its end; returns its output (none of it when it got `stdio`)."""
        with ExitStack() as files:
            log = files.enter_context(_memory_file("log"))
            output = errors = -1
            if stdio is None:
                inputs = files.enter_context(_memory_file("stdin", stdin))
                output = files.enter_context(_memory_file("stdout"))
                errors = files.enter_context(_memory_file("stderr"))
                stdio = (inputs, output, errors)
            argv = command(replace(self.runc, log=_path(log)))
            fds = {**dict(enumerate(stdio)), **{fd: fd for fd in (log, *pass_fds)}}
            try:
                child = self._reaper.spawn(argv, env=self._env, fds=fds)
            except OSError as error:
                reason = f'unable to run "{self.runc.binary}": {error.strerror or error}'
                raise RuncFailure(what, reason) from error
            exited = await child.exited
            if exited.status != 0:
                said = last_error(_path(log)) or _contents(errors).strip()
                raise RuncFailure(
                    what,
                    said or f"{self.runc.binary} did not terminate successfully: exit status {exited.status}",
                )
            return _contents(output)


def read_pid(path: Path, what: str) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise TaskError(f"failed to retrieve OCI runtime {what} pid: {error}") from error


@contextmanager
def _memory_file(name: str, contents: bytes = b"") -> Iterator[int]:
    """A descriptor of a file in memory, at its start; closed when the block ends."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        if contents:
            os.write(fd, contents)
            os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def _path(fd: int) -> Path:
    """Of the file that a child gets as `fd`."""
    return Path(f"/proc/self/fd/{fd}")


def _contents(fd: int) -> str:
    if fd < 0:
        return ""
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, 4 << 20), 0).decode(errors="replace")
