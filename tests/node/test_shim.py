"""The shim under real containerds: what people see is what they see with containerd's own.

Each comparison runs the same commands under `io.containerd.runc.v2` and under ours, and wants the same
answers: status, output, error text, events.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shim.bootstrap import socket_path
from shim.flags import Flags
from tests.node.containerds import IMAGE, Containerd, Done, containerd, normal, wait_until

Runtime = tuple[str, ...]
"""As ctr and nerdctl are told of it."""
STOCK: Runtime = ("--runtime", "io.containerd.runc.v2")
OURS: Runtime = ("--runtime", "io.containerd.cedana.v1")
LOOP = ("sh", "-c", "trap 'exit 4' TERM; i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done")

Transcript = list[object]
Scenario = Callable[[Containerd, Runtime], Transcript]


@pytest.fixture(scope="module", params=["2.x", "1.7"])
def daemon(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    with containerd(request.param, zygote=request.param == "2.x") as made:
        yield made


@pytest.fixture
def name(daemon: Containerd) -> Iterator[str]:
    """One container's name, the same for both runtimes."""
    yield "c1"
    daemon.remove("c1")


def _said(done: Done) -> tuple[int, str, str]:
    return done.status, normal(done.out), normal(done.err)


def _run(
    daemon: Containerd, runtime: Runtime, *argv: str, options: tuple[str, ...] = (), input: str = ""
) -> Done:
    return daemon.ctr("run", "--rm", *runtime, *options, IMAGE, "c1", *argv, input=input)


def _start(daemon: Containerd, runtime: Runtime, *argv: str, options: tuple[str, ...] = ()) -> None:
    argv = argv or LOOP
    done = daemon.ctr("run", "--detach", *runtime, *options, IMAGE, "c1", *argv)
    assert done.status == 0, done.err


def _exec(daemon: Containerd, *argv: str, options: tuple[str, ...] = (), input: str = "") -> Done:
    words = ("tasks", "exec", "--exec-id", f"e{os.urandom(3).hex()}", *options, "c1", *argv)
    return daemon.ctr(*words, input=input)


def _life(daemon: Containerd, runtime: Runtime) -> Transcript:
    """run: output, exit codes, what cannot be started."""
    return [
        _said(_run(daemon, runtime, "echo", "hello")),
        _said(_run(daemon, runtime, "sh", "-c", "echo err >&2; exit 42")),
        _said(_run(daemon, runtime, "sh", "-c", "kill -9 $$")),
        _said(_run(daemon, runtime, "/nope")),
        _said(_run(daemon, runtime, "sh", "-c", "hostname; id -u; pwd; ls /proc/self/fd | wc -l")),
        len(_run(daemon, runtime, "sh", "-c", "head -c 3000000 /dev/zero").out),
        _said(_run(daemon, runtime, "sh", "-c", "read line; echo got $line", input="in\n")),
        _said(_run(daemon, runtime, "sh", "-c", "exit 3", options=("--net-host", "--env", "A=b"))),
        _said(_run(daemon, runtime, "sh", "-c", "touch /x", options=("--read-only",))),
        _said(_run(daemon, runtime, "sh", "-c", "echo null", options=("--null-io",))),
    ]  # fmt: skip


def _execs(daemon: Containerd, runtime: Runtime) -> Transcript:
    """exec: output, input, exit codes, what cannot be executed."""
    _start(daemon, runtime)
    said = [
        _said(_exec(daemon, "sh", "-c", "echo out; echo err >&2; exit 7")),
        _said(_exec(daemon, "sh", "-c", "read line; echo got $line", input="piped\n")),
        re.sub("e[0-9a-f]{6}", "EXEC", str(_said(_exec(daemon, "/nope")))),
        _said(_exec(daemon, "pwd", options=("--cwd", "/tmp"))),
        len(_exec(daemon, "sh", "-c", "head -c 3000000 /dev/zero").out),
    ]
    daemon.ctr("tasks", "kill", "--signal", "KILL", "c1")
    daemon.wait_for("c1", "STOPPED")
    said.append(_said(_exec(daemon, "true")))
    return said


