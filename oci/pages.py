"""Memory into an artifact, as deduplicated chunks in packs.

A chunk is what there is of one aligned 256 KiB range of a memory object, so that the same memory gives the
same chunks in the next checkpoint, whatever moved around it. Each worker fills a pack of its own and
stores it when full: while one waits for the registry, the others hash and compress (all of which release
the GIL). Nothing is copied that need not be: packs hold views of the caller's memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeGuard

import blake3
import zstandard

from base.malloc import keep_freed_memory
from base.trace import Trace
from oci.index import CHUNK_BYTES, ZERO, Chunk, Extent, Index, check_name
from oci.store import Buffer, Descriptor, Store, worker_count

PAGES = "application/vnd.cedana.checkpoint.pages.v1+zstd"
PACK_BYTES = 32 << 20
_PACKS_PER_SIZE = 1024
"""After so many packs their size doubles: the manifest of a container of any size stays small."""
_MAX_DOUBLINGS = 5
_BATCH_WINDOWS = 64
"""As many follow each other in a pack, and can be fetched in one go."""
_QUEUED_BATCHES = 16
_ZEROS = bytes(CHUNK_BYTES)
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(
    1, source_size=CHUNK_BYTES, min_match=6, target_length=2, write_checksum=False
)
"""Half way to the negative levels: 1.5 times as fast as level 1 on text, a tenth more on the wire."""
_SAMPLES = 4
_SAMPLE_BYTES = 4096
_WORTH = 0.95
"""A chunk is compressed when that leaves less than this part of it."""


Read = Callable[[int, memoryview], None]
"""Fills the buffer with the memory at an address; called from any thread."""


@dataclass(slots=True, eq=False)
class _Window:
    """What was added of one aligned range: pieces in the order of their addresses."""

    number: int
    addresses: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    pieces: list[memoryview | Read] = field(default_factory=list)
    chunk: int = ZERO


class _Scratch(bytearray):
    """A chunk's room that is ours."""


def _is_scratch(part: Buffer) -> TypeGuard[memoryview]:
    return isinstance(part, memoryview) and isinstance(part.obj, _Scratch)


@dataclass(slots=True, eq=False)
class _Pack:
    buffers: list[Buffer] = field(default_factory=list)
    size: int = 0
    number: int = -1


@dataclass(slots=True, eq=False)
class _Stored:
    """Where a chunk went; `pack.number` is known when the pack is stored."""

    pack: _Pack
    offset: int
    stored: int
    length: int
    digest: bytes


