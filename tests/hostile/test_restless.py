"""Containers that never hold still: processes come and go by the hundred while a checkpoint is taken."""

from __future__ import annotations

import pytest

from tests.node.bed import Bed, wait_until

SHELL = (
    "i=0; while true; do i=$((i+1)); echo $i; done"
    " | while read x; do echo $x > /count.new; mv /count.new /count; done | cat"
)
VFORK = """
import subprocess, itertools, os
for i in itertools.count():
    subprocess.run(["/bin/true"])
    with open("/count.new", "w") as file:
        file.write(str(i))
    os.rename("/count.new", "/count")
"""
THREADS = """
import itertools, os, threading
for i in itertools.count():
    threads = [threading.Thread(target=os.getpid) for _ in range(20)]
    [t.start() for t in threads]; [t.join() for t in threads]
    with open("/count.new", "w") as file:
        file.write(str(i))
    os.rename("/count.new", "/count")
"""


@pytest.mark.parametrize(
    "argv",
    [("/bin/sh", "-c", SHELL), ("/usr/bin/python3", "-c", VFORK), ("/usr/bin/python3", "-c", THREADS)],
    ids=["fork", "vfork", "threads"],
)
def test_every_checkpoint_of_a_restless_container_succeeds(
    bed: Bed, name: str, argv: tuple[str, ...]
) -> None:
    node = bed.node_a
    node.run_container(bed.image("python"), name, *argv)
    wait_until(lambda: count(bed, name) > 10, "the program is at work")
    for _ in range(10):
        node.cedana("checkpoint", name, "--leave-running")
    before = count(bed, name)
    wait_until(lambda: count(bed, name) > before, "the program goes on")
    bed.move(name)
    moved = int(bed.node_b.read(name, "/count"))
    assert moved >= before
    wait_until(lambda: int(bed.node_b.read(name, "/count") or 0) > moved, "the program goes on there")


def count(bed: Bed, name: str) -> int:
    return int(bed.node_a.read(name, "/count") or 0)
