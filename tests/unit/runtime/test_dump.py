"""A dump ends, whatever runc and CRIU do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from base.config import Config
from hooks.participant import CriuSettings
from runtime import scratch
from runtime.container import Container
from runtime.dump import Dump
from runtime.errors import CheckpointError

HANGS = "exec sleep 60"
WORKS = "for i in 1 2 3 4 5; do sleep 0.2; echo $i >>$work/dump.log; done"


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dump:
    """Of a container `c1`; CRIU may stand still for half a second."""
    monkeypatch.setattr(scratch, "STALLED_S", 0.5)
    state = tmp_path / "state" / "c1"
    state.mkdir(parents=True)
    (state / "state.json").write_text(json.dumps({"config": {}}))
    private = tmp_path / "scratch"
    private.mkdir()
    config = Config(tools_dir=tmp_path, state_dir=tmp_path / "kept")
    return Dump(
        Container("c1", "default", tmp_path, 1, tmp_path / "state"), private, tmp_path / "work", config
    )


@pytest.mark.parametrize("lazy", [False, True])
def test_dump_that_gets_no_further_is_ended(dump: Dump, tmp_path: Path, lazy: bool) -> None:
    runc(tmp_path, HANGS)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="got no further") as raised:
        run(dump, tmp_path, lazy)
    assert raised.value.details == "collecting"
    assert time.monotonic() - began < 5
    assert scratch.users(tmp_path / "scratch") == {}


def test_dump_that_gets_on_is_waited_for(dump: Dump, tmp_path: Path) -> None:
    runc(tmp_path, f"exec 9>>$work/dump.log; {WORKS}")
    run(dump, tmp_path)
    assert (tmp_path / "work" / "dump.log").read_text().endswith("5\n")


def test_abandoning_a_dump_that_hangs_raises_nothing(dump: Dump, tmp_path: Path) -> None:
    runc(tmp_path, HANGS)
    start(dump, tmp_path)
    dump.abandon()
    dump.abandon()
    assert scratch.users(tmp_path / "scratch") == {}


def runc(directory: Path, program: str) -> None:
    script = directory / "runc"
    script.write_text(
        f"#!/bin/sh\nwork={directory}/work\necho '(00.01) collecting' >$work/dump.log\n{program}\n"
    )
    script.chmod(0o755)


def start(dump: Dump, directory: Path, lazy: bool = False) -> None:
    dump.start(directory / "images", CriuSettings(), [1], 1, (), lazy)


def run(dump: Dump, directory: Path, lazy: bool = False) -> None:
    start(dump, directory, lazy)
    dump.finish()
