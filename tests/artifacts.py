"""Makes small, complete checkpoint artifacts, and a base image for them, without a container."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from base.trace import Trace
from oci.artifact import (
    ArtifactWriter,
    BaseImage,
    CheckpointRecord,
    ContainerRecord,
    FileRecord,
    NodeRecord,
    ProcessRecord,
    SocketRecord,
    StepRecord,
)
from oci.manifest import IMAGE_CONFIG, IMAGE_MANIFEST, LAYER_GZIP, Manifest
from oci.store import Descriptor, Store

RECORD = CheckpointRecord(
    id="",
    created="2026-01-02T03:04:05Z",
    node=NodeRecord("node-a", "6.18.0", "amd64", ("avx2", "sse4_2")),
    container=ContainerRecord("c1", name="web", image="registry.example/web:1", labels={"app": "web"}),
    tools={"cedana": "0.1.0", "criu": "4.2.1", "runc": "1.3.6"},
    processes=(
        ProcessRecord(1, 0, "server", threads=4, memory=1 << 20, argv=("server", "-p", "80")),
        ProcessRecord(7, 1, "worker", argv=("worker", "\udcff")),
    ),
    sockets=(SocketRecord(1, "inet", "stream", "established", "10.0.0.2:80", "10.0.0.9:4000"),),
    files=(FileRecord(1, 3, "/var/log/web.log"), FileRecord(7, 4, "/tmp/gone", deleted=True)),
    mounts=("/proc", "/data"),
    participants={"network": {"interfaces": [{"name": "eth0"}]}},
    criu={"flags": ["tcp-established"]},
    options={"tcp": "established"},
    steps=(StepRecord("freeze", 0.1, 0.02),),
)
CRIU_IMAGES = {"inventory.img": b"inventory", "core-1.img": bytes(5000), "pagemap-1.img": b"\x19\x43"}
SPEC = {"ociVersion": "1.2.0", "process": {"args": ["server"]}}
MEMORY_ADDRESS = 0x7F00_0000_0000


def layer_tar(files: Mapping[str, bytes]) -> bytes:
    """An uncompressed layer with these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return buffer.getvalue()


def put_image(store: Store, tag: str | None, *layers: bytes, env: tuple[str, ...] = ("A=b",)) -> Descriptor:
    """A plain image of these uncompressed layers."""
    descriptors = [store.write(LAYER_GZIP, [gzip.compress(layer, mtime=0)]) for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": list(env), "Cmd": ["/bin/true"]},
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers],
        },
        "history": [{"created_by": "a test"} for _ in layers],
    }
    config_descriptor = store.write(IMAGE_CONFIG, [json.dumps(config).encode()])
    manifest = Manifest(config_descriptor, tuple(descriptors))
    return store.put_manifest(IMAGE_MANIFEST, manifest.to_bytes(), tag)


def put_checkpoint(
    store: Store,
    tag: str,
    base: BaseImage | None,
    directory: Path,
    *,
    memory: bytes = bytes(range(256)) * 2048,
    rootfs: bytes | None = None,
    record: CheckpointRecord = RECORD,
    images: Mapping[str, bytes] = CRIU_IMAGES,
) -> Descriptor:
    """A checkpoint; its CRIU images are made in `directory`."""
    directory.mkdir(exist_ok=True, parents=True)
    for name, content in images.items():
        (directory / name).write_bytes(content)
    with ArtifactWriter(store, base, Trace()) as writer:
        writer.add_rootfs_diff([layer_tar({"changed": b"yes"}) if rootfs is None else rootfs])
        if memory:
            writer.pages.add("pagemap-1.img", MEMORY_ADDRESS, memory)
        writer.add_criu_images(directory)
        writer.add_spec(json.dumps(SPEC).encode())
        return writer.finish(record, tag)
