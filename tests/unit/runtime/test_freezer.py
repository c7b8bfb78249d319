"""A container is stopped as a whole, wherever in its cgroup its processes are. With real cgroups."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime import freezer
from runtime.cgroups import hierarchies
from runtime.container import Container
from runtime.errors import EngineError
from runtime.freezer import Freezer

HIERARCHIES = {"v1": "freezer", "v2": ""}
MOUNTS = hierarchies()


@pytest.fixture(params=[version for version, kind in HIERARCHIES.items() if kind in MOUNTS])
def cgroup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A container's cgroup with two below it; the hierarchy it is in is the only one."""
    kind = HIERARCHIES[request.param]
    monkeypatch.setattr(freezer, "hierarchies", lambda: {kind: MOUNTS[kind]})
    top = MOUNTS[kind] / f"cedana-test-{os.getpid()}"
    below = [top / "init.scope", top / "system.slice"]
    with ExitStack() as cleanup:
        for directory in (top, *below):
            directory.mkdir()
            cleanup.callback(directory.rmdir)
        yield top


def test_processes_that_moved_below_are_stopped_together(cgroup: Path, tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        init, service = (process_in(cgroup / name, cleanup) for name in ("init.scope", "system.slice"))
        found = Freezer.of(container(tmp_path, init, cgroup))
        assert found.path == cgroup
        assert found.pids() == sorted([init, service])
        found.freeze()
        for directory in cgroup.iterdir():
            if directory.is_dir():
                assert Freezer(directory, found.unified).frozen
        found.thaw()
        assert not found.frozen


def test_container_without_a_record_of_its_cgroup_is_found_by_its_init(cgroup: Path, tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        init = process_in(cgroup, cleanup)
        assert Freezer.of(container(tmp_path, init, None)).path == cgroup
        assert Freezer.of(container(tmp_path, init, Path("/elsewhere"))).path == cgroup


def test_init_that_left_the_container_is_refused(cgroup: Path, tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        init = process_in(cgroup / "system.slice", cleanup)
        with pytest.raises(EngineError, match="left the container's cgroup"):
            Freezer.of(container(tmp_path, init, cgroup / "init.scope"))


def process_in(directory: Path, cleanup: ExitStack) -> int:
    process = subprocess.Popen(["/bin/sleep", "60"])
    cleanup.callback(process.wait)
    cleanup.callback(process.kill)
    (directory / "cgroup.procs").write_text(str(process.pid))
    return process.pid


def container(directory: Path, pid: int, cgroup: Path | None) -> Container:
    paths = {} if cgroup is None else {"freezer": str(cgroup), "": str(cgroup)}
    (directory / "c1").mkdir(exist_ok=True)
    (directory / "c1" / "state.json").write_text(json.dumps({"cgroup_paths": paths}))
    return Container("c1", "default", directory, pid, directory)
