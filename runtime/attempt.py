"""A restore under way, noted in its scratch directory: how to undo it when its engine or runc was killed.

`runc delete --force` does most of that. But a runc that was killed before it wrote its state forgets the
container, while CRIU goes on restoring it: then its processes are found by their cgroup.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from runtime import syscalls
from runtime.cgroups import hierarchies
from runtime.scratch import kill_users

_FILE = "attempt.json"
_DIE_S = 5.0
_POLL_S = 0.01
_CRIU_ROOT = "criu-root"
"""Where runc mounts the root filesystem for CRIU, below its state of the container."""
_CRIU_MOUNTS = ".criu.*"
"""CRIU's view of the cgroup hierarchies (criu/cgroup.c, prepare_cgroup_sfd)."""


@dataclass(frozen=True)
class Attempt:
    delete: Sequence[str]
    """The command line that makes runc remove the container."""
    environment: Mapping[str, str]
    state_dir: str
    """runc's, of the container."""
    work: str
    """CRIU's working directory."""
    cgroup: str
    """The spec's cgroupsPath."""
    taken: Sequence[str] = ()
    """Those cgroups of that name that had processes before: others'."""

    @classmethod
    def begin(cls, delete: Sequence[str], environment: Mapping[str, str], state_dir: Path, work: Path,
              cgroup: str) -> Attempt:  # fmt: skip
        """An attempt that is about to be made."""
        taken = [str(found) for found in _cgroups(cgroup) if _pids([found])]
        return cls(delete, environment, str(state_dir), str(work), cgroup, taken)

    @classmethod
    def read(cls, scratch: Path) -> Attempt | None:
        try:
            return cls(**json.loads((scratch / _FILE).read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, scratch: Path) -> None:
        fresh = scratch / f"{_FILE}.new"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
        fresh.rename(scratch / _FILE)

    def undo(self, scratch: Path) -> None:
        """End who restores and what is restored; nothing of it is left."""
        kill_users(scratch, below=True)
        own = [cgroup for cgroup in _cgroups(self.cgroup) if str(cgroup) not in self.taken]
        _kill_all(own)
        subprocess.run(self.delete, capture_output=True, check=False, env=dict(self.environment))
        for mounted in Path(self.work).glob(_CRIU_MOUNTS):
            _detach(mounted)
        if _detach(Path(self.state_dir, _CRIU_ROOT)):
            shutil.rmtree(self.state_dir, ignore_errors=True)
        _remove(own)


def _detach(mounted: Path) -> bool:
    """Whether nothing is mounted there any more: what is may not be walked into, let alone removed."""
    with suppress(OSError):
        syscalls.unmount(str(mounted), syscalls.MNT_DETACH)
    with suppress(OSError):
        mounted.rmdir()
    return not os.path.lexists(mounted)


def _cgroups(path: str) -> list[Path]:
    """What there is at the container's cgroupsPath, in every hierarchy."""
    roots = sorted(set(hierarchies().values()))
    if path.count(":") == 2:  # systemd's: slice, prefix, name
        _, prefix, name = path.split(":")
        unit = f"{prefix}-{name}.scope"
        return [found for root in roots for found in root.rglob(unit)] if prefix and name else []
    relative = os.path.normpath(path).lstrip("/") if path.startswith("/") else ""
    return [root / relative for root in roots if relative and (root / relative).is_dir()]


def _kill_all(cgroups: Sequence[Path]) -> None:
    deadline = time.monotonic() + _DIE_S
    while (pids := _pids(cgroups)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _remove(cgroups: Sequence[Path]) -> None:
    """The kernel refuses (EBUSY) until the last process, invisible already, has let go of its memory."""
    deadline = time.monotonic() + _DIE_S
    while (left := [cgroup for cgroup in cgroups if cgroup.exists()]) and time.monotonic() < deadline:
        for cgroup in left:
            for directory, _, _ in os.walk(cgroup, topdown=False):
                with suppress(OSError):
                    os.rmdir(directory)
        time.sleep(_POLL_S)


def _pids(cgroups: Sequence[Path]) -> set[int]:
    pids: set[int] = set()
    for cgroup in cgroups:
        for directory, _, _ in os.walk(cgroup):
            with suppress(OSError):
                pids.update(map(int, (Path(directory) / "cgroup.procs").read_text().split()))
    return pids - {0}
