"""Memory in an artifact: written as deduplicated chunks in packs, read back in parallel and verified.

A chunk is what there is of one aligned 256 KiB range of a memory object, so that the same memory gives the
same chunks in the next checkpoint, whatever moved around it. Each worker fills a pack of its own and
stores it when full: while one waits for the registry, the others hash and compress (all of which release
the GIL). Nothing is copied that need not be: packs hold views of the caller's memory.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import blake3
import zstandard

from base.trace import Trace
from oci.errors import ArtifactError, DigestError
from oci.index import CHUNK_BYTES, ZERO, Chunk, Extent, Index, check_name
from oci.store import BlobReader, Buffer, Descriptor, Store, worker_count

PAGES = "application/vnd.cedana.checkpoint.pages.v1+zstd"
PACK_BYTES = 32 << 20
_PACKS_PER_SIZE = 1024
"""After so many packs their size doubles: the manifest of a container of any size stays small."""
_MAX_DOUBLINGS = 5
_BATCH_WINDOWS = 16
_QUEUED_BATCHES = 64
_ZEROS = bytes(CHUNK_BYTES)
_COMPRESSION = zstandard.ZstdCompressionParameters.from_level(
    1, source_size=CHUNK_BYTES, min_match=6, target_length=2, write_checksum=False
)
"""Half way to the negative levels: 1.5 times as fast as level 1 on text, a tenth more on the wire."""
_SAMPLES = 4
_SAMPLE_BYTES = 4096
_PIECE_BYTES = 1 << 20
_WORTH = 0.95
"""A chunk is compressed when that leaves less than this part of it."""


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed: by default a chunk's buffer is mapped, zeroed by the kernel page after
    page, and unmapped again each time, which costs as much as decompressing it."""
    libc = ctypes.CDLL(None)
    if mallopt := getattr(libc, "mallopt", None):  # glibc's alone
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, 512 << 20)


