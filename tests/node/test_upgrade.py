"""Shims go on working while their code on the disk is removed, and replaced by another version."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from base import __version__
from runtime import proc
from tests.node.containerds import IMAGE, ROOT, Containerd, containerd, wait_until

PACKAGES = ("agent", "base", "hooks", "oci", "runtime", "shim")
NEXT = "999.0.0"
LOOP = ("sh", "-c", "trap 'exit 4' TERM; while :; do sleep 0.1; done")


class Installation:
    """A shim of its own: a program, and the code beside it."""

    def __init__(self, base: Path) -> None:
        self.program = base / "containerd-shim-cedana-v1"
        self._code = base / "code"

    def install(self, version: str) -> None:
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, self._code / package, ignore=ignored)
        init = self._code / "base" / "__init__.py"
        init.write_text(f"{init.read_text()}\n__version__ = {version!r}\n")
        packages = sysconfig.get_path("purelib")
        self.program.write_text(
            f"#!{sys.executable} -IS\nimport sys\n"
            f"sys.path.insert(0, {str(self._code)!r})\nsys.path.append({packages!r})\n"
            "from shim.launch import main\nsys.exit(main(sys.argv))\n"
        )
        self.program.chmod(0o755)

    def remove(self) -> None:
        shutil.rmtree(self._code)
        self.program.unlink()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Containerd]:
    with containerd("2.x", zygote=False) as made:
        yield made


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    made = Installation(tmp_path)
    made.install(__version__)
    return made


@pytest.fixture
def names(daemon: Containerd, installation: Installation) -> Iterator[list[str]]:
    """Of an old container and of a new one; `installation` must outlive them."""
    made = [f"{age}-{os.urandom(3).hex()}" for age in ("old", "new")]
    yield made
    for name in made:
        daemon.remove(name)


def _ctr(daemon: Containerd, *arguments: str) -> str:
    done = daemon.ctr(*arguments)
    assert done.status == 0, done.err
    return done.out


def _run(daemon: Containerd, installation: Installation, name: str) -> int:
    _ctr(daemon, "run", "--detach", "--runtime", str(installation.program), IMAGE, name, *LOOP)
    return daemon.task(name)[0]


def _uses(daemon: Containerd, name: str) -> None:
    """Everything that a container of a removed version may still be asked for."""
    exec_id = f"e{os.urandom(3).hex()}"
    assert _ctr(daemon, "tasks", "exec", "--exec-id", exec_id, name, "echo", "here") == "here\n"
    _ctr(daemon, "tasks", "pause", name)
    assert daemon.task(name)[1] == "PAUSED"
    _ctr(daemon, "tasks", "resume", name)
    assert re.search(r"memory|pids", _ctr(daemon, "tasks", "metrics", name))
    assert str(daemon.task(name)[0]) in _ctr(daemon, "tasks", "ps", name)


def test_a_shim_works_on_without_its_code_and_beside_a_newer_version(
    daemon: Containerd, installation: Installation, names: list[str]
) -> None:
    old, new = names
    pid = _run(daemon, installation, old)
    installation.remove()
    _uses(daemon, old)
    installation.install(NEXT)
    assert NEXT in subprocess.check_output([installation.program, "-v"], text=True, timeout=60)
    _run(daemon, installation, new)
    _uses(daemon, new)
    _uses(daemon, old)
    os.kill(pid, signal.SIGTERM)
    daemon.wait_for(old, "STOPPED")
    assert "exit code 4" in daemon.ctr("tasks", "delete", old).err
    assert daemon.task(new)[1] == "RUNNING"


def test_a_newer_version_cleans_up_after_a_killed_older_one(
    daemon: Containerd, installation: Installation, names: list[str]
) -> None:
    old, _ = names
    pid = _run(daemon, installation, old)
    shim = int(proc.stat(pid)[1])
    bundle = daemon.state / "io.containerd.runtime.v2.task" / daemon.namespace / old
    state = Path("/run/containerd/runc") / daemon.namespace / old
    assert bundle.exists()
    assert state.exists()
    installation.remove()
    installation.install(NEXT)
    os.kill(shim, signal.SIGKILL)
    wait_until(lambda: not bundle.exists() and not state.exists(), "nothing is left of it", 120)
    wait_until(lambda: not Path(f"/proc/{pid}/root").exists(), "the container has ended", 120)