def _states(daemon: Containerd, runtime: Runtime) -> Transcript:
    """pause, resume, kill, delete: from every state, allowed or not."""
    said: Transcript = []

    def note(*arguments: str) -> None:
        said.append((*_said(daemon.ctr(*arguments)), daemon.task("c1")[1]))

    _start(daemon, runtime)
    note("tasks", "resume", "c1")
    note("tasks", "rm", "c1")
    note("tasks", "start", "c1")
    note("tasks", "pause", "c1")
    note("tasks", "pause", "c1")
    said.append(_said(_exec(daemon, "true")))
    note("tasks", "resume", "c1")
    note("tasks", "kill", "--exec-id", "nope", "c1")
    said.append(_said(daemon.ctr("tasks", "kill", "--signal", "TERM", "c1")))
    daemon.wait_for("c1", "STOPPED")
    note("tasks", "kill", "c1")
    note("tasks", "pause", "c1")
    note("tasks", "resume", "c1")
    note("tasks", "rm", "c1")
    note("tasks", "rm", "c1")
    note("containers", "rm", "c1")
    return said


def _looks(daemon: Containerd, runtime: Runtime) -> Transcript:
    """ps and metrics."""
    _start(daemon, runtime, options=("--memory-limit", "67108864"))
    time.sleep(0.3)
    processes = daemon.ctr("tasks", "ps", "c1")
    metrics = json.loads(daemon.ctr("tasks", "metrics", "--format", "json", "c1").out)
    table = daemon.ctr("tasks", "metrics", "c1").out
    return [
        processes.status,
        processes.out.splitlines()[0],
        sorted(metrics),
        sorted(key for key, value in metrics["memory"].items() if isinstance(value, dict)),
        [line.split()[0] for line in table.splitlines() if line.split()],
        [line.split()[1] for line in table.splitlines() if line.startswith("memory.limit")],
    ]


def _published(daemon: Containerd, runtime: Runtime) -> Transcript:
    """Every event of a life, in its order."""
    events = daemon.events()
    _start(daemon, runtime)
    daemon.ctr("tasks", "exec", "--exec-id", "e1", "c1", "sh", "-c", "exit 7")
    daemon.ctr("tasks", "pause", "c1")
    daemon.ctr("tasks", "resume", "c1")
    daemon.ctr("tasks", "kill", "--signal", "KILL", "c1")
    daemon.wait_for("c1", "STOPPED")
    removed = daemon.ctr("tasks", "rm", "c1")
    assert removed.status in (0, 137), removed.err
    return list(events.until("/tasks/delete"))


def _nerdctl(daemon: Containerd, runtime: Runtime) -> Transcript:
    """nerdctl's daily verbs."""

    def n(*arguments: str, input: str = "") -> tuple[int, str, str]:
        return _said(daemon.nerdctl(*arguments, input=input))

    def logged(text: str) -> bool:
        wait_until(lambda: text in daemon.nerdctl("logs", "n1").out, f"the log says {text}")
        return True

    try:
        return [
            n("run", "--rm", "--net", "none", *runtime, IMAGE, "sh", "-c", "echo out; exit 5"),
            n("run", "-d", "--name", "n1", "--net", "none", *runtime, IMAGE, *LOOP),
            logged("3\n"),
            n("exec", "n1", "sh", "-c", "echo hi; exit 3"),
            n("exec", "-i", "n1", "cat", input="piped"),
            n("pause", "n1"),
            n("exec", "n1", "true"),
            n("unpause", "n1"),
            n("update", "--memory", "64m", "n1"),
            n("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", "n1"),
            n("stop", "-t", "5", "n1"),
            n("inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", "n1"),
            n("start", "n1"),
            n("kill", "n1")[0],
            n("rm", "-f", "n1"),
            n("run", "-d", "-t", "--name", "n1", "--net", "none", *runtime, IMAGE,
              "sh", "-c", "tty; echo on-a-tty; sleep 60"),
            logged("on-a-tty"),
            n("rm", "-f", "n1"),
        ]  # fmt: skip
    finally:
        daemon.nerdctl("rm", "-f", "n1")


