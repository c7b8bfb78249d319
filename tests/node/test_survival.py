"""What is left of containers, and of us, when containerd or a shim ends at the wrong moment."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runtime import proc
from runtime.cgroups import hierarchies
from tests.node.containerds import IMAGE, Containerd, containerd, wait_until

OURS = "io.containerd.cedana.v1"
LOOP = ("sh", "-c", "trap 'exit 4' TERM; while :; do sleep 0.1; done")
MANY = 20
PATIENCE_S = 120.0


@pytest.fixture(scope="module", params=["with a zygote", "without"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    with containerd("2.x", zygote=request.param == "with a zygote") as made:
        yield made


@pytest.fixture
def name(daemon: Containerd) -> Iterator[str]:
    made = f"c{os.urandom(3).hex()}"
    yield made
    daemon.remove(made)


def _run(daemon: Containerd, name: str, *argv: str, options: tuple[str, ...] = ()) -> int:
    """Start it; returns its pid."""
    done = daemon.ctr("run", "--detach", "--runtime", OURS, *options, IMAGE, name, *(argv or LOOP))
    assert done.status == 0, done.err
    return daemon.task(name)[0]


def _exec(daemon: Containerd, name: str, *argv: str) -> str:
    done = daemon.ctr("tasks", "exec", "--exec-id", f"e{os.urandom(3).hex()}", name, *argv)
    assert done.status == 0, done.err
    return done.out


def _shim(pid: int) -> int:
    """The shim of the container whose init is `pid`: its parent."""
    return int(proc.stat(pid)[1])


def _lives(pid: int) -> bool:
    try:
        return proc.stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _left(daemon: Containerd, name: str) -> list[str]:
    """All that there can be of a container outside containerd's own records."""
    bundle = daemon.state / "io.containerd.runtime.v2.task" / daemon.namespace / name
    mounts = Path("/proc/self/mountinfo").read_text()
    cgroups = [root / daemon.namespace / name for root in hierarchies().values()]
    paths = [bundle, Path("/run/containerd/runc") / daemon.namespace / name, *cgroups]
    return [str(path) for path in paths if path.exists()] + re.findall(rf"\S*/{name}/\S*", mounts)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_containerd_that_comes_back_finds_its_containers(daemon: Containerd, end: str) -> None:
    names = [f"many{index}" for index in range(MANY)]
    commands = [
        subprocess.Popen(
            [*daemon.ctr_line(), "run", "--detach", "--runtime", OURS, IMAGE, name, *LOOP],
            env=daemon.environment(),
        )
        for name in names
    ]
    try:
        assert [command.wait(timeout=PATIENCE_S) for command in commands] == [0] * MANY
        before = {name: daemon.task(name) for name in names}
        if end == "stop":
            daemon.stop()
        else:
            daemon.kill()
        stopped, killed, *others = names
        os.kill(before[stopped][0], signal.SIGTERM)
        os.kill(before[killed][0], signal.SIGKILL)
        wait_until(lambda: not any(_lives(before[name][0]) for name in (stopped, killed)), "two ended")
        daemon.start()
        # As with its own shim, containerd removes the task of a container that ended meanwhile.
        wait_until(lambda: not _left(daemon, stopped) + _left(daemon, killed), "they are cleaned up")
        assert daemon.task(stopped) == daemon.task(killed) == (0, "")
        assert {name: daemon.task(name) for name in others} == {name: before[name] for name in others}
        assert _exec(daemon, others[0], "echo", "here") == "here\n"
        os.kill(before[others[0]][0], signal.SIGTERM)
        daemon.wait_for(others[0], "STOPPED")
        assert "exit code 4" in daemon.ctr("tasks", "delete", others[0]).err
    finally:
        for name in names:
            daemon.remove(name)
    assert [left for name in names for left in _left(daemon, name)] == []
    wait_until(lambda: not daemon.shims(), "every shim has ended")


def _while_it_runs(daemon: Containerd, name: str) -> None:
    return


def _while_it_is_paused(daemon: Containerd, name: str) -> None:
    assert daemon.ctr("tasks", "pause", name).status == 0


def _during_an_exec(daemon: Containerd, name: str) -> None:
    argv = [*daemon.ctr_line(), "tasks", "exec", "--exec-id", "long", name, "sleep", "1000"]
    with open(os.devnull, "r+b") as null:
        subprocess.Popen(argv, env=daemon.environment(), stdin=null, stdout=null, stderr=null)
    wait_until(lambda: "long" in daemon.ctr("tasks", "ps", name).out, "the exec runs")


