"""Every state of a process against every verb: what is refused, in which words, with which code."""

from __future__ import annotations

import pytest

from shim import execs, init
from shim.errors import Code, TaskError
from shim.process import State

INIT_VERBS = ("start", "delete", "pause", "resume", "update", "checkpoint", "exec", "kill", "resize")
ALLOWED = {
    init.Created: {"start", "delete", "update", "exec", "kill", "resize"},
    init.CreatedCheckpoint: {"start", "delete", "update", "kill", "resize"},
    init.Running: {"pause", "update", "checkpoint", "exec", "kill", "resize"},
    init.Paused: {"resume", "update", "checkpoint", "kill", "resize"},
    init.Stopped: {"delete", "kill", "resize"},
    init.Deleted: set(),
}
EXEC_VERBS = ("start", "delete", "kill", "resize")
EXEC_ALLOWED = {
    execs.Created: {"start", "delete", "kill", "resize"},
    execs.Running: {"kill", "resize"},
    execs.Stopped: {"delete", "kill"},
    execs.Deleted: set(),
}
CELLS = [
    *((state, verb, verb in allowed) for state, allowed in ALLOWED.items() for verb in INIT_VERBS),
    *((state, verb, verb in allowed) for state, allowed in EXEC_ALLOWED.items() for verb in EXEC_VERBS),
]


@pytest.mark.parametrize(("state", "verb", "allowed"), CELLS)
def test_a_state_allows_what_containerds_own_shim_allows(
    state: type[State], verb: str, allowed: bool
) -> None:
    if allowed:
        state().require(verb)
        return
    with pytest.raises(TaskError) as refused:
        state().require(verb)
    assert str(refused.value).startswith(f"cannot {verb} ")
    gone = state in (init.Deleted, execs.Deleted) and verb in ("delete", "kill")
    assert refused.value.code == (Code.NOT_FOUND if gone else Code.UNKNOWN)


@pytest.mark.parametrize(
    ("state", "verb", "sentence"),
    [
        (init.Created, "pause", "cannot pause task in created state"),
        (init.Created, "checkpoint", "cannot checkpoint a task in created state"),
        (init.CreatedCheckpoint, "exec", "cannot exec in a created state"),
        (init.Running, "resume", "cannot resume a running process"),
        (init.Paused, "pause", "cannot pause a paused container"),
        (init.Paused, "exec", "cannot exec in a paused state"),
        (init.Stopped, "resume", "cannot resume a stopped container"),
        (init.Deleted, "delete", "cannot delete a deleted process: not found"),
        (execs.Stopped, "resize", "cannot resize a stopped container"),
    ],
)
def test_the_words_are_those_that_clients_know(state: type[State], verb: str, sentence: str) -> None:
    with pytest.raises(TaskError) as refused:
        state().require(verb)
    assert str(refused.value) == sentence
