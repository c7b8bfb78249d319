"""Real artifacts in real layouts, small: a base image of two layers, and a checkpoint upon it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from base.trace import Trace
from oci.artifact import ArtifactWriter, BaseImage
from oci.layout import Layout
from oci.record import CheckpointRecord, ContainerRecord, NodeRecord, ProcessRecord
from oci.store import Descriptor
from runtime.node import this_node

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
IMAGE_NAME = "docker.io/library/counter:1"
NERDCTL_ID = "5" * 64


def tar(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, body in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


def digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def image(directory: Path, content: bytes = b"one") -> tuple[BaseImage, dict[str, str]]:
    """An image in a layout, and its layers' digests → uncompressed digests."""
    store = Layout(directory)
    tars = [tar(a=content), tar(b=b"two")]
    layers = [store.write(LAYER, [gzip.compress(body, mtime=0)]) for body in tars]
    config = {
        "architecture": this_node().arch,
        "os": "linux",
        "config": {"Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(body) for body in tars]},
    }
    config_blob = store.write(CONFIG, [json.dumps(config).encode()])
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config_blob.to_json(),
        "layers": [layer.to_json() for layer in layers],
    }
    descriptor = store.put_manifest(MANIFEST, json.dumps(manifest).encode(), "base")
    diff_ids = {layer.digest: digest(body) for layer, body in zip(layers, tars, strict=True)}
    return BaseImage(store, descriptor, IMAGE_NAME), diff_ids


def checkpoint(
    directory: Path, base: BaseImage | None, spec: dict[str, Any], tag: str = "c1", **container: Any
) -> Descriptor:
    """A checkpoint in the layout `directory`; `container` are fields of its container's record."""
    node = this_node()
    described = replace(
        ContainerRecord(id="c1", name="c1", namespace="default", image=IMAGE_NAME), **container
    )
    images = directory.parent / "criu"
    images.mkdir(parents=True, exist_ok=True)
    (images / "inventory.img").write_bytes(b"x" * 64)
    (images / "pstree.img").write_bytes(struct.pack("<II", 0x54564319, 0x50273030))
    with ArtifactWriter(Layout(directory), base, Trace()) as writer:
        writer.add_rootfs_diff([tar(new=b"file")])
        writer.add_criu_images(images)
        writer.add_spec(json.dumps(spec).encode())
        record = CheckpointRecord(
            id=writer.id,
            created="2026-12-03T07:00:00.000+00:00",
            node=NodeRecord(node.hostname, node.kernel, node.arch, tuple(sorted(node.cpu_flags))),
            container=described,
            processes=(ProcessRecord(1, 0, "sh", 1, 4096, ("sh", "-c", "x")),),
        )
        return writer.finish(record, tag)
