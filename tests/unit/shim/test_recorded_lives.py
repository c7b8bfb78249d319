"""Every recorded life of containerd's own shim, played to ours: the same answers and events, in order."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shim import wire
from shim.api import task_pb2 as api
from tests.unit.shim import harness, recordings
from tests.unit.shim.recordings import Frame
from tests.unit.shim.replay import Replay

LIVES = [name for name in recordings.NAMES if any(recordings.frames(name))]
DIFFERENT: Mapping[str, str] = {
    "runc-fp.: executable file not found": "ours says why, not that a log is missing which nobod",
}
"""Where ours answers otherwise, on purpose: a pattern of the difference → the reason."""


def _play(directory: Path, frames: list[Frame]) -> Replay:
    async def play() -> Replay:
        async with harness.shim(directory) as shim:
            played = Replay(frames, shim)
            await played.run()
            return played

    return asyncio.run(play())


@pytest.mark.parametrize("name", LIVES)
def test_a_recorded_life_is_answered_alike(name: str, tmp_path: Path) -> None:
    played = _play(tmp_path, list(recordings.frames(name)))
    unexplained = [
        difference
        for difference in played.differences
        if not any(re.search(pattern, difference) for pattern in DIFFERENT)
    ]
    assert unexplained == []
    assert played.compared >= 2


# The comparison itself


def _index(frames: list[Frame], method: str, *, request: bool) -> int:
    return next(i for i, f in enumerate(frames) if f.method == method and f.sent_by_client == request)


def _other_code(frames: list[Frame]) -> None:
    index = _index(frames, "Kill", request=False)
    frames[index] = replace(frames[index], status=wire.field(1, 5) + wire.field(2, "no such process"))


def _other_field(frames: list[Frame]) -> None:
    index = _index(frames, "Delete", request=False)
    answer = api.DeleteResponse.FromString(frames[index].payload)
    answer.exit_status += 1
    frames[index] = replace(frames[index], payload=answer.SerializeToString())


def _other_identity(frames: list[Frame]) -> None:
    index = _index(frames, "Delete", request=False)
    answer = api.DeleteResponse.FromString(frames[index].payload)
    answer.pid += 1
    frames[index] = replace(frames[index], payload=answer.SerializeToString())


def _one_event_less(frames: list[Frame]) -> None:
    del frames[_index(frames, "Forward", request=True)]


def _events_in_another_order(frames: list[Frame]) -> None:
    first, second = [i for i, f in enumerate(frames) if f.method == "Forward" and f.sent_by_client][-2:]
    frames[first], frames[second] = frames[second], frames[first]


@pytest.mark.parametrize(
    "change", [_other_code, _other_field, _other_identity, _one_event_less, _events_in_another_order]
)
def test_the_comparison_notices_what_is_changed(
    change: Callable[[list[Frame]], None], tmp_path: Path
) -> None:
    frames = list(recordings.frames("TestContainerExec"))
    change(frames)
    assert _play(tmp_path, frames).differences
