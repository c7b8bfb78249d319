"""`packaging/node/install` on this machine: what it left works, and running it again costs nothing."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from runtime import criu_trial
from runtime.features import version

INSTALL = Path(__file__).resolve().parents[2] / "packaging/node/install"
PREFIX = Path("/opt/cedana")


def _run(*argv: str | Path, **environment: str) -> str:
    done = subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("option", [(), ("--containerd-1.7",), ("--crun",), ("--cri-tools",)])
def test_second_run_finds_everything_in_two_seconds(option: tuple[str, ...]) -> None:
    _run(INSTALL, *option)
    began = time.monotonic()
    assert "is up to date" in _run(INSTALL, *option)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("program", "minimum"),
    [
        ("node/bin/containerd", (2, 0)),
        ("node/bin/ctr", (2, 0)),
        ("node/bin/runc", (1, 1, 15)),
        ("node/bin/criu", (4, 2)),
        ("node/bin/docker-registry", (2, 8)),
        ("node/bin/nerdctl", (2, 2)),
        ("node-1.7/bin/containerd", (1, 7)),
        ("node-1.7/bin/ctr", (1, 7)),
        ("crun/bin/crun", (1, 8)),
    ],
)
def test_program_is_new_enough(program: str, minimum: tuple[int, ...]) -> None:
    words = _run(PREFIX / program, "--version").split()
    found = next(numbers for word in words if len(numbers := version(word.removeprefix("v"))) > 1)
    assert found >= minimum


@pytest.mark.parametrize("program", ["critest", "crictl", "checkpointctl"])
def test_tool_of_cri_runs(program: str) -> None:
    subprocess.run([PREFIX / "cri-tools/bin" / program, "--help"], capture_output=True, check=True)


def test_older_line_stays_below_containerd_2() -> None:
    assert " 1.7." in _run(PREFIX / "node-1.7/bin/containerd", "--version")


def test_criu_carries_a_live_connection() -> None:
    assert criu_trial.failure(str(PREFIX / "node/bin/criu")) == ""


@pytest.mark.parametrize("line", ["node", "node-1.7", "crun"])
def test_fetched_programs_load_nothing_of_the_system_s(line: str) -> None:
    prefix = (PREFIX / line).resolve()
    own = [path for path in (prefix / "bin").iterdir() if not path.is_symlink() and path.name != "nerdctl"]
    for program in own:
        loaded = _run(program, LD_TRACE_LOADED_OBJECTS="1")
        paths = [word for line in loaded.splitlines() for word in line.split() if word.startswith("/")]
        assert paths, program
        assert [path for path in paths if not path.startswith(f"{prefix}/lib/")] == [], program


def test_nerdctl_keeps_its_place_when_the_tools_are_replaced() -> None:
    real = (PREFIX / "node/bin/nerdctl").resolve()
    assert not real.is_relative_to((PREFIX / "node").resolve())


def test_packages_come_with_all_they_need(tmp_path: Path) -> None:
    folder = tmp_path / "debs"
    _run(INSTALL, "--packages", folder, "busybox-static", "base-files")
    names = {path.name.split("_")[0] for path in folder.glob("*.deb")}
    assert {"busybox-static", "base-files"} <= names
    assert "up to date" in _run(INSTALL, "--packages", folder, "base-files", "busybox-static")
