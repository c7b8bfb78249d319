from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import artifacts
import grpc
import pytest
from fake_containerd import FakeContainerd
from google.protobuf import any_pb2

from agent import checkpoint as command
from agent import images
from agent.api import containerd_pb2 as api
from agent.checkpoint import Checkpointed
from agent.containerd import Client
from agent.containers import CHECKPOINTED_LABEL
from base.config import Config
from base.errors import NotFoundError
from base.trace import Trace
from oci.artifact import BaseImage
from oci.store import Descriptor
from runtime import checkpoint as engine
from runtime.errors import CheckpointError, IncompatibleError
from shim.api import options_pb2

STATUS, POLICY = "containerd.io/restart.status", "containerd.io/restart.policy"


@pytest.fixture
def running(containerd: FakeContainerd, tmp_path: Path) -> api.Container:
    """A running container whose image is in containerd's content store."""
    base, _ = artifacts.image(tmp_path / "image")
    shutil.copytree(tmp_path / "image" / "blobs", containerd.content_root / "blobs")
    record = images.read_image(base.store, base.manifest.digest)
    target = api.Descriptor(
        media_type=artifacts.MANIFEST, digest=base.manifest.digest, size=base.manifest.size
    )
    space = containerd.space
    space.images[artifacts.IMAGE_NAME] = api.Image(name=artifacts.IMAGE_NAME, target=target)
    space.snapshots |= {record.chain[0]: "", record.chain[1]: record.chain[0], "k1": record.chain[1]}
    bundle, state = tmp_path / "bundle", tmp_path / "runc" / "default" / "c1"
    bundle.mkdir()
    state.mkdir(parents=True)
    (bundle / "config.json").write_text("{}")
    (state / "state.json").write_text(json.dumps({"config": {"labels": [f"bundle={bundle}"]}}))
    options = options_pb2.Options(root=str(tmp_path / "runc")).SerializeToString()
    packed = any_pb2.Any(type_url="containerd.runc.v1.Options", value=options)
    container = api.Container(
        id="c1",
        image=artifacts.IMAGE_NAME,
        snapshotter="overlayfs",
        snapshot_key="k1",
        runtime=api.Container.Runtime(name="io.containerd.runc.v2", options=packed),
    )
    space.containers["c1"] = container
    space.tasks["c1"] = api.Process(id="c1", pid=77, status=api.RUNNING)
    return container


