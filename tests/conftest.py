"""Fixtures of the tests that need real nodes: one bed for the session, names that clean themselves up."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.node.bed import Bed


@pytest.fixture(scope="session")
def bed() -> Iterator[Bed]:
    """Two nodes and a registry, for the whole session."""
    from tests.node.bed import bed as running_bed

    with running_bed() as made:
        yield made


@pytest.fixture
def name(bed: Bed, request: pytest.FixtureRequest) -> Iterator[str]:
    """A container name of the test's own; whatever carries it is removed from both nodes."""
    test = "".join(c if c.isalnum() else "-" for c in request.node.name.removeprefix("test_").lower())
    made = f"{test[:40].strip('-')}-{os.urandom(2).hex()}"
    yield made
    for node in bed.nodes:
        with contextlib.suppress(Exception):
            node.remove_container(made)
