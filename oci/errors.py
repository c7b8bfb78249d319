"""What stores and artifacts raise: the blob, tag or registry is in the sentence."""

from __future__ import annotations

from base.errors import CedanaError


class StoreError(CedanaError):
    """A registry or an image layout could not be read or written."""

    exit_code = 5


class DigestError(StoreError):
    """Bytes are not those their digest promises: truncated or tampered."""


class ArtifactError(StoreError):
    """Not a checkpoint artifact, of another format version, malformed, or too large."""


class AuthError(StoreError):
    """The registry does not let us in."""
