"""What a dump was made with, kept beside the CRIU images as `cedana.json`.

Written at the checkpoint, replayed at the restore: the CRIU settings, the participants' records and the
processes. Images made by another tool have none; then everything is asked of CRIU
that a restore may need. The file may come out of an artifact: `read` checks its shape.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hooks.participant import CriuSettings
from runtime.errors import RestoreError
from runtime.probe import Process

_NAME = "cedana.json"
_ALLOWED_FLAGS = frozenset(
    {
        "ext-unix-sk",
        "file-locks",
        "force-irmap",
        "link-remap",
        "skip-in-flight",
        "tcp-close",
        "tcp-established",
    }
)
_ALLOWED_VALUES = frozenset({"ghost-limit"})
"""Options an artifact may replay; everything else it names (paths, scripts) is dropped as hostile."""


@dataclass(frozen=True)
class DumpManifest:
    flags: tuple[str, ...] = ("tcp-established", "file-locks", "ext-unix-sk", "link-remap")
    values: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    participants: Mapping[str, Any] = field(default_factory=dict)
    processes: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(
        cls,
        settings: CriuSettings,
        options: Mapping[str, Any],
        participants: Mapping[str, Any],
        processes: Sequence[Process],
    ) -> DumpManifest:
        return cls(
            flags=tuple(sorted(settings.flags)),
            values=tuple(settings.values),
            options=options,
            participants=participants,
            processes=[asdict(process) for process in processes],
        )

    @classmethod
    def read(cls, directory: Path) -> DumpManifest:
        """The manifest beside the images in `directory`; the default one when there is none."""
        try:
            value = json.loads((directory / _NAME).read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise RestoreError("the checkpoint's cedana.json is broken", details=str(error)) from error
        try:
            return cls(
                flags=tuple(str(flag) for flag in value["flags"] if flag in _ALLOWED_FLAGS),
                values=tuple((str(k), str(int(v))) for k, v in value["values"] if k in _ALLOWED_VALUES),
                options=dict(value["options"]),
                participants=dict(value["participants"]),
                processes=[dict(process) for process in value["processes"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RestoreError("the checkpoint's cedana.json is malformed", details=repr(error)) from error

    def write(self, directory: Path) -> None:
        with open(os.open(directory / _NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self.__dict__, file)

    def criu_settings(self) -> CriuSettings:
        return CriuSettings(set(self.flags), [*self.values])
