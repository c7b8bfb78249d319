"""The C library's allocator, told how we use it."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Have malloc keep what is freed: by default a chunk's buffer is mapped, zeroed by the kernel page after
    page, and unmapped again each time, which costs as much as decompressing it."""
    libc = ctypes.CDLL(None)
    if mallopt := getattr(libc, "mallopt", None):  # glibc's alone
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 512 << 20)
