"""The CRIU image parser: what it reads, and that no byte of a hostile image gets past it."""

from __future__ import annotations

import contextlib
import struct
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
    assert (found.name, found.pages_id, found.pid) == ("pagemap-7.img", 3, 7)
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
