"""nerdctl says what is to become of a container that is checkpointed only to a runtime of the name
io.containerd.runc.v2; to any other it sends no options at all (docs/shim.md, "The name of the runtime").

So the shim works under both names, and without options it leaves the container running: nothing is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.containerds import IMAGE, ROOT, Containerd, containerd, wait_until

OUR_NAME, STOCK_NAME = "io.containerd.cedana.v1", "io.containerd.runc.v2"
COUNT = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > /new; mv /new /count; sleep 0.05; done")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    """It finds our shim under the name of its own."""
    directory = tmp_path_factory.mktemp("shims")
    (directory / "containerd-shim-runc-v2").symlink_to(ROOT / ".venv/bin/containerd-shim-cedana-v1")
    with containerd("2.x", path=[directory]) as made:
        yield made


@pytest.fixture
def name(daemon: Containerd) -> Iterator[str]:
    made = f"c{os.urandom(3).hex()}"
    yield made
    daemon.nerdctl("rm", "--force", made)


def _nerdctl(daemon: Containerd, *arguments: str) -> str:
    done = daemon.nerdctl(*arguments)
    assert done.status == 0, done.err
    return done.out


def _status(daemon: Containerd, name: str) -> str:
    return _nerdctl(daemon, "inspect", "--format", "{{.State.Status}}", name).strip()


def _count(daemon: Containerd, name: str) -> int:
    pid = _nerdctl(daemon, "inspect", "--format", "{{.State.Pid}}", name).strip()
    path = Path(f"/proc/{pid}/root/count")
    return int(path.read_text() or 0) if path.exists() else 0


@pytest.mark.parametrize("leave_running", [False, True], ids=["no flag", "--leave-running"])
@pytest.mark.parametrize("runtime", [OUR_NAME, STOCK_NAME])
def test_a_checkpoint_by_nerdctl(daemon: Containerd, name: str, runtime: str, leave_running: bool) -> None:
    _nerdctl(daemon, "run", "--detach", "--name", name, "--net", "none", "--runtime", runtime, IMAGE, *COUNT)
    wait_until(lambda: _count(daemon, name) > 20, "it counts", 60)
    assert all("python" in os.readlink(f"/proc/{shim}/exe") for shim in daemon.shims()), "the shim is ours"

    flags = ("--leave-running",) if leave_running else ()
    checkpoint = f"checkpoint-{name}"  # nerdctl keeps those of all containers in one folder
    _nerdctl(daemon, "checkpoint", "create", *flags, name, checkpoint)
    if leave_running or runtime == OUR_NAME:
        saved = _count(daemon, name)
        wait_until(lambda: _count(daemon, name) > saved + 5, "it goes on", 60)
        _nerdctl(daemon, "kill", name)
    wait_until(lambda: _status(daemon, name) == "exited", "it has ended", 60)

    assert checkpoint in _nerdctl(daemon, "checkpoint", "ls", name)
    _nerdctl(daemon, "start", "--checkpoint", checkpoint, name)
    assert _count(daemon, name) >= 20
    wait_until(lambda: _count(daemon, name) > 30, "it counts on from there", 60)
