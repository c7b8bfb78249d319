"""Reading ahead: in any order, within bounds, and every reader hears of an error."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from base.trace import Progress, Trace
from oci import page_stream
from oci.errors import StoreError
from oci.index import CHUNK_BYTES
from oci.layout import Layout
from oci.page_stream import PageImage, PageReader
from oci.pages import PageWriter
from oci.store import BlobReader
from tests.page_images import read_range

PAGE = 4096
BASE = 0x7F12_3400_0000


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


class Counting(Layout):
    """Counts how often a pack is opened; from the `fails_at`th time on that fails."""

    opened = 0
    fails_at = 1 << 30

    @contextmanager
    def open(self, *args: Any, **options: Any) -> Iterator[BlobReader]:
        self.opened += 1
        if self.opened >= self.fails_at:
            raise StoreError("the registry is gone")
        with super().open(*args, **options) as blob:
            yield blob


@pytest.fixture
def store(tmp_path: Path) -> Counting:
    return Counting(tmp_path / "layout")


def saved(store: Layout, *memory: bytes) -> tuple[PageReader, list[PageImage]]:
    """Each of `memory` as an object of its own, and an image of all of it."""
    writer = PageWriter(store, Trace(), workers=2)
    for number, content in enumerate(memory):
        writer.add(f"o{number}", BASE, content)
    index, packs = writer.close()
    images = [PageImage(f"o{number}", [(BASE, len(content))]) for number, content in enumerate(memory)]
    return PageReader(store, index, packs), images


def test_reads_in_any_order_get_the_right_bytes(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_stream, "_AHEAD_BYTES", 1 << 20)
    monkeypatch.setattr(page_stream, "_SEGMENT_BYTES", 1 << 20)
    memory = noise(5 << 20, 1) + bytes(2 << 20) + b"text " * (1 << 18) + noise(PAGE, 2)
    memory = memory[: len(memory) // PAGE * PAGE]
    reader, images = saved(store, memory)
    shuffled = [(offset, 300_000) for offset in range(0, len(memory), 200_000)]
    random.Random(3).shuffle(shuffled)
    with reader.stream(images, Trace(), "memory") as stream, ThreadPoolExecutor(4) as readers:
        answers = readers.map(lambda r: (r, b"".join(stream.read(0, *r))), shuffled)
        for (offset, size), answer in answers:
            assert answer == memory[offset : offset + size]


def test_no_more_is_fetched_ahead_than_the_bound(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_stream, "_AHEAD_BYTES", 4 << 20)
    monkeypatch.setattr(page_stream, "_SEGMENT_BYTES", 1 << 20)
    told = threading.Event()
    done: list[int] = []

    def listener(event: object) -> None:
        if isinstance(event, Progress):
            done.append(event.done)
            if event.done >= 4 << 20:
                told.set()

    reader, images = saved(store, noise(32 << 20, 1))
    with reader.stream(images, Trace(listener), "memory") as stream:
        assert told.wait(10)
        b"".join(stream.read(0, 0, 1 << 20))
    workers = page_stream.worker_count()
    assert max(done) <= (5 << 20) + workers * (1 << 20)


def test_two_images_at_once_whatever_was_fetched_ahead(
    store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CRIU's processes read their memory at the same time, and wait for each other in between."""
    monkeypatch.setattr(page_stream, "_AHEAD_BYTES", 1 << 20)
    first, second = noise(8 << 20, 1), noise(8 << 20, 2)
    reader, images = saved(store, first, second)
    with reader.stream(images, Trace(), "memory") as stream:
        assert b"".join(stream.read(1, 0, len(second))) == second
        assert b"".join(stream.read(0, 0, len(first))) == first


def test_memory_that_repeats_is_held_once_and_within_the_bound(
    store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_stream, "_AHEAD_BYTES", 2 << 20)
    block = noise(4 << 20, 1)
    reader, images = saved(store, block * 3)
    with reader.stream(images, Trace(), "memory") as stream:
        for offset in range(0, 3 * len(block), 1 << 20):
            assert b"".join(stream.read(0, offset, 1 << 20)) == (block * 3)[offset : offset + (1 << 20)]
            assert sum(map(len, stream._ready.values())) <= (2 << 20) + 16 * CHUNK_BYTES
        assert not stream._ready


def test_an_error_reaches_every_reader_and_stays(store: Counting) -> None:
    reader, images = saved(store, noise(8 << 20, 1))
    store.fails_at = 1
    with reader.stream(images, Trace(), "memory") as stream:
        for _ in range(2):
            with pytest.raises(StoreError, match="the registry is gone"):
                stream.read(0, 4 << 20, PAGE)
        assert isinstance(stream.error, StoreError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("page-stream")]


def test_a_reader_past_the_end_gets_nothing(store: Counting) -> None:
    reader, images = saved(store, noise(PAGE, 1))
    with reader.stream(images, Trace(), "memory") as stream:
        assert stream.read(0, PAGE, PAGE) == []
        assert b"".join(stream.read(0, 1024, 1 << 20)) == noise(PAGE, 1)[1024:]


def test_large_memory_is_fetched_in_few_requests(store: Counting) -> None:
    memory = noise(64 << 20, 1)
    reader, _ = saved(store, memory)
    assert read_range(reader, "o0", (BASE, len(memory))) == memory
    assert store.opened <= 6
