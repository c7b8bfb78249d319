"""The participants, in the order they quiesce; everything is undone in the reverse order."""

from __future__ import annotations

from hooks.network import NetworkParticipant
from hooks.participant import Participant


def participants() -> tuple[Participant, ...]:
    return (NetworkParticipant(),)
