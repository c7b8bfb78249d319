"""The root of every error a user can see.

A `CedanaError` carries the three things the command line prints: a sentence saying what failed, a
`hint` saying what to do about it, and `details`, the decisive line of whatever log knows more.
"""

from __future__ import annotations


class CedanaError(Exception):
    """Something failed that a person has to know about.

    `exit_code` is the status the command line ends with (documented in docs/cli.md).
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "", details: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return self.message


class UsageError(CedanaError):
    """The request itself is wrong: a malformed reference, an unknown option value."""

    exit_code = 2


class NotFoundError(CedanaError):
    """The container, artifact, image or file named does not exist."""

    exit_code = 3
