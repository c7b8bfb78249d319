"""What waits for a container to be restored: complete or not there, and handed over to whoever reads it."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from base.config import Config
from runtime.container import Mount
from runtime.staging import Source, Staging, sweep

STORE = "registry:5000/a@sha256:" + "0" * 64


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=tmp_path / "run")


@pytest.fixture
def staging(config: Config) -> Staging:
    made = Staging.of(config, "default", "f" * 64)
    made.make()
    return made


def overlay(upper: Path) -> list[Mount]:
    options = (f"upperdir={upper}", f"workdir={upper}-work", f"lowerdir={upper}-lower")
    return [Mount("overlay", "overlay", "", options)]


def test_nothing_is_ready_before_everything_is(staging: Staging, config: Config, tmp_path: Path) -> None:
    mounts = overlay(tmp_path / "upper")
    source = Source("sha256:1", STORE)
    assert not staging.ready_for(STORE, mounts)
    assert Staging.around(staging.images, config) is None
    staging.note(source)
    assert Staging.around(staging.images, config) == staging
    assert not staging.ready_for(STORE, mounts)
    staging.note(replace(source, upper=str(tmp_path / "upper")))
    assert staging.ready_for(STORE, mounts)


def test_another_checkpoint_or_another_layer_is_not_ready(staging: Staging, tmp_path: Path) -> None:
    staging.note(Source("sha256:1", STORE, str(tmp_path / "upper")))
    assert not staging.ready_for("registry:5000/b", overlay(tmp_path / "upper"))
    assert not staging.ready_for(STORE, overlay(tmp_path / "other"))
    assert not staging.ready_for(STORE, [Mount("bind", "/somewhere")])


def test_images_of_an_orchestrator_have_no_staging(config: Config, tmp_path: Path) -> None:
    elsewhere = Staging(tmp_path / "elsewhere")
    elsewhere.make()
    elsewhere.note(Source("sha256:1", STORE))
    assert Staging.around(elsewhere.images, config) is None


def test_everything_is_for_root_alone(staging: Staging, config: Config) -> None:
    staging.note(Source("sha256:1", STORE))
    for path in (config.run_dir / "restore", *(config.run_dir / "restore").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_descriptor_goes_to_whoever_fetches(staging: Staging) -> None:
    readable, writable = os.pipe()
    assert not staging.hand_over(writable)
    with socket.socket(socket.AF_UNIX) as listener, staging.socket_path() as path:
        listener.bind(path)
        listener.listen(1)
        handing = threading.Thread(target=lambda: staging.hand_over(writable))
        handing.start()
        with listener.accept()[0] as connection:
            _, (received,), _, _ = socket.recv_fds(connection, 1, 1)
        handing.join()
        os.write(received, b"served")
        assert os.read(readable, 6) == b"served"
    assert not staging.hand_over(writable)  # a listener that has died leaves its socket
    for fd in (readable, writable, received):
        os.close(fd)


def test_a_discard_that_was_killed_is_finished(staging: Staging, config: Config) -> None:
    staging.note(Source("sha256:1", STORE))
    doomed = config.run_dir / "restore" / ".doomed-1"
    staging.path.rename(doomed)
    sweep(config)
    deadline = time.monotonic() + 10
    while doomed.exists():
        assert time.monotonic() < deadline
    staging.discard()
    assert not staging.path.exists()
