"""The checkpoint artifact: one OCI image manifest that is also an ordinary, runnable image.

docs/artifact.md specifies it. `ArtifactWriter` makes one in a store, the manifest last, so that it is
there as a whole or not at all; `Artifact` opens one and believes nothing it reads.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import zstandard

from base.annotations import ENV_MARKER
from base.trace import Trace
from oci import criutar
from oci.decode import dump_json, load_json
from oci.errors import ArtifactError
from oci.index import MAX_INDEX_BYTES, Index
from oci.manifest import (
    IMAGE_CONFIG,
    IMAGE_MANIFEST,
    LAYER_ZSTD,
    Manifest,
    as_oci_layer,
    is_image_layer,
)
from oci.page_stream import PageReader
from oci.pages import PAGES, PageWriter
from oci.record import (
    FORMAT_VERSION,
    CheckpointRecord,
    ContainerRecord,
    FileRecord,
    MemoryRecord,
    NodeRecord,
    ProcessRecord,
    SocketRecord,
    StepRecord,
)
from oci.reference import is_digest
from oci.store import BlobReader, Descriptor, Store, read_blob
from oci.streams import UNCOMPRESSED_SIZE, CompressedUpload, Decompressed

__all__ = [
    "ARTIFACT_TYPE",
    "CRIU",
    "FORMAT_VERSION",
    "INDEX",
    "PAGES",
    "SPEC",
    "Artifact",
    "ArtifactWriter",
    "BaseImage",
    "CheckpointRecord",
    "ContainerRecord",
    "FileRecord",
    "MemoryRecord",
    "NodeRecord",
    "ProcessRecord",
    "SocketRecord",
    "StepRecord",
]

ARTIFACT_TYPE = "application/vnd.cedana.checkpoint.v1"
CRIU = "application/vnd.cedana.checkpoint.criu.v1.tar+zstd"
INDEX = "application/vnd.cedana.checkpoint.index.v1+zstd"
SPEC = "application/vnd.cedana.checkpoint.spec.v1+json"

LAYER_ROLE = "ai.cedana.layer"
"""Annotation whose only value, "rootfs-diff", tells our image layer from the base image's."""
ROOTFS_DIFF = "rootfs-diff"


MAX_CONFIG_BYTES = 16 << 20
MAX_SPEC_BYTES = 16 << 20
_BASE_STEP = "base image"
_LEVEL = 1
_UPLOADS = 4


@dataclass(frozen=True)
class BaseImage:
    """The image the container was made from: the manifest of its platform, and where it is."""

    store: Store
    manifest: Descriptor
    reference: str


