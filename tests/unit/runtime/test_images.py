"""The CRIU image parser: what it reads, and that no byte of a hostile image gets past it."""

from __future__ import annotations

import contextlib
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import images
from runtime.errors import EngineError

COMMON, PAGEMAP = 0x54564319, 0x56084025


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def image(*messages: bytes, magic: int = PAGEMAP) -> bytes:
    body = b"".join(struct.pack("<I", len(m)) + m for m in messages)
    return struct.pack("<II", COMMON, magic) + body


def test_page_map_lists_present_runs_in_file_order(tmp_path: Path) -> None:
    present, lazy_only = 1 << 2, 1 << 1
    (tmp_path / "pagemap-7.img").write_bytes(
        image(
            number(1, 3),
            number(1, 0x10000) + number(2, 4) + number(4, present),
            number(1, 0x90000) + number(2, 9) + number(4, lazy_only),
            number(1, 0x7F0000000000) + number(2, 1) + number(4, present),
        )
    )
    (found,) = images.page_maps(tmp_path)
    assert (found.name, found.pages_id, found.process) == ("pagemap-7.img", 3, 7)
    assert (found.file_bytes, found.size_bytes) == (5 * 4096, 14 * 4096)
    assert [(run.address, run.pages, run.in_process) for run in found.runs] == [
        (0x10000, 4, False), (0x90000, 9, True), (0x7F0000000000, 1, False)
    ]  # fmt: skip


def test_a_lazy_page_map_becomes_a_plain_one(tmp_path: Path) -> None:
    lazy, both = 1 << 1, 1 << 1 | 1 << 2
    path = tmp_path / "pagemap-7.img"
    path.write_bytes(
        image(
            number(1, 3),
            number(1, 0x7F0000000000) + number(2, 9) + number(4, lazy),
            number(1, 0x7F1000000000) + number(2, 2) + number(4, both),
            number(1, 0x7F2000000000) + number(2, 1) + number(4, 4),
        )
    )
    images.mark_present(path)
    (found,) = images.page_maps(tmp_path)
    assert found.file_bytes == found.size_bytes == 12 * 4096
    before = path.read_bytes()
    images.mark_present(path)
    assert path.read_bytes() == before


pages_in_runs = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=6)
"""(gap before, pages) one after the other."""


def placed(shape: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges [start, end) of addresses that a shape describes."""
    ranges, at = [], 0x10000
    for gap, pages in shape:
        at += gap * 4096
        ranges.append((at, at + pages * 4096))
        at += pages * 4096
    return ranges


def addresses(ranges: list[tuple[int, int]]) -> set[int]:
    return {address for start, end in ranges for address in range(start, end, 4096)}


@given(pages_in_runs, pages_in_runs)
def test_what_is_left_out_of_a_page_map_is_out_and_nothing_else(
    held: list[tuple[int, int]], left_out: list[tuple[int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "pagemap-7.img"
        entries = [
            number(1, start) + number(2, (end - start) // 4096) + number(4, 4) for start, end in placed(held)
        ]
        path.write_bytes(image(number(1, 3), *entries))
        images.leave_out(path, placed(left_out))
        (found,) = images.page_maps(Path(directory))
    runs = [(run.address, run.address + run.size_bytes) for run in found.runs]
    assert addresses(runs) == addresses(placed(held)) - addresses(placed(left_out))
    assert runs == sorted(runs)
    assert all(run.pages for run in found.runs)


def test_only_plain_private_anonymous_memory_is_zero_until_written(tmp_path: Path) -> None:
    private, anonymous, locked, growsdown, huge = 0x02, 0x20, 0x2000, 0x100, 0x40000
    regular, heap, plain, ring, file = 1, 1 << 5, 1 << 9, 1 << 13, 1 << 6
    kinds = [
        (private | anonymous, regular | plain),
        (private | anonymous, regular | plain | heap),
        (private | anonymous | locked, regular | plain),
        (private | anonymous | growsdown, regular | plain),
        (private | anonymous | huge, regular | plain),
        (private, regular | file),
        (private | anonymous, regular | plain | ring),
        (0x01 | anonymous, regular | 1 << 8),
    ]
    areas = []
    for index, (flags, status) in enumerate(kinds):
        area = number(1, index << 20) + number(2, (index << 20) + 4096) + number(6, flags) + number(7, status)
        areas.append(b"\x72" + bytes([len(area)]) + area)
    (tmp_path / "mm-5.img").write_bytes(image(number(12, 1) + b"".join(areas), magic=0x57492820))
    assert images.anonymous_areas(tmp_path, 5) == [(0, 4096), (1 << 20, (1 << 20) + 4096)]


def test_a_page_that_is_in_the_parent_is_not_in_this_image(tmp_path: Path) -> None:
    in_parent = number(1, 0x10000) + number(2, 1) + number(3, 1)
    (tmp_path / "pagemap-7.img").write_bytes(image(number(1, 3), in_parent))
    assert images.page_maps(tmp_path)[0].runs == ()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        image(number(1, 3))[:-1],
        image(number(1, 3)) + b"\1",
        image(number(1, 3), magic=1),
        image(),
        image(b"\x08" + b"\xff" * 11),
        image(b"\x0a\xff\x01"),
        image(b"\x0b"),
        image(number(1, 3), b"\x0a\x01a"),
    ],
)
def test_broken_images_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pagemap-7.img").write_bytes(data)
    with pytest.raises(EngineError):
        images.page_maps(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_an_engine_error(data: bytes) -> None:
    with contextlib.suppress(EngineError):
        images.parse(data)
