"""CRIU's page images through a real artifact store and back, byte for byte."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from base.trace import Trace
from oci.layout import Layout
from oci.pages import PageReader, PageWriter
from runtime import memory
from runtime.errors import CheckpointError, RestoreError
from tests.unit.runtime.test_images import image, number

PAGE = 4096


def dump(directory: Path, name: str, pages_id: int, runs: list[tuple[int, bytes]]) -> None:
    """What CRIU leaves of one process: a page map and its pages."""
    entries = (number(1, address) + number(2, len(data) // PAGE) + number(4, 4) for address, data in runs)
    (directory / name).write_bytes(image(number(1, pages_id), *entries))
    (directory / f"pages-{pages_id}.img").write_bytes(b"".join(data for _, data in runs))


def stored(tmp_path: Path, source: Path) -> PageReader:
    store = Layout(tmp_path / "layout")
    writer = PageWriter(store, Trace())
    memory.store(source, writer, {})
    index, packs = writer.close()
    return PageReader(store, index, packs)


def test_pages_come_back_and_zeros_stay_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    noise = os.urandom(300 * PAGE)
    dump(
        source,
        "pagemap-1.img",
        1,
        [(0x400000, noise), (0x7F0000001000, bytes(2000 * PAGE)), (0x7FFFFF000000, noise)],
    )
    dump(source, "pagemap-shmem-9.img", 2, [(0, b"shared! " * 512 * 3)])
    reader = stored(tmp_path, source)
    for path in source.glob("pagemap-*"):
        (target / path.name).write_bytes(path.read_bytes())
    assert memory.load(target, reader, Trace(), "memory") == 2603 * PAGE
    for path in source.glob("pages-*"):
        assert (target / path.name).read_bytes() == path.read_bytes()
        assert (target / path.name).stat().st_mode & 0o777 == 0o600
    assert (target / "pages-1.img").stat().st_blocks * 512 < 1000 * PAGE


def test_fewer_pages_than_the_map_lists_is_an_error(tmp_path: Path) -> None:
    dump(tmp_path, "pagemap-1.img", 1, [(0x1000, os.urandom(2 * PAGE))])
    os.truncate(tmp_path / "pages-1.img", PAGE)
    with pytest.raises(CheckpointError, match="fewer pages"):
        memory.store(tmp_path, PageWriter(Layout(tmp_path / "layout"), Trace()), {})


@pytest.mark.parametrize("pages", [[1, 1], [(1 << 40), 2]])
def test_hostile_page_maps_are_refused_before_a_file_is_made(tmp_path: Path, pages: list[int]) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    dump(source, "pagemap-1.img", 1, [(0x1000, os.urandom(PAGE))])
    reader = stored(tmp_path, source)
    for name, count in enumerate(pages):
        entry = number(1, 0x1000) + number(2, count) + number(4, 4)
        head = number(1, 1)
        (target / f"pagemap-{name}.img").write_bytes(image(head, entry))
    with pytest.raises(RestoreError):
        memory.load(target, reader, Trace(), "memory")
    assert not list(target.glob("pages-*"))


def test_memory_a_lazy_dump_left_is_read_from_the_process(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    held = mmap.mmap(-1, 3000 * PAGE)
    held[: 1500 * PAGE] = os.urandom(1500 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    lazy = number(1, address) + number(2, 3000) + number(4, 2)
    stack = os.urandom(2 * PAGE)
    (source / "pagemap-1.img").write_bytes(
        image(number(1, 5), lazy, number(1, address + (1 << 30)) + number(2, 2) + number(4, 4))
    )
    (source / "pages-5.img").write_bytes(stack)
    store = Layout(tmp_path / "layout")
    writer = PageWriter(store, Trace())
    assert memory.store(source, writer, {1: os.getpid()}) == 3002 * PAGE
    index, packs = writer.close()
    (target / "pagemap-1.img").write_bytes((source / "pagemap-1.img").read_bytes())
    memory.load(target, PageReader(store, index, packs), Trace(), "memory")
    assert (target / "pages-5.img").read_bytes() == held[:] + stack


def test_memory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    lazy = number(1, 0x1000) + number(2, 1) + number(4, 2)
    (tmp_path / "pagemap-1.img").write_bytes(image(number(1, 5), lazy))
    with pytest.raises(CheckpointError, match="cannot be read"):
        memory.store(tmp_path, PageWriter(Layout(tmp_path / "layout"), Trace()), {1: os.getpid()})