@dataclass(slots=True, eq=False)
class _Window:
    """What was added of one aligned range: pieces in the order of their addresses."""

    number: int
    addresses: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    pieces: list[memoryview] = field(default_factory=list)
    chunk: int = ZERO


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
        _keep_freed_memory()
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
        if object_name != self._object:
            self._finish_window()
            windows = self._objects.setdefault(check_name(object_name), [])
            self._object = object_name
            self._end = windows[-1].addresses[-1] + windows[-1].lengths[-1] if windows else 0
        if address < self._end:
            raise ValueError(f"{object_name} has {address:#x} after {self._end:#x}")
        self._end = address + len(view)
        self.total_bytes += len(view)
        offset = 0
        while offset < len(view):
            number, within = divmod(address + offset, CHUNK_BYTES)
            length = min(CHUNK_BYTES - within, len(view) - offset)
            if self._window is None or self._window.number != number:
                self._finish_window()
                self._window = _Window(number)
            self._window.addresses.append(address + offset)
            self._window.lengths.append(length)
            self._window.pieces.append(view[offset : offset + length])
            offset += length

    def flush(self) -> None:
        """Wait until no added buffer is needed any more; raises what a worker met."""
        self._finish_window()
        self._send_batch()
        if self._threads:
            self._queue.join()
            for pack in self._open_packs:
                pack.buffers = [
                    bytes(part) if isinstance(part, memoryview) else part for part in pack.buffers
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
                            self._store_pack(pack)
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
        pieces = window.pieces
        if all(_ZEROS.startswith(piece) for piece in pieces):
            with self._lock:
                self.zero_bytes += sum(window.lengths)
            return pack.size
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
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

    def encode(self, data: memoryview) -> Buffer:
        """A zstd frame if that is smaller by more than a little, else `data` itself."""
        if self._doubtful and not self._sample_shrinks(data):
            return data
        frame = self._compressor.compress(data)
        self._doubtful = len(frame) > len(data) * _WORTH
        return data if self._doubtful else frame

    def _sample_shrinks(self, data: memoryview) -> bool:
        if len(data) <= _SAMPLES * _SAMPLE_BYTES:
            return True
        stride = len(data) // _SAMPLES
        sample = b"".join(data[start : start + _SAMPLE_BYTES] for start in range(0, len(data), stride))
        return len(self._compressor.compress(sample)) <= len(sample) * _WORTH


@dataclass(frozen=True)
class Run:
    """The bytes of [address, address + length) of an object go into `fd` from `offset` on."""

    address: int
    length: int
    fd: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Target:
    """`length` bytes from `start` of a chunk go to `offset` of `fd`."""

    start: int
    length: int
    fd: int
    offset: int


class PageReader:
    def __init__(self, store: Store, index: Index, packs: Sequence[Descriptor]) -> None:
        _keep_freed_memory()
        self._store = store
        self._index = index
        self._packs = packs

    def objects(self) -> list[str]:
        return list(self._index.objects)

    def size_bytes(self, object_name: str) -> int:
        """Bytes of memory the object has, zero ones included."""
        return sum(extent.length for extent in self._index.objects[object_name])

    def fill(self, objects: Mapping[str, Sequence[Run]], trace: Trace, step: str) -> None:
        """Write the memory the runs ask for, pack by pack in parallel.

        Zero ranges are left as they are: the files must be fresh (sparse) and have their full size.
        Raises `ArtifactError` before anything is read when a run is not in the index, `DigestError`
        when a chunk is not what the index promises.
        """
        targets: dict[int, list[_Target]] = defaultdict(list)
        for name, runs in objects.items():
            self._plan(name, runs, targets)
        by_pack: dict[int, list[int]] = defaultdict(list)
        for number in targets:
            by_pack[self._index.chunks[number].pack].append(number)
        total = sum(self._index.chunks[number].stored for number in targets)
        progress = _Progress(trace, step, total)
        jobs = []
        for pack, numbers in by_pack.items():
            numbers.sort(key=lambda number: self._index.chunks[number].offset)
            jobs.append((pack, numbers))
        stop = threading.Event()

        def run(job: tuple[int, list[int]]) -> None:
            try:
                self._fill_from_pack(*job, targets, progress, stop)
            except BaseException:
                stop.set()
                raise

        with ThreadPoolExecutor(min(worker_count(), len(jobs) or 1)) as pool:
            try:
                list(pool.map(run, jobs))
            except BaseException:
                stop.set()
                raise

    def _plan(self, name: str, runs: Sequence[Run], targets: dict[int, list[_Target]]) -> None:
        extents = self._index.objects.get(name)
        if extents is None:
            raise ArtifactError(f"the checkpoint has no memory object {name}")
        starts = [extent.address for extent in extents]
        for run in runs:
            address, end = run.address, run.address + run.length
            position = bisect_right(starts, address) - 1
            while address < end:
                extent = extents[position] if 0 <= position < len(extents) else None
                if extent is None or not extent.address <= address < extent.address + extent.length:
                    raise ArtifactError(f"the checkpoint has no memory at {address:#x} of {name}")
                length = min(end, extent.address + extent.length) - address
                if extent.chunk != ZERO:
                    start = extent.offset + address - extent.address
                    offset = run.offset + address - run.address
                    targets[extent.chunk].append(_Target(start, length, run.fd, offset))
                address += length
                position += 1

    def _fill_from_pack(
        self,
        pack: int,
        numbers: Sequence[int],
        targets: Mapping[int, Sequence[_Target]],
        progress: _Progress,
        stop: threading.Event,
    ) -> None:
        decompressor = zstandard.ZstdDecompressor()
        chunks = self._index.chunks
        for first, last in _spans([chunks[number] for number in numbers]):
            begin = chunks[numbers[first]].offset
            end = max(chunks[number].offset + chunks[number].stored for number in numbers[first:last])
            with self._store.open(self._packs[pack], begin, end - begin) as blob:
                pieces = _Pieces(blob, begin, end)
                for number in numbers[first:last]:
                    if stop.is_set():
                        return
                    chunk = chunks[number]
                    data = _verified(pieces.take(chunk.offset, chunk.stored), chunk, decompressor)
                    for target in targets[number]:
                        _write_at(target.fd, data[target.start : target.start + target.length], target.offset)
                    progress.add(chunk.stored)


def _spans(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int]]:
    """Positions [first, last) of chunks near enough to each other to be read in one go."""
    first = 0
    for position in range(1, len(chunks)):
        before = chunks[position - 1]
        if chunks[position].offset > before.offset + before.stored + _PIECE_BYTES:
            yield first, position
            first = position
    yield first, len(chunks)


class _Pieces:
    """Bytes [begin, end) of a pack, read a MiB at a time; taken in ascending order of offset."""

    def __init__(self, blob: BlobReader, begin: int, end: int) -> None:
        self._blob = blob
        self._piece = memoryview(b"")
        self._start = begin
        self._read = begin
        self._end = end

    def take(self, offset: int, size: int) -> memoryview:
        if offset + size > self._read:
            rest = self._piece[offset - self._start :]
            wanted = min(self._end - self._read, max(_PIECE_BYTES, offset + size - self._read))
            more = self._blob.read(wanted)
            if len(more) < wanted:
                raise DigestError("a page pack is truncated")
            # Views of the piece before are gone by now or keep it alive.
            self._piece = memoryview(bytes(rest) + more if rest else more)
            self._start = self._read - len(rest)
            self._read += wanted
        return self._piece[offset - self._start :][:size]


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


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


class _Progress:
    def __init__(self, trace: Trace, step: str, total: int) -> None:
        self._trace = trace
        self._step = step
        self._total = total
        self._done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            before, self._done = self._done, self._done + size
        if before >> 22 != self._done >> 22 or self._done == self._total:
            self._trace.progress(self._step, self._done, self._total)
