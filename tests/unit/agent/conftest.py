from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_containerd import FakeContainerd

from agent.containerd import Client
from base.config import Config


@pytest.fixture
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeContainerd]:
    # Not tmp_path: a socket's path may have 107 bytes, and that one carries the test's name.
    fake = FakeContainerd(tmp_path_factory.mktemp("ctd"))
    yield fake
    fake.stop()


@pytest.fixture
def client(containerd: FakeContainerd) -> Iterator[Client]:
    with Client(containerd.address, "default") as client:
        yield client


@pytest.fixture
def config(containerd: FakeContainerd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A node without nerdctl."""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return Config(
        containerd_address=containerd.address,
        run_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        tools_dir=tmp_path / "tools",
    )
