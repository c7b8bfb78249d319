"""The cgroups of a machine of the test bed: one per hierarchy, made before it starts, removed at its end."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MachineCgroups:
    directories: tuple[Path, ...]
    version: int
    """2 when the machine sees a pure cgroup v2 tree."""

    @classmethod
    def create(cls, name: str, version: int) -> MachineCgroups:
        directories = []
        for hierarchy in hierarchies():
            directory = hierarchy / name
            directory.mkdir()
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (hierarchy / file).exists() and (directory / file).exists():
                    with contextlib.suppress(OSError):
                        (directory / file).write_text((hierarchy / file).read_text())
            directories.append(directory)
        return cls(tuple(directories), version)

    def procs(self, *, started: bool) -> list[str]:
        """Where a process that enters the machine writes itself; before and after its init laid it out."""
        leaf = "init" if started and self.version == 2 else ""
        return [
            str(d / (leaf if (d / "cgroup.subtree_control").exists() else "") / "cgroup.procs")
            for d in self.directories
        ]

    def remove(self) -> None:
        """Remove every cgroup of the machine; its processes may still be on their way out."""
        deadline = time.monotonic() + 10
        while True:
            left = []
            for top in self.directories:
                for directory, _, _ in os.walk(top, topdown=False):
                    try:
                        os.rmdir(directory)
                    except OSError:
                        left.append(directory)
            if not left:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"cgroups are still in use: {left}")
            time.sleep(0.05)


def default_version() -> int:
    """2 on a machine whose controllers are in cgroup v2, else 1."""
    return 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1


def hierarchies() -> list[Path]:
    """The mount point of every cgroup hierarchy, cgroup2 included."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            found.setdefault("" if kind == "cgroup2" else options, Path(left.split()[4]))
    if "" in found:
        for controller in ("cpu", "cpuset", "io", "memory", "pids"):
            with contextlib.suppress(OSError):
                (found[""] / "cgroup.subtree_control").write_text(f"+{controller}")
    return list(found.values())
