"""What a killed engine leaves is undone once, by whoever comes first, and what is alive is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from base.config import Config
from runtime import scratch
from runtime.container import Container
from runtime.freezer import Freezer
from runtime.recover import Journal, recover
from runtime.scratch import claim, private_directory, work_dir

ENGINE = """
import sys, time
from pathlib import Path
from base.config import Config
from runtime.scratch import private_directory
with private_directory(Config(run_dir=Path(sys.argv[1])), "checkpoint-default-c1") as directory:
    print(directory, flush=True)
    time.sleep(float(sys.argv[2]))
"""


class Recorder:
    """A participant that says what is asked of it."""

    name = "recorder"

    def __init__(self, said: list[str], fails: bool = False) -> None:
        self._said, self._fails = said, fails

    def adopt_source(self, source: Any) -> None:
        self._said.append(f"adopt {source.container_id} {source.options['tcp']}")
        if self._fails:
            raise OSError("no such namespace")

    def abort_source(self, source: Any) -> None:
        self._said.append("abort")

    def release_source(self, source: Any) -> None:
        self._said.append("release")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=tmp_path / "run")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the container's cgroup and its participants, in order."""
    said: list[str] = []
    monkeypatch.setattr(Freezer, "thaw", lambda _: said.append("thaw"))
    monkeypatch.setattr(Freezer, "kill", lambda _: said.append("kill"))
    return said


def test_directory_goes_with_the_block_and_its_watchdog_too(config: Config) -> None:
    before = _children()
    with private_directory(config, "x") as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert len(_children() - before) == 1
        recover(config)
        assert directory.exists()
    assert list(work_dir(config).iterdir()) == []
    assert _children() == before


def test_watchdog_clears_up_after_an_engine_that_was_killed(config: Config) -> None:
    engine, directory = _engine(config)
    (directory / "images").mkdir()
    engine.kill()
    assert engine.stdout is not None
    assert engine.stdout.read() == ""  # at its end only when everything is undone
    assert not directory.exists()
    engine.wait()


def test_kill_of_the_whole_process_group_spares_the_watchdog(config: Config) -> None:
    engine, directory = _engine(config)
    os.killpg(engine.pid, signal.SIGKILL)
    engine.wait()
    _until(lambda: not directory.exists())


def test_frozen_container_is_let_go_of_in_reverse(config: Config, tmp_path: Path, said: list[str]) -> None:
    directory = _abandoned(config, _journal(tmp_path))
    recover(config, parts=[Recorder(said)])
    assert said == ["adopt c1 close", "abort", "thaw"]
    assert not directory.exists()
    recover(config, parts=[Recorder(said)])
    assert len(said) == 3


def test_container_that_was_paused_before_stays_paused(
    config: Config, tmp_path: Path, said: list[str]
) -> None:
    _abandoned(config, _journal(tmp_path, thaws=False))
    recover(config, parts=[Recorder(said)])
    assert said == ["adopt c1 close", "abort"]


def test_container_being_destroyed_is_destroyed(config: Config, tmp_path: Path, said: list[str]) -> None:
    directory = _abandoned(config, journal := _journal(tmp_path))
    journal.write_ending(directory)
    recover(config, parts=[Recorder(said)])
    assert said == ["adopt c1 close", "kill", "release"]


def test_container_is_thawed_even_if_its_network_cannot_be_opened(
    config: Config, tmp_path: Path, said: list[str]
) -> None:
    directory = _abandoned(config, _journal(tmp_path))
    recover(config, parts=[Recorder(said, fails=True)])
    assert said == ["adopt c1 close", "abort", "thaw"]
    assert not directory.exists()


def test_another_container_in_the_same_place_is_left_alone(
    config: Config, tmp_path: Path, said: list[str]
) -> None:
    journal = _journal(tmp_path)
    (tmp_path / "cgroup").rename(tmp_path / "gone")
    (tmp_path / "cgroup").mkdir()
    _abandoned(config, journal)
    recover(config, parts=[Recorder(said)])
    assert said == ["adopt c1 close", "abort"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 1}'])
def test_broken_journal_stops_nothing(config: Config, text: str) -> None:
    directory = _abandoned(config)
    (directory / "journal.json").write_text(text)
    recover(config)
    assert not directory.exists()


def test_journal_is_private_and_read_back_as_written(tmp_path: Path) -> None:
    journal = _journal(tmp_path)
    journal.write(tmp_path)
    assert (tmp_path / "journal.json").stat().st_mode & 0o777 == 0o600
    assert Journal.read(tmp_path) == journal
    Journal.close(tmp_path)
    Journal.close(tmp_path)
    assert Journal.read(tmp_path) is None


def test_operation_waits_for_whoever_undoes_the_last_one_on_its_container(
    config: Config, tmp_path: Path, said: list[str]
) -> None:
    directory = _abandoned(config, _journal(tmp_path))
    lock = claim(directory)
    assert lock is not None
    container = SimpleNamespace(namespace="default", id="c1", pid=1)
    recover(config, SimpleNamespace(namespace="default", id="c2"))  # type: ignore[arg-type]
    waiting = threading.Thread(target=recover, args=(config, container, [Recorder(said)]))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    os.close(lock)
    waiting.join()
    assert said == ["adopt c1 close", "abort", "thaw"]


def test_criu_that_outlives_the_engine_is_waited_for(config: Config, tmp_path: Path, said: list[str]) -> None:
    directory = _abandoned(config, _journal(tmp_path))
    with _user(directory, "0.3"):
        recover(config, parts=[Recorder(said)])
        assert said == ["adopt c1 close", "abort", "thaw"]
        assert scratch.users(directory) == {}


def test_criu_that_no_longer_moves_is_killed(
    config: Config, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "STALLED_S", 0.3)
    directory = _abandoned(config, _journal(tmp_path))
    with _user(directory, "60") as process:
        recover(config, parts=[Recorder(said)])
        assert process.wait() == -signal.SIGKILL
    assert said == ["adopt c1 close", "abort", "thaw"]


def test_interrupted_removal_of_restored_images_is_finished(config: Config) -> None:
    doomed = config.run_dir / "restore" / ".doomed-0123"
    (doomed / "images").mkdir(parents=True)
    waiting = config.run_dir / "restore" / "default" / "c1"
    waiting.mkdir(parents=True)
    recover(config)
    _until(lambda: not doomed.exists())
    assert waiting.exists()


def _journal(tmp_path: Path, *, thaws: bool = True) -> Journal:
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    container = Container("c1", "default", tmp_path, 1, tmp_path)
    return Journal.of(container, Freezer(cgroup, unified=True), {"tcp": "close"}, thaws=thaws)


def _abandoned(config: Config, journal: Journal | None = None) -> Path:
    directory = work_dir(config) / "checkpoint-default-c1-1-00000000"
    directory.mkdir(parents=True)
    if journal is not None:
        journal.write(directory)
    return directory


def _engine(config: Config) -> tuple[subprocess.Popen[str], Path]:
    """A process that works in a scratch directory."""
    argv = [sys.executable, "-c", ENGINE, str(config.run_dir), "60"]
    engine = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert engine.stdout is not None
    return engine, Path(engine.stdout.readline().strip())


def _user(directory: Path, seconds: str) -> subprocess.Popen[bytes]:
    fd = os.open(directory, os.O_RDONLY)
    try:
        return subprocess.Popen(["/bin/sleep", seconds], pass_fds=[fd])
    finally:
        os.close(fd)


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
