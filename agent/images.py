"""Container images in containerd: which one a container came from, and bringing one here for a restore."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.containers import NERDCTL_NAME
from agent.errors import AlreadyExistsError
from base.errors import CedanaError, NotFoundError
from base.trace import Trace
from oci.artifact import Artifact, BaseImage
from oci.content import ContentDirectory
from oci.errors import ArtifactError
from oci.store import Descriptor, Store
from runtime.errors import IncompatibleError
from runtime.node import arch

_CONTENT_PLUGIN = "io.containerd.content.v1"
_READ_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 8 << 20
_IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,511}")
_HERE = {"os": "linux", "architecture": arch()}
_UNNAMED = "cedana.local/base"


@dataclass(frozen=True)
class Image:
    """The manifest of an image for this platform, and what it names."""

    manifest: Descriptor
    body: bytes
    config: Descriptor
    layers: tuple[Descriptor, ...]
    diff_ids: tuple[str, ...]

    @property
    def chain(self) -> tuple[str, ...]:
        """The name of the snapshot after each layer (image-spec, config.md, "Layer ChainID")."""
        chain: list[str] = []
        for diff_id in self.diff_ids:
            both = f"{chain[-1]} {diff_id}" if chain else ""
            chain.append(f"sha256:{hashlib.sha256(both.encode()).hexdigest()}" if chain else diff_id)
        return tuple(chain)


def content_directory(client: Client) -> Path:
    return client.plugin_root(_CONTENT_PLUGIN)


def locate(client: Client, container: api.Container) -> tuple[Path, str]:
    """containerd's content directory, and the digest in it of the manifest of the container's image."""
    directory = content_directory(client)
    record = client.image(container.image) if container.image else None
    if record is None:
        raise NotFoundError(
            f"the image of container {container.id} is not in containerd", hint="pull it again"
        )
    return directory, platform_manifest(ContentDirectory(directory), record.target.digest)[0].digest


def base_image(client: Client, container: api.Container) -> BaseImage:
    """The image whose layers the container's root filesystem stands on.

    The container's image *name* may mean another image by now: what counts is the snapshot it was made from.
    """
    name = container.labels.get(NERDCTL_NAME) or container.id
    store = ContentDirectory(content_directory(client))
    parent = client.snapshot_parent(container.snapshotter, container.snapshot_key)
    if not parent:
        raise IncompatibleError(
            f"the root filesystem of container {name} is not made from an image",
            hint="run the container from an image with an overlay snapshotter",
        )
    for record in sorted(client.images(), key=lambda image: image.name != container.image):
        try:
            image = read_image(store, record.target.digest)
        except CedanaError:
            continue  # of another platform, or not all there: not the one that was unpacked
        if image.chain and image.chain[-1] == parent:
            _require_layers(store, image, record.name, name)
            return BaseImage(store, image.manifest, container.image or record.name)
    raise IncompatibleError(
        f"the image that container {name} was made from ({container.image}) is no longer in containerd",
        hint="pull the very same image again, then checkpoint",
        details=f"no image of the namespace {client.namespace} ends in the snapshot {parent}",
    )


def bring(
    client: Client, artifact: Artifact, source: Store, snapshotter: str, trace: Trace
) -> tuple[str, str]:
    """Put the artifact's base image into containerd, unpacked; returns its name and its last snapshot.

    Call inside `client.lease()`.
    """
    if artifact.base is None:
        raise IncompatibleError(
            "the checkpoint has no base image: its container was not made from one",
            hint="checkpoint a container that was run from an image",
        )
    image = read_image(source, artifact.base.digest)
    missing = [d for d in (*image.layers, image.config) if not client.has_content(d.digest)]
    with trace.step("image"):
        total, done = sum(blob.size for blob in missing), 0
        for blob in missing:
            with source.open(blob) as reader:
                client.write_content(
                    blob.digest, blob.size, _chunks(reader, trace, done, total), _gc_labels(image, blob)
                )
            done += blob.size
        labels = _gc_labels(image, image.manifest)
        client.write_content(image.manifest.digest, len(image.body), [image.body], labels)
    with trace.step("unpack"):
        snapshot = unpack(client, image, snapshotter)
    return _name_image(client, artifact.record.container.image, image), snapshot


def remove_new(client: Client, known: Collection[str], manifest_digest: str) -> None:
    """Remove the image with this manifest if it is not among `known` names and no container uses it."""
    for image in client.images():
        unused = image.target.digest == manifest_digest and image.name not in known
        if unused and not any(container.image == image.name for container in client.containers()):
            client.delete_image(image.name)


def unpack(client: Client, image: Image, snapshotter: str) -> str:
    """Make the image's snapshots; returns the name of the last one ('' for an image without layers)."""
    parent = ""
    for layer, diff_id, name in zip(image.layers, image.diff_ids, image.chain, strict=True):
        if client.snapshot_parent(snapshotter, name) is None:
            _unpack_layer(client, snapshotter, layer, diff_id, parent, name)
        parent = name
    if parent:
        client.label_content(image.config.digest, {f"containerd.io/gc.ref.snapshot.{snapshotter}": parent})
    return parent


