"""The engine or CRIU is killed in the middle of a checkpoint: soon it is as if there had been none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node.bed import Bed, Node, wait_until
from tests.node.clients import RedisClient

_MEMORY_BYTES, _NOISE_BYTES = 400 << 20, 128 << 20
_WAITING, _DUMPING = "Starting lazy pages server", "Dumping pages"
"""Lines of CRIU's log: all images are written, and it waits for the engine; it works in the processes."""
ENGINE = 6
_COMMANDS = {
    "reading-memory": (_WAITING, ["cedana", "checkpoint"]),
    "lazy-dump": (_DUMPING, ["cedana", "checkpoint"]),
    "plain-dump": (_DUMPING, ["cedana", "checkpoint", "--leave-running"]),
    "shim": (_DUMPING, ["ctr", "tasks", "checkpoint", "--image-path", "/tmp/images"]),
}


@pytest.mark.parametrize("moment", _COMMANDS)
def test_container_runs_on_with_its_connections(bed: Bed, name: str, moment: str) -> None:
    line, argv = _COMMANDS[moment]
    node = bed.node_a
    node.run_container(bed.image("redis"), name)
    with RedisClient(bed.hub, node.container_address(name)) as client:
        _fill(client)
        before = node.state()
        command = node.popen([*argv, name])
        try:
            _until(lambda: _journals(node))
            _until(lambda: line in _criu_log(node))
            node.ns_exec(["kill", "-KILL", _journals(node)[0].parent.name.split("-")[-2]])
            killed = time.monotonic()
            assert client.command("PING") == "PONG"
            assert time.monotonic() - killed < 5
        finally:
            command.wait(timeout=30)
        wait_until(lambda: not list(_work(node).iterdir()), "the scratch directory is gone", 5)
        assert node.task_status(name) == "RUNNING"
        assert [item for item in node.state().left_behind(before) if not _expected(item)] == []
        bed.move(name)
        assert _is_full(client)


def test_next_checkpoint_undoes_what_the_watchdog_could_not(bed: Bed, name: str) -> None:
    node = bed.node_a
    node.run_container(bed.image("redis"), name)
    with RedisClient(bed.hub, node.container_address(name)) as client:
        _fill(client)
        command = node.popen(["cedana", "checkpoint", name])
        _until(lambda: _WAITING in _criu_log(node))
        _signal(node, "cedana-watchdog", "KILL")
        _signal(node, f"cedana checkpoint {name}", "KILL")
        command.wait(timeout=30)
        assert len(_journals(node)) == 1
        node.cedana("checkpoint", name, "--leave-running")
        assert list(_work(node).iterdir()) == []
        assert client.command("PING") == "PONG"


@pytest.mark.parametrize(("signal", "says"), [("STOP", "got no further"), ("KILL", "criu")])
def test_container_runs_on_when_criu_hangs_or_dies(bed: Bed, name: str, signal: str, says: str) -> None:
    node = bed.node_a
    node.run_container(bed.image("redis"), name)
    with RedisClient(bed.hub, node.container_address(name)) as client:
        _fill(client)
        before = node.state()
        impatient = "import runtime.scratch; runtime.scratch.STALLED_S = 3; from cli.main import main; main()"
        argv = [sys.executable, "-P", "-c", impatient, "checkpoint", name, "--leave-running"]
        command = node.popen(argv, stderr=subprocess.PIPE, text=True)
        _until(lambda: _DUMPING in _criu_log(node))
        _signal(node, "criu: dump", signal)
        assert command.stderr is not None
        said = command.stderr.read()
        assert command.wait() == ENGINE
        assert "could not dump" in said
        assert says in said
        assert client.command("PING") == "PONG"
        assert [item for item in node.state().left_behind(before) if not _expected(item)] == []
        bed.move(name)
        assert _is_full(client)


def _fill(client: RedisClient) -> None:
    """Give redis so much memory that a checkpoint takes long enough to be met in the middle of it."""
    for key in ("first", "second"):
        client.command("SETRANGE", key, str(_MEMORY_BYTES), "x")
    client.command("SET", "noise", os.urandom(_NOISE_BYTES // 2).hex())


def _is_full(client: RedisClient) -> bool:
    sizes = [client.command("STRLEN", key) for key in ("first", "second", "noise")]
    return sizes == [str(_MEMORY_BYTES + 1)] * 2 + [str(_NOISE_BYTES)]


def _signal(node: Node, command: str, signal: str) -> None:
    """To every process of the node whose command line has `command` in it."""
    shown = node.ns_exec(["ps", "-eo", "pid,args"])
    pids = [line.split()[0] for line in shown.splitlines() if command in line]
    node.ns_exec(["kill", f"-{signal}", *pids])


def _expected(item: str) -> bool:
    """What the next operation uses: its lock's file, blobs in the store, images that the caller keeps."""
    kept = ("/run/cedana/locks/", "/var/lib/cedana/checkpoints/", "/tmp/images")
    return any(path in item for path in kept)


def _work(node: Node) -> Path:
    return Path(f"/proc/{node.pid}/root/run/cedana/work")


def _journals(node: Node) -> list[Path]:
    return list(_work(node).glob("*/journal.json"))


def _criu_log(node: Node) -> str:
    logs = [*_work(node).glob("*/criu/dump.log"), *node.base.glob("containerd/*/*/*/criu-work/dump.log")]
    return "".join(log.read_text(errors="replace") for log in logs)


def _until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    """As `wait_until`, without the pause in which a dump has long ended."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)
