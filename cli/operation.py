"""Runs an operation so that Ctrl-C ends it cleanly: at its next step, by its own undoing.

The operation runs in a thread of its own with the signals blocked, so that no Python code is interrupted
anywhere, and runc and CRIU, which inherit the mask, survive the Ctrl-C a terminal sends to all of us.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from base.trace import Listener, Progress, Step, Trace

Result = TypeVar("Result")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NO_RETURN = frozenset({"destroy", "remove task"})
"""Steps from which on an operation is finished rather than undone."""


class Operation:
    """A trace that a signal turns into `KeyboardInterrupt` where it can be undone."""

    def __init__(self, listener: Listener) -> None:
        self.trace = Trace(self._tell)
        self._listener = listener
        self._interrupted = threading.Event()
        self._committed = False

    def run(self, work: Callable[[Trace], Result]) -> Result:
        """What `work` returns or raises; `KeyboardInterrupt` if it was ended by a signal."""
        outcome: list[Result] = []
        errors: list[BaseException] = []

        def target() -> None:
            try:
                outcome.append(work(self.trace))
            except BaseException as error:
                errors.append(error)

        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        thread = threading.Thread(target=target, name="operation")
        before = {number: signal.signal(number, self._interrupt) for number in _SIGNALS}
        try:
            thread.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            thread.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if errors and self._interrupted.is_set() and not self._committed:
            raise KeyboardInterrupt from errors[0]
        if errors:
            raise errors[0]
        return outcome[0]

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._interrupted.is_set():
            end = "finishing" if self._committed else "undoing what was begun"
            print(f"cedana: interrupted, {end} …", file=sys.stderr, flush=True)
        self._interrupted.set()

    def _tell(self, event: Step | Progress | str) -> None:
        self._listener(event)
        if isinstance(event, str) and event in _NO_RETURN:
            self._committed = True
        if self._interrupted.is_set() and not self._committed and not isinstance(event, Step):
            raise KeyboardInterrupt
