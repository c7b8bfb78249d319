"""Files a process has open under a name that is gone, while the file lives on under another.

CRIU gives such a file a temporary name, `link_remap.N`, and takes the name away again when the dump ends.
It is needed at the restore, so the root filesystem's difference has to carry it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime import images
from runtime.errors import CheckpointError
from runtime.probe import Process, read_process

_REMAP_MAGIC = 0x59133954
"""criu/include/magic.h, REMAP_FPATH_MAGIC."""
_FILES_MAGIC = 0x56303138
"""criu/include/magic.h, FILES_MAGIC."""
_LINK_REMAP = re.compile(r"(?:.*/)?link_remap\.\d+")


def link_remaps(dump: Path, processes: Sequence[Process]) -> dict[str, Path]:
    """{name CRIU gave it, from the root: a path of this host that opens it}; the processes are stopped."""
    remaps = dump / "remap-fpath.img"
    if not remaps.exists():
        return {}
    names = _regular_files(dump / "files.img")
    found = {}
    for message in images.messages(remaps, _REMAP_MAGIC):
        original, remapped = (names.get(images.number(message, field), "") for field in (1, 2))
        if original and _LINK_REMAP.fullmatch(remapped):
            path = _path_to(original, processes)
            if path is None:
                raise CheckpointError(
                    f"the unlinked file {original} is held in a way that cannot be followed"
                )
            found["/" + remapped.lstrip("/")] = path
    return found


def _regular_files(path: Path) -> Mapping[int, str]:
    """{file id: name} of the regular files of a dump (criu, images/fdinfo.proto: file_entry)."""
    names = {}
    for message in images.messages(path, _FILES_MAGIC):
        for regular in message.get(3, []):
            if isinstance(regular, bytes):
                fields = images.parse(regular)
                name = fields.get(6, [b""])[-1]
                if isinstance(name, bytes):
                    names[images.number(fields, 1)] = name.decode(errors="surrogateescape")
    return names


def _path_to(name: str, processes: Sequence[Process]) -> Path | None:
    wanted = "/" + name.lstrip("/")
    for process in processes:
        current = read_process(process.host_pid)
        for file in current.files if current else ():
            if file.deleted and file.links and file.path == wanted:
                return Path(f"/proc/{process.host_pid}/fd/{file.fd}")
        for mapping in Path(f"/proc/{process.host_pid}/map_files").iterdir():
            if str(mapping.readlink()).removesuffix(" (deleted)") == wanted:
                return mapping
    return None
