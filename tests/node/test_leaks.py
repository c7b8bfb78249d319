"""Nothing grows with the number of containers that have come and gone.

`CEDANA_CYCLES` says how many lives each test lives; the default is what fits into every run of the tests.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import proc
from runtime.cgroups import hierarchies
from tests.node.containerds import IMAGE, Containerd, containerd, wait_until

OURS = "io.containerd.cedana.v1"
CYCLES = int(os.environ.get("CEDANA_CYCLES", "60"))
WARM_UP = 20
_GROWTH_KIB = 1024
"""Of the memory over all cycles, however many."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Containerd]:
    with containerd("2.x") as made:
        yield made


@pytest.fixture
def pod(daemon: Containerd) -> Iterator[str]:
    """The sandbox id of a pod with one container, `holder`, that keeps its shim."""
    made = f"pod-{os.urandom(3).hex()}"
    _run(daemon, "holder", made)
    yield made
    daemon.remove("holder")


def _run(daemon: Containerd, name: str, pod: str) -> None:
    annotation = f"io.kubernetes.cri.sandbox-id={pod}"
    done = daemon.ctr(
        "run", "--detach", "--runtime", OURS, "--annotation", annotation, IMAGE, name, "sleep", "100000"
    )
    assert done.status == 0, done.err


def _left(daemon: Containerd) -> dict[str, object]:
    """All of the machine that containers of this containerd could have left something in."""
    mounts = Path("/proc/self/mountinfo").read_text()
    cgroups = [path for root in hierarchies().values() for path in root.rglob(f"*{daemon.namespace}*/*")]
    roots = (daemon.state, Path("/run/containerd/runc") / daemon.namespace, daemon.base / "run")
    return {
        "mounts": len(re.findall(re.escape(f"{daemon.base}/"), mounts)),
        "cgroups": sorted(str(path) for path in cgroups if path.is_dir()),
        "sockets": sorted(path.name for path in Path("/run/containerd/s").iterdir()),
        "fifos": sorted(str(path) for path in Path("/run/containerd/fifo").glob("*/*")),
        "files": sorted(str(path) for root in roots if root.exists() for path in root.rglob("*")),
        "shims": len(daemon.shims()),
    }


def _resources(pid: int) -> Counter[str]:
    """What a process has open, by kind, and its threads."""
    kinds: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        kinds[re.sub(r"\d+", "N", os.readlink(fd))] += 1
    kinds["threads"] = int(proc.status(pid)["Threads"])
    return kinds


def _memory_kib(pid: int) -> int:
    return int(proc.status(pid)["VmRSS"].split()[0])


def _same_as(daemon: Containerd, before: dict[str, object]) -> None:
    wait_until(lambda: _left(daemon) == before, f"{before} is all there is, not {_left(daemon)}", 60)


def test_containers_with_a_shim_each_leave_nothing(daemon: Containerd) -> None:
    def live() -> None:
        done = daemon.ctr("run", "--rm", "--runtime", OURS, IMAGE, "one", "echo", "x")
        assert (done.status, done.out) == (0, "x\n"), done.err

    live()
    wait_until(lambda: not daemon.shims(), "the shim has ended")
    before, zygote = _left(daemon), _resources(daemon.zygote_pid)
    memory = _memory_kib(daemon.zygote_pid)
    for _ in range(CYCLES):
        live()
    _same_as(daemon, before)
    assert _resources(daemon.zygote_pid) == zygote
    assert _memory_kib(daemon.zygote_pid) < memory + _GROWTH_KIB


def test_containers_that_share_a_shim_leave_nothing_in_it(daemon: Containerd, pod: str) -> None:
    def live() -> None:
        _run(daemon, "one", pod)
        daemon.remove("one")

    (shim,) = daemon.shims()
    for _ in range(WARM_UP):
        live()
    before, resources, memory = _left(daemon), _resources(shim), _memory_kib(shim)
    for _ in range(CYCLES):
        live()
    _same_as(daemon, before)
    assert _resources(shim) == resources
    assert _memory_kib(shim) < memory + _GROWTH_KIB


def test_processes_executed_in_a_container_leave_nothing(daemon: Containerd, pod: str) -> None:
    def live(number: int) -> None:
        done = daemon.ctr("tasks", "exec", "--exec-id", f"e{number}", "holder", "echo", "x")
        assert (done.status, done.out) == (0, "x\n"), done.err

    (shim,) = daemon.shims()
    for number in range(WARM_UP):
        live(number)
    before, resources, memory = _left(daemon), _resources(shim), _memory_kib(shim)
    for number in range(CYCLES):
        live(number)
    _same_as(daemon, before)
    assert _resources(shim) == resources
    assert _memory_kib(shim) < memory + _GROWTH_KIB
