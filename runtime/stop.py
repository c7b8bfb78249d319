"""A container, stopped for a checkpoint: frozen, its participants quiesced, its processes dumped.

`StoppedContainer` is what the two checkpoint sequences (`runtime.checkpoint`) share. It ends in exactly
one of three ways: `resume` (it goes on), `destroy` (it is gone, its connections silent), or, when the
block is left in any other way, an abort that undoes everything in reverse. `probe` comes before the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from base.config import Config
from base.errors import CedanaError
from base.trace import Trace
from hooks.participant import CriuSettings, Finding, Participant, Source
from runtime.container import Container
from runtime.dump import Dump
from runtime.errors import IncompatibleError
from runtime.freezer import Freezer
from runtime.probe import Report, probe
from runtime.recover import Journal


@dataclass
class StoppedContainer:
    container: Container
    participants: Sequence[Participant]
    options: dict[str, Any]
    """The user's wishes, handed to the participants: {"tcp": "established" | "close"}."""
    scratch: Path
    config: Config
    trace: Trace
    runc_options: tuple[str, ...] = ()
    """Further options of `runc checkpoint`, from the Task API."""

    criu: CriuSettings = field(init=False, default_factory=CriuSettings)
    report: Report = field(init=False)
    warnings: tuple[str, ...] = field(init=False, default=())
    _source: Source = field(init=False)
    _freezer: Freezer = field(init=False)
    _journal: Journal = field(init=False)
    _undo: ExitStack = field(init=False, default_factory=ExitStack)
    _dump: Dump | None = field(init=False, default=None)
    _thaws: bool = field(init=False, default=True)

    def __enter__(self) -> StoppedContainer:
        try:
            with self.trace.step("freeze"):
                self._freeze()
                self.probe()
            with self.trace.step("quiesce"):
                for participant in self.participants:
                    self._undo.callback(participant.abort_source, self._source)
                    participant.quiesce(self._source)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def probe(self) -> None:
        """Look before anything is touched; raises `IncompatibleError` when something cannot move.

        To be called before the block, which looks again once everything is frozen.
        """
        self.criu = CriuSettings()
        self.report = probe(self.container, self.criu)
        self._source = Source(
            container_id=self.container.id,
            pid=self.container.pid,
            pids=self.report.pids,
            spec=self.container.spec,
            scratch=self.scratch,
            options=self.options,
        )
        findings = [*self.report.findings]
        for participant in self.participants:
            findings += participant.probe_source(self._source, self.criu)
        self.warnings = tuple(
            f"{finding.message}; {finding.hint}" if finding.hint else finding.message
            for finding in findings
            if not finding.fatal
        )
        refuse(findings, f"container {self.container.name or self.container.id} cannot be checkpointed")

    def dump(self, images: Path, work: Path, *, leave_memory: bool = False) -> None:
        """Write the CRIU images of every process into `images`. The processes stay stopped.

        With `leave_memory` what anonymous memory holds stays in the processes, to be read from there, and
        CRIU waits until `finish_dump`.
        """
        images.mkdir(mode=0o700, exist_ok=True)
        self._dump = dump = Dump(self.container, self.scratch, work, self.config)
        self._undo.callback(dump.abandon)
        threads = sum(process.threads for process in self.report.processes)
        dump.start(images, self.criu, self.report.pids, threads, self.runc_options, leave_memory)
        if not leave_memory:
            self.finish_dump()

    def finish_dump(self) -> None:
        """Let CRIU end, if it waits; raises `CheckpointError` when it failed."""
        if self._dump is not None:
            self._dump.finish()

    def capture(self) -> dict[str, Any]:
        """What each participant has to say, by its name."""
        return {participant.name: participant.capture(self._source) for participant in self.participants}

    def resume(self) -> None:
        """Let the container go on."""
        self.finish_dump()
        for participant in reversed(self.participants):
            participant.resume_source(self._source)
        if self._thaws:
            self._freezer.thaw()
        Journal.close(self.scratch)
        self._undo.pop_all()

    def destroy(self) -> None:
        """End every process without a word reaching the other end of its connections."""
        self.finish_dump()
        self._journal.write_ending(self.scratch)
        self._undo.pop_all()
        self._freezer.kill()
        for participant in reversed(self.participants):
            try:
                participant.release_source(self._source)
            except CedanaError as error:
                self.warnings += (f"the container has ended, but: {error.message} ({error.details})",)
        Journal.close(self.scratch)

    def _freeze(self) -> None:
        self._freezer = Freezer.of(self.container)
        self._thaws = not self._freezer.frozen
        self._journal = Journal.of(self.container, self._freezer, self.options, thaws=self._thaws)
        self._undo.callback(Journal.close, self.scratch)
        self._journal.write(self.scratch)
        if self._thaws:
            self._undo.callback(self._freezer.thaw)
            self._freezer.freeze()


def refuse(findings: Sequence[Finding], what: str) -> None:
    """Raise `IncompatibleError` naming every fatal finding; do nothing when there is none."""
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        raise IncompatibleError(
            f"{what}: {'; '.join(finding.message for finding in fatal)}",
            hint="; ".join(dict.fromkeys(finding.hint for finding in fatal if finding.hint)),
        )
