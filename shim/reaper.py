"""Every child of this process: how they are started, and the one place that waits for them.

The daemon is a sub-reaper: besides what it starts itself (runc, the engine, log drivers), the init and
the exec'd processes of its containers become its children when runc exits. `Reaper` collects all of
them on SIGCHLD. An exit may arrive before anyone knows the pid (a container that ends at once), so exits
nobody waits for are kept while an `expecting()` block is open.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""By Python, but not by what it starts."""


@dataclass(frozen=True)
class Exit:
    pid: int
    status: int
    """The exit code, or 128 plus the number of the signal that ended it."""
    at: datetime


@dataclass(frozen=True)
class Child:
    """A process we started ourselves."""

    pid: int
    exited: asyncio.Future[Exit]

    def signal(self, number: int) -> None:
        if not self.exited.done():
            os.kill(self.pid, number)


class Reaper:
    """Made in the running event loop; `close` gives SIGCHLD back."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Exit]] = {}
        self._unclaimed: dict[int, Exit] = {}
        self._expecting = 0
        self._loop.add_signal_handler(signal.SIGCHLD, self._collect)

    def close(self) -> None:
        self._loop.remove_signal_handler(signal.SIGCHLD)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Keep exits of unknown pids until this block ends: one of them may be learnt of in it."""
        self._expecting += 1
        try:
            yield
        finally:
            self._expecting -= 1
            if not self._expecting:
                self._unclaimed.clear()

    def watch(self, pid: int) -> asyncio.Future[Exit]:
        """The exit of `pid`, which must be (about to become) our child."""
        if (known := self._unclaimed.pop(pid, None)) is not None:
            done = self._loop.create_future()
            done.set_result(known)
            return done
        return self._waiting.setdefault(pid, self._loop.create_future())

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        own_group: bool = False,
    ) -> Child:
        """Start `argv`, which gets our descriptors `fds` by its numbers for them. Raises `OSError`.

        posix_spawn borrows our memory until the program runs (vfork), so that starting one costs the same
        whatever we hold. It belongs to our process group, by which `delete` ends it when we are killed,
        unless it gets its `own_group`.
        """
        with ExitStack() as copies:
            actions = []
            first_free = max(fds) + 1  # above the child's numbers: none is overwritten before its turn
            for number, fd in fds.items():
                copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first_free)
                copies.callback(os.close, copy)
                actions.append((os.POSIX_SPAWN_DUP2, copy, number))
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                env,
                file_actions=actions,
                setsigdef=_IGNORED,
                setpgroup=0 if own_group else os.getpgrp(),
            )
        return Child(pid, self.watch(pid))

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            exited = Exit(pid, code if code >= 0 else 128 - code, datetime.now(UTC))
            if (future := self._waiting.pop(pid, None)) is not None:
                if not future.done():
                    future.set_result(exited)
            elif self._expecting:
                self._unclaimed[pid] = exited
