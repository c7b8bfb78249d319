"""Errors as the Task API's clients see them: a gRPC code and a sentence.

containerd and its clients compare both: the code, and for some codes the words they append to the
sentence (github.com/containerd/errdefs).
"""

from __future__ import annotations

from enum import IntEnum

from base.errors import CedanaError, NotFoundError, UsageError


class Code(IntEnum):
    """gRPC status codes (google.rpc.Code)."""

    OK = 0
    CANCELED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class TaskError(CedanaError):
    """A call of the Task API failed."""

    code = Code.UNKNOWN
    suffix = ""

    def __str__(self) -> str:
        return f"{self.message}: {self.suffix}" if self.suffix else self.message


class InvalidArgument(TaskError):
    code = Code.INVALID_ARGUMENT
    suffix = "invalid argument"


class NotFound(TaskError):
    code = Code.NOT_FOUND
    suffix = "not found"


class AlreadyExists(TaskError):
    code = Code.ALREADY_EXISTS
    suffix = "already exists"


class FailedPrecondition(TaskError):
    code = Code.FAILED_PRECONDITION
    suffix = "failed precondition"


class EngineFailure(TaskError):
    """The engine said no; the sentence, hint and decisive log line are its own."""

    def __init__(self, message: str, *, hint: str = "", details: str = "", exit_code: int = 1) -> None:
        super().__init__(message, hint=hint, details=details)
        self.exit_code = exit_code
        self.code = _ENGINE_CODES.get(exit_code, Code.UNKNOWN)

    @property
    def incompatible(self) -> bool:
        """The checkpoint does not fit this node; nothing was touched."""
        return self.exit_code == 4

    def __str__(self) -> str:
        sentence = f"{self.message} ({self.details})" if self.details else self.message
        return f"{sentence}; {self.hint}" if self.hint else sentence


_ENGINE_CODES = {
    UsageError.exit_code: Code.INVALID_ARGUMENT,
    NotFoundError.exit_code: Code.NOT_FOUND,
    4: Code.FAILED_PRECONDITION,
}


def describe(error: BaseException) -> tuple[int, str]:
    """The code and the text an exception travels with."""
    if isinstance(error, TaskError):
        return error.code, str(error)
    if isinstance(error, CedanaError):
        return Code.UNKNOWN, f"{error.message}; {error.hint}" if error.hint else error.message
    if isinstance(error, TimeoutError):
        return Code.DEADLINE_EXCEEDED, "context deadline exceeded"
    return Code.UNKNOWN, str(error) or repr(error)