@pytest.mark.parametrize("moment", [_while_it_runs, _while_it_is_paused, _during_an_exec])
def test_nothing_stays_of_a_container_whose_shim_is_killed(
    daemon: Containerd, name: str, moment: Callable[[Containerd, str], None]
) -> None:
    pid = _run(daemon, name)
    moment(daemon, name)
    os.kill(_shim(pid), signal.SIGKILL)
    wait_until(lambda: not _lives(pid), "the container has ended", PATIENCE_S)
    wait_until(lambda: not _left(daemon, name), f"nothing is left: {_left(daemon, name)}", PATIENCE_S)
    daemon.ctr("tasks", "rm", "--force", name)
    assert daemon.ctr("tasks", "start", "--detach", name).status == 0
    assert _exec(daemon, name, "echo", "again") == "again\n"


def test_what_a_killed_shim_had_started_ends_too(daemon: Containerd, name: str, tmp_path: Path) -> None:
    """A runc that hangs: nothing but us knows of it."""
    mark = tmp_path / "pid"
    hangs = tmp_path / "hanging-runc"
    hangs.write_text(
        f"""#!/bin/sh
case "$*" in *" create "*) ;; *) exit 1 ;; esac
echo $$ > {mark}.new
mv {mark}.new {mark}
exec sleep 1000
"""
    )
    hangs.chmod(0o755)
    (tmp_path / "options.toml").write_text(f'BinaryName = "{hangs}"\n')
    argv = [*daemon.ctr_line(), "run", "--detach", "--runtime", OURS, "--runtime-config-path",
            str(tmp_path / "options.toml"), IMAGE, name, *LOOP]  # fmt: skip
    command = subprocess.Popen(argv, env=daemon.environment(), stderr=subprocess.PIPE, text=True)
    wait_until(mark.exists, "runc runs", PATIENCE_S)
    runc = int(mark.read_text())
    os.kill(_shim(runc), signal.SIGKILL)
    _, said = command.communicate(timeout=PATIENCE_S)
    assert command.returncode != 0
    assert said
    wait_until(lambda: not _lives(runc), "runc has ended", PATIENCE_S)
    wait_until(lambda: not _left(daemon, name), f"nothing is left: {_left(daemon, name)}", PATIENCE_S)


def test_containers_of_a_pod_share_a_shim_until_the_last_is_gone(daemon: Containerd) -> None:
    names = [f"pod{index}-{os.urandom(2).hex()}" for index in range(3)]
    group = ("--annotation", f"io.kubernetes.cri.sandbox-id=pod-{os.urandom(3).hex()}")
    try:
        pids = [_run(daemon, name, options=group) for name in names]
        (shim,) = {_shim(pid) for pid in pids}
        first, second, last = names
        os.kill(pids[0], signal.SIGKILL)
        daemon.wait_for(first, "STOPPED")
        assert "exit code 137" in daemon.ctr("tasks", "delete", first).err
        assert daemon.task(second) == (pids[1], "RUNNING")
        daemon.remove(second)
        assert _exec(daemon, last, "echo", "here") == "here\n"
        assert _lives(shim)
        assert not _left(daemon, first)
        assert _left(daemon, last)
    finally:
        for name in names:
            daemon.remove(name)
    wait_until(lambda: not _lives(shim), "the shim has ended with the last", PATIENCE_S)


def test_a_killed_pod_shim_takes_its_containers_and_no_others(daemon: Containerd, name: str) -> None:
    names = [f"pod{index}-{os.urandom(2).hex()}" for index in range(2)]
    group = ("--annotation", f"io.kubernetes.cri.sandbox-id=pod-{os.urandom(3).hex()}")
    try:
        other = _run(daemon, name)
        pids = [_run(daemon, name_, options=group) for name_ in names]
        os.kill(_shim(pids[0]), signal.SIGKILL)
        wait_until(lambda: not any(map(_lives, pids)), "the pod has ended", PATIENCE_S)
        wait_until(lambda: not any(_left(daemon, name_) for name_ in names), "nothing is left", PATIENCE_S)
        assert daemon.task(name) == (other, "RUNNING")
    finally:
        for name_ in names:
            daemon.remove(name_)


def test_a_zygote_may_be_restarted_while_containers_run(name: str, daemon: Containerd) -> None:
    pid = _run(daemon, name)
    daemon.stop_zygote()
    alone = f"{name}-alone"
    try:
        _run(daemon, alone)
        daemon.start_zygote()
        assert daemon.task(name) == (pid, "RUNNING")
        assert _exec(daemon, name, "echo", "one") == "one\n"
        assert _exec(daemon, alone, "echo", "two") == "two\n"
    finally:
        with contextlib.suppress(AssertionError):
            daemon.remove(alone)
