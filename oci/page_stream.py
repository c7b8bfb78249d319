"""Memory out of an artifact: page images read while their chunks arrive, each verified before it is given.

A `PageStream` is read by whoever restores, mostly from front to back. Threads fetch, decompress and check
what comes next, as far ahead as a bounded number of bytes; what is asked for out of turn is fetched at once.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import blake3
import zstandard

from base.malloc import keep_freed_memory
from base.trace import Trace
from oci.errors import ArtifactError, DigestError
from oci.index import CHUNK_BYTES, ZERO, Chunk, Index
from oci.store import BlobReader, Descriptor, Store, worker_count

_AHEAD_BYTES = 128 << 20
_SEGMENT_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_ZEROS = memoryview(bytes(CHUNK_BYTES))


@dataclass(frozen=True)
class PageImage:
    """A file made of memory: ranges (address, length) of the object `name`, one after the other."""

    name: str
    runs: Sequence[tuple[int, int]]

    @property
    def size_bytes(self) -> int:
        return sum(length for _, length in self.runs)


class PageReader:
    """The memory objects of an artifact."""

    def __init__(self, store: Store, index: Index, packs: Sequence[Descriptor]) -> None:
        self._store = store
        self._index = index
        self._packs = packs

    def objects(self) -> list[str]:
        return list(self._index.objects)

    def size_bytes(self, object_name: str) -> int:
        """Bytes of memory the object has, zero ones included."""
        return sum(extent.length for extent in self._index.objects[object_name])

    def zero_ranges(self, object_name: str) -> list[tuple[int, int]]:
        """The ranges [start, end) of an object that are zero, ascending."""
        return [
            (extent.address, extent.address + extent.length)
            for extent in self._index.objects.get(object_name, ())
            if extent.chunk == ZERO
        ]

    def stream(self, images: Sequence[PageImage], trace: Trace, step: str) -> PageStream:
        """The contents of `images`, best read in their order; its progress is that of `step`.

        Raises `ArtifactError` when an image needs memory that is not in the index.
        """
        pieces = [list(_pieces(self._index, image)) for image in images]
        return PageStream(self._store, self._index.chunks, self._packs, pieces, trace, step)


@dataclass(frozen=True, slots=True)
class _Piece:
    """`length` bytes at `offset` of an image: those of `chunk` from `start` on, or zeros."""

    offset: int
    length: int
    chunk: int
    start: int


def _pieces(index: Index, image: PageImage) -> Iterator[_Piece]:
    extents = index.objects.get(image.name)
    if extents is None:
        raise ArtifactError(f"the checkpoint has no memory object {image.name}")
    starts = [extent.address for extent in extents]
    offset = 0
    for address, length in image.runs:
        end = address + length
        position = bisect_right(starts, address) - 1
        while address < end:
            extent = extents[position] if 0 <= position < len(extents) else None
            if extent is None or not extent.address <= address < extent.address + extent.length:
                raise ArtifactError(f"the checkpoint has no memory at {address:#x} of {image.name}")
            size = min(end, extent.address + extent.length) - address
            yield _Piece(offset, size, extent.chunk, extent.offset + address - extent.address)
            offset, address, position = offset + size, address + size, position + 1


@dataclass(slots=True, eq=False)
class _Segment:
    """Chunks that follow each other in a pack, fetched in one go."""

    pack: int
    chunks: list[int]
    size_bytes: int
    """Uncompressed."""
    claimed: bool = False
    done: bool = False


class PageStream:
    """A context manager: fetches ahead while it is entered. `read` may be called from any thread."""

    def __init__(
        self,
        store: Store,
        chunks: Sequence[Chunk],
        packs: Sequence[Descriptor],
        images: Sequence[Sequence[_Piece]],
        trace: Trace,
        step: str,
    ) -> None:
        keep_freed_memory()
        self.error: BaseException | None = None
        """What fetching met; every read after it raises it."""
        self._store = store
        self._chunks = chunks
        self._packs = packs
        self._images = images
        self._offsets = [[piece.offset for piece in pieces] for pieces in images]
        self._trace = trace
        self._step = step
        self._wanted: dict[int, int] = {}
        """Bytes of each chunk that are still to be read."""
        for pieces in images:
            for piece in pieces:
                if piece.chunk != ZERO:
                    self._wanted[piece.chunk] = self._wanted.get(piece.chunk, 0) + piece.length
        self._segments = list(_segments(chunks, self._wanted))
        self._segment_of = {chunk: segment for segment in self._segments for chunk in segment.chunks}
        self._next = 0
        self._total = sum(chunks[number].stored for number in self._wanted)
        self._fetched = 0
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._ready: dict[int, memoryview] = {}
        self._ahead = 0
        """Bytes of the chunks in `_ready`, and of those being fetched."""
        self._in_part: set[int] = set()
        """Chunks in `_ready` of which something has been read, and something has not."""
        self._closing = False
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> PageStream:
        for number in range(min(worker_count(), len(self._segments))):
            thread = threading.Thread(target=self._work, name=f"page-stream-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closing = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join()
        self._ready.clear()

    def read(self, image: int, offset: int, size: int) -> list[memoryview]:
        """The bytes [offset, offset + size) of an image, in parts; fewer at its end.

        Raises `DigestError` when a chunk is not what the index promises, or the store's error.
        """
        parts: list[memoryview] = []
        pieces = self._images[image]
        position = max(0, bisect_right(self._offsets[image], offset) - 1)
        end = offset + size
        while offset < end and position < len(pieces):
            piece = pieces[position]
            within = offset - piece.offset
            length = min(end, piece.offset + piece.length) - offset
            if length <= 0:
                break
            if piece.chunk == ZERO:
                parts += _zeros(length)
            else:
                start = piece.start + within
                parts.append(self._chunk(piece.chunk)[start : start + length])
                self._gave(piece.chunk, length)
            offset, position = offset + length, position + 1
        return parts

    def _chunk(self, number: int) -> memoryview:
        with self._lock:
            while True:
                if self.error is not None:
                    raise self.error
                if (data := self._ready.get(number)) is not None:
                    return data
                segment = self._segment_of[number]
                if not segment.claimed:
                    self._evict()
                elif segment.done:  # given before, and forgotten since
                    segment = _Segment(segment.pack, [number], self._chunks[number].length)
                else:
                    self._arrived.wait()
                    continue
                self._claim(segment)
                break
        self._fetch(segment)
        return self._chunk(number)

    def _gave(self, number: int, length: int) -> None:
        """Forget a chunk of which everything has been read."""
        with self._lock:
            self._wanted[number] -= length
            if self._wanted[number] > 0:
                self._in_part.add(number)
            else:
                self._forget(number)

    def _evict(self) -> None:
        """Make room by forgetting what was read in part: the other part may be wanted much later."""
        if self._ahead >= _AHEAD_BYTES:
            for number in list(self._in_part):
                self._forget(number)

    def _forget(self, number: int) -> None:
        self._in_part.discard(number)
        if self._ready.pop(number, None) is not None:
            self._ahead -= self._chunks[number].length
            if self._ahead < _AHEAD_BYTES:
                self._room.notify()

    def _claim(self, segment: _Segment) -> None:
        segment.claimed = True
        self._ahead += segment.size_bytes

    def _work(self) -> None:
        while True:
            with self._lock:
                while self._ahead >= _AHEAD_BYTES and not self._ended:
                    self._room.wait()
                while self._next < len(self._segments) and self._segments[self._next].claimed:
                    self._next += 1
                if self._ended or self._next == len(self._segments):
                    self._room.notify_all()
                    return
                segment = self._segments[self._next]
                self._claim(segment)
                if self._ahead < _AHEAD_BYTES:
                    self._room.notify()
            self._fetch(segment)

    @property
    def _ended(self) -> bool:
        return self._closing or self.error is not None

    def _fetch(self, segment: _Segment) -> None:
        """Bring the chunks of a claimed segment; an error becomes everybody's."""
        try:
            begin = self._chunks[segment.chunks[0]].offset
            final = self._chunks[segment.chunks[-1]]
            decompressor = zstandard.ZstdDecompressor()
            length = final.offset + final.stored - begin
            with self._store.open(self._packs[segment.pack], begin, length) as blob:
                for number, stored in _stored(blob, self._chunks, segment.chunks):
                    chunk = self._chunks[number]
                    data = _verified(stored, chunk, decompressor)
                    with self._lock:
                        if self._ended:
                            return
                        self._ready[number] = data
                        self._fetched += chunk.stored
                        self._arrived.notify_all()
                    self._trace.progress(self._step, min(self._fetched, self._total), self._total)
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
                self._room.notify_all()
        finally:
            with self._lock:
                segment.done = True
                self._arrived.notify_all()


