"""The process group of a shim: what it starts (runc, the engine) belongs to it and must not outlive it.

Nobody tells a child that its parent was killed, and a parent-death signal would have to be asked for between
fork and exec, which posix_spawn has no room for. So the shim notes its group in the bundle before it starts
anything there, and `delete`, which containerd runs when a shim is gone, ends what is left of it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from runtime import proc

_FILE = "shim-group"


def note(bundle: Path) -> None:
    """Say in `bundle` which group works on it: ours."""
    leader = os.getpgrp()
    (bundle / _FILE).write_text(f"{leader} {_start_time(leader)}")


def end_orphans(bundle: Path) -> None:
    """Kill what a shim that is dead left running; the group of one that lives is left alone.

    While a group has members the kernel gives its number to no new process: one that has it, but began at
    another time, says that the group is gone.
    """
    try:
        leader, started = (int(word) for word in (bundle / _FILE).read_text().split())
    except (OSError, ValueError):
        return
    if leader <= 1 or (os.path.exists(f"/proc/{leader}") and not _is_zombie(leader, started)):
        return
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_zombie(pid: int, started: int) -> bool:
    """A dead leader that its parent has not waited for still has its number."""
    fields = proc.stat(pid)
    return fields[0] in ("Z", "X") and int(fields[19]) == started


def _start_time(pid: int) -> int:
    """In clock ticks since boot (proc_pid_stat(5), field 22)."""
    return int(proc.stat(pid)[19])
