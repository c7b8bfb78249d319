"""Reads the CRIU image files the engine must understand: page maps, and remaps of unlinked files.

A CRIU image is two 32-bit magic numbers followed by protobuf messages, each with a 32-bit length before
it (criu, images/*.proto and criu/include/magic.h). Images arrive inside artifacts, so every length is
checked; nothing here trusts a byte.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import EngineError

PAGE_SIZE = 4096
_COMMON_MAGIC = 0x54564319
_PAGEMAP_MAGIC = 0x56084025
_PSTREE_MAGIC = 0x50273030
_MM_MAGIC = 0x57492820
_MAX_IMAGE_BYTES = 1 << 30
_PE_LAZY, _PE_PRESENT = 1 << 1, 1 << 2
"""criu/include/pagemap.h: the pages can be asked for later; they are in the pages image."""
_MAP_PRIVATE, _MAP_ANONYMOUS = 0x02, 0x20
_VMA_PLAIN, _VMA_HEAP = 1 << 0 | 1 << 9, 1 << 5
"""criu/include/image.h: VMA_AREA_REGULAR and VMA_ANON_PRIVATE; VMA_AREA_HEAP."""

Fields = dict[int, list[int | bytes]]


@dataclass(frozen=True)
class PageRun:
    """`pages` pages from the virtual address `address`."""

    address: int
    pages: int
    in_process: bool = False
    """Their bytes are still in the process (a lazy dump), not in the pages image."""

    @property
    def size_bytes(self) -> int:
        return self.pages * PAGE_SIZE


@dataclass(frozen=True)
class PageMap:
    """One `pagemap-*.img`: the runs of memory of one process, in ascending order of address; what is in
    `pages-<pages_id>.img` is there in the same order."""

    name: str
    pages_id: int
    runs: tuple[PageRun, ...]

    @property
    def process(self) -> int | None:
        """The process, as the container numbers it; None for shared memory."""
        digits = self.name.removeprefix("pagemap-").removesuffix(".img")
        return int(digits) if digits.isdecimal() else None

    @property
    def size_bytes(self) -> int:
        return sum(run.size_bytes for run in self.runs)

    @property
    def file_bytes(self) -> int:
        """Size of the pages image."""
        return sum(run.size_bytes for run in self.runs if not run.in_process)


def page_maps(directory: Path) -> list[PageMap]:
    """Every page map of a dump, by name; raises `EngineError` on a malformed one."""
    return [_page_map(path) for path in sorted(directory.glob("pagemap-*.img"))]


def _page_map(path: Path) -> PageMap:
    entries = messages(path, _PAGEMAP_MAGIC)
    head = next(entries, None)
    if head is None:
        raise EngineError(f"{path.name} has no head")
    runs = []
    for entry in entries:
        flags = number(entry, 4, default=_PE_PRESENT)
        pages = number(entry, 5, default=number(entry, 2))
        if flags & (_PE_PRESENT | _PE_LAZY) and not number(entry, 3):
            runs.append(PageRun(number(entry, 1), pages, in_process=not flags & _PE_PRESENT))
    return PageMap(path.name, number(head, 1), tuple(runs))


def sharing_processes(directory: Path) -> tuple[set[int], set[int]]:
    """Of a dump: the processes that run their parent's program, and so may share memory with it; those
    parents."""
    parents: dict[int, int] = {}
    programs: dict[int, int] = {}
    for entry in messages(directory / "pstree.img", _PSTREE_MAGIC):
        pid = number(entry, 1)
        parents[pid] = number(entry, 2)
        if (mm := directory / f"mm-{pid}.img").exists():  # a zombie has none
            programs[pid] = number(next(messages(mm, _MM_MAGIC), {}), 12)
    children = {pid for pid in programs if programs[pid] == programs.get(parents[pid])}
    return children, {parents[pid] for pid in children}


def anonymous_areas(directory: Path, pid: int) -> list[tuple[int, int]]:
    """The ranges [start, end) of a process that are plain private anonymous memory: zero until written."""
    areas = []
    for mm in messages(directory / f"mm-{pid}.img", _MM_MAGIC):
        for body in mm.get(14, []):
            if not isinstance(body, bytes):
                raise EngineError(f"mm-{pid}.img has a malformed memory area")
            area = parse(body)
            flags, status = number(area, 6), number(area, 7)
            if flags == _MAP_PRIVATE | _MAP_ANONYMOUS and status & ~_VMA_HEAP == _VMA_PLAIN:
                areas.append((number(area, 1), number(area, 2)))
    return areas


def mark_present(path: Path) -> None:
    """Rewrite the page map `path` of a lazy dump as a plain one's: every page is in the pages image."""

    def present(entry: Fields) -> list[Fields]:
        if number(entry, 4, default=_PE_PRESENT) & _PE_LAZY:
            entry[4] = [_PE_PRESENT]
        return [entry]

    _rewrite(path, present)