class ArtifactWriter:
    """Writes one checkpoint. Leaving the block without `finish` makes nothing visible.

    Entering puts the base image, before anything is frozen: a store that cannot be reached or written
    shows there.
    """

    def __init__(self, store: Store, base: BaseImage | None, trace: Trace) -> None:
        self.id = secrets.token_hex(16)
        self.pages = PageWriter(store, trace)
        self._store = store
        self._base = base
        self._trace = trace
        self._base_parts = _BaseParts(None, (), {})
        self._rootfs: CompressedUpload | None = None
        self._criu: CompressedUpload | None = None
        self._spec: Future[Descriptor] | None = None
        self._uploads = ThreadPoolExecutor(_UPLOADS, thread_name_prefix="artifact")
        self._layer_bytes = 0
        self._finished = False

    def __enter__(self) -> ArtifactWriter:
        try:
            if self._base is not None:
                with self._trace.step(_BASE_STEP):
                    self._base_parts = _put_base(self._store, self._base, self._uploads, self._trace)
        except BaseException:
            self._give_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._finished:
            self._uploads.shutdown()
        else:
            self._give_up()

    @property
    def stored_bytes(self) -> int:
        """Compressed bytes written for this checkpoint, without the base image."""
        return self._layer_bytes + self.pages.stored_bytes

    def add_rootfs_diff(self, chunks: Iterable[bytes]) -> None:
        """Store an uncompressed layer tar stream. All of it is read when this returns; some of it may
        then still be on its way to the store."""
        self._rootfs = CompressedUpload(self._store, LAYER_ZSTD, self._uploads)
        self._rootfs.feed(chunks)

    def add_criu_images(self, directory: Path) -> None:
        """Store every regular file of `directory` but memory pages. All is read when this returns."""
        paths = [
            path
            for path in sorted(directory.iterdir())
            if path.is_file() and not path.is_symlink() and not path.match("pages-*.img")
        ]
        self._criu = CompressedUpload(self._store, CRIU, self._uploads)
        self._criu.feed(criutar.pack(paths))

    def add_spec(self, body: bytes) -> None:
        """Store the container's OCI runtime spec (config.json)."""
        self._spec = self._uploads.submit(self._store.write, SPEC, [body])

    def finish(self, record: CheckpointRecord, tag: str) -> Descriptor:
        """Store what is left and then the manifest, as `tag` (the id, when ''). The record's id and
        memory are the writer's own."""
        if self._criu is None or self._spec is None:
            raise ValueError("a checkpoint needs CRIU images and a spec")
        index, packs = self.pages.close()
        body = zstandard.ZstdCompressor(level=_LEVEL).compress(index.encode())
        index_upload = self._uploads.submit(self._store.write, INDEX, [body])
        record = replace(record, id=self.id, memory=self._memory())
        rootfs = self._rootfs_layer()
        config = self._uploads.submit(self._store.write, IMAGE_CONFIG, [self._fitting_config(record)])
        layers = [self._criu.result(), index_upload.result(), *packs, self._spec.result()]
        if rootfs is not None:
            layers.insert(0, rootfs)
        manifest = Manifest(
            config=config.result(),
            layers=(*self._base_parts.layers, *layers),
            artifact_type=ARTIFACT_TYPE,
            subject=self._base_parts.manifest,
            annotations=self._annotations(record),
        )
        self._layer_bytes = manifest.config.size + sum(layer.size for layer in layers if layer not in packs)
        descriptor = self._store.put_manifest(IMAGE_MANIFEST, manifest.to_bytes(), tag or self.id)
        self._finished = True
        return replace(descriptor, artifact_type=ARTIFACT_TYPE)

    def _memory(self) -> MemoryRecord:
        return MemoryRecord(self.pages.total_bytes, self.pages.zero_bytes, self.pages.stored_bytes)

    def _rootfs_layer(self) -> Descriptor | None:
        if self._rootfs is None:
            return None
        layer = self._rootfs.result()
        return replace(layer, annotations={**layer.annotations, LAYER_ROLE: ROOTFS_DIFF})

    def _fitting_config(self, record: CheckpointRecord) -> bytes:
        """The config, without what only people read where it would be larger than readers take."""
        without_argv = replace(record, processes=tuple(replace(p, argv=()) for p in record.processes))
        for fitting in (record, without_argv, replace(without_argv, files=(), sockets=())):
            body = self._config(fitting)
            if len(body) <= MAX_CONFIG_BYTES:
                return body
        raise ArtifactError(f"the record of the checkpoint is too large: {len(body)} bytes")

    def _config(self, record: CheckpointRecord) -> bytes:
        """The base image's config with our layer, our marker and our record in it."""
        config = dict(self._base_parts.config) or {"architecture": record.node.architecture, "os": "linux"}
        settings = dict(config.get("config") or {})
        settings["Env"] = [*_without_marker(settings.get("Env")), f"{ENV_MARKER}={self.id}"]
        diff_ids = [*(config.get("rootfs") or {}).get("diff_ids", ())]
        if self._rootfs is not None:
            diff_ids.append(self._rootfs.diff_id)
        config |= {
            "created": record.created,
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "checkpoint": record.to_json(),
        }
        if isinstance(config.get("history"), list):
            entry: dict[str, Any] = {"created": record.created, "created_by": "cedana checkpoint"}
            if self._rootfs is None:
                entry["empty_layer"] = True
            config["history"] = [*config["history"], entry]
        return dump_json(config)

    def _annotations(self, record: CheckpointRecord) -> dict[str, str]:
        annotations = {
            "org.opencontainers.image.created": record.created,
            "org.opencontainers.image.base.name": self._base.reference if self._base else "",
            "org.opencontainers.image.base.digest": self._base.manifest.digest if self._base else "",
            "ai.cedana.checkpoint.id": self.id,
            "ai.cedana.checkpoint.container": record.container.name or record.container.id,
            "ai.cedana.checkpoint.node": record.node.hostname,
            "ai.cedana.checkpoint.memory": str(self.pages.total_bytes),
        }
        return {key: value for key, value in annotations.items() if value}

    def _give_up(self) -> None:
        self.pages.abort()
        self._uploads.shutdown(cancel_futures=True)
        self._store.discard()


