"""What the agent raises: containerd's refusals, and containers it cannot act on."""

from __future__ import annotations

from base.errors import CedanaError, NotFoundError
from runtime.errors import IncompatibleError


class ContainerdError(CedanaError):
    """containerd could not be reached, or answered with an error."""


class ContainerdNotFoundError(ContainerdError, NotFoundError):
    """containerd knows no such object."""

    exit_code = NotFoundError.exit_code


class AlreadyExistsError(ContainerdError):
    """containerd, or nerdctl, has an object of that name."""


class FailedPreconditionError(ContainerdError):
    """containerd, or the runtime behind it, says that the time or the place is wrong."""


class NotRunningError(CedanaError):
    """The container exists, but has no process to checkpoint."""


class NotAllowedError(IncompatibleError):
    """The checkpointed container had privileges that a restore grants only by name (`--allow`)."""