@pytest.mark.parametrize(
    "scenario", [_life, _execs, _states, _looks, _published, _nerdctl], ids=lambda s: s.__name__.strip("_")
)
def test_clients_see_what_they_see_with_containerds_own_shim(
    daemon: Containerd, name: str, scenario: Scenario
) -> None:
    ours = scenario(daemon, OURS)
    for _ in range(5):  # on a busy machine the stock shim now and then loses the end of an output or an event
        daemon.remove(name)
        if (stock := scenario(daemon, STOCK)) == ours:
            break
    assert ours == stock


def test_the_last_event_of_a_life_is_always_told(daemon: Containerd, name: str) -> None:
    for _ in range(5):
        told = [str(line).split()[0] for line in _published(daemon, OURS)]
        daemon.remove(name)
        assert told[0] == "/tasks/create"
        assert told[-2:] == ["/tasks/exit", "/tasks/delete"]


@pytest.mark.parametrize("runtime", [STOCK, OURS])
def test_a_terminal_session(daemon: Containerd, name: str, runtime: Runtime) -> None:
    argv = ("sh", "-c", "echo ready; read line; echo z${line}z; stty size; exit 5")
    with daemon.terminal("run", "--rm", "-t", *runtime, IMAGE, name, *argv) as screen:
        screen.expect("ready")
        time.sleep(0.5)
        screen.type("hello\n")
        screen.expect("zhelloz")
        screen.expect("24 80")
        assert screen.process.wait(10) == 5


def test_a_terminal_exec_outlives_a_detached_client(daemon: Containerd, name: str) -> None:
    _start(daemon, OURS)
    argv = ("tasks", "exec", "-t", "--exec-id", "e1", name, "sh", "-c", "echo ready; cat; echo bye")
    with daemon.terminal(*argv) as screen:
        screen.expect("ready")
        screen.type("abc\n")
        screen.expect("abc")
        screen.expect("abc")
        screen.type("\x04")
        screen.expect("bye")
        assert screen.process.wait(10) == 0


def test_a_container_outlives_a_restart_of_containerd(daemon: Containerd, name: str) -> None:
    log = daemon.base / "restart.log"
    _start(daemon, OURS, options=("--log-uri", f"file://{log}"))
    pid, _ = daemon.task(name)
    daemon.stop()
    time.sleep(0.5)
    before = int(log.read_text().splitlines()[-1])
    daemon.start()
    assert daemon.task(name) == (pid, "RUNNING")
    wait_until(lambda: int(log.read_text().splitlines()[-1]) > before + 2, "the container writes on")
    assert _exec(daemon, "echo", "still").out == "still\n"
    events = daemon.events()
    daemon.ctr("tasks", "kill", "--signal", "KILL", name)
    daemon.wait_for(name, "STOPPED")
    assert events.until("/tasks/exit")[-1].startswith("/tasks/exit ")


def test_a_shim_that_is_killed_leaves_nothing(daemon: Containerd, name: str) -> None:
    _start(daemon, OURS)
    pid, _ = daemon.task(name)
    events = daemon.events()
    (shim,) = daemon.shims()
    os.kill(shim, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "the container is gone")
    bundle = daemon.state / "io.containerd.runtime.v2.task" / daemon.namespace / name
    wait_until(lambda: not bundle.exists(), "the bundle is gone")
    assert [line.split()[0] for line in events.until("/tasks/delete")] == ["/tasks/exit", "/tasks/delete"]
    assert str(bundle) not in Path("/proc/self/mountinfo").read_text()
    assert not Path(f"/run/containerd/runc/{daemon.namespace}/{name}").exists()