@dataclass(frozen=True)
class _BaseParts:
    """What an artifact takes over from the base image."""

    manifest: Descriptor | None
    layers: tuple[Descriptor, ...]
    config: dict[str, Any]


def _put_base(store: Store, base: BaseImage, pool: ThreadPoolExecutor, trace: Trace) -> _BaseParts:
    """Put the base image's layers, config and manifest into `store`.

    A base that is itself a checkpoint (a container started from an artifact as its image) is reduced to
    the image in it, so that no checkpoint needs another's memory.
    """
    descriptor, body = base.store.manifest(base.manifest.digest)
    manifest = Manifest.parse(body)
    config_body = read_blob(base.store, manifest.config, MAX_CONFIG_BYTES)
    config = load_json(config_body, "the base image's config")
    layers = tuple(layer for layer in manifest.layers if is_image_layer(layer.media_type))
    _check_diff_ids(config, len(layers))
    mount_from = base.reference.partition("@")[0]
    blobs = list(layers)
    media_type = descriptor.media_type
    if manifest.artifact_type == ARTIFACT_TYPE:
        config.pop("checkpoint", None)
        settings = dict(config.get("config") or {})
        config["config"] = settings | {"Env": _without_marker(settings.get("Env"))}
        plain_config = store.write(IMAGE_CONFIG, [dump_json(config)])
        body = Manifest(plain_config, tuple(replace(layer, annotations={}) for layer in layers)).to_bytes()
        media_type = IMAGE_MANIFEST
    else:
        blobs.append(manifest.config)
    total, done = sum(blob.size for blob in blobs), 0
    copies = [pool.submit(store.copy_from, base.store, blob, mount_from) for blob in blobs]
    for blob, copy in zip(blobs, copies, strict=True):
        copy.result()
        done += blob.size
        trace.progress(_BASE_STEP, done, total)
    subject = store.put_manifest(media_type, body)
    return _BaseParts(subject, tuple(as_oci_layer(layer) for layer in layers), config)


def _without_marker(env: object) -> list[str]:
    return [str(item) for item in env or () if not str(item).startswith(f"{ENV_MARKER}=")]  # type: ignore[attr-defined]


def _check_diff_ids(config: dict[str, Any], layer_count: int) -> list[str]:
    """The diff ids of an image config, one for each layer; raises `ArtifactError`."""
    rootfs = config.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if diff_ids is None and layer_count == 0:
        return []
    if not isinstance(diff_ids, list) or not all(isinstance(d, str) and is_digest(d) for d in diff_ids):
        raise ArtifactError("the image config has malformed diff ids")
    if len(diff_ids) != layer_count:
        raise ArtifactError(f"the image config has {len(diff_ids)} diff ids for {layer_count} layers")
    settings = config.get("config")
    if settings is not None and not isinstance(settings, dict):
        raise ArtifactError("the image config has malformed settings")
    env = (settings or {}).get("Env")
    if env is not None and not isinstance(env, list):
        raise ArtifactError("the image config has a malformed environment")
    return diff_ids


