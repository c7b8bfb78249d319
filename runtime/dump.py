"""One run of `runc checkpoint`: CRIU dumping the processes of a stopped container, which go on existing.

A lazy dump writes everything but anonymous memory and then waits, as a page server, for somebody to ask for
pages. We give it a connection of our own, ask for nothing, read the memory directly, and hang up: then it
ends as after a plain dump.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from base.config import Config
from hooks.participant import CriuSettings
from runtime import criu, rlimits
from runtime.container import Container
from runtime.errors import CheckpointError
from runtime.runc import last_error
from runtime.scratch import Stall, kill_users

_CRIU_TIMEOUT_S = 10
_THREADS_PER_S = 100
"""How long CRIU may take to stop what is stopped already: its own default, and more for many threads."""
_LOOK_S = 0.5
_WAITS = b"Starting lazy pages server"
"""criu/cr-dump.c, cr_lazy_mem_dump: logged when every image is written."""


class Dump:
    def __init__(self, container: Container, scratch: Path, work: Path, config: Config) -> None:
        self._container = container
        self._scratch = scratch
        self._work = work
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._output = scratch / "runc.out"
        self._resources = ExitStack()
        self._stalled = False

    def start(
        self,
        images: Path,
        settings: CriuSettings,
        pids: Sequence[int],
        threads: int,
        runc_options: Sequence[str],
        lazy: bool,
    ) -> None:
        """Start dumping into `images`; a lazy dump has written them all when this returns."""
        self._work.mkdir(mode=0o700, parents=True, exist_ok=True)
        values = [
            *settings.values,
            ("network-lock", "skip"),
            ("manage-cgroups", "ignore"),
            ("timeout", str(_CRIU_TIMEOUT_S + threads // _THREADS_PER_S)),
        ]
        flags = set(settings.flags)
        pass_fds: list[int] = []
        if lazy:
            self._connection, theirs = socket.socketpair()
            pass_fds.append(theirs.fileno())
            flags.add("lazy-pages")
            values.append(("ps-socket", str(theirs.fileno())))
        criu_config = self._scratch / "criu.conf"
        criu.write_config(criu_config, CriuSettings(flags, values))
        argv = [
            self._config.tool(self._container.runc_binary),
            *("--root", str(self._shadow_state(criu_config))),
            *("--log", str(self._runc_log), "--log-format", "json"),
            "checkpoint",
            *("--image-path", str(images), "--work-path", str(self._work), "--leave-running"),
            *runc_options,
            self._container.id,
        ]
        # By this descriptor a recovery sees that runc and CRIU are still at work.
        used = os.open(self._scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._resources.callback(os.close, used)
        pass_fds.append(used)
        launcher = self._resources.enter_context(rlimits.answering(pids))
        with open(self._output, "wb") as output:
            self._process = subprocess.Popen(
                [*launcher.prefix, *argv],
                pass_fds=[*launcher.pass_fds, *pass_fds],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=criu.environment(self._config),
            )
        if lazy:
            theirs.close()
            self._wait_until_it_waits()

    def finish(self) -> None:
        """Wait for the end of the dump; raises `CheckpointError` with CRIU's decisive line."""
        if self._end():
            self._raise_failed()

    def abandon(self) -> None:
        """End a dump that nobody needs any more. Idempotent, never raises."""
        self._end()

    def _end(self) -> int | None:
        """Hang up, and wait; runc's exit status, None when there is no runc any more."""
        if self._connection is not None:
            self._connection.close()
        status = self._wait(self._process) if self._process is not None else None
        self._process = None
        self._resources.close()
        return status

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """runc's exit status; it is killed, and CRIU with it, once they get no further."""
        stall = Stall(self._scratch)
        while not _ends_within(_LOOK_S, process):
            if stall.reached():
                self._kill()
                # If not even that ends it, it hangs in the kernel: the container need not wait for it.
                return process.wait() if _ends_within(_LOOK_S, process) else -signal.SIGKILL
        return process.wait()

    def _kill(self) -> None:
        self._stalled = True
        kill_users(self._scratch)

    def _wait_until_it_waits(self) -> None:
        assert self._process is not None
        stall = Stall(self._scratch)
        pause_s = 0.001
        while self._process.poll() is None and not self._stalled:
            try:
                if _WAITS in self._criu_log.read_bytes():
                    return
            except FileNotFoundError:
                pass
            if stall.reached():
                self._kill()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, 0.02)
        self._end()
        self._raise_failed()

    @property
    def _criu_log(self) -> Path:
        return self._work / "dump.log"

    @property
    def _runc_log(self) -> Path:
        return self._scratch / "runc.log"

    def _shadow_state(self, criu_config: Path) -> Path:
        """A copy of runc's state that differs only in the CRIU configuration it names.

        runc learns of that file from the annotation the container was *created* with; the copy makes any
        runc container checkpointable, and runc's own record is never written to.
        """
        state = self._container.runc_state()
        labels = state["config"].get("labels") or []
        kept = [label for label in labels if not label.startswith(f"{criu.CONFIG_ANNOTATION}=")]
        state["config"]["labels"] = [*kept, f"{criu.CONFIG_ANNOTATION}={criu_config}"]
        root = self._scratch / "runc"
        directory = root / self._container.id
        directory.mkdir(mode=0o700, parents=True)
        with open(os.open(directory / "state.json", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(state, file)
        return root

    def _raise_failed(self) -> None:
        container = self._container
        said = last_error(self._runc_log) or self._output.read_text(errors="replace").strip()
        if self._stalled:
            said = "it got no further, and was ended"
        name = f"{container.namespace}-{container.id}-dump"
        failure = criu.failure(self._criu_log, self._config.log_dir, name, said)
        hint = failure.hint or "the container runs on; the log says more"
        raise CheckpointError(
            f"CRIU could not dump container {container.name or container.id}: {said}",
            hint=f"{hint} (whole log: {failure.log})" if failure.log else hint,
            details=failure.line,
        )


def _ends_within(seconds: float, process: subprocess.Popen[bytes]) -> bool:
    """Whether a child ends in that time. Says so at once, where `Popen.wait` sleeps between its looks."""
    if process.poll() is not None:
        return True
    poll = select.poll()
    pidfd = os.pidfd_open(process.pid)
    try:
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)
