"""CRIU's page images through a real artifact store and back, byte for byte."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from base.trace import Trace
from oci.layout import Layout
from oci.page_stream import PageReader
from oci.pages import PageWriter
from runtime import memory
from runtime.errors import CheckpointError, RestoreError
from runtime.memory import PageImages
from tests.page_images import read_back
from tests.unit.runtime.test_images import image, number

PAGE = 4096


def dump(directory: Path, name: str, pages_id: int, runs: list[tuple[int, bytes]]) -> None:
    """What CRIU leaves of one process: a page map and its pages."""
    entries = (number(1, address) + number(2, len(data) // PAGE) + number(4, 4) for address, data in runs)
    (directory / name).write_bytes(image(number(1, pages_id), *entries))
    (directory / f"pages-{pages_id}.img").write_bytes(b"".join(data for _, data in runs))
    if not (directory / "pstree.img").exists():
        process_tree(directory, {1: 0})


def process_tree(directory: Path, parents: dict[int, int], programs: dict[int, int] | None = None) -> None:
    """What CRIU says of the processes: {pid: parent}, and the file each runs, 0 for a zombie."""
    entries = (number(1, pid) + number(2, parent) for pid, parent in parents.items())
    (directory / "pstree.img").write_bytes(image(*entries, magic=0x50273030))
    for pid, program in (programs or {}).items():
        (directory / f"mm-{pid}.img").write_bytes(image(number(12, program), magic=0x57492820))


def stored(tmp_path: Path, source: Path) -> PageReader:
    store = Layout(tmp_path / "layout")
    writer = PageWriter(store, Trace())
    memory.store(source, memory.claim(source), writer, {})
    index, packs = writer.close()
    return PageReader(store, index, packs)


def test_pages_come_back_as_the_page_images_criu_wrote(tmp_path: Path) -> None:
    noise = os.urandom(300 * PAGE)
    dump(
        tmp_path,
        "pagemap-1.img",
        1,
        [(0x400000, noise), (0x7F0000001000, bytes(2000 * PAGE)), (0x7FFFFF000000, noise)],
    )
    dump(tmp_path, "pagemap-shmem-9.img", 2, [(0, b"shared! " * 512 * 3)])
    reader = stored(tmp_path, tmp_path)
    pages = PageImages.of(tmp_path)
    assert [(file.name, file.size_bytes) for file in pages.files] == [
        ("pages-1.img", 2600 * PAGE),
        ("pages-2.img", 3 * PAGE),
    ]
    contents = read_back(reader, *pages.images)
    assert contents == [(tmp_path / file.name).read_bytes() for file in pages.files]


def test_memory_that_may_be_shared_with_the_parent_is_cached_by_the_kernel(tmp_path: Path) -> None:
    for pid in (1, 2, 3):
        dump(tmp_path, f"pagemap-{pid}.img", pid, [(0x400000, bytes(PAGE))])
    process_tree(tmp_path, {1: 0, 2: 1, 3: 1, 4: 1}, {1: 7, 2: 7, 3: 8})
    served = {file.name: file.direct for file in PageImages.of(tmp_path).files}
    assert served == {"pages-1.img": True, "pages-2.img": False, "pages-3.img": True}


def test_zero_memory_is_left_out_where_it_is_zero_anyway(tmp_path: Path) -> None:
    """Of process 1; 2 shares its memory with 3, and what is shared among processes is no process's own."""
    areas = b"".join(
        b"\x72" + bytes([len(area)]) + area
        for area in (
            number(1, 0x400000) + number(2, 0x500000) + number(6, 0x22) + number(7, 0x201),
            number(1, 0x500000) + number(2, 0x600000) + number(6, 0x02) + number(7, 0x41),
        )
    )
    for pid in (1, 2, 3):
        runs = [(0x400000, bytes(1 << 20)), (0x500000, bytes(1 << 20)), (0x700000, os.urandom(PAGE))]
        dump(tmp_path, f"pagemap-{pid}.img", pid, runs)
    dump(tmp_path, "pagemap-shmem-9.img", 9, [(0, bytes(1 << 20))])
    process_tree(tmp_path, {1: 0, 2: 0, 3: 2}, {1: 7, 2: 7, 3: 7})
    for pid in (1, 2, 3):
        (tmp_path / f"mm-{pid}.img").write_bytes(image(number(12, 7) + areas, magic=0x57492820))
    reader = stored(tmp_path, tmp_path)
    memory.leave_out_zeros(tmp_path, reader)
    pages = PageImages.of(tmp_path)
    sizes = {file.name: file.size_bytes for file in pages.files}
    whole = (2 << 20) + PAGE
    assert sizes == {
        "pages-1.img": (1 << 20) + PAGE,
        "pages-2.img": whole,
        "pages-3.img": whole,
        "pages-9.img": 1 << 20,
    }
    first = (tmp_path / "pages-1.img").read_bytes()
    assert read_back(reader, pages.images[0])[0] == first[1 << 20 :]


def test_fewer_pages_than_the_map_lists_is_an_error(tmp_path: Path) -> None:
    dump(tmp_path, "pagemap-1.img", 1, [(0x1000, os.urandom(2 * PAGE))])
    os.truncate(tmp_path / "pages-1.img", PAGE)
    with pytest.raises(CheckpointError, match="fewer pages"):
        memory.store(tmp_path, memory.claim(tmp_path), PageWriter(Layout(tmp_path / "layout"), Trace()), {})


@pytest.mark.parametrize("pages", [[1, 1], [(1 << 40), 2]])
def test_hostile_page_maps_are_refused(tmp_path: Path, pages: list[int]) -> None:
    for name, count in enumerate(pages):
        entry = number(1, 0x1000) + number(2, count) + number(4, 4)
        head = number(1, 1)
        (tmp_path / f"pagemap-{name}.img").write_bytes(image(head, entry))
    with pytest.raises(RestoreError):
        PageImages.of(tmp_path)


def test_memory_a_lazy_dump_left_is_read_from_the_process(tmp_path: Path) -> None:
    held = mmap.mmap(-1, 3000 * PAGE)
    held[: 1500 * PAGE] = os.urandom(1500 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    lazy = number(1, address) + number(2, 3000) + number(4, 2)
    stack = os.urandom(2 * PAGE)
    (tmp_path / "pagemap-1.img").write_bytes(
        image(number(1, 5), lazy, number(1, address + (1 << 30)) + number(2, 2) + number(4, 4))
    )
    (tmp_path / "pages-5.img").write_bytes(stack)
    process_tree(tmp_path, {1: 0})
    store = Layout(tmp_path / "layout")
    writer = PageWriter(store, Trace())
    before = held[:]
    memory.store(tmp_path, memory.claim(tmp_path), writer, {1: os.getpid()})
    assert writer.total_bytes == 3002 * PAGE
    held[:PAGE] = bytes(PAGE)  # nothing is read any more
    index, packs = writer.close()
    assert read_back(PageReader(store, index, packs), *PageImages.of(tmp_path).images) == [before + stack]


def test_memory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    lazy = number(1, 0x1000) + number(2, 1) + number(4, 2)
    (tmp_path / "pagemap-1.img").write_bytes(image(number(1, 5), lazy))
    writer = PageWriter(Layout(tmp_path / "layout"), Trace())
    with pytest.raises(CheckpointError, match="cannot be read"):
        memory.store(tmp_path, memory.claim(tmp_path), writer, {1: os.getpid()})
    writer.abort()
