"""The look before the freeze, at real processes of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hooks.participant import CriuSettings
from runtime import probe
from runtime.sockets import Socket, refused, sockets_of


@contextmanager
def program(code: str) -> Iterator[probe.Process]:
    """A Python program that runs `code`, says so, and waits; as the probe sees it."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        process = probe.read_process(child.pid)
        assert process is not None
        yield process
    finally:
        child.kill()
        child.communicate()


def sockets(process: probe.Process) -> list[Socket]:
    return list(probe._sockets(process))


def test_a_process_is_described() -> None:
    with program("import threading as t; t.Thread(target=input, daemon=True).start()") as process:
        assert process.threads == 2
        assert process.command[1] == "-c"
        assert process.resident_bytes > 1 << 20
        assert process.executable == os.path.realpath(sys.executable)


def test_a_process_may_have_a_name_that_is_no_text() -> None:
    with program("open('/proc/self/comm', 'wb').write(b'\\xff) Z 1 (\\rUid:\\t0')") as process:
        assert process.name == "\N{REPLACEMENT CHARACTER}) Z 1 (\rUid:\t0"
        assert process.threads == 1
        assert probe._descends(process.host_pid, os.getpid())


def test_deleted_files_raise_the_ghost_limit() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "x")
        code = f"import os; f = open({str(path)!r}, 'wb'); f.truncate(5 << 20); os.unlink({str(path)!r})"
        with program(code) as process:
            (file,) = [file for file in process.files if file.path == str(path)]
            assert file.deleted
            assert file.links == 0
            criu = CriuSettings()
            probe._ask_criu([process], criu)
            assert ("ghost-limit", str(10 << 20)) in criu.values


def test_an_io_uring_is_refused_in_one_sentence() -> None:
    setup = "import ctypes; p = (ctypes.c_char * 120)(); assert ctypes.CDLL(None).syscall(425, 4, p) > 0"
    with program(setup) as process:
        (finding,) = probe._refused(process)
        assert finding.fatal
        assert "io_uring" in finding.message
        assert finding.hint


def test_sockets_are_seen_with_state_and_addresses() -> None:
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0));"
        "c = socket.create_connection(s.getsockname()); a, _ = s.accept();"
        "u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('127.0.0.1', 0))"
    )
    with program(code) as process:
        found = sockets(process)
        assert sorted((s.kind, s.state) for s in found) == [
            ("tcp", "established"), ("tcp", "established"), ("tcp", "listen"), ("udp", "")
        ]  # fmt: skip
        one, other = (s for s in found if s.state == "established")
        assert (one.local, one.remote) == (other.remote, other.local)
        assert all(sock.carried for sock in found)
        assert not list(refused(found))


def test_kinds_of_sockets_criu_cannot_dump_are_refused() -> None:
    with program("import socket; s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)") as process:
        (finding,) = refused(sockets(process))
        assert finding.fatal
        assert "mptcp" in finding.message
    with program("import socket; s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)") as process:
        assert "vsock" in next(iter(refused(sockets(process)))).message


def test_a_socket_that_is_gone_is_skipped() -> None:
    assert list(sockets_of(os.getpid(), 1, "x", {9999: "1"})) == []
    assert list(sockets_of(1 << 30, 1, "x", {3: "1"})) == []


def test_looking_at_a_socket_does_not_disturb_it() -> None:
    here, there = socket.socketpair()
    with here, there:
        there.send(b"kept")
        fds = {here.fileno(): "1"}
        assert [sock.family for sock in sockets_of(os.getpid(), 1, "x", fds)] == ["unix"]
        assert here.recv(10) == b"kept"


def test_changed_files_are_named(tmp_path: Path) -> None:
    rootfs, volume = tmp_path / "rootfs", tmp_path / "volume"
    for directory in (rootfs / "var", volume):
        directory.mkdir(parents=True)
    (rootfs / "var/log").write_text("same")
    (rootfs / "escape").symlink_to("/etc")
    (volume / "db").write_text("grown!")
    files = [
        {"kind": "file", "path": "/var/log", "size_bytes": 4},
        {"kind": "file", "path": "/data/db", "size_bytes": 5},
        {"kind": "file", "path": "/gone away", "size_bytes": 1},
        {"kind": "file", "path": "/escape/passwd", "size_bytes": 1},
        {"kind": "file", "path": "/dev/shm/x", "size_bytes": 1},
        {"kind": "file", "path": "/unlinked", "size_bytes": 1, "deleted": True},
    ]
    spec = {
        "mounts": [
            {"destination": "/data", "source": str(volume), "options": ["rbind"]},
            {"destination": "/dev/shm", "type": "tmpfs"},
        ]
    }
    found = probe.changed_files([{"files": files}], rootfs, spec)
    assert list(found) == ["/data/db", "/gone away", "/escape/passwd"]
    assert all(path in sentence for path, sentence in found.items())


def test_a_packet_mode_pipe_is_refused_and_an_ordinary_one_is_not() -> None:
    with program("import os; p = os.pipe(); q = os.pipe2(os.O_DIRECT)") as process:
        (finding,) = probe._refused(process)
        assert "packet mode" in finding.message


def test_a_semaphore_eventfd_is_refused_and_an_ordinary_one_is_not() -> None:
    setup = "import ctypes; c = ctypes.CDLL(None); c.eventfd(1, 0); c.eventfd(1, 1)"
    with program(setup) as process:
        (finding,) = probe._refused(process)
        assert "EFD_SEMAPHORE" in finding.message


def test_the_paths_of_inotify_watches_are_found() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        deep = Path(directory, "a", "b")
        deep.mkdir(parents=True)
        (deep / "file").touch()
        code = (
            "import ctypes; c = ctypes.CDLL(None); fd = c.inotify_init1(0)\n"
            f"for p in {[str(deep), str(deep / 'file')]}: assert c.inotify_add_watch(fd, p.encode(), 2) > 0"
        )
        with program(code) as process:
            criu = CriuSettings()
            assert list(probe._watches([process], process.host_pid, criu)) == []
            assert "force-irmap" in criu.flags
            assert criu.values == [("irmap-scan-path", str(p)) for p in (deep, deep / "file")]
            (deep / "file").rename(deep / "renamed")
            os.link(deep / "renamed", deep / "other")
            (deep / "renamed").unlink()
            assert list(probe._watches([process], process.host_pid, CriuSettings())) == []


def test_a_watched_path_cannot_smuggle_an_option_into_criu() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        hostile = Path(directory, "w\naction-script ", "evil")
        hostile.mkdir(parents=True)
        code = (
            "import ctypes; c = ctypes.CDLL(None); fd = c.inotify_init1(0)\n"
            f"assert c.inotify_add_watch(fd, {str(hostile)!r}.encode(), 2) > 0"
        )
        with program(code) as process:
            criu = CriuSettings()
            (finding,) = probe._watches([process], process.host_pid, criu)
            assert finding.fatal
            assert criu.values == []
