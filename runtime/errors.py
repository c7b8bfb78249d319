"""What the engine raises: the failing step and container are in the sentence, the cause in `details`."""

from __future__ import annotations

from base.errors import CedanaError


class EngineError(CedanaError):
    """runc, CRIU or the kernel refused."""

    exit_code = 6


class CheckpointError(EngineError):
    """The checkpoint failed; the container runs on as before."""


class RestoreError(EngineError):
    """The restore failed; nothing of it is left on the node and the artifact is intact."""


class IncompatibleError(CedanaError):
    """A probe said no before anything was touched."""

    exit_code = 4


class BusyError(CedanaError):
    """Another process is checkpointing or restoring the same container."""
