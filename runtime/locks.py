"""One operation at a time per container: a second checkpoint would thaw what the first has frozen."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from base.config import Config
from runtime.errors import BusyError


@contextmanager
def exclusive(config: Config, namespace: str, container_id: str) -> Iterator[None]:
    """Hold the container's lock; raises `BusyError` at once if another process does."""
    directory = config.run_dir / "locks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{namespace}-{container_id}"
    lock = _take(path)
    if lock is None:
        raise BusyError(
            f"another checkpoint or restore of container {container_id[:64]} is under way",
            hint="wait until it has ended",
        )
    try:
        yield
    finally:
        path.unlink()
        os.close(lock)


def _take(path: Path) -> int | None:
    """The locked file; None if another process holds it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed the file between our open and our lock.
            if os.fstat(lock).st_nlink:
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        os.close(lock)
