"""containerd's content store on disk, read-only: where the layers of a container's image are.

`<root>/io.containerd.content.v1.content/blobs/sha256/<hex>`, as containerd's local content plugin lays it
out. Read directly, because base images may be gigabytes and are needed as they are.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn

from base.errors import NotFoundError
from oci.blobs import blob_path, open_blob, read_manifest_file
from oci.decode import load_json
from oci.errors import StoreError
from oci.manifest import IMAGE_MANIFEST, MAX_MANIFEST_BYTES
from oci.reference import is_digest
from oci.store import BlobReader, Buffer, Descriptor, Store


class ContentDirectory:
    """The content store in `directory` (the one that has `blobs/`)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __str__(self) -> str:
        return f"containerd's content store {self.directory}"

    def manifest(self, name: str) -> tuple[Descriptor, bytes]:
        if not is_digest(name):
            raise NotFoundError(f"{self} has no tags, so no {name}", hint="ask for a digest")
        try:
            body = read_manifest_file(blob_path(self.directory / "blobs", name), name, MAX_MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{self} has no manifest {name}", hint="pull the image again (`ctr images pull`)"
            ) from error
        media_type = load_json(body, "the manifest").get("mediaType") or IMAGE_MANIFEST
        return Descriptor(str(media_type), name, len(body)), body

    def exists(self, descriptor: Descriptor) -> bool:
        return blob_path(self.directory / "blobs", descriptor.digest).exists()

    def open(
        self, descriptor: Descriptor, offset: int = 0, length: int | None = None
    ) -> AbstractContextManager[BlobReader]:
        path = blob_path(self.directory / "blobs", descriptor.digest)
        if not path.exists():
            raise StoreError(
                f"the blob {descriptor.digest} ({descriptor.media_type}) is not in {self}",
                hint="containerd dropped it after unpacking, or the image was pulled for another platform: "
                "pull it again, with discard_unpacked_layers off",
            )
        return open_blob(path, descriptor, offset, length)

    def tags(self) -> list[str]:
        return []

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        return ()

    def write(
        self, media_type: str, chunks: Iterable[Buffer], annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        self._refuse()

    def copy_from(self, source: Store, descriptor: Descriptor, mount_from: str = "") -> None:
        self._refuse()

    def put_manifest(self, media_type: str, body: bytes, tag: str | None = None) -> Descriptor:
        self._refuse()

    def delete(self, name: str) -> None:
        self._refuse()

    def discard(self) -> None:
        """Nothing was written."""

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EROFS, f"{self} is only read")
