"""Memory between CRIU's page images and the artifact's chunks.

CRIU names memory objects by its page maps (`pagemap-12.img`: process 12; `pagemap-shmem-5.img`: a shared
mapping). The artifact keeps each under that name, cut by address; what CRIU reads back is built from it.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from pathlib import Path

from base.trace import Trace
from oci.pages import PageReader, PageWriter, Run
from runtime.errors import CheckpointError, RestoreError
from runtime.images import PAGE_SIZE, page_maps

_MAX_BYTES = 1 << 44
"""More than any machine has: the limit on what a hostile page map can ask for."""


def store(images: Path, writer: PageWriter) -> int:
    """Hand every page of the dump in `images` to `writer`; returns the bytes of memory.

    The writer reads the mapped files until it is finished.
    """
    maps = [page_map for page_map in page_maps(images) if page_map.runs]
    for page_map in maps:
        path = images / f"pages-{page_map.pages_id}.img"
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size < page_map.size_bytes:
                raise CheckpointError(f"CRIU wrote fewer pages than {page_map.name} lists", details=str(path))
            pages = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        offset = 0
        for run in page_map.runs:
            length = run.pages * PAGE_SIZE
            writer.add(page_map.name, run.address, pages[offset : offset + length])
            offset += length
    return sum(page_map.size_bytes for page_map in maps)


def load(images: Path, reader: PageReader, trace: Trace, step: str) -> int:
    """Write the page images that the page maps in `images` name; returns the bytes of memory."""
    maps = [page_map for page_map in page_maps(images) if page_map.runs]
    total = sum(page_map.size_bytes for page_map in maps)
    if total > _MAX_BYTES or len({page_map.pages_id for page_map in maps}) != len(maps):
        raise RestoreError("the checkpoint's page maps contradict each other", details=f"{total} bytes")
    with ExitStack() as files:
        objects: dict[str, list[Run]] = {}
        for page_map in maps:
            path = images / f"pages-{page_map.pages_id}.img"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            files.callback(os.close, fd)
            os.ftruncate(fd, page_map.size_bytes)
            offset = 0
            for run in page_map.runs:
                length = run.pages * PAGE_SIZE
                objects.setdefault(page_map.name, []).append(Run(run.address, length, fd, offset))
                offset += length
        reader.fill(objects, trace, step)
    return total
