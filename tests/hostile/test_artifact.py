"""Artifacts made by someone who means harm: each is refused in a sentence, and nothing gets out of its place.

Needs no nodes: a small artifact is made in an image layout, then changed in one way, its digests made good
again so that the change is reached.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import blake3
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from base.errors import CedanaError, NotFoundError
from base.trace import Trace
from oci import criutar
from oci.artifact import ARTIFACT_TYPE, CRIU, INDEX, SPEC, Artifact
from oci.errors import ArtifactError, DigestError, StoreError
from oci.index import CHUNK_BYTES, Chunk, Extent, Index
from oci.layout import Layout
from oci.manifest import IMAGE_MANIFEST, LAYER_ZSTD
from oci.pages import PAGES
from oci.store import Descriptor
from oci.transfer import copy
from tests.artifacts import MEMORY_ADDRESS, layer_tar, put_checkpoint
from tests.page_images import read_range

MEMORY_BYTES = 2 * CHUNK_BYTES
SIZE = "ai.cedana.uncompressed-size"


class Victim:
    """An artifact in a layout, and ways to forge it."""

    def __init__(self, directory: Path) -> None:
        self.layout = Layout(directory / "layout")
        self.out = directory / "out"
        self.out.mkdir()
        memory = os.urandom(CHUNK_BYTES) + b"compressible" * (CHUNK_BYTES // 12) + bytes(CHUNK_BYTES % 12)
        put_checkpoint(self.layout, "web", None, directory / "criu", memory=memory)
        self.directory = directory
        self.original = self.manifest

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads(self.layout.manifest("web")[1])  # type: ignore[no-any-return]

    def blob(self, descriptor: dict[str, Any]) -> Path:
        return self.layout.directory / "blobs" / "sha256" / descriptor["digest"][7:]

    def layer(self, media_type: str) -> dict[str, Any]:
        return next(layer for layer in self.manifest["layers"] if layer["mediaType"] == media_type)

    def config(self) -> dict[str, Any]:
        return json.loads(self.blob(self.manifest["config"]).read_bytes())  # type: ignore[no-any-return]

    def forge(self, manifest: dict[str, Any]) -> None:
        """Make `manifest` the artifact, whatever it says."""
        body = json.dumps(manifest).encode()
        self.put_raw(body)

    def put_raw(self, body: bytes) -> None:
        digest = hashlib.sha256(body).hexdigest()
        (self.layout.directory / "blobs" / "sha256" / digest).write_bytes(body)
        annotations = {"org.opencontainers.image.ref.name": "web"}
        entry = Descriptor(IMAGE_MANIFEST, f"sha256:{digest}", len(body), annotations)
        index = {"schemaVersion": 2, "manifests": [entry.to_json()]}
        (self.layout.directory / "index.json").write_text(json.dumps(index))

    def forge_config(self, **changes: Any) -> None:
        self.forge_blob("config", json.dumps({**self.config(), **changes}).encode())

    def forge_record(self, **changes: Any) -> None:
        self.forge_config(checkpoint={**self.config()["checkpoint"], **changes})

    def forge_blob(self, media_type: str, body: bytes, **annotations: str) -> None:
        """Replace the only layer of this type, or the config, by another; digests and sizes fit."""
        manifest = self.manifest
        new = self.layout.write("a/b", [body])
        targets = [layer for layer in manifest["layers"] if layer["mediaType"] == media_type]
        for target in [manifest["config"]] if media_type == "config" else targets:
            target.update(digest=new.digest, size=new.size)
            if annotations:
                target["annotations"] = {**target.get("annotations", {}), **annotations}
        self.forge(manifest)

    def forge_criu(self, tar: bytes, size: int | None = None) -> None:
        frame = zstandard.ZstdCompressor().compress(tar)
        self.forge_blob(CRIU, frame, **{SIZE: str(len(tar) if size is None else size)})

    def forge_index(self, change: Callable[[Index], Index]) -> None:
        sizes = [layer["size"] for layer in self.manifest["layers"] if layer["mediaType"] == PAGES]
        body = zstandard.ZstdDecompressor().decompress(self.blob(self.layer(INDEX)).read_bytes())
        index = change(Index.decode(body, sizes))
        self.forge_blob(INDEX, zstandard.ZstdCompressor().compress(index.encode()))

    def open(self) -> Artifact:
        return Artifact.open(self.layout, "web")

    def extract(self) -> None:
        self.open().extract_criu_images(self.out)

    def fill(self) -> bytes:
        """Read all memory back."""
        return read_range(self.open().pages(), "pagemap-1.img", (MEMORY_ADDRESS, MEMORY_BYTES))

    def use(self) -> None:
        """Everything a restore reads."""
        artifact = self.open()
        artifact.spec()
        artifact.extract_criu_images(self.out)
        with artifact.rootfs_diff() as stream:
            while stream.read(1 << 16):
                pass
        self.fill()
        artifact.base_blobs()


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path)


@contextmanager
def bounded(seconds: float = 10, memory: int = 1 << 30) -> Iterator[None]:
    """Whatever happens inside ends soon and does not take much more memory."""
    with Path("/proc/self/statm").open() as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + memory, hard))
    began = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - began < seconds


def test_the_artifact_is_good_before_it_is_forged(victim: Victim) -> None:
    victim.use()


# Blobs that are not what their digests promise.


@pytest.mark.parametrize("media_type", [CRIU, INDEX, SPEC, PAGES, LAYER_ZSTD, "config"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer", "empty", "missing"])
def test_damaged_blob_of_any_kind_is_noticed(victim: Victim, media_type: str, damage: str) -> None:
    path = victim.blob(victim.manifest["config"] if media_type == "config" else victim.layer(media_type))
    body = path.read_bytes()
    match damage:
        case "flipped":
            middle = len(body) // 2
            path.write_bytes(body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :])
        case "truncated":
            path.write_bytes(body[: len(body) // 2])
        case "longer" if media_type != PAGES:  # What follows the chunks of a pack is never read.
            path.write_bytes(body + b"x")
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
        case _:
            return
    with pytest.raises(StoreError) as raised:
        victim.use()
    if damage != "missing":
        assert isinstance(raised.value, DigestError)


def test_damaged_artifact_cannot_be_copied_either(victim: Victim, tmp_path: Path) -> None:
    path = victim.blob(victim.layer(SPEC))
    path.write_bytes(path.read_bytes().replace(b"server", b"s3rver"))
    with pytest.raises(DigestError):
        copy(victim.layout, "web", Layout(tmp_path / "copy"), "web", Trace())
    assert Layout(tmp_path / "copy").tags() == []


@pytest.mark.parametrize("size", [0, 1, 1 << 41])
def test_wrong_size_in_a_descriptor_is_noticed(victim: Victim, size: int) -> None:
    manifest = victim.manifest
    for layer in manifest["layers"]:
        if layer["mediaType"] == CRIU:
            layer["size"] = size
    victim.forge(manifest)
    with pytest.raises(DigestError), bounded():
        victim.extract()


# Manifests and configs.


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{" * 100_000,
        b"[" * 1_000_000,
        b'{"artifactType":' + b"[" * 500_000,
        b"\xff\xfe",
        b'{"schemaVersion":NaN}',
        bytes(5 << 20),
    ],
)
def test_manifest_that_is_none_is_refused(victim: Victim, body: bytes) -> None:
    victim.put_raw(body)
    with pytest.raises(StoreError), bounded():
        victim.open()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"artifactType": "application/vnd.example"}, "web is not a checkpoint"),
        ({"artifactType": None}, "web is not a checkpoint"),
        ({"schemaVersion": 1}, "not an image manifest"),
        ({"mediaType": "application/vnd.oci.image.index.v1+json"}, "not an image manifest"),
        ({"layers": None}, "no layers"),
        ({"layers": {}}, "no layers"),
        ({"layers": []}, "1 diff ids for 0 layers"),
        ({"layers": [None]}, "descriptor is not"),
        ({"config": None}, "descriptor is not"),
        ({"subject": []}, "descriptor is not"),
        ({"annotations": {"a": 1}}, "malformed annotations"),
    ],
)
def test_malformed_manifest_is_refused(victim: Victim, change: dict[str, Any], told: str) -> None:
    victim.forge({**victim.manifest, **change})
    with pytest.raises(ArtifactError, match=told):
        victim.open()


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "../x", "sha512:" + "0" * 128, "", 5])
def test_digest_that_is_a_path_is_refused(victim: Victim, digest: object) -> None:
    for part in ("config", "layers", "subject"):
        manifest = victim.manifest
        descriptor = {"mediaType": CRIU, "size": 1, "digest": digest}
        manifest[part] = [*manifest["layers"], descriptor] if part == "layers" else descriptor
        victim.forge(manifest)
        with pytest.raises(ArtifactError, match="no sha256 digest"):
            victim.open()


def test_huge_number_of_layers_is_refused(victim: Victim) -> None:
    manifest = victim.manifest
    manifest["layers"] = manifest["layers"] + [manifest["layers"][0]] * 100_000
    victim.forge(manifest)
    with pytest.raises(StoreError, match=r"too large|too many"), bounded():
        victim.open()


def test_unknown_part_is_refused(victim: Victim) -> None:
    manifest = victim.manifest
    manifest["layers"].append({**manifest["layers"][-1], "mediaType": "application/vnd.cedana.later.v9"})
    victim.forge(manifest)
    with pytest.raises(ArtifactError, match="unknown type") as raised:
        victim.open()
    assert "later version" in raised.value.hint


@pytest.mark.parametrize("media_type", [CRIU, INDEX, SPEC])
def test_part_that_is_there_twice_is_refused(victim: Victim, media_type: str) -> None:
    manifest = victim.manifest
    manifest["layers"].append(victim.layer(media_type))
    victim.forge(manifest)
    with pytest.raises(ArtifactError, match="2 parts of type"):
        victim.open()


def test_second_rootfs_difference_is_refused(victim: Victim) -> None:
    manifest = victim.manifest
    manifest["layers"].append(victim.layer(LAYER_ZSTD))
    victim.forge(manifest)
    with pytest.raises(ArtifactError, match="more than one root filesystem difference"):
        victim.open()


@pytest.mark.parametrize("version", [0, 2, 99, -1])
def test_other_format_version_is_told(victim: Victim, version: int) -> None:
    victim.forge_record(format_version=version)
    with pytest.raises(ArtifactError, match=f"format version {version}") as raised:
        victim.open()
    assert "version of cedana" in raised.value.hint


def test_record_of_the_wrong_shape_is_refused(victim: Victim) -> None:
    record = victim.config()["checkpoint"]
    for name, value in (
        ("node", "x"),
        ("processes", [{"pid": "1", "parent": 0, "name": "a"}]),
        ("processes", {"a": 1}),
        ("participants", []),
        ("container", {}),
    ):
        victim.forge_config(checkpoint={**record, name: value})
        with pytest.raises(ArtifactError, match="checkpoint"):
            victim.open()


def test_config_without_a_record_is_refused(victim: Victim) -> None:
    victim.forge_config(checkpoint=None)
    with pytest.raises(ArtifactError, match="no format version"):
        victim.open()


@pytest.mark.parametrize(
    "changes",
    [
        {"rootfs": None},
        {"rootfs": {"diff_ids": []}},
        {"rootfs": {"diff_ids": ["sha256:x"]}},
        {"rootfs": {"diff_ids": "sha256:" + "0" * 64}},
        {"config": []},
        {"config": {"Env": "A=b"}},
    ],
)
def test_image_config_that_contradicts_the_manifest_is_refused(
    victim: Victim, changes: dict[str, Any]
) -> None:
    victim.forge_config(**changes)
    with pytest.raises(ArtifactError, match="the image config"):
        victim.open()


def test_deep_json_is_refused(victim: Victim) -> None:
    victim.forge_blob("config", b'{"checkpoint":' + b'{"a":' * 400_000 + b"1" + b"}" * 400_001)
    with pytest.raises(ArtifactError, match="not valid JSON"), bounded():
        victim.open()


def test_huge_config_is_refused_before_it_is_read(victim: Victim) -> None:
    victim.forge_blob("config", b" " * (17 << 20))
    with pytest.raises(ArtifactError, match="at most are read"), bounded():
        victim.open()


def test_huge_spec_is_refused_before_it_is_read(victim: Victim) -> None:
    victim.forge_blob(SPEC, b" " * (17 << 20))
    with pytest.raises(ArtifactError, match="at most are read"), bounded():
        victim.open().spec()


# CRIU images.


def tar_of(**header: Any) -> bytes:
    """A tar stream with one entry."""
    content = header.pop("content", b"")
    entry = tarfile.TarInfo(header.pop("name", "core-1.img"))
    entry.size = len(content)
    for key, value in header.items():
        setattr(entry, key, value)
    padding = bytes(-len(content) % 512)
    return entry.tobuf(header.get("format", tarfile.USTAR_FORMAT)) + content + padding + bytes(1024)


@pytest.mark.parametrize(
    "tar",
    [
        tar_of(name="../escaped"),
        tar_of(name="/tmp/escaped"),
        tar_of(name="a/b"),
        tar_of(name="."),
        tar_of(name=".."),
        tar_of(name=".hidden"),
        tar_of(name="a b"),
        tar_of(name="a\nb"),
        tar_of(name=""),
        tar_of(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        tar_of(type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        tar_of(type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        tar_of(type=tarfile.BLKTYPE, devmajor=8),
        tar_of(type=tarfile.FIFOTYPE),
        tar_of(type=tarfile.DIRTYPE),
        tar_of(type=tarfile.GNUTYPE_LONGNAME, content=b"../../escaped\0"),
        tar_of(type=tarfile.XHDTYPE, content=b"28 path=../../tmp/escaped\n"),
        tar_of(type=tarfile.XGLTYPE, content=b"28 path=../../tmp/escaped\n"),
        tar_of(type=tarfile.GNUTYPE_SPARSE),
        tar_of() + b"trailing",
        tar_of()[:700],
        tar_of(content=b"x" * 5000)[:2000],
        tar_of(content=b"abc")[:515] + b"y" * 509 + bytes(1024),
        b"not a tar stream at all" * 100,
        tar_of(name="twice")[:512] + tar_of(name="twice"),
    ],
)
def test_criu_images_that_are_more_than_flat_files_are_refused(victim: Victim, tar: bytes) -> None:
    victim.forge_criu(tar)
    with pytest.raises(StoreError):
        victim.extract()
    for path in victim.out.iterdir():
        assert path.is_file()
        assert not path.is_symlink()
    assert not (victim.directory / "escaped").exists()
    assert not Path("/tmp/escaped").exists()


def test_file_that_a_link_is_waiting_for_is_not_written_through_it(victim: Victim) -> None:
    (victim.out / "core-1.img").symlink_to(victim.directory / "precious")
    with pytest.raises(ArtifactError, match="there twice"):
        victim.extract()
    assert not (victim.directory / "precious").exists()


def test_huge_file_in_the_criu_images_is_refused_by_its_header(victim: Victim) -> None:
    header = tarfile.TarInfo("core-1.img")
    header.size = (8 << 30) - 1
    more = tarfile.TarInfo("core-2.img")
    more.size = 2
    victim.forge_criu(header.tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    with pytest.raises(StoreError), bounded():
        victim.extract()
    header.size = 9 << 30
    victim.forge_criu(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ArtifactError), bounded():
        victim.extract()


def test_criu_images_that_swell_are_stopped_at_the_size_they_promise(victim: Victim) -> None:
    victim.forge_criu(tar_of(content=bytes(64 << 20)), size=1 << 20)
    with pytest.raises(ArtifactError, match="larger uncompressed"), bounded():
        victim.extract()
    assert sum(path.stat().st_size for path in victim.out.iterdir()) <= 3 << 20


@pytest.mark.parametrize("size", ["", "-1", "1e9", "9" * 40, "١٢"])
def test_malformed_uncompressed_size_is_refused(victim: Victim, size: str) -> None:
    victim.forge_blob(CRIU, victim.blob(victim.layer(CRIU)).read_bytes(), **{SIZE: size})
    with pytest.raises(ArtifactError, match="how large it is uncompressed"):
        victim.extract()


def test_frame_that_wants_a_huge_window_is_refused(victim: Victim) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(bytes(2048)) + compressor.flush()
    victim.forge_blob(CRIU, frame, **{SIZE: "2048"})
    with pytest.raises(StoreError, match="cannot be decompressed"), bounded():
        victim.extract()


# The root filesystem difference.


def test_rootfs_difference_that_swells_is_stopped(victim: Victim) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    victim.forge_blob(LAYER_ZSTD, frame, **{SIZE: str(1 << 20)})
    with (
        pytest.raises(ArtifactError, match="larger uncompressed"),
        bounded(),
        victim.open().rootfs_diff() as stream,
    ):
        stream.read()


def test_rootfs_difference_that_ends_early_is_noticed(victim: Victim) -> None:
    tar = layer_tar({"a": bytes(100_000)})
    frame = zstandard.ZstdCompressor().compress(tar[:50_000])
    victim.forge_blob(LAYER_ZSTD, frame, **{SIZE: str(len(tar))})
    with pytest.raises(DigestError, match="truncated"), victim.open().rootfs_diff() as stream:
        stream.read()


# Memory.


@pytest.mark.parametrize("body", [b"", b"no frame", zstandard.ZstdCompressor().compress(b"no index")])
def test_index_that_is_none_is_refused(victim: Victim, body: bytes) -> None:
    victim.forge_blob(INDEX, body)
    with pytest.raises(StoreError):
        victim.open().pages()


def test_index_that_swells_is_stopped(victim: Victim) -> None:
    compressor = zstandard.ZstdCompressor().compressobj()
    frame = b"".join(compressor.compress(bytes(64 << 20)) for _ in range(17)) + compressor.flush()
    victim.forge_blob(INDEX, frame)
    with pytest.raises(ArtifactError, match="larger uncompressed"), bounded(seconds=30, memory=3 << 30):
        victim.open().pages()


def test_huge_counts_in_the_index_take_no_memory(victim: Victim) -> None:
    head = Index((), {}).encode()
    for body in (head[:16] + b"\xff" * 4 + head[20:], head[:20] + b"\xff" * 4):
        victim.forge_blob(INDEX, zstandard.ZstdCompressor().compress(body))
        with pytest.raises(ArtifactError, match="truncated"), bounded(memory=1 << 28):
            victim.open().pages()


def changed_chunk(**fields: Any) -> Callable[[Index], Index]:
    return lambda index: Index([c._replace(**fields) for c in index.chunks], index.objects)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (changed_chunk(pack=1), ArtifactError),
        (changed_chunk(pack=0xFFFFFFFF), ArtifactError),
        (changed_chunk(offset=0xFFFFFFFF), ArtifactError),
        (changed_chunk(stored=0xFFFFFFFF), ArtifactError),
        (changed_chunk(length=0xFFFFFFFF), ArtifactError),
        (changed_chunk(digest=bytes(32)), DigestError),
        (changed_chunk(offset=0), StoreError),
        (changed_chunk(stored=17), StoreError),
    ],
)
def test_index_that_lies_about_its_chunks_is_caught(
    victim: Victim, change: Callable[[Index], Index], kind: type[CedanaError]
) -> None:
    victim.forge_index(change)
    with pytest.raises(kind), bounded():
        victim.fill()


def test_index_that_leaves_memory_out_is_caught(victim: Victim) -> None:
    victim.forge_index(lambda i: Index(i.chunks, {"pagemap-1.img": i.objects["pagemap-1.img"][:1]}))
    with pytest.raises(ArtifactError, match="no memory at"):
        victim.fill()


@pytest.mark.parametrize("claimed", [1 << 20, 1 << 40, None])
def test_chunk_that_swells_is_stopped_by_its_frame_header(victim: Victim, claimed: int | None) -> None:
    """The size in a zstd frame decides what is allocated; a frame without one is no chunk."""
    compressor = zstandard.ZstdCompressor(write_content_size=claimed is not None)
    frame = compressor.compress(bytes(CHUNK_BYTES * 4))
    if claimed is not None and claimed >= 1 << 32:
        # Magic, descriptor (8-byte content size, no single segment), window, size: then any block.
        frame = b"\x28\xb5\x2f\xfd" + b"\xc0" + b"\x38" + claimed.to_bytes(8, "little") + b"\x01\x00\x00"
    manifest = victim.manifest
    new = victim.layout.write("a/b", [frame])
    manifest["layers"] = [layer for layer in manifest["layers"] if layer["mediaType"] != PAGES]
    manifest["layers"].append({"mediaType": PAGES, "digest": new.digest, "size": new.size})
    victim.forge(manifest)
    digest = blake3.blake3(bytes(CHUNK_BYTES)).digest()
    chunk = Chunk(0, 0, len(frame), CHUNK_BYTES, digest)
    extents = [Extent(MEMORY_ADDRESS + i * CHUNK_BYTES, CHUNK_BYTES, 0, 0) for i in range(2)]
    index = Index([chunk], {"pagemap-1.img": extents})
    victim.forge_blob(INDEX, zstandard.ZstdCompressor().compress(index.encode()))
    with pytest.raises(DigestError, match="another size"), bounded(memory=1 << 28):
        victim.fill()


# Anything at all.


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim(tmp_path_factory.mktemp("lasting"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_the_manifest_is_taken_or_refused(lasting: Victim, data: st.DataObject) -> None:
    changed = json.loads(json.dumps(lasting.original))
    where: Any = changed
    path = data.draw(
        st.sampled_from(
            [
                ("mediaType",),
                ("config",),
                ("config", "size"),
                ("config", "digest"),
                ("layers",),
                ("layers", 0),
                ("layers", 1, "annotations"),
                ("layers", 2, "mediaType"),
                ("subject",),
                ("annotations",),
            ]
        )
    )
    for step in path[:-1]:
        where = where[step]
    where[path[-1]] = data.draw(json_values)
    lasting.forge(changed)
    try:
        artifact = lasting.open()
    except (StoreError, NotFoundError):
        return
    assert artifact.manifest.artifact_type == ARTIFACT_TYPE


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=2000), tail=st.booleans())
def test_any_bytes_as_criu_images_are_refused_or_flat_files(tmp_path: Path, body: bytes, tail: bool) -> None:
    directory = tmp_path / os.urandom(8).hex()
    directory.mkdir()
    stream = io.BytesIO((tar_of() if tail else b"") + body)
    try:
        criutar.extract(stream, directory)
    except ArtifactError:
        return
    assert all(path.is_file() and not path.is_symlink() for path in directory.iterdir())