def leave_out(path: Path, ranges: Sequence[tuple[int, int]]) -> None:
    """Rewrite the page map `path` without the pages in `ranges` [start, end): whole pages, ascending."""

    ends = [end for _, end in ranges]

    def without(entry: Fields) -> list[Fields]:
        start = number(entry, 1)
        end = start + number(entry, 5, default=number(entry, 2)) * PAGE_SIZE
        kept = []
        for position in range(bisect_right(ends, start), len(ranges) + 1):
            low, high = ranges[position] if position < len(ranges) else (end, end)
            if start < min(low, end):
                pages = (min(low, end) - start) // PAGE_SIZE
                kept.append(entry | {1: [start], 2: [pages], 5: [pages]})
            if low >= end:
                break
            start = max(start, high)
        return kept

    _rewrite(path, without)


def _rewrite(path: Path, change: Callable[[Fields], list[Fields]]) -> None:
    head, *entries = messages(path, _PAGEMAP_MAGIC)
    body = struct.pack("<II", _COMMON_MAGIC, _PAGEMAP_MAGIC)
    for fields in (head, *(changed for entry in entries for changed in change(entry))):
        message = b"".join(
            _encoded(field << 3) + _encoded(value)
            for field, values in sorted(fields.items())
            for value in values
            if isinstance(value, int)
        )
        body += struct.pack("<I", len(message)) + message
    path.write_bytes(body)


def messages(path: Path, magic: int | None = None) -> Iterator[Fields]:
    """The messages of an image, each as {field number: values}; raises `EngineError`."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise EngineError(f"the dump has no {path.name}") from error
    if len(data) > _MAX_IMAGE_BYTES or len(data) < 8:
        raise EngineError(f"{path.name} is not a CRIU image: {len(data)} bytes")
    common, kind = struct.unpack_from("<II", data)
    if common != _COMMON_MAGIC or (magic is not None and kind != magic):
        raise EngineError(f"{path.name} is not a CRIU image: magic {common:#x} {kind:#x}")
    offset = 8
    while offset < len(data):
        if offset + 4 > len(data):
            raise EngineError(f"{path.name} is truncated")
        (size,) = struct.unpack_from("<I", data, offset)
        offset += 4
        if offset + size > len(data):
            raise EngineError(f"{path.name} is truncated")
        yield parse(data[offset : offset + size])
        offset += size


def parse(message: bytes) -> Fields:
    """A protobuf message as {field number: [integers and byte strings]}; raises `EngineError`."""
    fields: Fields = {}
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        value: int | bytes
        match key & 7:
            case 0:
                value, offset = _varint(message, offset)
            case 1 | 5 as kind:
                size = 8 if kind == 1 else 4
                value = int.from_bytes(_slice(message, offset, size), "little")
                offset += size
            case 2:
                size, offset = _varint(message, offset)
                value = _slice(message, offset, size)
                offset += size
            case kind:
                raise EngineError(f"wire type {kind} in a CRIU image")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if offset >= len(data) or shift > 63:
            raise EngineError("a CRIU image holds a broken number")
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7


def _slice(data: bytes, offset: int, size: int) -> bytes:
    if offset + size > len(data):
        raise EngineError("a CRIU image holds a field longer than its message")
    return data[offset : offset + size]


def number(fields: Fields, number: int, default: int = 0) -> int:
    value = fields.get(number, [default])[-1]
    if not isinstance(value, int):
        raise EngineError(f"field {number} of a CRIU image is not a number")
    return value
