"""What a store of blobs and manifests is, whichever kind: registry, image layout, containerd's content.

`oci.artifact` and `oci.transfer` are written against `Store`; `oci.open_store` picks the implementation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from oci.errors import ArtifactError
from oci.reference import is_digest

Buffer = bytes | bytearray | memoryview

MAX_BLOB_BYTES = 1 << 42
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}")
_MAX_ANNOTATIONS = 256


@dataclass(frozen=True)
class Descriptor:
    """A blob or manifest by media type, digest and size (image-spec, descriptor.md)."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    artifact_type: str = field(default="", compare=False)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return value

    @classmethod
    def from_json(cls, value: object) -> Descriptor:
        """The descriptor in `value`, which may be hostile; raises `ArtifactError`."""
        if not isinstance(value, dict):
            raise ArtifactError("a descriptor is not a JSON object")
        media_type, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
        annotations = value.get("annotations") or {}
        artifact_type = value.get("artifactType") or ""
        if not isinstance(media_type, str) or not _MEDIA_TYPE.fullmatch(media_type):
            raise ArtifactError("a descriptor has no proper media type")
        if not isinstance(digest, str) or not is_digest(digest):
            raise ArtifactError(f"a descriptor of type {media_type} has no sha256 digest")
        if type(size) is not int or not 0 <= size <= MAX_BLOB_BYTES:
            raise ArtifactError(f"the descriptor of {digest} has no proper size")
        if not isinstance(annotations, dict) or len(annotations) > _MAX_ANNOTATIONS:
            raise ArtifactError(f"the descriptor of {digest} has malformed annotations")
        if not all(isinstance(v, str) for v in annotations.values()) or not isinstance(artifact_type, str):
            raise ArtifactError(f"the descriptor of {digest} has malformed annotations")
        return cls(media_type, digest, size, annotations, artifact_type)


class BlobReader(Protocol):
    """A blob, or part of one, read from front to back."""

    def read(self, size: int = -1, /) -> bytes: ...

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        """Fill `buffer`; fewer bytes only at the end."""


class Store(Protocol):
    def manifest(self, name: str) -> tuple[Descriptor, bytes]:
        """The manifest of a tag or digest, its digest checked; raises `NotFoundError`."""

    def exists(self, descriptor: Descriptor) -> bool: ...

    def open(
        self, descriptor: Descriptor, offset: int = 0, length: int | None = None
    ) -> AbstractContextManager[BlobReader]:
        """Read a blob. Without `length` (and from offset 0) the read that reaches the end raises
        `DigestError` when size or digest is wrong; a range is only checked to be complete."""

    def write(
        self, media_type: str, chunks: Iterable[Buffer], annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        """Store a blob of any size, from any thread. A `Sequence` is taken to be in memory as a whole."""

    def copy_from(self, source: Store, descriptor: Descriptor, mount_from: str = "") -> None:
        """Take over a blob if it is not here yet. `mount_from` is a repository (`HOST/NAME`) that may
        have it too: the same registry then takes it from there without a transfer."""

    def put_manifest(self, media_type: str, body: bytes, tag: str | None = None) -> Descriptor:
        """Store a manifest after everything it refers to; the tag makes it visible. Without a tag it
        is kept as long as another manifest refers to it."""

    def tags(self) -> list[str]: ...

    def delete(self, name: str) -> None:
        """Delete the tag, or with a digest the manifest; raises `NotFoundError`."""

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        """The manifests whose `subject` is `digest`."""

    def discard(self) -> None:
        """Drop what was written through this object and is referred to by nothing."""


_PIECE = 1 << 20


def worker_count() -> int:
    """How many threads hash, compress and transfer: two more than cores, for those that wait for the
    store; at least four transfers at a time."""
    return max(4, min(16, (os.cpu_count() or 1) + 2))


def read_blob(store: Store, descriptor: Descriptor, limit: int) -> bytes:
    """A whole small blob, verified; raises `ArtifactError` when it is larger than `limit`."""
    if descriptor.size > limit:
        raise ArtifactError(
            f"the blob {descriptor.digest} ({descriptor.media_type}) has {descriptor.size} bytes, "
            f"{limit} at most are read"
        )
    with store.open(descriptor) as reader:
        return b"".join(iter(lambda: reader.read(_PIECE), b""))