def platform_manifest(store: Store, digest: str) -> tuple[Descriptor, bytes]:
    """The manifest with this digest or, if it is an index, the one in it for this machine."""
    descriptor, body = store.manifest(digest)
    index = _json(body, "an image manifest")
    if "manifests" not in index or "config" in index:  # an index need not say that it is one
        return descriptor, body
    for entry in _array(index["manifests"]):
        named = Descriptor.from_json(entry)
        with suppress(NotFoundError):  # containerd keeps the manifests of this platform only
            manifest, manifest_body = store.manifest(named.digest)
            platform = entry.get("platform") or _config(store, manifest_body)[1]
            if isinstance(platform, dict) and _HERE.items() <= platform.items():
                return manifest, manifest_body
    raise IncompatibleError(f"the image {digest} has no manifest for linux/{arch()}")


def read_image(store: Store, digest: str) -> Image:
    """Read an image's manifest and config; raises `ArtifactError` when they contradict each other."""
    descriptor, body = platform_manifest(store, digest)
    layers = tuple(Descriptor.from_json(layer) for layer in _array(_json(body, "a manifest").get("layers")))
    config, image_config = _config(store, body)
    rootfs = image_config.get("rootfs")
    diff_ids = _array(rootfs.get("diff_ids") if isinstance(rootfs, dict) else None)
    if not all(isinstance(diff_id, str) for diff_id in diff_ids) or len(diff_ids) != len(layers):
        raise ArtifactError(f"the config of the image {descriptor.digest} does not match its manifest")
    return Image(descriptor, body, config, layers, tuple(diff_ids))


def _config(store: Store, manifest: bytes) -> tuple[Descriptor, dict[str, Any]]:
    """The config that a manifest names."""
    descriptor = Descriptor.from_json(_json(manifest, "an image manifest").get("config"))
    if descriptor.size > _MAX_CONFIG_BYTES:
        raise ArtifactError(f"the config {descriptor.digest} of an image is too large")
    with store.open(descriptor) as reader:
        return descriptor, _json(_read_all(reader), "an image config")


def _unpack_layer(
    client: Client, snapshotter: str, layer: Descriptor, diff_id: str, parent: str, name: str
) -> None:
    key = f"cedana-extract-{hashlib.sha256(f'{client.namespace} {name}'.encode()).hexdigest()[:16]}"
    with suppress(NotFoundError):
        client.remove_snapshot(snapshotter, key)  # left by one that was killed
    mounts = client.prepare_snapshot(snapshotter, key, parent)
    try:
        applied = client.apply_layer(descriptor_message(layer), mounts)
        if applied != diff_id:
            raise ArtifactError(
                f"the layer {layer.digest} is not what its image's config says",
                details=f"it unpacks to {applied}, the config names {diff_id}",
            )
        with suppress(AlreadyExistsError):
            client.commit_snapshot(snapshotter, name, key)
            return
    except BaseException:
        with suppress(CedanaError):
            client.remove_snapshot(snapshotter, key)
        raise
    client.remove_snapshot(snapshotter, key)


def _name_image(client: Client, wanted: str, image: Image) -> str:
    """The image's name here: the one it had if that means this image already, else that name and its digest.

    A bare name is never given: an artifact must not decide what `redis:latest` means on this node.
    """
    existing = client.image(wanted) if _IMAGE_NAME.fullmatch(wanted) else None
    if existing is not None and _same(client, existing, image):
        return wanted
    name = wanted.partition("@")[0] if _IMAGE_NAME.fullmatch(wanted) else _UNNAMED
    name = f"{name}@{image.manifest.digest}"
    with suppress(AlreadyExistsError):
        client.create_image(name, descriptor_message(image.manifest))
    return name


def _same(client: Client, existing: api.Image, image: Image) -> bool:
    if existing.target.digest == image.manifest.digest:
        return True
    with suppress(CedanaError):
        store = ContentDirectory(content_directory(client))
        return platform_manifest(store, existing.target.digest)[0].digest == image.manifest.digest
    return False


def _gc_labels(image: Image, blob: Descriptor) -> dict[str, str]:
    """What containerd's garbage collector follows from a manifest (docs/garbage-collection.md)."""
    if blob.digest != image.manifest.digest:
        return {}
    labels = {"containerd.io/gc.ref.content.config": image.config.digest}
    return labels | {f"containerd.io/gc.ref.content.l.{n}": d.digest for n, d in enumerate(image.layers)}


def _require_layers(store: Store, image: Image, reference: str, container: str) -> None:
    missing = [layer.digest for layer in image.layers if not store.exists(layer)]
    if missing:
        raise IncompatibleError(
            f"containerd no longer has the layers of {reference}, the image of container {container}",
            hint="pull the image again (and set discard_unpacked_layers = false)",
            details=missing[0],
        )


def descriptor_message(descriptor: Descriptor) -> api.Descriptor:
    return api.Descriptor(media_type=descriptor.media_type, digest=descriptor.digest, size=descriptor.size)


def _chunks(reader: Any, trace: Trace, done: int, total: int) -> Iterator[bytes]:
    while chunk := reader.read(_READ_BYTES):
        done += len(chunk)
        trace.progress("image", done, total)
        yield chunk


def _read_all(reader: Any) -> bytes:
    return b"".join(iter(lambda: reader.read(_READ_BYTES), b""))


def _json(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ArtifactError(f"{what} is not JSON", details=str(error)) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{what} is not an object")
    return value


def _array(value: object) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ArtifactError("an image's manifest or config lacks one of its lists")
    return value
