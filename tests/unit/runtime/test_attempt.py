"""Undoing a restore: what it made is gone, and nobody else's processes are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.attempt import Attempt
from runtime.cgroups import hierarchies


@pytest.fixture
def cgroup() -> Iterator[Path]:
    root = sorted(set(hierarchies().values()))[0]
    path = root / f"cedana-test-attempt-{os.getpid()}"
    path.mkdir()
    yield path
    if path.exists():
        path.rmdir()


def begin(cgroup: Path, tmp_path: Path) -> Attempt:
    return Attempt.begin(["/bin/true"], {}, tmp_path / "state", tmp_path / "work", f"/{cgroup.name}")


def process_in(cgroup: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "1000"])
    (cgroup / "cgroup.procs").write_text(str(process.pid))
    return process


def test_what_began_in_the_cgroup_ends_and_the_cgroup_goes(cgroup: Path, tmp_path: Path) -> None:
    begin(cgroup, tmp_path).write(tmp_path)
    process = process_in(cgroup)
    noted = Attempt.read(tmp_path)
    assert noted is not None
    noted.undo(tmp_path)
    assert process.wait(5) == -9
    assert not cgroup.exists()


def test_a_cgroup_that_others_were_in_is_left_alone(cgroup: Path, tmp_path: Path) -> None:
    process = process_in(cgroup)
    try:
        begin(cgroup, tmp_path).undo(tmp_path)
        assert process.poll() is None
        assert cgroup.exists()
    finally:
        process.kill()
        process.wait()


def test_without_a_path_of_its_own_nothing_is_killed(tmp_path: Path) -> None:
    for path in ("", "/", "/..", "relative", "a:b"):
        attempt = Attempt.begin(["/bin/true"], {}, tmp_path / "state", tmp_path / "work", path)
        attempt.undo(tmp_path)


def test_no_attempt_was_noted(tmp_path: Path) -> None:
    assert Attempt.read(tmp_path) is None
