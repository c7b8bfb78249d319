"""The test bed itself: what it promises to the tests that stand on it."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

from tests.node import cgroups
from tests.node.bed import BASES, Bed, wait_until
from tests.node.bed import bed as running_bed
from tests.node.test_move import COUNT, count, wait_for_count

STOCK = "io.containerd.runc.v2"


def test_containers_of_both_nodes_reach_each_other_and_keep_apart(bed: Bed, name: str) -> None:
    """The same name, and so the same cgroup path, on both nodes at once."""
    image = bed.image("redis")
    bed.node_b.ctr("images", "pull", "--plain-http", image)
    for node in bed.nodes:
        node.run_container(image, name, runtime=STOCK)
    for node, other in (bed.nodes, bed.nodes[::-1]):
        address = other.container_address(name)
        answer = node.exec(name, "redis-cli", "-h", address, "INCR", "seen")
        assert answer.strip() == "1"
    bed.node_a.remove_container(name)
    assert bed.node_b.exec(name, "redis-cli", "PING").strip() == "PONG"


def test_stock_containerd_checkpoints_and_restores_here(bed: Bed, name: str) -> None:
    """The peers' own way works on a node: CRIU, runc and the namespaces of the bed agree."""
    node = bed.node_a
    node.run_container(bed.image("base"), name, "sh", "-c", COUNT, runtime=STOCK, network=False)
    before = wait_for_count(node, name, 10)
    node.ctr("containers", "checkpoint", "--task", "--rw", "--image", name, f"stock/{name}:1")
    node.remove_container(name)
    node.ctr("containers", "restore", "--rw", "--live", name, f"stock/{name}:1")
    assert count(node, name) >= before
    wait_for_count(node, name, before + 20)


def test_bed_leaves_nothing(bed: Bed) -> None:
    before = host_state()
    with running_bed() as second:
        second.node_a.run_container(second.image("base"), "left", "sh", "-c", COUNT, runtime=STOCK)
        assert host_state() - before
    wait_until(lambda: not host_state() - before, "everything of the bed is gone")


def test_bed_of_a_killed_process_is_removed_by_the_next(bed: Bed) -> None:
    before = host_state()
    script = (
        "import os, signal\nfrom tests.node.bed import bed\n"
        "with bed() as made: os.kill(os.getpid(), signal.SIGKILL)"
    )
    import sys

    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False)
    with running_bed():
        pass
    wait_until(lambda: not host_state() - before, "everything of the killed bed is gone")


def host_state() -> Counter[str]:
    """Mounts, network links, cgroups, directories and processes of beds, as the host sees them."""
    found = Counter(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    found.update(os.listdir("/sys/class/net"))
    found.update(str(path) for path in BASES.iterdir())
    for hierarchy in cgroups.hierarchies():
        found.update(str(path) for path in hierarchy.glob("cedana-bed-*/**/"))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            continue
        if namespace != os.readlink("/proc/self/ns/net"):
            found[namespace] = 1
    return found
