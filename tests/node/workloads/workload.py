"""What the workload programs share: make some state, run on, and, when asked, say whether it is all there.

`/ticks` counts from when the state is made, `/gap` is the longest the program was kept from counting, in
seconds, and once `/verify` exists the state is looked at and `/result` says "ok" or what is wrong.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

PERIOD_S = 0.02
libc = ctypes.CDLL(None, use_errno=True)


def run(prepare: Callable[[], Callable[[], None]]) -> None:
    """`prepare` makes the state and returns what verifies it."""
    pid, tid, started = os.getpid(), threading.get_native_id(), time.monotonic()
    verify = prepare()
    ticks, longest_gap_s, last = 0, 0.0, time.monotonic()
    while not os.path.exists("/verify"):
        ticks += 1
        write("/ticks", str(ticks))
        print(f"tick {ticks}", flush=True)
        time.sleep(PERIOD_S)
        now = time.monotonic()
        if now - last - PERIOD_S > longest_gap_s:
            longest_gap_s = now - last - PERIOD_S
            write("/gap", f"{longest_gap_s:.4f}")
        last = now
    try:
        expect(os.getpid(), pid, "pid")
        expect(threading.get_native_id(), tid, "thread id")
        if time.monotonic() < started:
            raise AssertionError("the monotonic clock went backwards")
        verify()
        result = "ok"
    except BaseException:
        result = traceback.format_exc()
    write("/result", result)
    print(result, flush=True)
    while True:
        signal.pause()


def write(path: str, text: str) -> None:
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)


def expect(actual: object, expected: object, what: str) -> None:
    if actual != expected:
        raise AssertionError(f"{what}: {actual!r} instead of {expected!r}")


def call(name: str, *arguments: object) -> int:
    """A function of the C library; raises OSError when it returns -1."""
    function = getattr(libc, name)
    function.restype = ctypes.c_long
    result = int(function(*arguments))
    if result == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    sys.exit("this is a module")
