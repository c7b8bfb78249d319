"""The artifact: what a writer puts, a reader gets; and it is an image any OCI tool accepts."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import zstandard

import oci
from base.annotations import ENV_MARKER
from base.trace import Progress, Trace
from oci.artifact import ARTIFACT_TYPE, Artifact, ArtifactWriter, BaseImage
from oci.errors import ArtifactError, StoreError
from oci.index import CHUNK_BYTES
from oci.layout import Layout
from oci.manifest import LAYER_GZIP, LAYER_ZSTD, Manifest
from oci.record import ProcessRecord
from oci.store import Descriptor, Store, read_blob
from oci.transfer import copy
from tests.artifacts import CRIU_IMAGES, MEMORY_ADDRESS, RECORD, SPEC, layer_tar, put_checkpoint, put_image
from tests.page_images import read_range

SCHEMAS = Path(oci.__file__).parent / "schemas" / "image-spec"


def follows_spec(kind: str, body: bytes) -> None:
    """Raises unless `body` is what the image specification's own schema asks for."""

    def load(uri: str) -> Any:
        text = (SCHEMAS / uri.rpartition("/")[2]).read_text()
        # fastjsonschema takes every $ in a pattern for its end, even in a set of characters.
        return json.loads(text.replace("!#$&", r"!#\\x24&"))

    fastjsonschema.compile(load(f"{kind}.json"), handlers={"https": load, "": load})(json.loads(body))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


@pytest.fixture
def base(tmp_path: Path) -> BaseImage:
    images = Layout(tmp_path / "images")
    manifest = put_image(images, None, layer_tar({"bin/server": b"1"}), layer_tar({"etc/conf": b"2"}))
    return BaseImage(images, manifest, "registry.example/web:1")


@pytest.fixture
def put(layout: Layout, base: BaseImage, tmp_path: Path) -> Callable[..., Artifact]:
    def make(tag: str = "web", **options: Any) -> Artifact:
        options.setdefault("base", base)
        put_checkpoint(layout, tag, directory=tmp_path / "criu", **options)
        return Artifact.open(layout, tag)

    return make


def test_everything_put_into_a_checkpoint_comes_back(put: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = put()
    (tmp_path / "out").mkdir()
    artifact.extract_criu_images(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == CRIU_IMAGES
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o600}
    assert artifact.spec() == SPEC
    with artifact.rootfs_diff() as stream, tarfile.open(fileobj=io.BytesIO(stream.read())) as tar:
        assert tar.getnames() == ["changed"]
    memory = read_range(artifact.pages(), "pagemap-1.img", (MEMORY_ADDRESS, 2 * CHUNK_BYTES))
    assert memory == bytes(range(256)) * 2048
    assert artifact.record.container == RECORD.container
    assert artifact.record.memory.total == 2 * CHUNK_BYTES
    assert 0 < artifact.record.memory.stored < CHUNK_BYTES
    assert artifact.total_bytes > artifact.record.memory.stored


def test_id_is_the_same_everywhere(put: Callable[..., Artifact]) -> None:
    artifact = put()
    assert len(artifact.record.id) == 32
    assert artifact.image_config["config"]["Env"] == ["A=b", f"{ENV_MARKER}={artifact.record.id}"]
    manifest = Manifest.parse(artifact.store.manifest("web")[1])
    assert manifest.annotations["ai.cedana.checkpoint.id"] == artifact.record.id
    assert put("again").record.id != artifact.record.id


def test_manifest_config_and_index_follow_the_image_specification(
    put: Callable[..., Artifact], layout: Layout
) -> None:
    artifact = put()
    follows_spec("image-manifest-schema", layout.manifest("web")[1])
    follows_spec("config-schema", read_blob(layout, artifact.config, 1 << 20))
    follows_spec("image-index-schema", (layout.directory / "index.json").read_bytes())
    follows_spec("image-layout-schema", (layout.directory / "oci-layout").read_bytes())


def test_artifact_is_a_runnable_image(put: Callable[..., Artifact], layout: Layout, base: BaseImage) -> None:
    """containerd counts the layers of image types against the diff ids, in order."""
    artifact = put()
    manifest = Manifest.parse(layout.manifest("web")[1])
    assert manifest.config.media_type == "application/vnd.oci.image.config.v1+json"
    assert manifest.artifact_type == ARTIFACT_TYPE
    image_layers = [layer for layer in manifest.layers if "image.layer" in layer.media_type]
    assert manifest.layers[:3] == tuple(image_layers)
    assert [layer.media_type for layer in image_layers] == [LAYER_GZIP, LAYER_GZIP, LAYER_ZSTD]
    contents = [read_blob(layout, layer, 1 << 20) for layer in image_layers]
    plain = [gzip.decompress(c) for c in contents[:2]]
    plain.append(zstandard.ZstdDecompressor().decompressobj().decompress(contents[2]))
    config = artifact.image_config
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(p).hexdigest()}" for p in plain]
    assert config["config"]["Cmd"] == ["/bin/true"]
    assert len(config["history"]) == 3