def test_lives_leave_no_shim_no_socket_and_no_descriptor(daemon: Containerd, name: str) -> None:
    flags = Flags(namespace=daemon.namespace, address=str(daemon.socket), id=name)
    socket = socket_path("/run/containerd/s", flags, name)

    _run(daemon, OURS, "true")
    wait_until(lambda: not daemon.shims(), "the first shim has ended")
    before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    for _ in range(3):
        assert _run(daemon, OURS, "echo", "hi").out == "hi\n"
    wait_until(lambda: not daemon.shims(), "the shims have ended")
    assert not os.path.exists(socket)
    after = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    assert after <= before + 2, "containerd keeps an idle connection or two, no more"


def test_a_shim_is_likelier_to_be_killed_for_memory_than_containerd(daemon: Containerd, name: str) -> None:
    _start(daemon, OURS)
    (shim,) = daemon.shims()
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (daemon.pid, shim)]
    assert scores[1] == scores[0] + 1
    assert Path(f"/proc/{shim}/comm").read_text() == "containerd-shim\n"


def test_containers_of_one_group_share_a_shim(daemon: Containerd) -> None:
    names = ("g1", "g2", "g3")
    try:
        for each in names:
            group = ("--annotation", "io.containerd.runc.v2.group=pod")
            done = daemon.ctr("run", "--detach", *OURS, *group, IMAGE, each, *LOOP)
            assert done.status == 0, done.err
        assert len(daemon.shims()) == 1
        daemon.ctr("tasks", "kill", "--signal", "KILL", "g1")
        daemon.wait_for("g1", "STOPPED")
        daemon.remove("g1")
        assert daemon.task("g2")[1] == "RUNNING"
        assert len(daemon.shims()) == 1
    finally:
        for each in names:
            daemon.remove(each)
    wait_until(lambda: not daemon.shims(), "the shared shim has ended")


def test_an_oom_kill_is_told(daemon: Containerd, name: str) -> None:
    events = daemon.events()
    done = _run(
        daemon,
        OURS,
        "sh",
        "-c",
        "head -c 200m /dev/zero | tail -c 190m",
        options=("--memory-limit", "16777216"),
    )
    assert any(line.startswith("/tasks/oom ") for line in events.until("/tasks/oom")), done


def test_a_checkpoint_is_restored_where_it_was(daemon: Containerd, name: str) -> None:
    """`ctr containers checkpoint --task` and `restore --live`, all inside containerd."""
    reference = "shim.test/checkpoint:1"
    count = ("sh", "-c", "i=0; while :; do i=$((i+1)); echo $i > /new; mv /new /count; sleep 0.05; done")
    _start(daemon, OURS, *count)
    time.sleep(1)
    taken = daemon.ctr("containers", "checkpoint", "--rw", "--image", "--task", name, reference)
    assert taken.status == 0, taken.err
    assert daemon.task(name)[1] == "RUNNING", "a checkpoint leaves it running unless told otherwise"
    at_checkpoint = int(_exec(daemon, "cat", "/count").out or 0)
    assert at_checkpoint > 0
    daemon.remove(name)
    restored = daemon.ctr("containers", "restore", "--rw", "--live", name, reference)
    assert restored.status == 0, restored.err
    try:
        assert daemon.task(name)[1] == "RUNNING"
        wait_until(lambda: _number(_exec(daemon, "cat", "/count").out) > 10, "it counts on")
        assert _number(_exec(daemon, "cat", "/count").out) < at_checkpoint + 200
        assert "pids.current" in daemon.ctr("tasks", "metrics", name).out
        assert _exec(daemon, "echo", "in").out == "in\n"
    finally:
        daemon.remove(name)
        daemon.ctr("images", "rm", reference)


def _number(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
