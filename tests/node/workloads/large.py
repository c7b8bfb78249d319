"""More memory than a checkpoint copies: private, shared with a child on write, huge pages, read-only, and
a map that both share; parent and child each read theirs back."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable

import workload

MIB = 1 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def prepare() -> Callable[[], None]:
    private = mmap.mmap(-1, 96 * MIB, flags=PRIVATE)
    huge = mmap.mmap(-1, 16 * MIB, flags=PRIVATE)
    huge.madvise(mmap.MADV_HUGEPAGE)
    shared = mmap.mmap(-1, 8 * MIB)
    sparse = mmap.mmap(-1, 256 * MIB, flags=PRIVATE)
    for memory in (private, huge, shared):
        memory[:] = os.urandom(len(memory))
    for at in range(0, len(sparse), 3 * MIB):
        sparse[at : at + 5] = b"here!"
    locked = mmap.mmap(-1, 2 * MIB, flags=PRIVATE)
    locked[:] = os.urandom(len(locked))
    address = ctypes.addressof(ctypes.c_char.from_buffer(locked))
    workload.call("mprotect", ctypes.c_void_p(address), ctypes.c_size_t(len(locked)), mmap.PROT_READ)
    maps = (private, huge, shared, sparse, locked)
    before = [digest(memory) for memory in maps]

    ask, asked = os.pipe()
    answer, answered = os.pipe()
    if os.fork() == 0:
        for at in range(0, len(private), 8 * MIB):
            private[at] ^= 0xFF  # copied on write: from here on the two differ
        mine = [digest(memory) for memory in maps]
        os.write(answered, b"!")
        os.read(ask, 1)
        shared[0:5] = b"child"
        os.write(answered, b"y" if [digest(m) for m in (private, huge)] == mine[:2] else b"n")
        os._exit(0)
    workload.expect(os.read(answer, 1), b"!", "the child is ready")

    def verify() -> None:
        workload.expect([digest(memory) for memory in maps], before, "memory of the parent")
        os.write(asked, b"?")
        workload.expect(os.read(answer, 1), b"y", "memory of the child")
        workload.expect(shared[0:5], b"child", "shared memory")

    return verify


def digest(memory: mmap.mmap) -> str:
    return hashlib.sha256(memory).hexdigest()


workload.run(prepare)
