"""Compressed streams: into a store while they are made, and out of one with a bound on what comes out."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace

import zstandard

from oci.errors import ArtifactError, DigestError, StoreError
from oci.store import BlobReader, Buffer, Descriptor, Store

UNCOMPRESSED_SIZE = "ai.cedana.uncompressed-size"
_LEVEL = 1
_PIECE_BYTES = 1 << 20
_QUEUED_PIECES = 256
_PATIENCE_S = 0.2
_MAX_WINDOW = 1 << 27


class CompressedUpload:
    """One blob, compressed with zstd in the thread that feeds it and stored by another."""

    def __init__(self, store: Store, media_type: str, pool: Executor) -> None:
        self.diff_id = ""
        """sha256 of the uncompressed stream, known when `feed` has returned."""
        self._size = 0
        self._queue: queue.Queue[bytes | StoreError | None] = queue.Queue(_QUEUED_PIECES)
        self._upload: Future[Descriptor] = pool.submit(store.write, media_type, self._pieces())

    def feed(self, chunks: Iterable[Buffer]) -> None:
        """Take the whole stream; raises what making or storing it raises."""
        compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
        digest = hashlib.sha256()
        piece = bytearray()
        try:
            for chunk in chunks:
                self._check()
                digest.update(chunk)
                self._size += len(chunk)
                piece += compressor.compress(chunk)
                if len(piece) >= _PIECE_BYTES:
                    self._put(bytes(piece))
                    piece.clear()
            self._put(bytes(piece + compressor.flush()))
            self._put(None)
        except BaseException:
            if not self._upload.done():
                self._put(StoreError("the stream to be stored was given up"))
            raise
        self.diff_id = f"sha256:{digest.hexdigest()}"

    def result(self) -> Descriptor:
        """The stored blob, with its uncompressed size as annotation; waits for the store."""
        return replace(self._upload.result(), annotations={UNCOMPRESSED_SIZE: str(self._size)})

    def _put(self, piece: bytes | StoreError | None) -> None:
        while True:
            self._check()
            try:
                return self._queue.put(piece, timeout=_PATIENCE_S)
            except queue.Full:
                continue

    def _check(self) -> None:
        """Raise what storing met."""
        if self._upload.done():
            self._upload.result()

    def _pieces(self) -> Iterator[bytes]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, StoreError):
                raise piece
            yield piece


class Decompressed:
    """The uncompressed bytes of a zstd blob: exactly `size` of them, or (None) at most `limit`.

    The read that reaches the end reads the blob to its end too, which is where stores verify digests.
    """

    def __init__(self, blob: BlobReader, size: int | None, limit: int | None = None) -> None:
        self._blob = blob
        self._size = size
        self._limit = limit if size is None else size
        self._done = 0
        self._stream = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(
            blob,  # type: ignore[arg-type]
            read_across_frames=True,
            closefd=False,
        )

    def read(self, size: int = -1, /) -> bytes:
        if size < 0:
            return b"".join(iter(lambda: self.read(_PIECE_BYTES), b""))
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        view = memoryview(buffer)
        got = 0
        try:
            while got < len(view) and (more := self._stream.readinto(view[got:])):
                got += more
        except zstandard.ZstdError as error:
            raise DigestError(
                "a blob of the checkpoint cannot be decompressed",
                hint="the artifact was damaged; make or fetch it again",
                details=str(error),
            ) from error
        self._done += got
        if self._limit is not None and self._done > self._limit:
            raise ArtifactError(f"a blob of the checkpoint is larger uncompressed than {self._limit} bytes")
        if got < len(view):
            self._finish()
        return got

    def _finish(self) -> None:
        while self._blob.read(_PIECE_BYTES):
            pass
        if self._size is not None and self._done != self._size:
            raise DigestError(
                f"a blob of the checkpoint is truncated: {self._done} of {self._size} bytes uncompressed"
            )
