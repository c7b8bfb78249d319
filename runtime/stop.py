"""A container, stopped for a checkpoint: frozen, its participants quiesced, its processes dumped.

`StoppedContainer` is what the two checkpoint sequences (`runtime.checkpoint`) share. It ends in exactly
one of three ways: `resume` (it goes on), `destroy` (it is gone, its connections silent), or, when the
block is left in any other way, an abort that undoes everything in reverse. `probe` may come before the block.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from base.config import Config
from base.trace import Trace
from hooks.participant import CriuSettings, Finding, Participant, Source
from runtime import criu, rlimits
from runtime.container import Container
from runtime.errors import CheckpointError, IncompatibleError
from runtime.freezer import Freezer
from runtime.probe import Report, probe
from runtime.runc import last_error

_CRIU_TIMEOUT_S = 10
_THREADS_PER_S = 100
"""How long CRIU may take to stop what is stopped already: its own default, and more for many threads."""


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
    _undo: ExitStack = field(init=False, default_factory=ExitStack)
    _thaws: bool = field(init=False, default=True)

    def __enter__(self) -> StoppedContainer:
        self.probe()
        try:
            with self.trace.step("freeze"):
                self._freeze()
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

        Entering the block looks again: the container went on meanwhile.
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

    def dump(self, images: Path, work: Path) -> None:
        """Write the CRIU images of every process into `images`. The processes stay stopped."""
        images.mkdir(mode=0o700, exist_ok=True)
        work.mkdir(mode=0o700, parents=True, exist_ok=True)
        criu_config = self.scratch / "criu.conf"
        threads = sum(process.threads for process in self.report.processes)
        settings = CriuSettings(
            self.criu.flags,
            [
                *self.criu.values,
                ("network-lock", "skip"),
                ("manage-cgroups", "ignore"),
                ("timeout", str(_CRIU_TIMEOUT_S + threads // _THREADS_PER_S)),
            ],
        )
        criu.write_config(criu_config, settings)
        log = self.scratch / "runc.log"
        argv = [
            self.config.tool(self.container.runc_binary),
            *("--root", str(self._shadow_state(criu_config))),
            *("--log", str(log), "--log-format", "json"),
            "checkpoint",
            *("--image-path", str(images), "--work-path", str(work), "--leave-running"),
            *self.runc_options,
            self.container.id,
        ]
        with rlimits.answering(self.report.pids) as launcher:
            done = subprocess.run(
                [*launcher.prefix, *argv],
                pass_fds=launcher.pass_fds,
                capture_output=True,
                text=True,
                check=False,
                env=criu.environment(self.config),
            )
        if done.returncode != 0:
            self._raise_dump_failed(work / "dump.log", last_error(log) or done.stderr.strip())

    def capture(self) -> dict[str, Any]:
        """What each participant has to say, by its name."""
        return {participant.name: participant.capture(self._source) for participant in self.participants}

    def resume(self) -> None:
        """Let the container go on."""
        for participant in reversed(self.participants):
            participant.resume_source(self._source)
        if self._thaws:
            self._freezer.thaw()
        self._undo.pop_all()

    def destroy(self) -> None:
        """End every process without a word reaching the other end of its connections."""
        self._freezer.kill()
        self._undo.pop_all()
        for participant in reversed(self.participants):
            participant.release_source(self._source)

    def _freeze(self) -> None:
        self._freezer = Freezer.of(self.container.pid)
        self._thaws = not self._freezer.frozen
        if self._thaws:
            self._undo.callback(self._freezer.thaw)
            self._freezer.freeze()

    def _shadow_state(self, criu_config: Path) -> Path:
        """A copy of runc's state that differs only in the CRIU configuration it names.

        runc learns of that file from the annotation the container was *created* with; the copy makes any
        runc container checkpointable, and runc's own record is never written to.
        """
        state = self.container.runc_state()
        labels = state["config"].get("labels") or []
        kept = [label for label in labels if not label.startswith(f"{criu.CONFIG_ANNOTATION}=")]
        state["config"]["labels"] = [*kept, f"{criu.CONFIG_ANNOTATION}={criu_config}"]
        root = self.scratch / "runc"
        directory = root / self.container.id
        directory.mkdir(mode=0o700, parents=True)
        with open(os.open(directory / "state.json", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(state, file)
        return root

    def _raise_dump_failed(self, log: Path, runc_error: str) -> None:
        name = f"{self.container.namespace}-{self.container.id}-dump"
        failure = criu.failure(log, self.config.log_dir, name)
        hint = failure.hint or "the container runs on; the log says more"
        raise CheckpointError(
            f"CRIU could not dump container {self.container.name or self.container.id}: {runc_error}",
            hint=f"{hint} (whole log: {failure.log})" if failure.log else hint,
            details=failure.line,
        )


def refuse(findings: Sequence[Finding], what: str) -> None:
    """Raise `IncompatibleError` naming every fatal finding; do nothing when there is none."""
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        raise IncompatibleError(
            f"{what}: {'; '.join(finding.message for finding in fatal)}",
            hint="; ".join(dict.fromkeys(finding.hint for finding in fatal if finding.hint)),
        )


def make_scratch(config: Config, name: str) -> Path:
    """A fresh private directory under `run_dir`, for one operation."""
    parent = config.run_dir / "work"
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory = parent / f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
    directory.mkdir(mode=0o700)
    return directory


def remove_tree(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
