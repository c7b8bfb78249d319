"""The interface of a participant (docs/architecture.md, section 2).

The engine runs participants in order and knows nothing of what they do. `capture` returns a JSON
value that travels in the artifact's config under the participant's name and comes back to
`prepare` and `restore` on the target. It is hostile there until checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Source:
    """The running container a participant looks at during a checkpoint."""

    container_id: str
    pid: int
    """Init, in the host's pid namespace."""
    pids: tuple[int, ...]
    """Every process of the container, host pids, init first."""
    spec: Mapping[str, Any]
    """The OCI runtime spec (config.json) it runs with."""
    scratch: Path
    """A private directory (0700) for this checkpoint."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The user's wishes, e.g. {"tcp": "established" | "close"}."""


@dataclass(frozen=True)
class Target:
    """The container being restored: nothing of it runs yet."""

    container_id: str
    spec: dict[str, Any]
    """The target's own spec. `prepare` may change it (a netns path) before runc sees it."""
    bundle: Path
    rootfs: Path
    scratch: Path
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What a probe found: `fatal` stops the operation before anything is touched."""

    message: str
    hint: str = ""
    fatal: bool = False


@dataclass
class CriuSettings:
    """CRIU options the participants and the probe ask for; written to the CRIU configuration file.

    `flags` are bare options ("tcp-established"), `values` are repeatable key/value options
    (("external", "net[4026532]:extRootNetNS")).
    """

    flags: set[str] = field(default_factory=set)
    values: list[tuple[str, str]] = field(default_factory=list)


class Participant(Protocol):
    name: str

    def probe_source(self, source: Source, criu: CriuSettings) -> Sequence[Finding]:
        """Look, touch nothing; say what will stop us and what CRIU needs for the dump."""

    def quiesce(self, source: Source) -> None:
        """Stop the state from changing. Undone by `resume_source` or `abort_source`."""

    def capture(self, source: Source) -> dict[str, Any]:
        """Describe what this participant owns, as JSON, while everything is frozen."""

    def resume_source(self, source: Source) -> None:
        """Let go after a checkpoint that leaves the container running."""

    def release_source(self, source: Source) -> None:
        """Clean up after the container was destroyed at the end of a checkpoint."""

    def abort_source(self, source: Source) -> None:
        """Undo `quiesce`. Always safe, idempotent, never raises."""

    def adopt_source(self, source: Source) -> None:
        """Take over what `quiesce` did in another process, which was killed: by what it left in the same
        `scratch`. Of `source` only that, the id, the pids and the options are known. `abort_source` or
        `release_source` follows; both do nothing if there was nothing to take over."""

    def probe_target(
        self, target: Target, captured: Mapping[str, Any], criu: CriuSettings
    ) -> Sequence[Finding]:
        """Can this node take it?"""

    def prepare(self, target: Target, captured: Mapping[str, Any], criu: CriuSettings) -> None:
        """Make the place: netns, addresses, devices. Undone by `abort_target`."""

    def resume_target(self, target: Target, captured: Mapping[str, Any]) -> None:
        """Let go: the processes are back and about to run (or just running)."""

    def abort_target(self, target: Target) -> None:
        """Remove everything `prepare` made. Always safe, idempotent, never raises."""