@dataclass(frozen=True)
class Artifact:
    """A checkpoint in a store, its manifest and config checked."""

    store: Store
    manifest: Descriptor
    record: CheckpointRecord
    image_config: dict[str, Any]
    base: Descriptor | None
    """The manifest of the base image, to be found in the same store."""
    config: Descriptor
    base_layers: tuple[Descriptor, ...]
    rootfs_layer: Descriptor | None
    criu_layer: Descriptor
    index_layer: Descriptor
    packs: tuple[Descriptor, ...]
    spec_layer: Descriptor

    @classmethod
    def open(cls, store: Store, name: str) -> Artifact:
        """The checkpoint `name` (tag or digest) of `store`.

        Raises `NotFoundError`, or `ArtifactError` when it is no checkpoint, of another format version,
        malformed or too large.
        """
        descriptor, body = store.manifest(name)
        if not is_checkpoint(body):
            raise ArtifactError(
                f"{name} is not a checkpoint", hint="`cedana ls` lists the checkpoints of a repository"
            )
        manifest = Manifest.parse(body)
        config = load_json(read_blob(store, manifest.config, MAX_CONFIG_BYTES), "the checkpoint's config")
        record = CheckpointRecord.from_json(config.get("checkpoint"))
        image_layers = [layer for layer in manifest.layers if is_image_layer(layer.media_type)]
        rootfs = [layer for layer in image_layers if layer.annotations.get(LAYER_ROLE) == ROOTFS_DIFF]
        if len(rootfs) > 1 or (rootfs and image_layers[-1] != rootfs[0]):
            raise ArtifactError("the checkpoint has more than one root filesystem difference")
        _check_diff_ids(config, len(image_layers))
        known = {CRIU, INDEX, PAGES, SPEC}
        for layer in manifest.layers:
            if layer.media_type not in known and not is_image_layer(layer.media_type):
                raise ArtifactError(
                    f"the checkpoint has a part of the unknown type {layer.media_type}",
                    hint="it was made by a later version of cedana",
                )
        return cls(
            store=store,
            manifest=replace(descriptor, artifact_type=ARTIFACT_TYPE),
            record=record,
            image_config=config,
            base=manifest.subject,
            config=manifest.config,
            base_layers=tuple(layer for layer in image_layers if layer not in rootfs),
            rootfs_layer=rootfs[0] if rootfs else None,
            criu_layer=_only(manifest, CRIU),
            index_layer=_only(manifest, INDEX),
            packs=tuple(layer for layer in manifest.layers if layer.media_type == PAGES),
            spec_layer=_only(manifest, SPEC),
        )

    @property
    def total_bytes(self) -> int:
        """What a restore fetches, without the base image."""
        parts = (self.config, self.criu_layer, self.index_layer, *self.packs, self.spec_layer)
        return sum(part.size for part in parts) + (self.rootfs_layer.size if self.rootfs_layer else 0)

    def extract_criu_images(self, directory: Path) -> None:
        """Write the CRIU images into `directory`, each 0600; nothing but flat regular files is taken."""
        with self.store.open(self.criu_layer) as blob:
            criutar.extract(Decompressed(blob, _uncompressed_size(self.criu_layer)), directory)

    @contextmanager
    def rootfs_diff(self) -> Iterator[BlobReader]:
        """The root filesystem difference as an uncompressed tar stream, empty where there is none. The
        read that reaches its end raises `DigestError` when it was not what it should be."""
        if self.rootfs_layer is None:
            yield io.BytesIO(bytes(1024))
            return
        with self.store.open(self.rootfs_layer) as blob:
            yield Decompressed(blob, _uncompressed_size(self.rootfs_layer))

    def spec(self) -> dict[str, Any]:
        """The OCI runtime spec the container ran with. Information: a target's own spec decides."""
        return load_json(read_blob(self.store, self.spec_layer, MAX_SPEC_BYTES), "the checkpoint's spec")

    def pages(self) -> PageReader:
        """The memory; the first call reads the index."""
        return self._pages

    @cached_property
    def _pages(self) -> PageReader:
        frame = read_blob(self.store, self.index_layer, MAX_INDEX_BYTES)
        stream = Decompressed(io.BytesIO(frame), None, MAX_INDEX_BYTES)
        body = b"".join(iter(lambda: stream.read(1 << 20), b""))
        return PageReader(self.store, Index.decode(body, [pack.size for pack in self.packs]), self.packs)

    def base_blobs(self) -> list[Descriptor]:
        """Config and layers of the base image, as its own manifest names them."""
        if self.base is None:
            return []
        manifest = Manifest.parse(self.store.manifest(self.base.digest)[1])
        return [manifest.config, *manifest.layers]

    def blobs(self) -> list[Descriptor]:
        """Every blob of the artifact: config and layers, base image's included."""
        layers = [*self.base_layers, self.criu_layer, self.index_layer, *self.packs, self.spec_layer]
        return [self.config, *layers, *([self.rootfs_layer] if self.rootfs_layer else [])]


def is_checkpoint(body: bytes) -> bool:
    """Whether a manifest says it is a checkpoint; raises `ArtifactError` when it is no manifest at all."""
    return load_json(body, "the manifest").get("artifactType") == ARTIFACT_TYPE


def _only(manifest: Manifest, media_type: str) -> Descriptor:
    found = [layer for layer in manifest.layers if layer.media_type == media_type]
    if len(found) != 1:
        raise ArtifactError(f"the checkpoint has {len(found)} parts of type {media_type}, not one")
    return found[0]


def _uncompressed_size(layer: Descriptor) -> int:
    text = layer.annotations.get(UNCOMPRESSED_SIZE, "")
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ArtifactError(f"the layer {layer.digest} does not say how large it is uncompressed")
    return int(text)
