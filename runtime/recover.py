"""Undoes what an engine left that was killed: a container frozen and silent, its scratch directory.

Before it freezes a container the engine notes in the scratch directory what undoes that (`Journal`). A
scratch directory whose lock is free has lost its engine. Recovery runs at the start of every operation,
and as `python -m runtime.recover` from the watchdog of the engine that died.

A restore is ended (`runtime.attempt`). In a dump CRIU is waited for, not killed: it ends by itself (a lazy
dump when the connection closes), and only it can take its code out of the processes again. One that no
longer moves is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import syslog
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from base import config as configuration
from base.config import Config
from hooks.participant import Participant, Source
from runtime import staging
from runtime.attempt import Attempt
from runtime.container import Container
from runtime.freezer import Freezer
from runtime.participants import participants
from runtime.scratch import Stall, claim, kill_users, users, work_dir

_FILE = "journal.json"
_POLL_S = 0.01


@dataclass(frozen=True)
class Journal:
    """A container that is about to be frozen, or is."""

    namespace: str
    id: str
    pid: int
    cgroup: str
    """Its freezer."""
    unified: bool
    inode: int
    """Of that cgroup: another container at the same path has another."""
    thaws: bool
    """It was not frozen before."""
    options: dict[str, Any] = field(default_factory=dict)
    ends: bool = False
    """It is being destroyed: there is no way back, only forward."""

    @classmethod
    def of(cls, container: Container, freezer: Freezer, options: dict[str, Any], *, thaws: bool) -> Journal:
        return cls(
            namespace=container.namespace,
            id=container.id,
            pid=container.pid,
            cgroup=str(freezer.path),
            unified=freezer.unified,
            inode=freezer.path.stat().st_ino,
            thaws=thaws,
            options=options,
        )

    @classmethod
    def read(cls, scratch: Path) -> Journal | None:
        try:
            return cls(**json.loads((scratch / _FILE).read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, scratch: Path) -> None:
        fresh = scratch / f"{_FILE}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        fresh.rename(scratch / _FILE)

    def write_ending(self, scratch: Path) -> None:
        replace(self, ends=True).write(scratch)

    @staticmethod
    def close(scratch: Path) -> None:
        """Nothing is frozen any more."""
        (scratch / _FILE).unlink(missing_ok=True)

    @property
    def freezer(self) -> Freezer | None:
        """None when the container is gone."""
        freezer = Freezer(Path(self.cgroup), self.unified)
        try:
            return freezer if freezer.path.stat().st_ino == self.inode else None
        except FileNotFoundError:
            return None


def recover(config: Config, container: Container | None = None, parts: Sequence[Participant] = ()) -> None:
    """Undo what killed engines left. What cannot be undone goes to the system's log; never raises.

    The caller holds the lock of `container`, if it names one: when this returns nothing is left of earlier
    operations on it, also not of what another process is just undoing.
    """
    directory = work_dir(config)
    for scratch in sorted(directory.iterdir()) if directory.exists() else ():
        lock = claim(scratch, wait=container is not None and _concerns(scratch, container))
        if lock is None:
            continue
        try:
            _undo(scratch, parts or participants())
        except Exception as error:
            syslog.syslog(syslog.LOG_ERR, f"cedana: {scratch.name} could not be undone: {error!r}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)
    staging.sweep(config)


def _concerns(scratch: Path, container: Container) -> bool:
    try:
        journal = Journal.read(scratch)
    except (OSError, ValueError, TypeError):
        return False
    return journal is not None and (journal.namespace, journal.id) == (container.namespace, container.id)


def _undo(scratch: Path, parts: Sequence[Participant]) -> None:
    if (attempt := Attempt.read(scratch)) is not None:
        attempt.undo(scratch)
        return
    stall = Stall(scratch)
    while users(scratch):
        if stall.reached():
            kill_users(scratch)
            break
        time.sleep(_POLL_S)
    if (journal := Journal.read(scratch)) is None:
        return
    freezer = journal.freezer
    pids: tuple[int, ...] = ()
    with suppress(OSError):  # it may be ending
        pids = tuple(freezer.pids()) if freezer is not None else ()
    source = Source(journal.id, journal.pid, pids, {}, scratch, journal.options)
    with ExitStack() as undo:
        # Whatever fails, the rest is done; what comes last here, first.
        if freezer is not None and journal.thaws and not journal.ends:
            undo.callback(freezer.thaw)
        for participant in parts:
            undo.callback(participant.release_source if journal.ends else participant.abort_source, source)
        if freezer is not None and journal.ends:
            undo.callback(freezer.kill)
        for participant in parts:  # while its processes show the way to its network
            participant.adopt_source(source)


def main() -> int:
    os.umask(0o077)
    recover(configuration.load())
    return 0


if __name__ == "__main__":
    sys.exit(main())
