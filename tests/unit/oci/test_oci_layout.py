"""The image layout: its form on disk, its privacy, and many processes at once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from base.errors import NotFoundError
from oci.errors import DigestError, StoreError
from oci.layout import Layout
from oci.manifest import IMAGE_CONFIG, IMAGE_MANIFEST, LAYER_TAR, Manifest
from oci.store import Descriptor
from tests.artifacts import layer_tar, put_image


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def blobs(layout: Layout) -> set[str]:
    return {path.name for path in (layout.directory / "blobs" / "sha256").iterdir()}


def read(layout: Layout, descriptor: Descriptor, *, offset: int = 0, length: int | None = None) -> bytes:
    with layout.open(descriptor, offset, length) as reader:
        return b"".join(iter(lambda: reader.read(1000), b""))


def test_written_image_is_a_layout_other_tools_understand(layout: Layout) -> None:
    image = put_image(layout, "web", layer_tar({"a": b"1"}))
    assert json.loads((layout.directory / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout.directory / "index.json").read_text())
    assert index["manifests"][0]["digest"] == image.digest
    assert index["manifests"][0]["annotations"] == {"org.opencontainers.image.ref.name": "web"}
    for name in blobs(layout):
        assert hashlib.sha256((layout.directory / "blobs" / "sha256" / name).read_bytes()).hexdigest() == name


def test_only_the_owner_can_read_what_is_written(layout: Layout) -> None:
    put_image(layout, "web", layer_tar({"a": b"1"}))
    for path in (layout.directory, *layout.directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_manifest_is_found_by_tag_and_digest(layout: Layout) -> None:
    image = put_image(layout, "web", layer_tar({"a": b"1"}))
    assert layout.manifest("web") == layout.manifest(image.digest)
    assert layout.manifest("web")[0] == image
    assert layout.tags() == ["web"]


@pytest.mark.parametrize("name", ["", "absent", "../../etc/passwd", "sha256:" + "0" * 64])
def test_unknown_name_is_said_not_to_exist(layout: Layout, name: str) -> None:
    with pytest.raises(NotFoundError, match="there is no"):
        layout.manifest(name)
    put_image(layout, "web", layer_tar({"a": b"1"}))
    with pytest.raises(NotFoundError, match="there is no"):
        layout.manifest(name)
    with pytest.raises(NotFoundError, match="there is no"):
        layout.delete(name)


def test_reading_makes_nothing(layout: Layout) -> None:
    assert layout.tags() == []
    assert layout.referrers("sha256:" + "0" * 64) == []
    assert not layout.directory.exists()


def test_directory_with_other_things_in_it_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(StoreError, match="neither empty nor an OCI image layout"):
        Layout(tmp_path).write(LAYER_TAR, [b"x"])
    assert os.listdir(tmp_path) == ["precious"]


def test_stream_and_known_blob_of_the_same_bytes_are_one(layout: Layout) -> None:
    known = layout.write("a/b", [b"he", b"llo"], {"k": "v"})
    streamed = layout.write("a/b", iter([b"hel", b"lo"]), {"k": "v"})
    assert known == streamed
    assert (known.size, known.annotations) == (5, {"k": "v"})
    assert read(layout, known) == b"hello"
    assert read(layout, known, offset=1, length=3) == b"ell"
    assert read(layout, known, offset=2) == b"llo"


def test_blob_of_more_parts_than_one_system_call_takes_is_written_whole(layout: Layout) -> None:
    parts = [bytes([i % 256]) * 3 for i in range(5000)]
    assert read(layout, layout.write("a/b", parts)) == b"".join(parts)


@pytest.mark.parametrize("change", [b"hellO", b"hell", b"hello!", b""])
def test_damaged_blob_is_noticed_when_it_was_read(layout: Layout, change: bytes) -> None:
    blob = layout.write("a/b", [b"hello"])
    (layout.directory / "blobs" / "sha256" / blob.digest[7:]).write_bytes(change)
    with pytest.raises(DigestError):
        read(layout, blob)


def test_damaged_manifest_is_noticed(layout: Layout) -> None:
    image = put_image(layout, "web", layer_tar({"a": b"1"}))
    path = layout.directory / "blobs" / "sha256" / image.digest[7:]
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(DigestError):
        layout.manifest("web")


def test_manifest_without_its_blobs_is_refused(layout: Layout) -> None:
    absent = Descriptor(LAYER_TAR, "sha256:" + "1" * 64, 1)
    config = layout.write(IMAGE_CONFIG, [b"{}"])
    with pytest.raises(StoreError, match=absent.digest):
        layout.put_manifest(IMAGE_MANIFEST, Manifest(config, (absent,)).to_bytes(), "web")
    assert layout.tags() == []


def test_deleting_removes_what_only_it_needed(layout: Layout) -> None:
    shared, own = layer_tar({"a": b"1"}), layer_tar({"b": b"2"})
    put_image(layout, "keep", shared)
    before = blobs(layout)
    put_image(layout, "drop", shared, own)
    layout.close()
    layout.delete("drop")
    assert blobs(layout) == before
    assert layout.tags() == ["keep"]


def test_moving_a_tag_removes_what_it_pointed_to(tmp_path: Path) -> None:
    directory = tmp_path / "layout"
    put_image(Layout(directory), "web", layer_tar({"a": b"1"}))
    time.sleep(0.05)  # file times are some milliseconds coarse; what is in doubt is spared
    put_image(Layout(directory), "web", layer_tar({"a": b"2"}))
    assert len(blobs(Layout(directory))) == 3


def test_subject_of_a_manifest_stays_as_long_as_it(layout: Layout) -> None:
    base = put_image(layout, None, layer_tar({"a": b"1"}))
    config = layout.write(IMAGE_CONFIG, [b"{}"])
    body = Manifest(config, (), artifact_type="a/b", subject=base).to_bytes()
    layout.put_manifest(IMAGE_MANIFEST, body, "one")
    put_image(layout, "two", layer_tar({"c": b"3"}))
    layout.close()
    layout.delete("two")
    assert layout.manifest(base.digest)[0] == base
    assert [d.artifact_type for d in layout.referrers(base.digest)] == ["a/b"]
    layout.delete("one")
    assert blobs(layout) == set()


def test_failed_write_leaves_nothing(layout: Layout) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise StoreError("broke")

    with pytest.raises(StoreError, match="broke"):
        layout.write("a/b", broken())
    assert blobs(layout) == set()
    layout.close()
    assert os.listdir(layout.directory / ".cedana") == ["lock"]


def test_full_disk_is_said_and_leaves_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.write("a/b", [b"first"])

    def full(fd: int, views: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(StoreError, match="No space left on device") as raised:
        layout.write("a/b", [b"second"])
    assert "--to" in raised.value.hint
    assert len(blobs(layout)) == 1


def test_discarding_spares_what_is_referred_to(layout: Layout) -> None:
    put_image(layout, "web", layer_tar({"a": b"1"}))
    before = blobs(layout)
    layout.write("a/b", [b"given up"])
    layout.discard()
    assert blobs(layout) == before


def test_sweep_spares_what_another_writer_has_written_and_found(tmp_path: Path) -> None:
    directory = tmp_path / "layout"
    Layout(directory).write("a/b", [b"old"])  # its session ended with the object
    put_image(Layout(directory), "drop", layer_tar({"a": b"1"}))
    time.sleep(0.05)
    writer = Layout(directory)
    new = writer.write("a/b", [b"new"])
    old = writer.write("a/b", [b"old"])
    Layout(directory).delete("drop")
    assert blobs(writer) == {new.digest[7:], old.digest[7:]}
    writer.discard()
    assert blobs(writer) == set()


def test_sweep_removes_what_a_dead_writer_left(tmp_path: Path) -> None:
    directory = tmp_path / "layout"
    put_image(Layout(directory), "drop", layer_tar({"a": b"1"}))
    process = multiprocessing.get_context("fork").Process(target=write_and_die, args=(directory,))
    process.start()
    process.join()
    assert any(path.name.startswith("session-") for path in (directory / ".cedana").iterdir())
    Layout(directory).delete("drop")
    assert blobs(Layout(directory)) == set()
    assert os.listdir(directory / ".cedana") == ["lock"]


def write_and_die(directory: Path) -> None:
    layout = Layout(directory)
    layout.write("a/b", [b"lost"])

    def dying() -> Iterable[bytes]:
        yield b"half"
        os._exit(0)

    layout.write("a/b", dying())


def test_many_processes_write_and_delete_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "layout"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_and_delete, args=(directory, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    layout = Layout(directory)
    assert set(layout.tags()) == {f"keep-{number}-{turn}" for number in range(4) for turn in range(0, 12, 2)}
    needed = set()
    for tag in layout.tags():
        descriptor, body = layout.manifest(tag)
        manifest = Manifest.parse(body)
        needed |= {d.digest[7:] for d in (descriptor, manifest.config, *manifest.layers)}
    put_image(layout, "last", layer_tar({"z": b"1"}))
    layout.close()
    layout.delete("last")
    assert blobs(layout) == needed


def write_and_delete(directory: Path, number: int) -> None:
    common = layer_tar({"common": b"1"})
    for turn in range(12):
        own = layer_tar({f"{number}-{turn}": os.urandom(10)})
        tag = f"{'drop' if turn % 2 else 'keep'}-{number}-{turn}"
        put_image(Layout(directory), tag, common, own)
        if turn % 2:
            Layout(directory).delete(tag)
