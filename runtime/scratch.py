"""The private directory of one operation, below `run_dir/work`: who works in it, and who cleans up.

The engine holds a lock on the directory for as long as it lives, which the kernel releases however it dies.
runc and CRIU hold the directory open too: they outlive an engine that was killed. A watchdog, a shell that
waits for the engine's end of a pipe to close, then starts `runtime.recover` at once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from base.config import Config

STALLED_S = 60.0
"""How long runc and CRIU may show no sign of life."""
_LOOK_S = 1.0
_DIE_S = 5.0
_WATCHDOG = 'read -r _ || exec "$@"'


@contextmanager
def private_directory(config: Config, name: str) -> Iterator[Path]:
    """A fresh private directory for one operation; it goes with the block, or soon after this process."""
    parent = work_dir(config)
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = None
    while lock is None:  # a recovery may take it for abandoned between our mkdir and our lock
        directory = parent / f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
        directory.mkdir(mode=0o700)
        lock = claim(directory)
    try:
        with _watchdog(config):
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)


def work_dir(config: Config) -> Path:
    return config.run_dir / "work"


def claim(directory: Path, *, wait: bool = False) -> int | None:
    """The lock on a directory, to be closed; None if it is gone, or (unless we `wait`) another's."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None


@contextmanager
def _watchdog(config: Config) -> Iterator[None]:
    environment = {
        **os.environ,
        **{f"CEDANA_{n.upper()}": str(getattr(config, n)) for n in ("run_dir", "state_dir", "tools_dir")},
    }
    process = subprocess.Popen(
        ["/bin/sh", "-c", _WATCHDOG, "cedana-watchdog", sys.executable, "-P", "-m", "runtime.recover"],
        stdin=subprocess.PIPE,
        # Standard output stays ours: who reads it to its end (the shim) goes on when all is undone.
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # what kills our process group must not kill it
    )
    assert process.stdin is not None
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
            process.stdin.flush()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()


# Those who work in a directory: runc and CRIU, whoever their parent is


def users(directory: Path, *, below: bool = False) -> dict[int, tuple[tuple[str, int], ...]]:
    """The processes, ourselves apart, that have `directory` open, and (path, size) of all they have open.

    With `below` also those that have a file in it open, as runc has its log.
    """
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with suppress(OSError):
                files = tuple(_open_files(Path("/proc") / name / "fd"))
                if any(
                    path == str(directory) or (below and path.startswith(f"{directory}/"))
                    for path, _ in files
                ):
                    found[int(name)] = files
    return found


def _open_files(descriptors: Path) -> Iterator[tuple[str, int]]:
    for descriptor in descriptors.iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            yield os.readlink(descriptor), descriptor.stat().st_size


def kill_users(directory: Path, *, below: bool = False) -> None:
    """SIGKILL them, and wait a little until they are gone."""
    deadline = time.monotonic() + _DIE_S
    while (left := users(directory, below=below)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


class Stall:
    """Whether the users of a directory get on: open files, close them, write to them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._looked_at = self._moved_at = time.monotonic()
        self._seen: object = None

    def reached(self) -> bool:
        """Whether nothing has moved for `STALLED_S`. To be asked again and again; looks once a second."""
        now = time.monotonic()
        if now - self._looked_at < min(_LOOK_S, STALLED_S / 4):
            return False
        self._looked_at = now
        if (seen := users(self._directory)) != self._seen:
            self._seen, self._moved_at = seen, now
        return now - self._moved_at >= STALLED_S