def test_subject_is_the_base_image_and_complete(
    put: Callable[..., Artifact], layout: Layout, base: BaseImage
) -> None:
    artifact = put()
    assert artifact.base == base.manifest
    assert layout.manifest(base.manifest.digest)[1] == base.store.manifest(base.manifest.digest)[1]
    assert len(artifact.base_blobs()) == 3
    assert all(layout.exists(blob) for blob in artifact.base_blobs())
    assert [d.digest for d in layout.referrers(base.manifest.digest)] == [artifact.manifest.digest]


def test_checkpoint_without_a_base_image(put: Callable[..., Artifact]) -> None:
    artifact = put(base=None)
    assert artifact.base is None
    assert artifact.base_blobs() == []
    assert artifact.base_layers == ()
    assert len(artifact.image_config["rootfs"]["diff_ids"]) == 1
    assert artifact.image_config["architecture"] == "amd64"


def test_checkpoint_without_memory(put: Callable[..., Artifact]) -> None:
    artifact = put(memory=b"")
    assert artifact.packs == ()
    assert artifact.pages().objects() == []


def test_checkpoint_of_a_container_started_from_a_checkpoint_does_not_need_that_one(
    put: Callable[..., Artifact], layout: Layout
) -> None:
    first = put("first")
    second = put("second", base=BaseImage(layout, first.manifest, "registry.example/first:1"))
    assert len(second.base_layers) == 3
    assert [e for e in second.image_config["config"]["Env"] if ENV_MARKER in e] == [
        f"{ENV_MARKER}={second.record.id}"
    ]
    assert second.base is not None
    subject = Manifest.parse(layout.manifest(second.base.digest)[1])
    assert subject.artifact_type == ""
    config = json.loads(read_blob(layout, subject.config, 1 << 20))
    assert config["config"]["Env"] == ["A=b"]
    assert "checkpoint" not in config
    layout.close()
    layout.delete("first")
    assert all(layout.exists(blob) for blob in [*second.blobs(), *second.base_blobs()])
    assert not layout.exists(first.criu_layer) or first.criu_layer == second.criu_layer
    follows_spec("image-manifest-schema", layout.manifest(second.base.digest)[1])


