"""Stops and continues every process of a container through its freezer cgroup (v1 or v2).

runc and containerd see a container frozen here as paused. Called by the checkpoint sequence, for which
starting `runc pause` inside the freeze would cost more than the freeze.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import EngineError

_FREEZE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Freezer:
    """The freezer cgroup at `path`; `unified` tells v2 from v1."""

    path: Path
    unified: bool

    @classmethod
    def of(cls, pid: int) -> Freezer:
        """The freezer that holds process `pid`; raises `EngineError` when there is none."""
        unified: Freezer | None = None
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError as error:
            raise EngineError(f"process {pid} is gone", details=str(error)) from error
        mounts = dict(_cgroup_mounts())
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if "freezer" in controllers.split(",") and (root := mounts.get("freezer")):
                return cls(root / path.lstrip("/"), unified=False)
            if not controllers and (root := mounts.get("")):
                unified = cls(root / path.lstrip("/"), unified=True)
        if unified is None or not (unified.path / "cgroup.freeze").exists():
            raise EngineError(
                f"process {pid} is in no freezer cgroup",
                hint="mount the freezer controller, or cgroup v2",
            )
        return unified

    @property
    def frozen(self) -> bool:
        if self.unified:
            return "frozen 1" in (self.path / "cgroup.events").read_text().splitlines()
        return (self.path / "freezer.state").read_text().strip() == "FROZEN"

    def freeze(self) -> None:
        """Stop every process; raises `EngineError` (after thawing again) if one does not stop."""
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        pause_s = 0.0002
        self._write(frozen=True)
        while not self.frozen:
            if time.monotonic() > deadline:
                self.thaw()
                raise EngineError(
                    "the container's processes could not be stopped",
                    hint="a process is stuck in the kernel (state D in `ps`); try again when it is not",
                    details=str(self.path),
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.01)
            if not self.unified:
                self._write(frozen=True)  # v1 only retries a half-frozen group when it is told again

    def thaw(self) -> None:
        self._write(frozen=False)

    def pids(self) -> list[int]:
        """Every process in the cgroup and below it."""
        pids: set[int] = set()
        for directory, _, files in os.walk(self.path):
            if "cgroup.procs" in files:
                pids.update(int(line) for line in (Path(directory) / "cgroup.procs").read_text().split())
        return sorted(pids)

    def kill(self) -> None:
        """SIGKILL every process, frozen or not. None of them runs another instruction of its own."""
        for _ in range(100):
            pids = self.pids() if self.path.exists() else []
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.thaw()
            time.sleep(0.002)

    def _write(self, *, frozen: bool) -> None:
        try:
            if self.unified:
                (self.path / "cgroup.freeze").write_text("1" if frozen else "0")
            else:
                (self.path / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        except FileNotFoundError:
            if frozen:
                raise EngineError("the container ended", details=f"{self.path} is gone") from None


def _cgroup_mounts() -> Iterator[tuple[str, Path]]:
    """(controller, mount point) of each cgroup hierarchy; the controller of v2 is ''."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            yield "", Path(before.split()[4])
        elif kind == "cgroup":
            for option in options.split(","):
                yield option, Path(before.split()[4])
