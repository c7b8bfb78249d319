"""One process of a container as the Task API sees it: created, running, stopped, deleted.

`Process` holds what init and exec'd processes share. Which verbs are possible, and the sentence a client
gets for one that is not, is up to the process's state: a class per state, in `shim.init` and
`shim.execs`. All of it is touched by the event loop's thread alone; `lock` keeps the steps of one verb
together, and an exit out of the middle of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import ClassVar

from shim.errors import NotFound, TaskError
from shim.reaper import Exit
from shim.stdio import ProcessIO, Stdio


class State:
    """A verb that a state does not allow raises the sentence in `refusals`."""

    status: ClassVar[str]
    refusals: ClassVar[Mapping[str, str]] = {}
    missing: ClassVar[frozenset[str]] = frozenset()
    """Verbs whose refusal means that there is no such process any more."""

    def require(self, verb: str) -> None:
        if (sentence := self.refusals.get(verb)) is None:
            return
        raise NotFound(sentence) if verb in self.missing else TaskError(sentence)


class Process:
    def __init__(self, process_id: str, stdio: Stdio, state: State) -> None:
        self.id = process_id
        self.stdio = stdio
        self.state = state
        self.pid = 0
        self.exit_status = 0
        self.exited_at: datetime | None = None
        self.lock = asyncio.Lock()
        self.io: ProcessIO | None = None
        self._ended = asyncio.Event()

    @property
    def status(self) -> str:
        return self.state.status

    async def wait(self) -> None:
        """Until it has ended, or never began."""
        await self._ended.wait()

    def close_stdin(self) -> None:
        if self.io is not None:
            self.io.close_stdin()

    def never_began(self) -> None:
        self._ended.set()

    def _set_exited(self, exited: Exit) -> None:
        self.exit_status = exited.status
        self.exited_at = exited.at
        if self.io is not None:
            self.io.process_ended()
        self._ended.set()
