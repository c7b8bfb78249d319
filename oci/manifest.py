"""Image manifests and media types (image-spec 1.1, manifest.md), read strictly and written canonically."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oci.decode import dump_json, load_json
from oci.errors import ArtifactError
from oci.store import Descriptor

IMAGE_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_INDEX = "application/vnd.oci.image.index.v1+json"
IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
LAYER_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
_DOCKER_LAYERS = {
    "application/vnd.docker.image.rootfs.diff.tar": LAYER_TAR,
    "application/vnd.docker.image.rootfs.diff.tar.gzip": LAYER_GZIP,
    "application/vnd.docker.image.rootfs.diff.tar.zstd": LAYER_ZSTD,
}

MANIFEST_TYPES = (IMAGE_MANIFEST, IMAGE_INDEX, DOCKER_MANIFEST, DOCKER_LIST)
MAX_MANIFEST_BYTES = 4 << 20
"""What registries accept (distribution-spec, "Pushing Manifests")."""
MAX_LAYERS = 1 << 15


@dataclass(frozen=True)
class Manifest:
    config: Descriptor
    layers: tuple[Descriptor, ...]
    media_type: str = IMAGE_MANIFEST
    artifact_type: str = ""
    subject: Descriptor | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, body: bytes) -> Manifest:
        """The image manifest in `body`, which may be hostile; raises `ArtifactError`."""
        if len(body) > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"the manifest has {len(body)} bytes, {MAX_MANIFEST_BYTES} at most are read")
        value = load_json(body, "the manifest")
        media_type = value.get("mediaType", IMAGE_MANIFEST)
        if value.get("schemaVersion") != 2 or media_type not in (IMAGE_MANIFEST, DOCKER_MANIFEST):
            raise ArtifactError(f"not an image manifest but {str(media_type)[:100]}")
        layers = value.get("layers")
        if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
            raise ArtifactError("the manifest has no layers, or too many")
        annotations = value.get("annotations") or {}
        artifact_type = value.get("artifactType") or ""
        if not isinstance(annotations, dict) or not all(isinstance(v, str) for v in annotations.values()):
            raise ArtifactError("the manifest has malformed annotations")
        if not isinstance(artifact_type, str):
            raise ArtifactError("the manifest has a malformed artifactType")
        subject = value.get("subject")
        return cls(
            config=Descriptor.from_json(value.get("config")),
            layers=tuple(Descriptor.from_json(layer) for layer in layers),
            media_type=media_type,
            artifact_type=artifact_type,
            subject=None if subject is None else Descriptor.from_json(subject),
            annotations=annotations,
        )

    def to_bytes(self) -> bytes:
        value: dict[str, Any] = {"schemaVersion": 2, "mediaType": self.media_type}
        if self.artifact_type:
            value["artifactType"] = self.artifact_type
        value["config"] = self.config.to_json()
        value["layers"] = [layer.to_json() for layer in self.layers]
        if self.subject is not None:
            value["subject"] = self.subject.to_json()
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return dump_json(value)


def is_image_layer(media_type: str) -> bool:
    """Whether containerd counts a layer of this type against the config's diff ids."""
    return media_type.startswith("application/vnd.oci.image.layer.") or media_type in _DOCKER_LAYERS


def as_oci_layer(layer: Descriptor) -> Descriptor:
    """The same layer under its OCI media type."""
    return Descriptor(_DOCKER_LAYERS.get(layer.media_type, layer.media_type), layer.digest, layer.size)
