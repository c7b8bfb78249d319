"""Blobs as files: what an image layout and containerd's content store have in common."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from oci.errors import DigestError, StoreError
from oci.store import BlobReader, Descriptor

_DAMAGED = "the blob was damaged or tampered with; make or fetch the checkpoint again"


class Verified:
    """Reads `source`, and raises `DigestError` at its end unless it was the blob it should be."""

    def __init__(self, source: BlobReader, descriptor: Descriptor) -> None:
        self._source = source
        self._descriptor = descriptor
        self._hash = hashlib.sha256()
        self._done = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._source.read(size)
        self._account(data, ended=size < 0 or len(data) < size)
        return data

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        got = self._source.readinto(buffer)
        self._account(memoryview(buffer)[:got], ended=got < len(buffer))
        return got

    def _account(self, data: bytes | memoryview, *, ended: bool) -> None:
        self._hash.update(data)
        self._done += len(data)
        expected = self._descriptor
        if self._done > expected.size or (ended and self._done < expected.size):
            raise DigestError(
                f"the blob {expected.digest} has the wrong size: {self._done} bytes, not {expected.size}",
                hint=_DAMAGED,
            )
        if self._done == expected.size and f"sha256:{self._hash.hexdigest()}" != expected.digest:
            raise DigestError(f"the blob {expected.digest} has other content", hint=_DAMAGED)


class _Range:
    """`length` bytes of a file from where it stands; raises `DigestError` when it has fewer."""

    def __init__(self, file: BinaryIO, length: int, digest: str) -> None:
        self._file = file
        self._left = length
        self._digest = digest

    def read(self, size: int = -1, /) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        self._account(len(data), wanted)
        return data

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        wanted = min(len(buffer), self._left)
        got = self._file.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        self._account(got, wanted)
        return int(got)

    def _account(self, got: int, wanted: int) -> None:
        if got < wanted:
            raise DigestError(f"the blob {self._digest} is truncated", hint=_DAMAGED)
        self._left -= got


def blob_path(blobs: Path, digest: str) -> Path:
    """Where the blob is below the directory `blobs`; the digest has been checked to be one."""
    algorithm, _, encoded = digest.partition(":")
    return blobs / algorithm / encoded


@contextmanager
def open_blob(path: Path, descriptor: Descriptor, offset: int, length: int | None) -> Iterator[BlobReader]:
    """Reads the file of a blob as `Store.open` promises."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise StoreError(
            f"the blob {descriptor.digest} is not there", hint=_DAMAGED, details=str(error)
        ) from error
    with file:
        if offset == 0 and length is None:
            yield Verified(file, descriptor)
            return
        file.seek(offset)
        end = descriptor.size if length is None else offset + length
        yield _Range(file, end - offset, descriptor.digest)


def read_manifest_file(path: Path, digest: str, limit: int) -> bytes:
    """A manifest from its file, size bounded and digest checked."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise StoreError(f"the manifest {digest} is too large")
        body = file.read()
    if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
        raise DigestError(f"the manifest {digest} has other content", hint=_DAMAGED)
    return body