class PageWriter:
    """Stores memory objects, given piece by piece in ascending order of address."""

    def __init__(self, store: Store, trace: Trace, workers: int = 0) -> None:
        keep_freed_memory()
        self.total_bytes = 0
        self.zero_bytes = 0
        self._store = store
        self._trace = trace
        self._worker_count = workers or worker_count()
        self._threads: list[threading.Thread] = []
        self._queue: queue.Queue[list[_Window] | None] = queue.Queue(_QUEUED_BATCHES)
        self._objects: dict[str, list[_Window]] = {}
        self._object = ""
        self._end = 0
        self._window: _Window | None = None
        self._batch: list[_Window] = []
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, int] = {}
        self._chunks: list[_Stored] = []
        self._open_packs: list[_Pack] = []
        self._packs: list[Descriptor] = []
        self._pack_count = 0
        self._done_bytes = 0
        self._error: BaseException | None = None

    def add(self, object_name: str, address: int, buffer: Buffer) -> None:
        """Store `buffer` as the bytes of the object at `address`.

        The buffer is read by other threads later: it must not change or go away before `flush`, `close`
        or `abort` returned. An object's addresses must ascend.
        """
        view = memoryview(buffer).cast("B")
        for offset, length in self._windows(object_name, address, len(view)):
            self._piece(address + offset, length, view[offset : offset + length])

    def add_unread(self, object_name: str, address: int, length: int, read: Read) -> None:
        """Store `length` bytes of the object, which `read` gets when they are needed: before `flush`,
        `close` or `abort` returned. An object's addresses must ascend."""
        for offset, size in self._windows(object_name, address, length):
            self._piece(address + offset, size, read)

    def _windows(self, object_name: str, address: int, length: int) -> Iterator[tuple[int, int]]:
        """The parts (offset, length) of a range, none crossing a window's end."""
        if object_name != self._object:
            self._finish_window()
            windows = self._objects.setdefault(check_name(object_name), [])
            self._object = object_name
            self._end = windows[-1].addresses[-1] + windows[-1].lengths[-1] if windows else 0
        if address < self._end:
            raise ValueError(f"{object_name} has {address:#x} after {self._end:#x}")
        self._end = address + length
        self.total_bytes += length
        offset = 0
        while offset < length:
            size = min(CHUNK_BYTES - (address + offset) % CHUNK_BYTES, length - offset)
            yield offset, size
            offset += size

    def _piece(self, address: int, length: int, piece: memoryview | Read) -> None:
        number = address // CHUNK_BYTES
        if self._window is None or self._window.number != number:
            self._finish_window()
            self._window = _Window(number)
        self._window.addresses.append(address)
        self._window.lengths.append(length)
        self._window.pieces.append(piece)

    def flush(self) -> None:
        """Wait until no added buffer is needed any more; raises what a worker met."""
        self._finish_window()
        self._send_batch()
        if self._threads:
            self._queue.join()
            for pack in self._open_packs:
                pack.buffers = [
                    part if isinstance(part, bytes) or _is_scratch(part) else bytes(part)
                    for part in pack.buffers
                ]
        self._raise_error()

    def close(self) -> tuple[Index, list[Descriptor]]:
        """Store what is left; returns the index and its packs. Raises what a worker met."""
        self._finish_window()
        self._send_batch()
        self._stop_workers()
        self._raise_error()
        self._store_last_packs()
        return self._index(), self._packs

    def abort(self) -> None:
        """Stop, as soon as the transfers under way allow it. Never raises."""
        self._error = self._error or InterruptedError("the checkpoint was given up")
        self._stop_workers()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the packs stored so far."""
        return sum(pack.size for pack in self._packs)

    def _finish_window(self) -> None:
        if self._window is not None:
            self._objects[self._object].append(self._window)
            self._batch.append(self._window)
            self._window = None
            if len(self._batch) == _BATCH_WINDOWS:
                self._send_batch()

    def _send_batch(self) -> None:
        self._raise_error()
        if not self._batch:
            return
        if not self._threads:
            for number in range(self._worker_count):
                thread = threading.Thread(target=self._work, name=f"pages-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._queue.put(self._batch)
        self._batch = []

    def _stop_workers(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """One worker: takes batches until told to stop; after an error it only empties the queue."""
        encoder = _Encoder()
        pack = self._new_pack()
        while (batch := self._queue.get()) is not None:
            try:
                if self._error is None:
                    for window in batch:
                        if self._encode(encoder, window, pack) >= self._pack_limit():
                            buffers = pack.buffers
                            self._store_pack(pack)
                            encoder.take_back(buffers)
                            pack = self._new_pack()
                    self._report(batch)
            except BaseException as error:
                self._error = self._error or error
            finally:
                for window in batch:
                    window.pieces = []
                self._queue.task_done()
        self._queue.task_done()

    def _encode(self, encoder: _Encoder, window: _Window, pack: _Pack) -> int:
        """Add the window's chunk to the pack unless it is zero or known; returns the pack's size."""
        data = encoder.gather(window)
        if _ZEROS.startswith(data):
            with self._lock:
                self.zero_bytes += len(data)
            return pack.size
        digest = blake3.blake3(data).digest()
        with self._lock:
            known = self._by_digest.get(digest)
            if known is not None:
                window.chunk = known
                return pack.size
            window.chunk = self._by_digest[digest] = len(self._chunks)
            stored = _Stored(pack, pack.size, 0, len(data), digest)
            self._chunks.append(stored)
        part = encoder.encode(data)
        pack.buffers.append(part)
        stored.stored = len(part)
        pack.size += len(part)
        return pack.size

    def _new_pack(self) -> _Pack:
        pack = _Pack()
        with self._lock:
            self._open_packs.append(pack)
        return pack

    def _pack_limit(self) -> int:
        return PACK_BYTES << min(self._pack_count // _PACKS_PER_SIZE, _MAX_DOUBLINGS)

    def _store_pack(self, pack: _Pack) -> None:
        with self._lock:
            self._pack_count += 1
            self._open_packs.remove(pack)
        descriptor = self._store.write(PAGES, pack.buffers)
        pack.buffers = []
        with self._lock:
            pack.number = len(self._packs)
            self._packs.append(descriptor)

    def _store_last_packs(self) -> None:
        """Store what each worker had left, small ones together."""
        merged: list[_Pack] = []
        for pack in sorted(self._open_packs, key=lambda pack: pack.size):
            if not pack.size:
                continue
            if merged and merged[-1].size + pack.size <= PACK_BYTES:
                self._merge(pack, merged[-1])
            else:
                merged.append(pack)
        self._open_packs = list(merged)
        with ThreadPoolExecutor(self._worker_count) as pool:
            list(pool.map(self._store_pack, merged))

    def _merge(self, pack: _Pack, into: _Pack) -> None:
        for chunk in self._chunks:
            if chunk.pack is pack:
                chunk.pack, chunk.offset = into, chunk.offset + into.size
        into.buffers += pack.buffers
        into.size += pack.size

    def _report(self, batch: list[_Window]) -> None:
        with self._lock:
            self._done_bytes += sum(sum(window.lengths) for window in batch)
        self._trace.progress("memory", self._done_bytes, self.total_bytes)

    def _index(self) -> Index:
        chunks = [
            Chunk(chunk.pack.number, chunk.offset, chunk.stored, chunk.length, chunk.digest)
            for chunk in self._chunks
        ]
        return Index(chunks, {name: list(_extents(windows)) for name, windows in self._objects.items()})


def _extents(windows: Sequence[_Window]) -> Iterator[Extent]:
    """The extents of an object, neighbouring ones as one: zero ranges of any length, or within a chunk."""
    last: Extent | None = None
    for window in windows:
        within = 0
        for address, length in zip(window.addresses, window.lengths, strict=True):
            offset = 0 if window.chunk == ZERO else within
            within += length
            if (
                last is not None
                and last.address + last.length == address
                and last.chunk == window.chunk
                and (window.chunk == ZERO or last.offset + last.length == offset)
            ):
                last = last._replace(length=last.length + length)
                continue
            if last is not None:
                yield last
            last = Extent(address, length, window.chunk, offset)
    if last is not None:
        yield last


class _Encoder:
    """Compresses chunks for one worker, and leaves alone what does not get smaller.

    Finding out that memory does not compress takes time too. So after a chunk that did not get smaller,
    a sample of the next decides whether it is tried at all: neighbours in memory are alike.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_COMPRESSION)
        self._doubtful = True
        self._scratch = memoryview(_Scratch(CHUNK_BYTES))
        self._spare: list[memoryview] = []

    def take_back(self, buffers: Iterable[Buffer]) -> None:
        """Use again what `encode` gave away, now that it is stored."""
        self._spare += [memoryview(part.obj) for part in buffers if _is_scratch(part)]

    def gather(self, window: _Window) -> memoryview:
        """The window's bytes; good until the next call, unless `encode` gives them away."""
        first = window.pieces[0]
        if len(window.pieces) == 1 and isinstance(first, memoryview):
            return first
        offset = 0
        for address, length, piece in zip(window.addresses, window.lengths, window.pieces, strict=True):
            part = self._scratch[offset : offset + length]
            if isinstance(piece, memoryview):
                part[:] = piece
            else:
                piece(address, part)
            offset += length
        return self._scratch[:offset]

    def encode(self, data: memoryview) -> Buffer:
        """A zstd frame if that is smaller by more than a little, else the data as they are."""
        if not self._doubtful or self._sample_shrinks(data):
            frame = self._compressor.compress(data)
            self._doubtful = len(frame) > len(data) * _WORTH
            if not self._doubtful:
                return frame
        if data.obj is self._scratch.obj:
            self._scratch = self._spare.pop() if self._spare else memoryview(_Scratch(CHUNK_BYTES))
        return data

    def _sample_shrinks(self, data: memoryview) -> bool:
        if len(data) <= _SAMPLES * _SAMPLE_BYTES:
            return True
        stride = len(data) // _SAMPLES
        sample = b"".join(data[start : start + _SAMPLE_BYTES] for start in range(0, len(data), stride))
        return len(self._compressor.compress(sample)) <= len(sample) * _WORTH
