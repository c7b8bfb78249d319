"""A short run of `bench/fuzz.py`: bad messages by the thousand break nothing."""

from __future__ import annotations

import pytest

from bench.fuzz import fuzz


@pytest.mark.parametrize("seed", [1, 2])
def test_bad_messages_are_answered_or_dropped(seed: int) -> None:
    found = fuzz(10_000, seed)
    assert found.failures == []
    assert found.inputs >= 10_000
    assert found.answers > 1_000
