"""Stops and continues every process of a container through its freezer cgroup (v1 or v2).

runc and containerd see a container frozen here as paused. Called by the checkpoint sequence, for which
starting `runc pause` inside the freeze would cost more than the freeze.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.cgroups import hierarchies
from runtime.container import Container
from runtime.errors import EngineError

_FREEZE_TIMEOUT_S = 10.0
_CLONE_VFORK = 0x4000
_CLONE_CALLS = {"x86_64": (58, 56), "aarch64": (-1, 220)}
"""machine: numbers of vfork (aarch64 has none) and clone."""
_CLONE3 = 435


@dataclass(frozen=True)
class Freezer:
    """The freezer cgroup at `path`; `unified` tells v2 from v1."""

    path: Path
    unified: bool

    @classmethod
    def of(cls, container: Container) -> Freezer:
        """The freezer that runc put `container` in; raises `EngineError` when there is none.

        Its processes may have moved below it: systemd does, and makes cgroups for its services there.
        """
        found = cls._holding(container.pid)
        paths = container.runc_state().get("cgroup_paths") or {}
        path = Path(str(paths.get("" if found.unified else "freezer") or found.path))
        if not path.is_dir():  # runc sees its cgroups at another place than we do
            return found
        if not found.path.is_relative_to(path):
            raise EngineError(
                f"the init process of container {container.id} has left the container's cgroup",
                hint="move it back, or start the container again",
                details=f"{found.path} is not below {path}",
            )
        return replace(found, path=path)

    @classmethod
    def _holding(cls, pid: int) -> Freezer:
        unified: Freezer | None = None
        try:
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        except OSError as error:
            raise EngineError(f"process {pid} is gone", details=str(error)) from error
        mounts = hierarchies()
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
        """Stop every process, none of them in the middle of a vfork(2); raises `EngineError`, everything
        running again, if that does not come about.

        The parent of a vfork sleeps until its child executes a program or ends, so CRIU, for whom it would
        have to stop, would wait for it in vain while the child is frozen.
        """
        deadline = time.monotonic() + _FREEZE_TIMEOUT_S
        pause_s = 0.0005
        self._stop(deadline)
        while (pid := next((pid for pid in self.pids() if _awaits_vfork(pid)), None)) is not None:
            self.thaw()
            if time.monotonic() > deadline:
                raise EngineError(
                    f"process {pid} was between vfork() and exec() whenever it was stopped",
                    hint="try again: that moment passes",
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.02)
            self._stop(deadline)

    def _stop(self, deadline: float) -> None:
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
        """SIGKILL every process, frozen or not. None of them runs another instruction of its own.

        Raises `EngineError` if one is still there after seconds.
        """
        for _ in range(1000):
            try:
                pids = self.pids()
            except OSError:  # the cgroup is being removed: they are gone
                return
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.thaw()
            time.sleep(0.002)
        raise EngineError("processes of the container outlive SIGKILL", details=str(self.path))

    def _write(self, *, frozen: bool) -> None:
        try:
            if self.unified:
                (self.path / "cgroup.freeze").write_text("1" if frozen else "0")
            else:
                (self.path / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        except OSError as error:
            if frozen or error.errno not in (errno.ENOENT, errno.ENODEV):
                raise EngineError(
                    "the container ended" if not self.path.exists() else "the freezer cgroup refuses",
                    details=f"{self.path}: {error.strerror}",
                ) from None


def _awaits_vfork(pid: int) -> bool:
    """Whether a thread of the frozen process `pid` sleeps in vfork(2), or in what amounts to it."""
    vfork, clone = _CLONE_CALLS.get(platform.machine(), (-1, -1))
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            # "number arg0 … sp pc", or "running", or "-1 sp pc" outside system calls (proc(5))
            words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
            number = int(words[0]) if len(words) > 1 else -1
            if number == vfork >= 0:
                return True
            if number == clone >= 0 and int(words[1], 16) & _CLONE_VFORK:
                return True
            if number == _CLONE3 and _word(pid, int(words[1], 16)) & _CLONE_VFORK:
                return True
    except OSError:
        return False
    return False


def _word(pid: int, address: int) -> int:
    """The 64-bit word at `address` of a process: the flags that open `struct clone_args`."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return int.from_bytes(memory.read(8), "little")