class Engine:
    """Stands in for the checkpoint itself, which needs a kernel's cooperation (tests/node)."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.error: Exception | None = None
        self.look: Callable[[], None] = lambda: None

    def __call__(self, *arguments: Any) -> engine.CheckpointResult:
        self.arguments = arguments
        self.look()
        if self.error is not None:
            raise self.error
        manifest = Descriptor(artifacts.MANIFEST, artifacts.digest(b"x"), 1)
        return engine.CheckpointResult("abc", manifest, arguments[2], 1, 1, 0.1, ())


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Engine:
    stub = Engine()
    monkeypatch.setattr(engine, "checkpoint", stub)
    return stub


def take(config: Config, leave_running: bool = False, target: str = "") -> Checkpointed:
    return command.checkpoint(
        "c1", target, engine.CheckpointOptions(leave_running=leave_running), config, Trace()
    )


def test_engine_gets_container_store_tag_and_base_image(
    config: Config, running: api.Container, stub: Engine
) -> None:
    done = take(config, target="oci:/somewhere:tag")
    container, store, tag, base = stub.arguments[:4]
    assert (container.id, container.pid, tag) == ("c1", 77, "tag")
    assert str(store) == "oci:/somewhere"
    assert isinstance(base, BaseImage)
    assert base.reference == artifacts.IMAGE_NAME
    assert container.image_digest == base.manifest.digest
    assert str(done.reference) == "oci:/somewhere:tag"


def test_ended_container_keeps_its_record_and_loses_its_task(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    assert take(config).warnings == ()
    assert not containerd.space.tasks
    identity, _, when = containerd.space.containers["c1"].labels[CHECKPOINTED_LABEL].partition(" ")
    assert identity == "abc"
    assert float(when) > 1_700_000_000


def test_container_left_running_is_not_touched(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    running.labels[STATUS] = "running"
    take(config, leave_running=True)
    assert containerd.space.tasks
    assert not [call for call in containerd.calls if call.endswith(("Update", "Delete", "Kill"))]


def test_containerd_does_not_restart_a_container_that_was_moved(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    running.labels[STATUS] = "running"
    running.labels[POLICY] = "always"
    during: list[str | None] = []
    stub.look = lambda: during.append(containerd.space.containers["c1"].labels.get(STATUS))
    take(config)
    assert during == [None]
    labels = containerd.space.containers["c1"].labels
    assert labels[STATUS] == "stopped"
    assert labels["containerd.io/restart.explicitly-stopped"] == "true"
    assert labels[POLICY] == "always"


def test_failed_checkpoint_leaves_task_and_restart_policy(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    running.labels[STATUS] = "running"
    stub.error = CheckpointError("CRIU refused")
    with pytest.raises(CheckpointError):
        take(config)
    assert containerd.space.tasks
    assert dict(containerd.space.containers["c1"].labels) == {STATUS: "running"}


def test_task_that_cannot_be_removed_is_a_warning(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    containerd.failures["Tasks/Delete"] = (grpc.StatusCode.UNKNOWN, "device busy")
    [warning] = take(config).warnings
    assert "device busy" in warning


def test_task_that_someone_else_removes_first_is_no_warning(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    stub.look = containerd.space.tasks.clear
    assert take(config).warnings == ()
    assert CHECKPOINTED_LABEL in containerd.space.containers["c1"].labels


def test_container_that_is_removed_when_it_ends_is_no_error(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    def removed() -> None:
        containerd.space.tasks.clear()
        containerd.space.containers.clear()

    stub.look = removed
    assert take(config).warnings == ()


def test_base_image_is_found_by_its_snapshot_when_the_name_moved_on(
    containerd: FakeContainerd, client: Client, running: api.Container, tmp_path: Path
) -> None:
    newer, _ = artifacts.image(tmp_path / "newer", b"newer")
    shutil.copytree(tmp_path / "newer" / "blobs", containerd.content_root / "blobs", dirs_exist_ok=True)
    old = containerd.space.images.pop(artifacts.IMAGE_NAME)
    containerd.space.images["untagged"] = api.Image(name="untagged", target=old.target)
    moved = api.Descriptor(media_type=artifacts.MANIFEST, digest=newer.manifest.digest, size=1)
    containerd.space.images[artifacts.IMAGE_NAME] = api.Image(name=artifacts.IMAGE_NAME, target=moved)
    base = images.base_image(client, running)
    assert base.manifest.digest == old.target.digest
    assert base.reference == artifacts.IMAGE_NAME


def test_image_that_is_gone_is_said_so(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    containerd.space.images.clear()
    with pytest.raises(IncompatibleError, match="no longer in containerd"):
        images.base_image(client, running)


def test_layers_that_containerd_discarded_are_said_so(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    for blob in (containerd.content_root / "blobs" / "sha256").iterdir():
        if blob.read_bytes()[:2] == b"\x1f\x8b":
            blob.unlink()
    with pytest.raises(IncompatibleError, match="no longer has the layers"):
        images.base_image(client, running)


def test_container_not_made_from_an_image_is_refused(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    containerd.space.snapshots["k1"] = ""
    with pytest.raises(IncompatibleError, match="not made from an image"):
        images.base_image(client, running)


def test_image_of_several_platforms_is_read_for_this_one(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    target = containerd.space.images[artifacts.IMAGE_NAME].target
    entry = {"mediaType": artifacts.MANIFEST, "digest": target.digest, "size": target.size}
    index = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [
                {
                    **entry,
                    "digest": artifacts.digest(b"other"),
                    "platform": {"os": "linux", "architecture": "vax"},
                },
                {**entry, "platform": {"os": "linux", "architecture": images.arch()}},
            ],
        }
    ).encode()
    digest = artifacts.digest(index)
    (containerd.content_root / "blobs" / "sha256" / digest[7:]).write_bytes(index)
    containerd.space.images[artifacts.IMAGE_NAME].target.CopyFrom(
        api.Descriptor(media_type="application/vnd.oci.image.index.v1+json", digest=digest, size=len(index))
    )
    assert images.base_image(client, running).manifest.digest == entry["digest"]
    assert images.locate(client, running) == (containerd.content_root, entry["digest"])


def test_index_that_names_no_platform_is_read_by_the_images_config(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    target = containerd.space.images[artifacts.IMAGE_NAME].target
    entries = [
        {"mediaType": artifacts.MANIFEST, "digest": digest, "size": target.size}
        for digest in (artifacts.digest(b"not here"), target.digest)
    ]
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    digest = artifacts.digest(index)
    (containerd.content_root / "blobs" / "sha256" / digest[7:]).write_bytes(index)
    containerd.space.images[artifacts.IMAGE_NAME].target.digest = digest
    assert images.base_image(client, running).manifest.digest == entries[1]["digest"]


def test_terminal_one_can_attach_to_is_noted_in_the_checkpoint(
    containerd: FakeContainerd, config: Config, running: api.Container, stub: Engine
) -> None:
    containerd.space.tasks["c1"].terminal = True
    containerd.space.tasks["c1"].stdout = "/run/containerd/fifo/1/c1-stdout"
    take(config)
    assert stub.arguments[0].labels["ai.cedana.attachable"] == "true"
    assert "ai.cedana.attachable" not in containerd.space.containers["c1"].labels


def test_image_the_shim_asks_for_must_exist(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    containerd.space.images.clear()
    with pytest.raises(NotFoundError):
        images.locate(client, running)
