"""Reading other users' resource limits without CAP_SYS_RESOURCE, by the kernel's own means."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from runtime import rlimits

READ = """
import ctypes, sys
pair = (ctypes.c_uint64 * 2)()
libc = ctypes.CDLL(None, use_errno=True)
result = libc.prlimit64(int(sys.argv[1]), 7, None, ctypes.byref(pair))
print(result, pair[0], pair[1], ctypes.get_errno())
print(libc.prlimit64(0, 7, None, ctypes.byref(pair)), pair[0])
"""


def read(pid: int, other: int) -> list[list[int]]:
    """What prlimit(2) says of RLIMIT_NOFILE of `pid` and of itself, in a process that may read `other`'s."""
    with rlimits.answering([other]) as launcher:
        argv = [*launcher.prefix, sys.executable, "-c", READ, str(pid)]
        assert launcher.prefix
        done = subprocess.run(argv, capture_output=True, text=True, check=True, pass_fds=launcher.pass_fds)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


@pytest.fixture
def other() -> Iterator[int]:
    """A process of another user, with limits of its own."""
    process = subprocess.Popen(
        ["sleep", "60"], user=65534, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (77, 88))
    )
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def without_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlimits, "_may_read_limits", lambda: False)


def test_limits_are_read_from_proc_as_the_kernel_has_them() -> None:
    found = rlimits.limits_of(os.getpid())
    for number in range(16):
        expected = [value if value >= 0 else (1 << 64) - 1 for value in resource.getrlimit(number)]
        assert list(found[number]) == expected


@pytest.mark.usefixtures("without_capability")
def test_the_limits_of_another_users_process_can_be_read(other: int) -> None:
    assert read(other, other)[0][:3] == [0, 77, 88]


@pytest.mark.usefixtures("without_capability")
def test_its_own_limits_come_from_the_kernel_and_a_gone_process_is_an_error(other: int) -> None:
    (result, _, _, errno), (own, soft) = read(1 << 22, other)
    assert (result, errno) == (-1, 3)
    assert (own, soft) == (0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


@pytest.mark.usefixtures("without_capability")
def test_nothing_is_filtered_for_processes_of_root() -> None:
    with rlimits.answering([os.getpid()]) as launcher:
        assert launcher == rlimits.Launcher()


def test_nothing_is_filtered_where_root_has_the_capability(
    monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    monkeypatch.setattr(rlimits, "_may_read_limits", lambda: True)
    with rlimits.answering([other]) as launcher:
        assert launcher == rlimits.Launcher()
    assert not list(rlimits.refused([other]))


@pytest.mark.usefixtures("without_capability")
def test_other_users_under_seccomp_are_refused(monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    assert not list(rlimits.refused([other]))
    monkeypatch.setattr(rlimits, "_under_seccomp", lambda pids: True)
    (finding,) = rlimits.refused([other])
    assert finding.fatal
    assert "CAP_SYS_RESOURCE" in finding.message
    assert not list(rlimits.refused([os.getpid()]))


@pytest.mark.usefixtures("without_capability")
def test_a_child_that_cannot_start_leaves_no_thread(other: int) -> None:
    with rlimits.answering([other]) as launcher:
        argv = [*launcher.prefix, "/no/such/program"]
        assert subprocess.run(argv, pass_fds=launcher.pass_fds, capture_output=True, check=False).returncode
    with pytest.raises(FileNotFoundError), rlimits.answering([other]):
        subprocess.run(["/no/such/program"], check=False)
