"""Memory between CRIU's page images and the artifact's chunks.

CRIU names memory objects by its page maps (`pagemap-12.img`: process 12; `pagemap-shmem-5.img`: a shared
mapping). The artifact keeps each under that name, cut by address; what CRIU reads back is built from it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from base.trace import Trace
from oci.pages import PageReader, PageWriter, Run
from runtime import syscalls
from runtime.errors import CheckpointError, RestoreError
from runtime.images import PageMap, PageRun, mark_present, page_maps

_PIECE_BYTES = 4 << 20
_MAX_BYTES = 1 << 44
"""More than any machine has: the limit on what a hostile page map can ask for."""


def store(images: Path, writer: PageWriter, pids: Mapping[int, int]) -> int:
    """Hand every page of the dump in `images` to `writer`; returns the bytes of memory.

    What a lazy dump left in the processes is read from there: `pids` maps their pids in the container to
    those on this host. Then the page maps say what a plain dump's would. The writer reads the mapped files
    until it is finished.
    """
    maps = [page_map for page_map in page_maps(images) if page_map.runs]
    for page_map in maps:
        pages = _mapped(images, page_map)
        offset = 0
        for run in page_map.runs:
            if run.in_process:
                pid = pids.get(page_map.pid)
                if pid is None:
                    raise CheckpointError(f"CRIU dumped a process {page_map.pid} that was not seen")
                for address, data in _read(pid, run):
                    writer.add(page_map.name, address, data)
            else:
                writer.add(page_map.name, run.address, pages[offset : offset + run.size_bytes])
                offset += run.size_bytes
        mark_present(images / page_map.name)
    return sum(page_map.size_bytes for page_map in maps)


def _mapped(images: Path, page_map: PageMap) -> memoryview:
    if not page_map.file_bytes:
        return memoryview(b"")
    path = images / f"pages-{page_map.pages_id}.img"
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < page_map.file_bytes:
            raise CheckpointError(f"CRIU wrote fewer pages than {page_map.name} lists", details=str(path))
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def _read(pid: int, run: PageRun) -> Iterator[tuple[int, bytearray]]:
    """The memory of a stopped process, piece by piece."""
    for offset in range(0, run.size_bytes, _PIECE_BYTES):
        piece = bytearray(min(_PIECE_BYTES, run.size_bytes - offset))
        address = run.address + offset
        try:
            read = syscalls.process_vm_readv(pid, address, piece)
        except OSError as error:
            raise CheckpointError(f"the memory of process {pid} cannot be read: {error}") from error
        if read != len(piece):
            raise CheckpointError(f"process {pid} has no memory at {address + read:#x} any more")
        yield address, piece


def load(images: Path, reader: PageReader, trace: Trace, step: str) -> int:
    """Write the page images that the page maps in `images` name; returns the bytes of memory."""
    maps = [page_map for page_map in page_maps(images) if page_map.runs]
    total = sum(page_map.file_bytes for page_map in maps)
    if total > _MAX_BYTES or len({page_map.pages_id for page_map in maps}) != len(maps):
        raise RestoreError("the checkpoint's page maps contradict each other", details=f"{total} bytes")
    with ExitStack() as files:
        objects: dict[str, list[Run]] = {}
        for page_map in maps:
            path = images / f"pages-{page_map.pages_id}.img"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            files.callback(os.close, fd)
            os.ftruncate(fd, page_map.file_bytes)
            offset = 0
            for run in page_map.runs:
                if not run.in_process:
                    placed = Run(run.address, run.size_bytes, fd, offset)
                    objects.setdefault(page_map.name, []).append(placed)
                    offset += run.size_bytes
        reader.fill(objects, trace, step)
    return total
