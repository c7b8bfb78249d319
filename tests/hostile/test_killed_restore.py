"""Who restores is killed in the middle of it: the restore fails at once, and nothing of it is left."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.node.bed import Bed, Node, State, wait_until

_MEMORY = (
    "import os, time; m = os.urandom(300 << 20); open('/ready', 'w').write('1')\nwhile True: time.sleep(1)"
)
_READS = "page read"
"""CRIU opens the memory."""
ENGINE_FAILED = 6
_VICTIMS = {"engine": "-m runtime restore", "runc": " restore --detach ", "criu": "criu: restore"}


@pytest.mark.parametrize("victim", _VICTIMS)
def test_killed_restore_leaves_nothing(bed: Bed, name: str, victim: str) -> None:
    node, checkpoint = bed.node_b, _checkpoint(bed, name)
    node.cedana("restore", checkpoint)  # the base image, and the node's cgroup of all containers, stay
    node.remove_container(name)
    before = node.state()
    command = node.popen(["cedana", "restore", checkpoint], stderr=subprocess.PIPE, text=True)
    _until(lambda: _READS in _restore_log(node, name) or command.poll() is not None)
    node.ns_exec(["kill", "-KILL", *_pids(node, _VICTIMS[victim])])
    killed = time.monotonic()
    assert command.stderr is not None
    said = command.stderr.read()
    assert command.wait() == ENGINE_FAILED, said
    assert time.monotonic() - killed < 20
    with contextlib.suppress(TimeoutError):
        wait_until(lambda: _left(node, before) == [], "nothing is left", 5)
    assert _left(node, before) == []
    node.cedana("restore", checkpoint)
    assert node.task_status(name) == "RUNNING"


def test_restore_ends_though_somebody_copied_the_mount_namespace(bed: Bed, name: str) -> None:
    node, checkpoint = bed.node_b, _checkpoint(bed, name)
    image = bed.image("python")
    node.ctr("images", "pull", "--plain-http", image)
    command = node.popen(
        ["ctr", "run", "--detach", "--runtime", "io.containerd.cedana.v1",
         "--annotation", f"ai.cedana.restore-from={checkpoint}", image, name]
    )  # fmt: skip
    _until(lambda: _READS in _restore_log(node, name) or command.poll() is not None)
    copy = node.popen(["unshare", "--mount", "--propagation", "private", "cat"], stdin=subprocess.PIPE)
    try:
        assert command.wait(30) == 0
        assert node.task_status(name) == "RUNNING"
    finally:
        assert copy.stdin is not None
        copy.stdin.close()
        copy.wait()


def _checkpoint(bed: Bed, name: str) -> str:
    bed.node_a.run_container(bed.image("python"), name, "/usr/bin/python3", "-c", _MEMORY)
    wait_until(lambda: bed.node_a.read(name, "/ready"), "the memory is filled")
    reference = bed.reference(name)
    bed.node_a.cedana("checkpoint", name, "--to", reference)
    return reference


def _left(node: Node, before: State) -> list[str]:
    kept = ("/run/cedana/locks/", "/io.containerd.content.v1.content/")
    now = node.state()
    return [item for item in now.left_behind(before) if not any(path in item for path in kept)]


def _pids(node: Node, words: str) -> list[str]:
    shown = node.ns_exec(["ps", "-eo", "pid,args"])
    pids = [line.split()[0] for line in shown.splitlines() if words in line]
    assert pids, shown
    return pids


def _restore_log(node: Node, name: str) -> str:
    """CRIU's, in the container's directory."""
    logs = node.base.glob(f"containerd/io.containerd.runtime.v2.task/*/{name}/restore.log")
    return "".join(log.read_text(errors="replace") for log in logs)


def _until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """As `wait_until`, without the pause in which a restore has long ended."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)
