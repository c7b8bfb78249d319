"""The zygote and its clients: real processes, and what happens when there is none to be had."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from base import __version__
from runtime import proc
from shim import launch
from shim.zygote import Standing

ROOT = Path(__file__).resolve().parents[3]
SHIM = Path(sys.executable).with_name("containerd-shim-cedana-v1")


class Zygote:
    def __init__(self, directory: Path, **options: Any) -> None:
        self.run_dir = directory
        self.socket = directory / launch.SOCKET_NAME
        self.log = directory / "log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [SHIM, "zygote"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                **options,
            )
        _until(self.children)

    def environment(self) -> dict[str, str]:
        return {"PATH": os.defpath, "CEDANA_RUN_DIR": str(self.run_dir)}

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in path.read_text().split()]

    def spare(self) -> int:
        """The one that waits, once there is one."""
        _until(lambda: len(self.children()) == 1)
        return self.children()[0]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=20)


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    made = Zygote(tmp_path)
    yield made
    made.stop()


def _shim(
    zygote: Zygote | None,
    *arguments: str,
    cwd: Path = Path("/"),
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[bytes]:
    env = zygote.environment() if zygote else {"PATH": os.defpath, "CEDANA_RUN_DIR": "/nowhere"}
    return subprocess.run(
        [SHIM, *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=100,
        env={**env, **(environment or {})},
        **options,
    )


def _delete(bundle: Path, zygote: Zygote | None, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """A command whose answer depends on the working directory."""
    bundle.mkdir(exist_ok=True)
    (bundle / "init.pid").write_text("4242")
    return _shim(zygote, "-namespace", "ns", "-id", bundle.name, "delete", cwd=bundle, **options)


def test_a_command_says_the_same_with_a_zygote_and_without(zygote: Zygote, tmp_path: Path) -> None:
    for arguments in (("-v",), ("-nope",), ("-namespace", "ns", "dance"), ("start",)):
        ours, alone = _shim(zygote, *arguments), _shim(None, *arguments)
        assert (ours.returncode, ours.stdout, ours.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    ours, alone = _delete(tmp_path / "one", zygote), _delete(tmp_path / "one", None)
    assert ours.returncode == alone.returncode == 0
    assert ours.stdout[:6] == alone.stdout[:6] != b""


def test_the_zygote_is_what_runs_a_command(zygote: Zygote) -> None:
    spare = zygote.spare()
    assert __version__ in _shim(zygote, "-v").stdout.decode()
    assert zygote.spare() != spare


def test_commands_at_the_same_time_are_all_answered(zygote: Zygote) -> None:
    commands = [
        subprocess.Popen([SHIM, "-v"], stdout=subprocess.PIPE, env=zygote.environment()) for _ in range(30)
    ]
    for command in commands:
        out, _ = command.communicate(timeout=100)
        assert __version__ in out.decode()
        assert command.returncode == 0


def test_a_client_that_says_nothing_holds_up_nobody(zygote: Zygote) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(zygote.socket))
        assert silent.recv(1000) == launch.IDENTITY
        assert _shim(zygote, "-v").returncode == 0


@pytest.mark.parametrize(
    "message", [b"", b"x", b"\0" * 10, b"99\0-v\0", b"2\0shim\0-v\0A=b", os.urandom(500)]
)
def test_a_client_that_talks_nonsense_gets_no_answer_and_does_no_harm(zygote: Zygote, message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(60)
        client.connect(str(zygote.socket))
        client.recv(1000)
        with open("/dev/null") as null:
            socket.send_fds(client, [message], [null.fileno()])
        assert client.recv(1) == b""
    assert _shim(zygote, "-v").returncode == 0


@pytest.mark.parametrize("when", ["never started", "stopped", "killed", "does not answer"])
def test_without_a_zygote_a_command_runs_by_itself(tmp_path: Path, when: str) -> None:
    made = None
    if when != "never started":
        made = Zygote(tmp_path)
        {"stopped": made.stop, "killed": made.process.kill, "does not answer": lambda: None}[when]()
    if when == "does not answer":
        assert made
        os.kill(made.spare(), signal.SIGSTOP)
    try:
        done = _shim(made, "-v")
        assert (done.returncode, done.stderr) == (0, b"")
        assert __version__ in done.stdout.decode()
    finally:
        if made:
            made.process.kill()
            made.process.wait()


def test_the_spare_ends_with_the_zygote(tmp_path: Path) -> None:
    made = Zygote(tmp_path)
    spare = made.spare()
    made.process.kill()
    made.process.wait()
    _until(lambda: not Path(f"/proc/{spare}").exists() or proc.stat(spare)[0] == "Z")


def test_a_killed_spare_is_replaced(zygote: Zygote) -> None:
    os.kill(zygote.spare(), signal.SIGKILL)
    assert _shim(zygote, "-v").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_new_zygote_takes_the_place_of_one_that_ended(tmp_path: Path, number: signal.Signals) -> None:
    first = Zygote(tmp_path)
    first.process.send_signal(number)
    first.process.wait(timeout=20)
    second = Zygote(tmp_path)
    try:
        _until(second.children)
        spare = second.spare()
        assert _shim(second, "-v").returncode == 0
        assert second.spare() != spare
    finally:
        second.stop()


def test_a_second_zygote_is_refused_while_the_first_lives(zygote: Zygote) -> None:
    done = _shim(zygote, "zygote")
    assert done.returncode == 1
    assert b"listens" in done.stderr
    assert _shim(zygote, "-v").returncode == 0


def test_one_of_another_version_is_not_used(tmp_path: Path) -> None:
    """It only says who it is; whoever goes on talking to it would wait for ever."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(tmp_path / launch.SOCKET_NAME))
        other.listen()
        command = subprocess.Popen(
            [SHIM, "-v"], stdout=subprocess.PIPE, env={"CEDANA_RUN_DIR": str(tmp_path), "PATH": os.defpath}
        )
        other.settimeout(60)
        connection, _ = other.accept()
        connection.send(launch.IDENTITY.replace(__version__.encode(), b"0.0.7"))
        out, _ = command.communicate(timeout=100)
    assert __version__ in out.decode()