def _zeros(length: int) -> list[memoryview]:
    whole, rest = divmod(length, CHUNK_BYTES)
    return [_ZEROS] * whole + ([_ZEROS[:rest]] if rest else [])


def _segments(chunks: Sequence[Chunk], numbers: Iterable[int]) -> Iterator[_Segment]:
    """The chunks in the order they are wanted, as long as they follow each other in one pack."""
    segment: _Segment | None = None
    end = size = 0
    for number in numbers:
        chunk = chunks[number]
        near = segment is not None and chunk.pack == segment.pack and 0 <= chunk.offset - end <= _PIECE_BYTES
        if segment is None or not near or size + chunk.stored > _SEGMENT_BYTES:
            if segment is not None:
                yield segment
            segment, size = _Segment(chunk.pack, [], 0), 0
        segment.chunks.append(number)
        segment.size_bytes += chunk.length
        end, size = chunk.offset + chunk.stored, size + chunk.stored
    if segment is not None:
        yield segment


def _stored(
    blob: BlobReader, chunks: Sequence[Chunk], numbers: Sequence[int]
) -> Iterator[tuple[int, memoryview]]:
    """Each chunk's number and stored bytes, from a reader that stands at the first; read in whole chunks of
    about a MiB."""
    position = chunks[numbers[0]].offset
    first = 0
    while first < len(numbers):
        last, end = first, position
        while last < len(numbers) and end - position < _PIECE_BYTES:
            end = chunks[numbers[last]].offset + chunks[numbers[last]].stored
            last += 1
        piece = memoryview(blob.read(end - position))
        if len(piece) < end - position:
            raise DigestError("a page pack is truncated")
        for number in numbers[first:last]:
            offset = chunks[number].offset - position
            yield number, piece[offset : offset + chunks[number].stored]
        first, position = last, end


def _verified(stored: memoryview, chunk: Chunk, decompressor: zstandard.ZstdDecompressor) -> memoryview:
    """The bytes of a chunk; raises `DigestError` when they are not those of its hash."""
    data = stored
    if chunk.stored < chunk.length:
        try:
            # The size in the frame's own header decides how much is allocated.
            if zstandard.frame_content_size(stored) != chunk.length:
                raise DigestError("a chunk of memory in the checkpoint has another size than its index says")
            data = memoryview(decompressor.decompress(stored))
        except zstandard.ZstdError as error:
            raise DigestError(
                "a chunk of memory in the checkpoint cannot be decompressed", details=str(error)
            ) from error
    if blake3.blake3(data).digest() != chunk.digest:
        raise DigestError(
            "a chunk of memory in the checkpoint is not what its index promises",
            hint="the artifact was damaged or tampered with; make or fetch it again",
        )
    return data
