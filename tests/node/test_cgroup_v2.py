"""Nodes with cgroup v2 alone: runc, and crun named by the option BinaryName, under the shim.

crun 1.28 refuses a machine that has cgroup v1 and v2 side by side, so this is where it is tested. ctr has
`--runc-binary` for containerd's own shim alone; options reach ours in a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.bed import Bed, bed, wait_until
from tests.node.containerds import normal

CRUN = Path("/opt/cedana/crun/bin/crun")
OURS, STOCK = "io.containerd.cedana.v1", "io.containerd.runc.v2"
OURS_WITH_CRUN = ("--runtime", OURS, "--runtime-config-path", "/etc/cedana/crun.toml")
STOCK_WITH_CRUN = ("--runtime", STOCK, "--runc-binary", str(CRUN))
LOOP = ("sh", "-c", "trap 'exit 4' TERM; i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Bed]:
    with bed(cgroup_version=2) as made:
        made.node_a.ns_exec(["sh", "-c", f"echo 'BinaryName = \"{CRUN}\"' > /etc/cedana/crun.toml"])
        yield made


def _ctr(nodes: Bed, *arguments: str) -> tuple[int, str, str]:
    done = nodes.node_a.run(["ctr", *arguments], check=False)
    return done.returncode, normal(done.stdout), normal(done.stderr)


def _life(nodes: Bed, runtime: tuple[str, ...]) -> list[object]:
    """What clients see of it from the first run to the last removal."""
    options = (*runtime, "--cpu-shares", "0")
    image, name = nodes.image("base"), "crun"
    nodes.node_a.remove_container(name)

    def exec_(*argv: str) -> tuple[int, str, str]:
        return _ctr(nodes, "tasks", "exec", "--exec-id", f"e{os.urandom(3).hex()}", name, *argv)

    said: list[object] = [
        _ctr(nodes, "run", "--rm", *options, image, name, "sh", "-c", "echo out; echo err >&2; exit 42"),
        _ctr(nodes, "run", "--rm", *options, image, name, "sh", "-c", "kill -9 $$"),
        _ctr(nodes, "run", "--rm", *options, image, name, "/nope"),
        _ctr(nodes, "run", "--rm", "--read-only", *options, image, name, "touch", "/x"),
        _ctr(nodes, "run", "--detach", *options, image, name, *LOOP)[0],
        exec_("sh", "-c", "echo out; exit 7"),
        exec_("/nope")[0],
        _ctr(nodes, "tasks", "pause", name),
        nodes.node_a.task_status(name),
        _ctr(nodes, "tasks", "pause", name)[0],
        _ctr(nodes, "tasks", "resume", name),
        nodes.node_a.task_status(name),
        exec_("echo", "still"),
        _metrics(nodes, name),
        _ctr(nodes, "tasks", "kill", "--signal", "TERM", name),
    ]
    wait_until(lambda: nodes.node_a.task_status(name) == "STOPPED", "it ended")
    said += [_ctr(nodes, "tasks", "rm", name), _ctr(nodes, "tasks", "rm", name)]
    nodes.node_a.remove_container(name)
    return said


def _metrics(nodes: Bed, name: str) -> list[str]:
    """The names of the numbers that ctr understands."""
    said = nodes.node_a.ctr("tasks", "metrics", name)
    return [line.split()[0] for line in said.splitlines() if line.split()]


@pytest.mark.parametrize(
    ("ours", "stock"),
    [(("--runtime", OURS), ("--runtime", STOCK)), (OURS_WITH_CRUN, STOCK_WITH_CRUN)],
    ids=["runc", "crun"],
)
def test_clients_see_what_they_see_with_containerds_own_shim(
    nodes: Bed, ours: tuple[str, ...], stock: tuple[str, ...]
) -> None:
    seen, expected = _life(nodes, ours), _life(nodes, stock)
    assert seen == expected
    assert seen[0][:2] == (42, "out\n")  # type: ignore[index]


@pytest.fixture
def running(nodes: Bed) -> Iterator[str]:
    """The name of a container that crun runs."""
    name = f"crun-{os.urandom(3).hex()}"
    options = (*OURS_WITH_CRUN, "--cpu-shares", "0")
    nodes.node_a.ctr("run", "--detach", *options, nodes.image("base"), name, *LOOP)
    yield name
    nodes.node_a.remove_container(name)


def test_it_is_crun_that_runs(nodes: Bed, running: str) -> None:
    state = nodes.node_a.ns_exec([CRUN, "--root", "/run/containerd/runc/default", "state", running])
    assert '"status": "running"' in state
    assert not nodes.node_a.ns_exec(
        ["find", f"/run/containerd/runc/default/{running}", "-name", "state.json"]
    )


def test_a_checkpoint_of_it_is_refused_before_anything_is_touched(nodes: Bed, running: str) -> None:
    pid = nodes.node_a.task_pid(running)
    done = nodes.node_a.cedana_fails("checkpoint", running)
    assert "the container must be running under runc" in done.stderr
    assert (nodes.node_a.task_pid(running), nodes.node_a.task_status(running)) == (pid, "RUNNING")
