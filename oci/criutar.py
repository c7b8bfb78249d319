"""The CRIU images of a checkpoint as a tar stream: flat, regular files, nothing else.

The reader takes exactly what the writer makes (POSIX ustar headers of regular files whose names have no
slash) and refuses all other forms of tar: links, devices, directories, long-name and extended headers.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from oci.errors import ArtifactError
from oci.store import BlobReader

_BLOCK = tarfile.BLOCKSIZE
_PIECE = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,99}")
MAX_FILES = 1 << 17
MAX_BYTES = 1 << 33
"""Images without memory pages are megabytes; deleted files that were open add their size."""


def pack(paths: Iterable[Path]) -> Iterator[bytes]:
    """A tar stream of the files at `paths`, each under its bare name."""
    for path in paths:
        if not _NAME.fullmatch(path.name):
            raise ArtifactError(f"the CRIU image {path.name!r} has an impossible name")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = tarfile.TarInfo(path.name)
            header.size, header.mode = size, 0o600
            yield header.tobuf(tarfile.USTAR_FORMAT)
            left = size
            while left:
                piece = file.read(min(_PIECE, left))
                if not piece:
                    raise ArtifactError(f"the CRIU image {path.name} became shorter while it was read")
                left -= len(piece)
                yield piece
            yield bytes(-size % _BLOCK)
    yield bytes(2 * _BLOCK)


def extract(stream: BlobReader, directory: Path) -> None:
    """Write the files of a tar stream into `directory` (0600); raises `ArtifactError` for anything odd."""
    files = total = 0
    while (header := _header(stream)) is not None:
        name, size = header
        files, total = files + 1, total + size
        if files > MAX_FILES or total > MAX_BYTES:
            raise ArtifactError(f"the CRIU images are too many or too large: {files} files, {total} bytes")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(directory / name, flags, 0o600)
        except FileExistsError as error:
            raise ArtifactError(f"the CRIU image {name} is there twice") from error
        with open(fd, "wb", buffering=0) as file:
            left = size
            while left:
                piece = _exactly(stream, min(_PIECE, left))
                file.write(piece)
                left -= len(piece)
        if any(_exactly(stream, -size % _BLOCK)):
            raise ArtifactError("the CRIU images have data between files")
    while piece := stream.read(_PIECE):
        if any(piece):
            raise ArtifactError("the CRIU images have data after their end")


def _header(stream: BlobReader) -> tuple[str, int] | None:
    """Name and size of the next file; None at the end mark."""
    block = _exactly(stream, _BLOCK)
    if not any(block):
        return None
    try:
        header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise ArtifactError("the CRIU images are not a proper tar stream", details=str(error)) from error
    if header.type != tarfile.REGTYPE or block[257:263] != b"ustar\0":
        raise ArtifactError(f"the CRIU images hold {header.name!r}, which is not a regular file")
    if not _NAME.fullmatch(header.name):
        raise ArtifactError(f"the CRIU images hold a file of the impossible name {header.name!r}")
    if not 0 <= header.size <= MAX_BYTES:
        raise ArtifactError(f"the CRIU image {header.name} has an impossible size")
    return header.name, header.size


def _exactly(stream: BlobReader, size: int) -> bytes:
    data = stream.read(size)
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            raise ArtifactError("the CRIU images are truncated")
        data += more
    return data
