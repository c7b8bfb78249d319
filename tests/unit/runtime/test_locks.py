from __future__ import annotations

import threading
from pathlib import Path

import pytest

from base.config import Config
from runtime.errors import BusyError
from runtime.locks import exclusive


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=tmp_path / "run")


def test_second_operation_on_a_container_is_refused(config: Config) -> None:
    with exclusive(config, "default", "c1"):
        with pytest.raises(BusyError, match="c1"), exclusive(config, "default", "c1"):
            pass
        with exclusive(config, "default", "c2"), exclusive(config, "k8s.io", "c1"):
            pass


def test_lock_is_gone_afterwards_also_after_an_error(config: Config) -> None:
    with pytest.raises(ValueError, match="x"), exclusive(config, "default", "c1"):
        raise ValueError("x")
    assert list((config.run_dir / "locks").iterdir()) == []
    with exclusive(config, "default", "c1"):
        pass


def test_only_one_of_many_holds_it_at_a_time(config: Config) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(200):
            try:
                with exclusive(config, "default", "c1"):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except BusyError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
