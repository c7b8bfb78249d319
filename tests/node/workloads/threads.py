"""Threads, each with a list of its own, all of them with a growing list in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import workload


def prepare() -> Callable[[], None]:
    shared: list[int] = []
    own: list[list[int]] = [[] for _ in range(8)]
    lock, local = threading.Lock(), threading.local()
    idents: dict[int, int] = {}

    def work(number: int) -> None:
        local.value = 0
        idents[number] = threading.get_native_id()
        while True:
            workload.expect(threading.get_native_id(), idents[number], "thread id")
            workload.expect(local.value, len(own[number]), "thread-local value")
            own[number].append(local.value)
            local.value += 1
            with lock:
                shared.append(len(shared))
            time.sleep(0.002)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(own))]
    for thread in threads:
        thread.start()
    while len(shared) < 1000:
        time.sleep(0.01)

    def verify() -> None:
        before = [len(numbers) for numbers in own]
        time.sleep(0.5)
        for number, numbers in enumerate(own):
            if not threads[number].is_alive() or len(numbers) <= before[number]:
                raise AssertionError(f"thread {number} does not go on")
            workload.expect(numbers, list(range(len(numbers))), f"list of thread {number}")
        with lock:
            workload.expect(shared, list(range(len(shared))), "shared list")

    return verify


workload.run(prepare)
