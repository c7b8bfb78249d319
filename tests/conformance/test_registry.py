"""The registry client against a real registry: `docker-registry` on loopback, and the tools others use."""

from __future__ import annotations

import os
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from base.config import Config
from base.errors import NotFoundError
from base.trace import Trace
from oci import open_store, registry
from oci.artifact import Artifact, ArtifactWriter, BaseImage
from oci.errors import StoreError
from oci.layout import Layout
from oci.manifest import Manifest
from oci.reference import parse
from oci.registry import Repository
from oci.store import Descriptor
from oci.transfer import copy
from tests.artifacts import MEMORY_ADDRESS, layer_tar, put_checkpoint, put_image
from tests.page_images import read_range

CONFIG = Config()
PROGRAM = CONFIG.tool("docker-registry")


@dataclass
class Server:
    """A docker-registry of our own, which can be stopped and started again."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self.directory / "config.yml"
        config.write_text(
            f"""
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {self.directory / "data"}}}
  delete: {{enabled: true}}
http: {{addr: "{self.host}"}}
"""
        )
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen([PROGRAM, "serve", str(config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise AssertionError(f"docker-registry does not start: {(self.directory / 'log').read_text()}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def repository(self, name: str) -> Repository:
        store = open_store(parse(f"{self.host}/{name}"), CONFIG)
        assert isinstance(store, Repository)
        return store

    def garbage_collect(self) -> None:
        argv = [PROGRAM, "garbage-collect", "--delete-untagged", str(self.directory / "config.yml")]
        subprocess.run(argv, check=True, capture_output=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = Server(tmp_path_factory.mktemp("registry"), port)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def repository(server: Server, request: pytest.FixtureRequest) -> Repository:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name.lower())[:60].strip("-")
    return server.repository(f"tests/{'-'.join(filter(None, name.split('-')))}")


@pytest.fixture
def base(tmp_path: Path) -> BaseImage:
    images = Layout(tmp_path / "images")
    return BaseImage(images, put_image(images, None, layer_tar({"bin/a": os.urandom(100)})), "r.example/a:1")


def read(store: Repository, blob: Descriptor, offset: int = 0, length: int | None = None) -> bytes:
    with store.open(blob, offset, length) as reader:
        return b"".join(iter(lambda: reader.read(1 << 20), b""))


def test_blobs_of_every_size_come_back(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PART_BYTES", 1 << 20)
    for size in (0, 1, 1000, 1 << 20, (1 << 20) + 1, 5 << 20):
        content = os.urandom(size)
        pieces = [content[i : i + 100_000] for i in range(0, size, 100_000)]
        for blob in (repository.write("a/b", pieces), repository.write("a/b", iter(pieces))):
            assert blob.size == size
            assert repository.exists(blob)
            assert read(repository, blob) == content
    assert read(repository, blob, 3 << 20, 100) == content[3 << 20 :][:100]
    assert read(repository, blob, 4 << 20) == content[4 << 20 :]


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cuts two connections of this thread, each in the middle of what it sends."""
    broken: list[int] = []
    sent = 0
    send = socket.socket.sendall

    def sendall(sock: socket.socket, data: bytes, *flags: int) -> None:
        nonlocal sent
        if threading.current_thread() is threading.main_thread():
            sent += len(data)
        if sent > 700_000 and len(broken) < 2:
            sent = 0
            broken.append(sock.send(data[:70_000]))
            sock.close()
            raise ConnectionResetError("cut by the test")
        send(sock, data, *flags)

    monkeypatch.setattr(registry, "PART_BYTES", 2 << 20)
    monkeypatch.setattr(socket.socket, "sendall", sendall)
    return broken


def test_copy_that_broke_off_is_made_whole(repository: Repository, cut: list[int], tmp_path: Path) -> None:
    """docker-registry drops an upload that breaks off inside a chunk: the blob is sent again."""
    local = Layout(tmp_path / "local")
    blob = local.write("a/b", [os.urandom(5 << 20)])
    repository.copy_from(local, blob)
    assert len(cut) == 2
    assert read(repository, blob) == read(local, blob)


def test_blob_in_memory_that_broke_off_is_sent_again(repository: Repository, cut: list[int]) -> None:
    content = os.urandom(1 << 20)
    assert read(repository, repository.write("a/b", [content])) == content
    assert len(cut) == 2


def test_stream_that_broke_off_is_told(repository: Repository, cut: list[int]) -> None:
    with pytest.raises(StoreError, match="lost an upload under way") as raised:
        repository.write("a/b", iter([os.urandom(1 << 20) for _ in range(5)]))
    assert "try again" in raised.value.hint


def test_absent_things_are_told(repository: Repository) -> None:
    absent = Descriptor("a/b", "sha256:" + "0" * 64, 5)
    assert not repository.exists(absent)
    assert repository.tags() == []
    assert repository.referrers(absent.digest) == []
    with pytest.raises(StoreError, match="does not have a blob"):
        read(repository, absent)
    for name in ("absent", absent.digest):
        with pytest.raises(NotFoundError):
            repository.manifest(name)
        with pytest.raises(NotFoundError):
            repository.delete(name)


