"""The page index: which chunk of which pack holds which range of which memory object.

A binary table (docs/artifact.md, "The page index"), because a container of 100 GiB has 400,000 chunks.
Read from an artifact it is hostile: `decode` checks every count, offset and length against what is there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oci.errors import ArtifactError

CHUNK_BYTES = 256 * 1024
"""A chunk never crosses a multiple of this address."""
ZERO = 0xFFFFFFFF
"""The chunk number of a range that is all zero."""
MAX_INDEX_BYTES = 1 << 30

_MAGIC = b"CEDANAIX"
_VERSION = 1
_HEAD = struct.Struct("<8sIIII")
_CHUNK = struct.Struct("<IIII32s")
_OBJECT = struct.Struct("<HI")
_EXTENT = struct.Struct("<QQII")
_NAME = re.compile(r"[!-~]{1,255}")
_ADDRESS_END = 1 << 64


class Chunk(NamedTuple):
    """`length` bytes whose BLAKE3 is `digest`, as `stored` bytes at `offset` of pack number `pack`.

    Stored as they are when `stored == length`, else as one zstd frame.
    """

    pack: int
    offset: int
    stored: int
    length: int
    digest: bytes


class Extent(NamedTuple):
    """The range [address, address + length) of an object: bytes of `chunk` from `offset` on, or zero."""

    address: int
    length: int
    chunk: int
    offset: int


@dataclass(frozen=True)
class Index:
    chunks: Sequence[Chunk]
    objects: Mapping[str, Sequence[Extent]]
    """Extents ascending by address, none overlapping another."""

    def encode(self) -> bytes:
        parts = [_HEAD.pack(_MAGIC, _VERSION, CHUNK_BYTES, len(self.chunks), len(self.objects))]
        parts += [_CHUNK.pack(*chunk) for chunk in self.chunks]
        for name, extents in self.objects.items():
            encoded = name.encode("ascii")
            parts += [_OBJECT.pack(len(encoded), len(extents)), encoded]
            parts += [_EXTENT.pack(*extent) for extent in extents]
        return b"".join(parts)

    @classmethod
    def decode(cls, body: bytes, pack_sizes: Sequence[int]) -> Index:
        """The index in `body`, for packs of these sizes; raises `ArtifactError` for anything wrong."""
        reader = _Reader(body)
        magic, version, chunk_bytes, chunk_count, object_count = reader.one(_HEAD)
        if magic != _MAGIC or version != _VERSION or chunk_bytes != CHUNK_BYTES:
            raise ArtifactError("the page index is none, or of another version")
        chunks = [Chunk(*fields) for fields in reader.many(_CHUNK, chunk_count)]
        for chunk in chunks:
            if chunk.pack >= len(pack_sizes) or chunk.offset + chunk.stored > pack_sizes[chunk.pack]:
                raise ArtifactError("the page index points outside its packs")
            if not 0 < chunk.stored <= chunk.length <= CHUNK_BYTES:
                raise ArtifactError("the page index has a chunk of impossible size")
        objects: dict[str, Sequence[Extent]] = {}
        for _ in range(object_count):
            name_length, extent_count = reader.one(_OBJECT)
            name = check_name(reader.take(name_length).decode("latin-1"))
            if name in objects:
                raise ArtifactError(f"the page index has the object {name} twice")
            extents = [Extent(*fields) for fields in reader.many(_EXTENT, extent_count)]
            _check_extents(name, extents, chunks)
            objects[name] = extents
        reader.end()
        return cls(chunks, objects)


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ArtifactError(f"the page index has an object of the malformed name {name[:100]!r}")
    return name


def _check_extents(name: str, extents: Sequence[Extent], chunks: Sequence[Chunk]) -> None:
    end = 0
    for extent in extents:
        if extent.address < end or extent.length == 0:
            raise ArtifactError(f"the page index has overlapping ranges of {name}")
        end = extent.address + extent.length
        if end > _ADDRESS_END:
            raise ArtifactError(f"the page index has a range of {name} past the end of memory")
        if extent.chunk == ZERO:
            continue
        if extent.chunk >= len(chunks) or extent.offset + extent.length > chunks[extent.chunk].length:
            raise ArtifactError(f"the page index has a range of {name} that no chunk holds")


class _Reader:
    def __init__(self, body: bytes) -> None:
        self._rest = memoryview(body)

    def take(self, size: int) -> bytes:
        if size > len(self._rest):
            raise ArtifactError("the page index is truncated")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)

    def one(self, record: struct.Struct) -> tuple[Any, ...]:
        return record.unpack(self.take(record.size))

    def many(self, record: struct.Struct, count: int) -> list[tuple[Any, ...]]:
        return list(record.iter_unpack(self.take(record.size * count)))

    def end(self) -> None:
        if self._rest:
            raise ArtifactError("the page index has bytes after its end")
