"""Memory pages: what goes in comes out, costs what it should, and what is damaged is noticed."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base.trace import Progress, Trace
from oci import pages
from oci.errors import ArtifactError, DigestError, StoreError
from oci.index import CHUNK_BYTES, ZERO, Chunk, Extent, Index
from oci.layout import Layout
from oci.page_stream import PageImage, PageReader
from oci.pages import PageWriter
from oci.store import Descriptor
from tests.page_images import read_back, read_range

PAGE = 4096
BASE = 0x7F12_3456_7000


@pytest.fixture
def store(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def save(store: Layout, objects: dict[str, Sequence[tuple[int, bytes]]]) -> tuple[PageWriter, PageReader]:
    writer = PageWriter(store, Trace())
    for name, pieces in objects.items():
        for address, data in pieces:
            writer.add(name, address, data)
    index, packs = writer.close()
    decoded = Index.decode(index.encode(), [pack.size for pack in packs])
    assert decoded == index
    return writer, PageReader(store, decoded, packs)


def test_memory_comes_back_as_it_was(store: Layout) -> None:
    first = noise(3 * CHUNK_BYTES + 5 * PAGE)
    second = b"text " * 200_000
    second = second[: len(second) // PAGE * PAGE]
    _, reader = save(store, {"a": [(BASE, first)], "b": [(PAGE, second)]})
    images = PageImage("a", [(BASE, len(first))]), PageImage("b", [(PAGE, len(second))])
    assert read_back(reader, *images) == [first, second]
    assert sorted(reader.objects()) == ["a", "b"]
    assert reader.size_bytes("a") == len(first)


def test_zero_memory_costs_nothing(store: Layout) -> None:
    size = 64 << 20
    writer, reader = save(store, {"a": [(0, bytes(size))]})
    assert (writer.zero_bytes, writer.stored_bytes) == (size, 0)
    assert not any(read_range(reader, "a", (0, size)))


def test_equal_memory_is_stored_once(store: Layout) -> None:
    data = noise(CHUNK_BYTES)
    writer, _ = save(store, {"a": [(0, data * 4)], "b": [(CHUNK_BYTES * 100, data)]})
    assert writer.total_bytes == 5 * CHUNK_BYTES
    assert writer.stored_bytes == CHUNK_BYTES


def test_the_same_memory_makes_the_same_chunks_whatever_lies_before_it(store: Layout) -> None:
    heap = noise(4 * CHUNK_BYTES)
    writer = PageWriter(store, Trace())
    writer.add("a", 16 * CHUNK_BYTES, heap)
    first, _ = writer.close()
    writer = PageWriter(store, Trace())
    writer.add("a", CHUNK_BYTES + PAGE, noise(7 * PAGE, seed=1))
    writer.add("a", 16 * CHUNK_BYTES, heap)
    second, _ = writer.close()
    assert {chunk.digest for chunk in first.chunks} < {chunk.digest for chunk in second.chunks}


def test_incompressible_memory_is_stored_as_it_is(store: Layout) -> None:
    writer, _ = save(store, {"a": [(0, noise(2 << 20))]})
    assert writer.stored_bytes == 2 << 20


def test_compressible_memory_is_compressed_though_incompressible_came_before(store: Layout) -> None:
    half = b"".join(noise(PAGE // 2, seed) + bytes(PAGE // 2) for seed in range(512))
    writer, _ = save(store, {"a": [(0, noise(2 << 20)), (16 << 20, half)]})
    assert writer.stored_bytes < (2 << 20) + 0.6 * len(half)


def test_scattered_pages_share_chunks_and_come_back(store: Layout) -> None:
    pieces = [(BASE // CHUNK_BYTES * CHUNK_BYTES + i * 2 * PAGE, noise(PAGE, i)) for i in range(128)]
    writer = PageWriter(store, Trace())
    for address, data in pieces:
        writer.add("a", address, data)
    index, packs = writer.close()
    assert len(index.chunks) == 4
    runs = [(address, PAGE) for address, _ in pieces]
    assert read_range(PageReader(store, index, packs), "a", *runs) == b"".join(data for _, data in pieces)


def test_small_memory_of_many_workers_makes_one_pack(store: Layout) -> None:
    writer = PageWriter(store, Trace(), workers=8)
    writer.add("a", 0, noise(40 << 20)[: 24 << 20])
    _, packs = writer.close()
    assert len(packs) == 1


def test_large_memory_makes_packs_of_about_32_mib(store: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PACK_BYTES", 1 << 20)
    data = noise(16 << 20)
    writer = PageWriter(store, Trace())
    writer.add("a", 0, data)
    index, packs = writer.close()
    assert len(packs) > 8
    assert all(pack.size <= (1 << 20) + CHUNK_BYTES for pack in packs)
    assert read_range(PageReader(store, index, packs), "a", (0, len(data))) == data


def test_buffer_may_change_after_flush(store: Layout) -> None:
    first, second = noise(CHUNK_BYTES, 1), noise(CHUNK_BYTES, 2)
    buffer = bytearray(first)
    writer = PageWriter(store, Trace())
    writer.add("a", 0, buffer)
    writer.flush()
    buffer[:] = second
    writer.add("a", CHUNK_BYTES, buffer)
    index, packs = writer.close()
    assert read_range(PageReader(store, index, packs), "a", (0, 2 * CHUNK_BYTES)) == first + second


def test_addresses_must_ascend(store: Layout) -> None:
    writer = PageWriter(store, Trace())
    writer.add("a", 8 * PAGE, bytes(PAGE))
    writer.add("b", 0, bytes(PAGE))
    with pytest.raises(ValueError, match="0x8000"):
        writer.add("a", 8 * PAGE, bytes(PAGE))
    writer.abort()


def test_progress_reaches_the_total(store: Layout) -> None:
    events: list[Progress] = []
    trace = Trace(lambda event: events.append(event) if isinstance(event, Progress) else None)
    writer = PageWriter(store, trace)
    writer.add("a", 0, noise(9 << 20))
    writer.close()
    assert max(event.done for event in events) == 9 << 20


class FullStore(Layout):
    def write(self, *args: object, **options: object) -> Descriptor:
        raise StoreError("no space left")


def test_failure_of_the_store_reaches_the_caller_and_ends_the_workers(tmp_path: Path) -> None:
    writer = PageWriter(FullStore(tmp_path), Trace())

    def write_much() -> None:
        for number in range(40):
            writer.add("a", number * (4 << 20), noise(4 << 20, number))
        writer.close()

    with pytest.raises(StoreError, match="no space left"):
        write_much()
    writer.abort()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pages-")]


def test_run_that_is_not_in_the_index_is_refused_before_anything_is_read(store: Layout) -> None:
    _, reader = save(store, {"a": [(BASE, noise(4 * PAGE)), (BASE + 8 * PAGE, noise(PAGE))]})
    for name, address, length in (
        ("a", BASE - PAGE, PAGE),
        ("a", BASE + 3 * PAGE, 2 * PAGE),
        ("a", BASE + 8 * PAGE, 2 * PAGE),
        ("b", BASE, PAGE),
    ):
        with pytest.raises(ArtifactError, match="has no memory"):
            reader.stream([PageImage(name, [(address, length)])], Trace(), "memory")


@pytest.mark.parametrize("data", [noise(2 * CHUNK_BYTES), b"compressible " * 50_000], ids=["raw", "zstd"])
def test_changed_pack_is_noticed(store: Layout, data: bytes) -> None:
    data = data[: len(data) // PAGE * PAGE]
    writer = PageWriter(store, Trace())
    writer.add("a", 0, data)
    index, packs = writer.close()
    path = store.directory / "blobs" / "sha256" / packs[0].digest.removeprefix("sha256:")
    good = path.read_bytes()
    for bad in (
        bytes([good[0] ^ 1]) + good[1:],
        good[:-1] + bytes([good[-1] ^ 1]),
        good[: len(good) // 2],
        b"",
    ):
        path.write_bytes(bad)
        with pytest.raises(DigestError):
            read_range(PageReader(store, index, packs), "a", (0, len(data)))


runs_of_pages = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 150), st.integers(0, 3)), max_size=12)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(objects=st.lists(runs_of_pages, min_size=1, max_size=3), data=st.data())
def test_any_memory_comes_back_whole_and_in_part(
    objects: list[list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Layout(Path(directory) / "layout")
        writer = PageWriter(store, Trace(), workers=3)
        memory: dict[str, list[tuple[int, bytes]]] = {}
        for number, shape in enumerate(objects):
            address = BASE
            pieces = memory.setdefault(f"o{number}", [])
            for gap, count, kind in shape:
                address += gap * PAGE
                piece = (bytes(count * PAGE), noise(count * PAGE, count), b"ab" * (count * PAGE // 2))[
                    kind % 3
                ]
                writer.add(f"o{number}", address, piece)
                pieces.append((address, piece))
                address += len(piece)
        index, packs = writer.close()
        reader = PageReader(store, Index.decode(index.encode(), [p.size for p in packs]), packs)
        images, expected = [], []
        for name, pieces in memory.items():
            runs, content = [], b""
            for address, piece in pieces:
                first = data.draw(st.integers(0, len(piece) // PAGE - 1)) * PAGE
                runs.append((address + first, len(piece) - first))
                content += piece[first:]
            if runs:
                images.append(PageImage(name, runs))
                expected.append(content)
        assert read_back(reader, *images) == expected


def index_of(chunks: Sequence[Chunk] = (), **objects: Sequence[Extent]) -> bytes:
    return Index(chunks, objects).encode()


GOOD = Chunk(0, 0, 100, 200, bytes(32))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"CEDANAIX",
        index_of()[:-1],
        index_of() + b"x",
        b"XEDANAIX" + index_of()[8:],
        index_of()[:8] + b"\2" + index_of()[9:],
        index_of()[:16] + b"\xff\xff\xff\xff" + index_of()[20:],
        index_of()[:20] + b"\xff\xff\xff\xff",
        index_of([GOOD._replace(pack=1)]),
        index_of([GOOD._replace(offset=901)]),
        index_of([GOOD._replace(stored=201)]),
        index_of([GOOD._replace(stored=0)]),
        index_of([GOOD._replace(length=CHUNK_BYTES + 1)]),
        index_of([GOOD], a=[Extent(0, 0, 0, 0)]),
        index_of([GOOD], a=[Extent(0, 201, 0, 0)]),
        index_of([GOOD], a=[Extent(0, 1, 0, 200)]),
        index_of([GOOD], a=[Extent(0, 1, 1, 0)]),
        index_of([GOOD], a=[Extent(0, 2, 0, 0), Extent(1, 1, 0, 0)]),
        index_of([GOOD], a=[Extent((1 << 64) - 1, 2, ZERO, 0)]),
        index_of([GOOD], **{"a b": [Extent(0, 1, 0, 0)]}),
        index_of([GOOD], **{"": [Extent(0, 1, 0, 0)]}),
    ],
)
def test_impossible_index_is_refused(body: bytes) -> None:
    with pytest.raises(ArtifactError):
        Index.decode(body, [1000])


@given(st.binary(max_size=200), st.integers(0, 120))
def test_any_bytes_are_an_index_or_refused(noise_bytes: bytes, position: int) -> None:
    good = index_of([GOOD], a=[Extent(0, 100, 0, 50), Extent(4096, 1 << 30, ZERO, 0)])
    for body in (noise_bytes, good[:position] + noise_bytes + good[position + len(noise_bytes) :]):
        try:
            Index.decode(body, [1000])
        except ArtifactError:
            continue
