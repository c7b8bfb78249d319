"""Shows a trace while it runs: bars on a terminal, lines elsewhere; nothing for what takes under a second."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from base.trace import Progress as Advance
from base.trace import Step
from cli.text import duration, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_S = 1.0
_TICK_S = 0.2
_LINE_EVERY_S = 10.0


class ProgressDisplay:
    """A trace listener; use as a context manager around the operation."""

    def __init__(self, stream: TextIO) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, tuple[float, int, int]] = {}
        """Step → when it began, bytes done, bytes in all."""
        self._view: _Bars | _Lines = _Bars(stream) if stream.isatty() else _Lines(stream)
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True, name="progress")

    def __enter__(self) -> ProgressDisplay:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._ticker.join()
        self._view.close()

    def __call__(self, event: Step | Advance | str) -> None:
        with self._lock:
            if isinstance(event, str):
                self._running[event] = (time.monotonic(), 0, 0)
            elif isinstance(event, Step):
                self._running.pop(event.name, None)
                self._view.end(event)
            elif event.name in self._running:
                self._running[event.name] = (self._running[event.name][0], event.done, event.total)

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_S):
            with self._lock:
                for name, (began, done, total) in self._running.items():
                    if time.monotonic() - began > _PATIENCE_S:
                        self._view.show(name, done, total)


class _Bars:
    """One bar per long step; rich is imported when the first is needed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int) -> None:
        if self._progress is None:
            self._progress = _rich_progress(self._stream)
            self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, amount="")
        amount = f"{size(done)} of {size(total)}" if total else size(done) if done else ""
        self._progress.update(self._tasks[name], completed=done, total=total or None, amount=amount)

    def end(self, step: Step) -> None:
        if self._progress is not None and step.name in self._tasks:
            task = self._tasks.pop(step.name)
            self._progress.update(task, completed=1, total=1, amount=duration(step.duration_s))

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


class _Lines:
    """A line when a long step ends, and every ten seconds while it runs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, float] = {}

    def show(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last.get(name, 0.0) < _LINE_EVERY_S:
            return
        self._last[name] = now
        amount = f": {size(done)} of {size(total)}" if total else f": {size(done)}" if done else ""
        print(f"{name}{amount} …", file=self._stream, flush=True)

    def end(self, step: Step) -> None:
        if self._last.pop(step.name, None) is not None:
            print(f"{step.name}: {duration(step.duration_s)}", file=self._stream, flush=True)

    def close(self) -> None:
        pass


def _rich_progress(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
        console=Console(file=stream),
    )
