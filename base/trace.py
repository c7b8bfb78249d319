"""The trace: the named, timed steps of one operation.

The engine wraps each step in `with trace.step("dump")`. What the steps took goes into the artifact,
the log and `--trace`; listeners (a progress bar, the shim's log) hear of each step as it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One finished step: offsets and durations in seconds since the trace began."""

    name: str
    start_s: float
    duration_s: float
    failed: bool = False


@dataclass(frozen=True)
class Progress:
    """How far the running step `name` is: `done` of `total` bytes (`total` 0 when unknown)."""

    name: str
    done: int
    total: int


Listener = Callable[[Step | Progress | str], None]
"""Called with a `str` when the step of that name begins, with `Progress` while it runs, and with
its `Step` when it ends. May be called from any thread."""


@dataclass
class Trace:
    listener: Listener | None = None
    steps: list[Step] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        self._tell(name)
        failed = True
        try:
            yield
            failed = False
        finally:
            step = Step(name, start - self.began, time.monotonic() - start, failed)
            self.steps.append(step)
            self._tell(step)

    def progress(self, name: str, done: int, total: int = 0) -> None:
        self._tell(Progress(name, done, total))

    def elapsed_s(self) -> float:
        """Seconds since the trace began."""
        return time.monotonic() - self.began

    def duration_s(self, name: str) -> float:
        """Seconds spent in all steps called `name`."""
        return sum(step.duration_s for step in self.steps if step.name == name)

    def _tell(self, event: Step | Progress | str) -> None:
        if self.listener is not None:
            self.listener(event)
