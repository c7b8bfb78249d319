"""Reads memory back out of an artifact, as a restore does."""

from __future__ import annotations

from collections.abc import Iterator

from base.trace import Trace
from oci.page_stream import PageImage, PageReader

_READ_BYTES = 1 << 20


def read_back(reader: PageReader, *images: PageImage) -> list[bytes]:
    """The contents of the images, read from front to back."""
    with reader.stream(images, Trace(), "memory") as stream:

        def parts(number: int, image: PageImage) -> Iterator[bytes]:
            for offset in range(0, image.size_bytes, _READ_BYTES):
                yield from map(bytes, stream.read(number, offset, _READ_BYTES))

        return [b"".join(parts(number, image)) for number, image in enumerate(images)]


def read_range(reader: PageReader, name: str, *runs: tuple[int, int]) -> bytes:
    """The bytes of ranges (address, length) of one object."""
    return read_back(reader, PageImage(name, runs))[0]
