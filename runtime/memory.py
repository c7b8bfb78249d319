"""Memory between CRIU's page images and the artifact's chunks.

CRIU names memory objects by its page maps (`pagemap-12.img`: process 12; `pagemap-shmem-5.img`: a shared
mapping). The artifact keeps each under that name, cut by address; what CRIU reads back is built from it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from oci.page_stream import PageImage, PageReader
from oci.pages import PageWriter
from runtime import syscalls
from runtime.errors import CheckpointError, RestoreError
from runtime.fuse import ServedFile
from runtime.images import (
    PAGE_SIZE,
    PageMap,
    anonymous_areas,
    leave_out,
    mark_present,
    page_maps,
    sharing_processes,
)

_MAX_BYTES = 1 << 44
"""More than any machine has: the limit on what a hostile page map can ask for."""


def claim(images: Path) -> list[PageMap]:
    """The page maps of the dump in `images`, to be stored; those of a lazy dump say then what a plain one's
    would: every page is in the page images."""
    maps = [page_map for page_map in page_maps(images) if page_map.runs]
    for page_map in maps:
        if any(run.in_process for run in page_map.runs):
            mark_present(images / page_map.name)
    return maps


def store(images: Path, maps: Sequence[PageMap], writer: PageWriter, pids: Mapping[int, int]) -> None:
    """Hand every page of the dump in `images` to `writer`.

    What a lazy dump left in the processes is read from there: `pids` maps their pids in the container to
    those on this host; it is all read when this returns. The writer reads the pages of a plain dump until
    it is finished.
    """
    for page_map in maps:
        pages = _mapped(images, page_map)
        offset = 0
        for run in page_map.runs:
            if run.in_process:
                pid = pids.get(page_map.process or 0)
                if pid is None:
                    raise CheckpointError(f"CRIU left memory of {page_map.name}, a process that was not seen")
                writer.add_unread(page_map.name, run.address, run.size_bytes, partial(_read, pid))
            else:
                writer.add(page_map.name, run.address, pages[offset : offset + run.size_bytes])
                offset += run.size_bytes
    if any(run.in_process for page_map in maps for run in page_map.runs):
        writer.flush()


def _mapped(images: Path, page_map: PageMap) -> memoryview:
    if not page_map.file_bytes:
        return memoryview(b"")
    path = images / _pages_name(page_map)
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < page_map.file_bytes:
            raise CheckpointError(f"CRIU wrote fewer pages than {page_map.name} lists", details=str(path))
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _read(pid: int, address: int, into: memoryview) -> None:
    """Fill `into` with the memory of a stopped process."""
    try:
        read = syscalls.process_vm_readv(pid, address, into)
    except OSError as error:
        raise CheckpointError(f"the memory of process {pid} cannot be read: {error}") from error
    if read != len(into):
        raise CheckpointError(f"process {pid} has no memory at {address + read:#x} any more")


@dataclass(frozen=True)
class PageImages:
    """The page images that the page maps of a dump name, to be served instead of written."""

    files: tuple[ServedFile, ...]
    images: tuple[PageImage, ...]
    """What each file holds."""

    @classmethod
    def of(cls, directory: Path) -> PageImages:
        """Raises `RestoreError` when page maps contradict each other, `EngineError` for a malformed one."""
        maps = [page_map for page_map in page_maps(directory) if page_map.file_bytes]
        total = sum(page_map.file_bytes for page_map in maps)
        if total > _MAX_BYTES or len({page_map.pages_id for page_map in maps}) != len(maps):
            raise RestoreError("the checkpoint's page maps contradict each other", details=f"{total} bytes")
        children, _ = sharing_processes(directory)
        inheriting = {f"pagemap-{pid}.img" for pid in children}
        return cls(
            # CRIU reads memory that may be shared with the parent page by page.
            tuple(ServedFile(_pages_name(m), m.file_bytes, direct=m.name not in inheriting) for m in maps),
            tuple(
                PageImage(m.name, [(r.address, r.size_bytes) for r in m.runs if not r.in_process])
                for m in maps
            ),
        )


def leave_out_zeros(directory: Path, reader: PageReader) -> None:
    """Take zero memory out of the page maps in `directory` where it is there without being written: private
    memory of no file, of processes that share none with a child or parent."""
    children, parents = sharing_processes(directory)
    for page_map in page_maps(directory):
        pid = page_map.process
        if pid is None or pid in children | parents:
            continue
        zero = list(_common(anonymous_areas(directory, pid), reader.zero_ranges(page_map.name)))
        if zero:
            leave_out(directory / page_map.name, zero)


def _common(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What lies in a range of both; each ascends."""
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end and not (start | end) % PAGE_SIZE:
            yield start, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def _pages_name(page_map: PageMap) -> str:
    return f"pages-{page_map.pages_id}.img"