def test_memory_pages_of_criu_are_not_stored_twice(put: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = put(images={**CRIU_IMAGES, "pages-1.img": bytes(4096)})
    (tmp_path / "out").mkdir()
    artifact.extract_criu_images(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(CRIU_IMAGES)


def test_record_too_large_for_readers_loses_what_only_people_read(put: Callable[..., Artifact]) -> None:
    processes = tuple(ProcessRecord(pid, 1, "shell", argv=("x" * 100_000,)) for pid in range(1, 200))
    artifact = put(record=replace(RECORD, processes=processes))
    assert [process.pid for process in artifact.record.processes] == list(range(1, 200))
    assert {process.argv for process in artifact.record.processes} == {()}


def test_without_a_tag_the_id_is_the_tag(put: Callable[..., Artifact], layout: Layout) -> None:
    put_again = put("")
    assert layout.tags() == [put_again.record.id]


@pytest.fixture(autouse=True)
def _open_empty_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """`put("")` opens what got the id as its tag."""
    opened = Artifact.open.__func__  # type: ignore[attr-defined]

    def open_named(cls: type[Artifact], store: Store, name: str) -> Artifact:
        return opened(cls, store, name or store.tags()[0])  # type: ignore[no-any-return]

    monkeypatch.setattr(Artifact, "open", classmethod(open_named))


def test_rootfs_difference_larger_than_the_queue_goes_through(put: Callable[..., Artifact]) -> None:
    content = bytes(range(256)) * (40 << 12)
    layer = layer_tar({"large": content})
    with put(rootfs=layer).rootfs_diff() as stream:
        buffer = bytearray(len(layer))
        assert stream.readinto(buffer) == len(buffer)
        assert stream.read(1) == b""
    with tarfile.open(fileobj=io.BytesIO(buffer)) as tar:
        large = tar.extractfile("large")
        assert large is not None
        assert large.read() == content


def test_failure_makes_nothing_visible_and_leaves_no_blob(
    layout: Layout, base: BaseImage, tmp_path: Path
) -> None:
    (tmp_path / "core.img").write_bytes(b"x")

    def fail_late() -> None:
        with ArtifactWriter(layout, base, Trace()) as writer:
            writer.pages.add("a", 0, bytes(range(256)) * 4096)
            writer.add_criu_images(tmp_path)
            writer.add_spec(b"{}")
            writer.pages.flush()
            raise RuntimeError("dump failed")

    with pytest.raises(RuntimeError, match="dump failed"):
        fail_late()
    assert layout.tags() == []
    assert list((layout.directory / "blobs" / "sha256").iterdir()) == []


def test_failing_rootfs_stream_fails_the_checkpoint(layout: Layout, tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(1024)
        raise OSError("cannot read the upper directory")

    with (
        pytest.raises(OSError, match="upper directory"),
        ArtifactWriter(layout, None, Trace()) as writer,
    ):
        writer.add_rootfs_diff(broken())
    assert list((layout.directory / "blobs" / "sha256").iterdir()) == []


class RefusingStore(Layout):
    """Takes no layer of the given type."""

    refused = LAYER_ZSTD

    def write(self, media_type: str, chunks: Any, annotations: Any = None) -> Descriptor:
        if media_type == self.refused:
            raise StoreError("the registry is gone")
        return super().write(media_type, chunks, annotations)


def test_store_that_fails_while_the_rootfs_is_read_is_noticed_then(tmp_path: Path) -> None:
    endless = iter(lambda: bytes(range(256)) * 4096, b"")
    with (
        pytest.raises(StoreError, match="registry is gone"),
        ArtifactWriter(RefusingStore(tmp_path / "x"), None, Trace()) as writer,
    ):
        writer.add_rootfs_diff(endless)


def test_base_image_that_cannot_be_put_stops_the_checkpoint_before_it_begins(
    base: BaseImage, layout: Layout
) -> None:
    incomplete = Layout(base.store.directory)  # type: ignore[attr-defined]
    manifest = Manifest.parse(base.store.manifest(base.manifest.digest)[1])
    (incomplete.directory / "blobs" / "sha256" / manifest.layers[0].digest[7:]).unlink()
    with pytest.raises(StoreError, match=manifest.layers[0].digest), ArtifactWriter(layout, base, Trace()):
        pytest.fail("entered")


def test_ordinary_image_is_no_checkpoint(layout: Layout) -> None:
    put_image(layout, "web", layer_tar({"a": b"1"}))
    with pytest.raises(ArtifactError, match="web is not a checkpoint"):
        Artifact.open(layout, "web")


def test_copy_takes_everything_and_skips_what_is_there(put: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = put()
    events: list[Progress] = []
    trace = Trace(lambda event: events.append(event) if isinstance(event, Progress) else None)
    target = Layout(tmp_path / "target")
    copied = copy(artifact.store, "web", target, "other", trace)
    assert copied == artifact.manifest
    assert target.tags() == ["other"]
    there = replace(Artifact.open(target, "other"), store=artifact.store)
    assert there == artifact
    assert all(target.exists(blob) for blob in [*artifact.blobs(), *there.base_blobs()])
    assert target.manifest(artifact.base.digest)[0] == artifact.base  # type: ignore[union-attr]
    assert events[-1].done == events[-1].total > 0
    copy(artifact.store, "web", target, "", Trace())
    assert target.tags() == sorted(["other", artifact.record.id])


def test_copy_of_a_damaged_artifact_leaves_nothing(put: Callable[..., Artifact], tmp_path: Path) -> None:
    artifact = put()
    path = artifact.store.directory / "blobs" / "sha256" / artifact.packs[0].digest[7:]  # type: ignore[attr-defined]
    path.write_bytes(bytes(artifact.packs[0].size))
    target = Layout(tmp_path / "target")
    with pytest.raises(StoreError, match=artifact.packs[0].digest):
        copy(artifact.store, "web", target, "other", Trace())
    assert target.tags() == []
    assert list((target.directory / "blobs" / "sha256").iterdir()) == []
