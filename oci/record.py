"""The record of a checkpoint: what `cedana inspect` shows and a restore decides by.

It is the JSON under `checkpoint` in the artifact's config; `oci/schemas/checkpoint.v1.json` is its schema
and docs/artifact.md its specification. Coming out of an artifact it is hostile until `from_json` has
checked it, and what is opaque here (`participants`, `criu`, `options`) until its owner has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from oci.decode import decode
from oci.errors import ArtifactError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class NodeRecord:
    hostname: str
    kernel: str
    architecture: str
    """As in OCI image configs: "amd64", "arm64"."""
    cpu_features: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContainerRecord:
    id: str
    name: str = ""
    namespace: str = ""
    image: str = ""
    image_digest: str = ""
    runtime: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessRecord:
    pid: int
    """In the container's own pid namespace."""
    parent: int
    name: str
    threads: int = 1
    memory: int = 0
    """Bytes resident."""
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class MemoryRecord:
    total: int = 0
    """Bytes of all pages in the checkpoint."""
    zero: int = 0
    """Of them, bytes in chunks that were all zero."""
    stored: int = 0
    """Bytes the page packs take."""


@dataclass(frozen=True)
class SocketRecord:
    process: int
    family: str
    kind: str
    state: str = ""
    local: str = ""
    remote: str = ""


@dataclass(frozen=True)
class FileRecord:
    process: int
    fd: int
    path: str
    deleted: bool = False


@dataclass(frozen=True)
class StepRecord:
    name: str
    start_s: float
    duration_s: float


@dataclass(frozen=True)
class CheckpointRecord:
    id: str
    created: str
    """RFC 3339, UTC."""
    node: NodeRecord
    container: ContainerRecord
    parent: str = ""
    """Digest of the manifest of the checkpoint before this one, or ''."""
    format_version: int = FORMAT_VERSION
    tools: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[ProcessRecord, ...] = ()
    memory: MemoryRecord = MemoryRecord()
    sockets: tuple[SocketRecord, ...] = ()
    files: tuple[FileRecord, ...] = ()
    mounts: tuple[str, ...] = ()
    gpus: tuple[Any, ...] = ()
    participants: Mapping[str, Any] = field(default_factory=dict)
    """What each participant captured, by its name; checked by the participant itself."""
    criu: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> CheckpointRecord:
        """The record in `value`, which may be hostile; raises `ArtifactError`."""
        version = value.get("format_version") if isinstance(value, dict) else None
        if type(version) is int and version != FORMAT_VERSION:
            raise ArtifactError(
                f"the checkpoint has format version {version}, this cedana reads version {FORMAT_VERSION}",
                hint="use the version of cedana that wrote it, or a later one",
            )
        if version is None:
            raise ArtifactError("the checkpoint record names no format version")
        return decode(cls, value, "checkpoint")
