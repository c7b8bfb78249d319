"""`make bench BENCH=basic`: the whole move of a 1 GiB container, ours and the peers' way, side by side.

Ours:   cedana checkpoint --to REGISTRY, cedana restore.
Peers': ctr container checkpoint --task --rw --image, ctr images push, ctr images pull, ctr container restore
        --live, with containerd's own shim.

Both move the same program between the same two nodes through the same registry, in turns. Its memory is a
quarter random bytes, a quarter zero and half text: 3 to 1. The base image is on both nodes beforehand.
Freeze is what the program itself saw: the longest it was kept from running by a checkpoint that leaves it
running. What was written before is on disk (sync) when a timed part begins. The first round warms up; of the
others the median counts. With --warm free memory is touched before each timed part: the host of a virtual
machine may have taken it back.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.figures import Figure, at_least, at_most, finish
from tests.node.bed import Bed, bed, wait_until

ROUNDS = 3
_MADV_POPULATE_WRITE = 23
STOCK, OURS = "io.containerd.runc.v2", "io.containerd.cedana.v1"


@dataclass(frozen=True)
class Round:
    """Seconds one move took."""

    save: float
    """Until the checkpoint is in the registry."""
    bring_back: float
    freeze: float

    @property
    def whole(self) -> float:
        return self.save + self.bring_back


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.basic", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="memory of the container")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that count")
    parser.add_argument("--warm", type=int, default=0, metavar="GIB", help="touch so much free memory first")
    arguments = parser.parse_args()
    copy, sha256 = copy_rate(), sha256_rate()
    ours, peers = [], []
    with bed() as made:
        made.node_b.ctr("images", "pull", "--plain-http", made.image("python"))
        for number in range(arguments.rounds + 1):
            ours.append(move_ours(made, arguments.mib, arguments.warm))
            peers.append(move_peers(made, arguments.mib, arguments.warm))
            note = " (warm-up)" if number == 0 else ""
            print(
                f"round {number}: ours {ours[-1].whole:.2f} s, peers {peers[-1].whole:.2f} s{note}",
                flush=True,
            )
    ours, peers = ours[1:], peers[1:]
    figures = judge(ours, peers, arguments.mib << 20, copy, sha256)
    show(ours, peers)
    finish("basic", figures)


def move_ours(made: Bed, mib: int, warm: int) -> Round:
    node_a, node_b = made.nodes
    name = start(made, OURS, mib)
    settle(warm)
    node_a.cedana("checkpoint", name, "--to", made.reference("freeze"), "--leave-running", timeout_s=600)
    freeze = longest_gap(made, name)
    settle(warm)
    reference = made.reference("bench")
    save = seconds(lambda: node_a.cedana("checkpoint", name, "--to", reference, timeout_s=600))
    settle(warm)
    back = seconds(lambda: node_b.cedana("restore", reference, timeout_s=600))
    verify(made, name)
    return Round(save, back, freeze)


def move_peers(made: Bed, mib: int, warm: int) -> Round:
    node_a, node_b = made.nodes
    name = start(made, STOCK, mib)
    reference = made.reference("peers")

    def save() -> None:
        node_a.ctr("containers", "checkpoint", "--task", "--rw", "--image", name, reference, timeout_s=600)
        node_a.ctr("images", "push", "--plain-http", reference, timeout_s=600)

    def bring_back() -> None:
        node_b.ctr("images", "pull", "--plain-http", reference, timeout_s=600)
        node_b.ctr("containers", "restore", "--rw", "--live", name, reference, timeout_s=600)

    settle(warm)
    saved = seconds(save)
    freeze = longest_gap(made, name)
    node_a.remove_container(name)
    settle(warm)
    back = seconds(bring_back)
    verify(made, name)
    for node in made.nodes:
        node.ctr("images", "rm", reference)
    return Round(saved, back, freeze)


def start(made: Bed, runtime: str, mib: int) -> str:
    name = f"bench-{os.urandom(3).hex()}"
    argv = ("/usr/bin/python3", "/workloads/memory.py", str(mib))
    made.node_a.run_container(made.image("python"), name, *argv, runtime=runtime, network=False)
    wait_until(lambda: made.node_a.read(name, "/ticks"), "the memory is filled", 120)
    os.sync()
    return name


def settle(warm: int) -> None:
    """What was written before is on disk, and with `warm` that many GiB of free memory have been touched.

    The host of a virtual machine may take free memory back (virtio-balloon, free page reporting); the next to
    touch it waits for the host, seconds per GiB.
    """
    os.sync()
    if warm:
        with mmap.mmap(-1, warm << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(_MADV_POPULATE_WRITE)


def longest_gap(made: Bed, name: str) -> float:
    """The longest the program was kept from running, once it has noticed."""
    ticks = int(made.node_a.read(name, "/ticks"))
    wait_until(lambda: int(made.node_a.read(name, "/ticks") or 0) > ticks + 2, "the program goes on")
    return float(made.node_a.read(name, "/gap"))


def verify(made: Bed, name: str) -> None:
    """What arrived is what was sent; then nothing of it is left."""
    made.node_b.exec(name, "touch", "/verify")
    wait_until(lambda: made.node_b.read(name, "/result"), "the memory is verified", 60)
    if (result := made.node_b.read(name, "/result")) != "ok":
        sys.exit(f"the memory did not arrive whole: {result}")
    for node in made.nodes:
        node.remove_container(name)


def judge(
    ours: Sequence[Round], peers: Sequence[Round], size: int, copy: float, sha256: float
) -> dict[str, Figure]:
    """The figures, each against what it must be and what the machine allows.

    The limit of a move: the memory is copied out and in once each, and the 37 % that are left after
    compression are hashed by whoever sends, keeps and receives it, on all cores.
    """
    cores = os.cpu_count() or 1
    fastest_freeze = size / copy
    fastest_move = 2 * size / copy + 3 * 0.37 * size / (sha256 * cores)
    move, freeze = median(ours, "whole"), median(ours, "freeze")
    peers_move, peers_freeze = median(peers, "whole"), median(peers, "freeze")
    ratio = peers_move / move
    return {
        "move_ratio": at_least(ratio, "x", 3.0, 5.0, peers_move / fastest_move),
        "freeze": at_most(freeze, "s", peers_freeze, peers_freeze / 3, fastest_freeze),
        "move": at_most(move, "s", peers_move / 3, peers_move / 5, fastest_move),
        "peers_move": Figure(peers_move, "s"),
        "peers_freeze": Figure(peers_freeze, "s"),
        "memory_copy": Figure(copy / 1e9, "GB/s"),
        "sha256": Figure(sha256 / 1e9, "GB/s"),
    }


def show(ours: Sequence[Round], peers: Sequence[Round]) -> None:
    print(f"\n{'median of ' + str(len(ours)):<26} {'ours':>8} {'peers':>8}")
    rows = (("checkpoint + push", "save"), ("pull + restore", "bring_back"), ("whole move", "whole"),
            ("freeze", "freeze"))  # fmt: skip
    for label, field in rows:
        print(f"{label:<26} {median(ours, field):>6.2f} s {median(peers, field):>6.2f} s")


def median(rounds: Sequence[Round], field: str) -> float:
    return float(statistics.median(getattr(one, field) for one in rounds))


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def copy_rate() -> float:
    """Bytes per second that one core copies from memory to memory."""
    source = bytearray(os.urandom(1 << 20)) * 256
    target = bytearray(len(source))

    def copy() -> None:
        memoryview(target)[:] = source

    copy()
    return len(source) / min(seconds(copy) for _ in range(3))


def sha256_rate() -> float:
    """Bytes per second that one core hashes."""
    data = os.urandom(1 << 20) * 256
    return len(data) / min(seconds(lambda: hashlib.sha256(data).digest()) for _ in range(3))


if __name__ == "__main__":
    main()