def test_what_the_client_is_the_zygotes_process_becomes(zygote: Zygote, tmp_path: Path) -> None:
    """`-info` runs the runtime it finds, which shows what it was given."""
    runc = tmp_path / "runc"
    runc.write_text(
        '#!/bin/sh\necho "$(umask) $(ulimit -n) $(nice) $(cat /proc/self/oom_score_adj)'
        ' $(grep -o Cpus_allowed_list.* /proc/self/status | tr -d [:space:])"\n'
    )
    runc.chmod(0o755)
    environment = {"CEDANA_TOOLS_DIR": str(tmp_path)}

    def be_different() -> None:
        os.umask(0o057)
        os.nice(3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (321, 4321))
        os.sched_setaffinity(0, [0])
        Path("/proc/self/oom_score_adj").write_text("123")

    said = _shim(zygote, "-info", environment=environment, preexec_fn=be_different)
    alone = _shim(None, "-info", environment=environment, preexec_fn=be_different)
    niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)
    assert f"0057 321 {niceness} 123 Cpus_allowed_list:0".encode() in said.stdout
    assert said.stdout == alone.stdout


@pytest.mark.parametrize("namespace", ["--mount", "--net", "--uts", "--ipc", "--cgroup"])
def test_a_client_in_another_namespace_is_left_to_itself(zygote: Zygote, namespace: str) -> None:
    spare = zygote.spare()
    done = subprocess.run(
        ["unshare", namespace, SHIM, "-v"],
        env=zygote.environment(),
        capture_output=True,
        check=True,
        timeout=100,
    )
    assert __version__ in done.stdout.decode()
    assert zygote.spare() != spare
    assert "namespaces" in zygote.log.read_text()


def test_a_client_with_other_capabilities_is_left_to_itself(zygote: Zygote) -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_boot", SHIM, "-v"],
        env=zygote.environment(), capture_output=True, check=True, timeout=100,
    )  # fmt: skip
    assert __version__ in done.stdout.decode()
    assert "status" in zygote.log.read_text()


def test_what_may_not_differ_is_compared_as_a_whole() -> None:
    own = Standing.of(os.getpid())
    assert own.differs(Standing.of(os.getppid())) == ""
    assert own.status[0]
    assert all(own.namespaces)


def test_a_zygote_at_rest_does_not_wake_up(zygote: Zygote) -> None:
    def switches() -> list[str]:
        pids = (zygote.process.pid, zygote.spare())
        return [proc.status(pid)["voluntary_ctxt_switches"] for pid in pids]

    zygote.spare()
    time.sleep(0.5)  # until it has come to rest
    before = switches()
    time.sleep(1.5)
    assert switches() == before


def test_systemd_may_pass_the_socket(tmp_path: Path) -> None:
    path = tmp_path / launch.SOCKET_NAME
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        script = 'exec env LISTEN_PID=$$ LISTEN_FDS=1 "$0" zygote 3<&"$1"'
        process = subprocess.Popen(
            ["bash", "-c", script, SHIM, str(listener.fileno())],
            pass_fds=[listener.fileno()], env={"PATH": os.defpath, "CEDANA_RUN_DIR": str(tmp_path)},
        )  # fmt: skip
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            _until(lambda: "zygote" in proc.status(process.pid).get("Name", "") and children.read_text())
            done = subprocess.run(
                [SHIM, "-v"], capture_output=True, env={"PATH": os.defpath, "CEDANA_RUN_DIR": str(tmp_path)},
                check=True, timeout=100,
            )  # fmt: skip
            assert __version__ in done.stdout.decode()
        finally:
            process.terminate()
            process.wait(timeout=20)
    assert path.exists()


def test_the_memory_of_shims_may_be_merged_and_that_of_what_they_start_not(
    zygote: Zygote, tmp_path: Path
) -> None:
    def mergeable(smaps: str) -> int:
        return sum("mg" in line.split() for line in smaps.splitlines() if line.startswith("VmFlags:"))

    has_ksm = Path("/sys/kernel/mm/ksm").is_dir()
    assert (mergeable(Path(f"/proc/{zygote.spare()}/smaps").read_text()) > 0) is has_ksm
    (tmp_path / "runc").write_text("#!/bin/sh\ncat /proc/self/smaps\n")
    (tmp_path / "runc").chmod(0o755)
    said = _shim(zygote, "-info", environment={"CEDANA_TOOLS_DIR": str(tmp_path)}).stdout
    assert b"VmFlags:" in said
    assert mergeable(said.decode(errors="replace")) == 0