def test_checkpoint_goes_there_and_comes_back(
    repository: Repository, base: BaseImage, tmp_path: Path
) -> None:
    memory = os.urandom(1 << 20) + bytes(1 << 20) + b"compressible" * 100_000
    memory = memory[: len(memory) // 4096 * 4096]
    put = put_checkpoint(repository, "web", base, tmp_path / "criu", memory=memory)
    artifact = Artifact.open(repository, "web")
    assert artifact.manifest == put
    assert repository.tags() == ["web"]
    assert read_range(artifact.pages(), "pagemap-1.img", (MEMORY_ADDRESS, len(memory))) == memory
    with artifact.rootfs_diff() as stream, tarfile.open(fileobj=stream, mode="r|") as tar:  # type: ignore[call-overload]
        assert tar.getnames() == ["changed"]
    assert artifact.base == base.manifest
    assert [d.digest for d in repository.referrers(base.manifest.digest)] == [put.digest]


def test_push_and_pull_keep_every_byte(server: Server, base: BaseImage, tmp_path: Path) -> None:
    local = Layout(tmp_path / "local")
    put = put_checkpoint(local, "web", base, tmp_path / "criu")
    copy(local, "web", server.repository("tests/push"), "web", Trace())
    copy(server.repository("tests/push"), "web", server.repository("tests/mounted"), "web", Trace())
    back = Layout(tmp_path / "back")
    copy(server.repository("tests/mounted"), put.digest, back, "web", Trace())
    assert back.manifest("web") == local.manifest("web")
    artifact = Artifact.open(back, "web")
    assert all(back.exists(blob) for blob in [*artifact.blobs(), *artifact.base_blobs()])
    blobs = Path("blobs") / "sha256"
    assert sorted(os.listdir(back.directory / blobs)) == sorted(os.listdir(local.directory / blobs))


def test_base_layers_of_the_same_registry_are_mounted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a byte of the base image is sent where the registry has it already, though the node lacks it."""
    images = server.repository("tests/images")
    manifest = put_image(images, "1", layer_tar({"bin/b": os.urandom(1000)}))
    base = BaseImage(images, manifest, f"{server.host}/tests/images:1")
    target = server.repository("tests/uses-mounts")
    monkeypatch.setattr(Repository, "open", lambda *_: pytest.fail("a layer was read"))
    layer = Manifest.parse(images.manifest("1")[1]).layers[0]
    target.copy_from(Layout(tmp_path / "empty"), layer, base.reference)
    assert target.exists(layer)


def test_moved_tag_and_several_referrers(repository: Repository, base: BaseImage, tmp_path: Path) -> None:
    first = put_checkpoint(repository, "web", base, tmp_path / "criu")
    second = put_checkpoint(repository, "web", base, tmp_path / "criu")
    assert Artifact.open(repository, "web").manifest == second
    referrers = {d.digest: d for d in repository.referrers(base.manifest.digest)}
    assert set(referrers) == {first.digest, second.digest}
    assert referrers[first.digest].artifact_type == first.artifact_type
    assert referrers[first.digest].annotations["ai.cedana.checkpoint.container"] == "web"


def test_deleted_checkpoint_is_gone_and_its_space_can_be_reclaimed(
    server: Server, repository: Repository, base: BaseImage, tmp_path: Path
) -> None:
    kept = put_checkpoint(repository, "kept", base, tmp_path / "criu")
    dropped = put_checkpoint(repository, "dropped", base, tmp_path / "criu")
    layers = Artifact.open(repository, "dropped")
    repository.delete("dropped")
    assert repository.tags() == ["kept"]
    with pytest.raises(NotFoundError):
        repository.manifest(dropped.digest)
    assert [d.digest for d in repository.referrers(base.manifest.digest)] == [kept.digest]
    server.stop()
    server.garbage_collect()
    server.start()
    assert not repository.exists(layers.config)
    artifact = Artifact.open(repository, "kept")
    assert all(repository.exists(blob) for blob in artifact.blobs())


def test_deleting_one_of_two_tags_does_not_take_the_other(
    repository: Repository, base: BaseImage, tmp_path: Path
) -> None:
    """This registry cannot delete a tag alone, and says so; nothing is lost."""
    put_checkpoint(repository, "one", base, tmp_path / "criu")
    descriptor, body = repository.manifest("one")
    repository.put_manifest(descriptor.media_type, body, "two")
    with pytest.raises(StoreError, match="delete the tag one alone"):
        repository.delete("one")
    assert sorted(repository.tags()) == ["one", "two"]
    repository.delete(descriptor.digest)
    assert repository.tags() == []


def test_registry_that_dies_in_the_middle_fails_the_checkpoint_within_seconds(
    server: Server, repository: Repository, base: BaseImage
) -> None:
    def write() -> None:
        with ArtifactWriter(repository, base, Trace()) as writer:
            server.stop()
            for number in range(16):
                writer.pages.add("a", number << 24, os.urandom(8 << 20))
            writer.pages.close()

    began = time.monotonic()
    try:
        with pytest.raises(StoreError, match=f"the registry {server.host}"):
            write()
        assert time.monotonic() - began < 20
    finally:
        server.start()
    assert repository.tags() == []


def test_registry_that_is_down_is_told_before_anything_is_done(server: Server, base: BaseImage) -> None:
    server.stop()
    try:
        with (
            pytest.raises(StoreError, match="refuses connections"),
            ArtifactWriter(server.repository("tests/down"), base, Trace()),
        ):
            pytest.fail("entered")
    finally:
        server.start()
