"""containerd's content store, read without containerd."""

from __future__ import annotations

from pathlib import Path

import pytest

from base.errors import NotFoundError
from oci.content import ContentDirectory
from oci.errors import DigestError, StoreError
from oci.layout import Layout
from oci.manifest import Manifest
from tests.artifacts import layer_tar, put_image


def test_image_is_read_as_it_lies_there(tmp_path: Path) -> None:
    image = put_image(Layout(tmp_path), None, layer_tar({"a": b"1"}))
    store = ContentDirectory(tmp_path)
    descriptor, body = store.manifest(image.digest)
    assert descriptor == image
    layer = Manifest.parse(body).layers[0]
    assert store.exists(layer)
    with store.open(layer) as reader:
        assert len(reader.read()) == layer.size
    assert store.tags() == []


def test_dropped_layer_is_told_with_what_to_do(tmp_path: Path) -> None:
    image = put_image(Layout(tmp_path), None, layer_tar({"a": b"1"}))
    store = ContentDirectory(tmp_path)
    layer = Manifest.parse(store.manifest(image.digest)[1]).layers[0]
    (tmp_path / "blobs" / "sha256" / layer.digest[7:]).unlink()
    with pytest.raises(StoreError, match=layer.digest) as raised:
        store.open(layer)
    assert "discard_unpacked_layers" in raised.value.hint


def test_missing_and_damaged_manifests_are_told(tmp_path: Path) -> None:
    image = put_image(Layout(tmp_path), None, layer_tar({"a": b"1"}))
    store = ContentDirectory(tmp_path)
    for name in ("latest", "sha256:" + "0" * 64):
        with pytest.raises(NotFoundError):
            store.manifest(name)
    (tmp_path / "blobs" / "sha256" / image.digest[7:]).write_bytes(b"{}")
    with pytest.raises(DigestError):
        store.manifest(image.digest)


def test_it_is_never_written_to(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="only read"):
        ContentDirectory(tmp_path).write("a/b", [b"x"])
    assert list(tmp_path.iterdir()) == []
