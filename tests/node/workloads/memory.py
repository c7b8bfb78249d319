"""Holds memory: `memory.py MIB`, and counts.

A quarter of it is incompressible, a quarter zero, half of it text: it compresses 3 to 1, as the memory of
production machines does (Lagar-Cavilla et al., Software-Defined Far Memory, ASPLOS 2019).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
from collections.abc import Callable

import workload

BLOCK = 1 << 20


def prepare() -> Callable[[], None]:
    size = int(sys.argv[1]) * BLOCK
    run = os.urandom(4).hex()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size, BLOCK):
        match at // BLOCK % 4:
            case 0:
                memory[at : at + BLOCK] = os.urandom(BLOCK)
            case 1:
                memory[at : at + BLOCK] = bytes(BLOCK)
            case _:
                memory[at : at + BLOCK] = text(run, at // BLOCK)
    digest = hashlib.sha256(memory).hexdigest()

    def verify() -> None:
        workload.expect(hashlib.sha256(memory).hexdigest(), digest, "digest of the memory")

    return verify


def text(run: str, number: int) -> bytes:
    """A mebibyte of lines as a log has them: every line differs, a compressor finds much to take out, and
    nothing is the same in the next run."""
    lines, length = [], 0
    while length < BLOCK:
        item, took = length * 7919 % 99991, length * 31 % 5077
        line = f"{run} {number:06d} {length:08d} GET /api/v1/items/{item} 200 {took} ms\n"
        lines.append(line)
        length += len(line)
    return "".join(lines)[:BLOCK].encode()


workload.run(prepare)
