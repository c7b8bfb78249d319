from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import artifacts
import grpc
import pytest
from fake_containerd import FakeContainerd
from test_target_spec import ordinary

from agent import restore as command
from agent.api import containerd_pb2 as api
from agent.containers import CHECKPOINTED_LABEL
from agent.errors import AlreadyExistsError, NotAllowedError
from agent.restore import Restored, RestoreOptions, restore
from base.config import Config
from base.errors import NotFoundError, UsageError
from base.trace import Trace
from oci.artifact import Artifact
from oci.errors import DigestError
from oci.layout import Layout
from oci.store import Descriptor
from runtime import fetch
from runtime.errors import IncompatibleError, RestoreError

Take = Callable[..., Descriptor]


@pytest.fixture
def take(containerd: FakeContainerd, config: Config, tmp_path: Path) -> Take:
    """Puts a checkpoint into the node's own layout."""
    base, diff_ids = artifacts.image(tmp_path / "image")
    containerd.layers = diff_ids

    def checkpoint(spec: dict[str, Any] | None = None, **container: Any) -> Descriptor:
        return artifacts.checkpoint(config.layout_dir, base, spec or ordinary(), **container)

    return checkpoint


def bring_back(config: Config, reference: str = "c1", **options: Any) -> Restored:
    return restore(reference, RestoreOptions(**options), config, Trace())


def left_behind(containerd: FakeContainerd, config: Config) -> list[str]:
    """Everything a failed restore must not leave."""
    space = containerd.space
    snapshots = [key for key in space.snapshots if not key.startswith("sha256:")]
    fetched = [str(path) for path in (config.run_dir / "restore").rglob("*") if path.is_file()]
    own = [str(path) for path in (config.state_dir / "containers").rglob("*") if path.is_file()]
    images = [name for name in space.images if "@" in name]
    return [*space.containers, *space.tasks, *snapshots, *space.leases, *images, *fetched, *own]


def record_of(containerd: FakeContainerd, container_id: str = "c1") -> tuple[api.Container, dict[str, Any]]:
    container = containerd.space.containers[container_id]
    return container, json.loads(container.spec.value)


def test_restored_container_runs_under_our_runtime(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    manifest = take()
    seen: list[dict[str, Any]] = []
    containerd.hooks["Tasks/Create"] = lambda r: seen.append(record_of(containerd)[1])
    done = bring_back(config)
    assert (done.container_id, done.name, done.pid) == ("c1", "c1", 4242)
    assert str(done.reference) == f"oci:{config.layout_dir}@{manifest.digest}"
    container, _ = record_of(containerd)
    assert container.runtime.name == "io.containerd.cedana.v1"
    assert container.image == f"{artifacts.IMAGE_NAME}@{_base(config).digest}"
    assert container.snapshotter == "overlayfs"
    assert container.snapshot_key in containerd.space.snapshots
    assert containerd.space.tasks["c1"].status == api.RUNNING
    assert seen[0]["annotations"]["ai.cedana.restore-from"] == str(done.reference)
    assert not containerd.space.leases


def test_restored_container_starts_anew_when_started_again(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    bring_back(config, tcp="close", bridge="br0")
    _, spec = record_of(containerd)
    assert not [name for name in spec["annotations"] if name.startswith("ai.cedana.")]


def test_wishes_reach_the_runtime_as_annotations(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    seen: list[dict[str, str]] = []
    containerd.hooks["Tasks/Create"] = lambda r: seen.append(record_of(containerd)[1]["annotations"])
    bring_back(config, tcp="close", bridge="br0")
    assert (seen[0]["ai.cedana.tcp"], seen[0]["ai.cedana.bridge"]) == ("close", "br0")


def test_base_image_is_unpacked_once_and_kept_from_the_collector(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    bring_back(config)
    bring_back(config, name="c2")
    assert containerd.calls.count("Diff/Apply") == 2
    assert containerd.calls.count("Images/Create") >= 1
    space = containerd.space
    chain = space.snapshots[space.containers["c1"].snapshot_key]
    assert chain == space.snapshots[space.containers["c2"].snapshot_key]
    base = _base(config).digest
    assert "containerd.io/gc.ref.content.l.1" in space.content_labels[base]
    config_digest = space.content_labels[base]["containerd.io/gc.ref.content.config"]
    assert space.content_labels[config_digest]["containerd.io/gc.ref.snapshot.overlayfs"] == chain


def test_artifact_does_not_decide_what_an_image_name_means(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    bring_back(config)
    assert artifacts.IMAGE_NAME not in containerd.space.images


def test_image_of_the_same_name_and_digest_is_used(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    target = api.Descriptor(media_type=artifacts.MANIFEST, digest=_base(config).digest, size=1)
    containerd.space.images[artifacts.IMAGE_NAME] = api.Image(name=artifacts.IMAGE_NAME, target=target)
    bring_back(config)
    assert record_of(containerd)[0].image == artifacts.IMAGE_NAME


@pytest.mark.parametrize("image", ["", "x y", "-rf", "a" * 600, "a\nb"])
def test_image_of_no_proper_name_gets_one(
    containerd: FakeContainerd, config: Config, take: Take, image: str
) -> None:
    take(image=image)
    bring_back(config)
    assert record_of(containerd)[0].image == f"cedana.local/base@{_base(config).digest}"


def test_layer_that_is_not_what_the_config_says_is_refused(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    containerd.layers = {layer: artifacts.digest(b"else") for layer in containerd.layers}
    with pytest.raises(Exception, match="not what its image's config says"):
        bring_back(config)
    assert left_behind(containerd, config) == []


def test_name_that_is_taken_is_said_before_anything_is_made(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    containerd.space.containers["other"] = api.Container(id="other", labels={"nerdctl/name": "c1"})
    with pytest.raises(AlreadyExistsError) as caught:
        bring_back(config)
    assert "--name" in caught.value.hint
    assert list(containerd.space.containers) == ["other"]
    assert "Snapshots/Prepare" not in containerd.calls


def test_other_name_is_taken_as_asked(containerd: FakeContainerd, config: Config, take: Take) -> None:
    take()
    containerd.space.containers["c1"] = api.Container(id="c1")
    assert bring_back(config, name="c2").container_id == "c2"


@pytest.mark.parametrize("name", ["../x", "a b", "-x", "x" * 200, "x\n"])
def test_impossible_name_is_a_usage_error(config: Config, take: Take, name: str) -> None:
    take()
    with pytest.raises(UsageError):
        bring_back(config, name=name)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "x\0"])
def test_impossible_name_from_an_artifact_is_refused(
    containerd: FakeContainerd, config: Config, take: Take, name: str
) -> None:
    take(name=name)
    with pytest.raises(UsageError):
        bring_back(config)
    assert left_behind(containerd, config) == []


def test_nerdctls_container_keeps_its_id_if_it_is_free(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take(id=artifacts.NERDCTL_ID, name="web", labels={"nerdctl/name": "web"})
    assert bring_back(config, "c1").container_id == artifacts.NERDCTL_ID
    second = bring_back(config, "c1", name="web2")
    assert len(second.container_id) == 64
    assert second.container_id != artifacts.NERDCTL_ID


def test_container_that_ended_with_the_checkpoint_makes_way(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() + 5)
    done = bring_back(config)
    assert done.container_id == "c1"
    assert record_of(containerd)[0].snapshot_key != "old"
    assert "old" not in containerd.space.snapshots


def test_container_that_a_later_checkpoint_ended_makes_way_too(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() + 5, checkpoint_id="later")
    assert bring_back(config).container_id == "c1"
    assert "old" not in containerd.space.snapshots


def test_other_container_of_the_name_that_a_checkpoint_ended_stays(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() + 5, checkpoint_id="other", container_id="c2")
    with pytest.raises(AlreadyExistsError):
        bring_back(config, name="c2")


def test_stopped_task_of_the_predecessor_is_removed(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() + 5)
    containerd.space.tasks["c1"] = api.Process(id="c1", status=api.STOPPED)
    assert bring_back(config).pid == 4242
    assert containerd.space.tasks["c1"].status == api.RUNNING


def test_container_that_has_run_since_the_checkpoint_does_not_make_way(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() - 5)
    with pytest.raises(AlreadyExistsError):
        bring_back(config)
    assert containerd.space.containers["c1"].snapshot_key == "old"


def test_container_that_runs_again_does_not_make_way(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() + 5)
    containerd.space.tasks["c1"] = api.Process(id="c1", status=api.RUNNING)
    with pytest.raises(AlreadyExistsError):
        bring_back(config)


def test_predecessor_is_back_after_a_failed_restore(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    _ended(containerd, config, time.time() + 5)
    containerd.failures["Tasks/Start"] = (grpc.StatusCode.UNKNOWN, "CRIU refused")
    with pytest.raises(RestoreError):
        bring_back(config)
    assert containerd.space.containers["c1"].snapshot_key == "old"
    assert "old" in containerd.space.snapshots


FAILURES = [
    "Snapshots/Prepare",
    "Containers/Create",
    "Tasks/Create",
    "Tasks/Start",
    "Content/Write",
    "Diff/Apply",
    "Images/Create",
    "Snapshots/Commit",
]


@pytest.mark.parametrize("call", FAILURES)
def test_failed_restore_leaves_nothing(
    containerd: FakeContainerd, config: Config, take: Take, call: str
) -> None:
    take()
    containerd.failures[call] = (grpc.StatusCode.UNKNOWN, "disk on fire")
    with pytest.raises(Exception, match=r".") as caught:
        bring_back(config)
    assert "disk on fire" in str(getattr(caught.value, "details", ""))
    containerd.failures.clear()
    assert left_behind(containerd, config) == []
    assert bring_back(config).pid == 4242


def test_failed_start_says_what_the_runtime_said(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    containerd.failures["Tasks/Start"] = (grpc.StatusCode.UNKNOWN, "CRIU could not bind 10.0.0.2")
    with pytest.raises(RestoreError) as caught:
        bring_back(config)
    assert caught.value.exit_code == 6
    assert caught.value.details == "CRIU could not bind 10.0.0.2"


def test_nobody_waits_for_the_end_of_what_never_ran(
    containerd: FakeContainerd, config: Config, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    take()
    containerd.failures["Tasks/Start"] = (grpc.StatusCode.UNKNOWN, "CRIU could not bind 10.0.0.2")
    waited: list[str] = []
    monkeypatch.setattr(command.Client, "wait_task", lambda _, container_id, __: waited.append(container_id))
    with pytest.raises(RestoreError):
        bring_back(config)
    assert waited == []


def test_node_that_does_not_fit_is_told_from_one_that_fails(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take()
    containerd.failures["Tasks/Create"] = (grpc.StatusCode.FAILED_PRECONDITION, "the file /x differs")
    with pytest.raises(IncompatibleError) as caught:
        bring_back(config)
    assert caught.value.exit_code == 4
    assert caught.value.details == "the file /x differs"


def test_interrupted_restore_leaves_nothing(containerd: FakeContainerd, config: Config, take: Take) -> None:
    take()

    def interrupt(event: object) -> None:
        if event == "start":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore("c1", RestoreOptions(), config, Trace(interrupt))
    assert left_behind(containerd, config) == []


def test_privileges_are_refused_before_anything_is_fetched(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    spec = ordinary()
    spec["process"]["capabilities"]["bounding"] = ["CAP_SYS_ADMIN"]
    take(spec)
    with pytest.raises(NotAllowedError):
        bring_back(config)
    assert left_behind(containerd, config) == []
    assert bring_back(config, allow=frozenset({"capabilities"})).pid


def test_checkpoint_of_another_architecture_is_refused(
    containerd: FakeContainerd, config: Config, take: Take, monkeypatch: pytest.MonkeyPatch
) -> None:
    take()
    here = fetch.this_node()
    other = replace(here, arch="riscv64")
    monkeypatch.setattr(fetch, "this_node", lambda: other)
    with pytest.raises(IncompatibleError):
        bring_back(config)
    assert left_behind(containerd, config) == []


def test_checkpoint_without_a_base_image_is_refused(
    containerd: FakeContainerd, config: Config, tmp_path: Path
) -> None:
    artifacts.checkpoint(config.layout_dir, None, ordinary())
    with pytest.raises(IncompatibleError, match="no base image"):
        bring_back(config)
    assert left_behind(containerd, config) == []


def test_tampered_images_are_refused(containerd: FakeContainerd, config: Config, take: Take) -> None:
    take()
    blob = Artifact.open(Layout(config.layout_dir), "c1").criu_layer
    path = config.layout_dir / "blobs" / "sha256" / blob.digest.removeprefix("sha256:")
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    os.chmod(path, 0o600)
    path.write_bytes(body)
    with pytest.raises((DigestError, Exception)):
        bring_back(config)
    assert left_behind(containerd, config) == []


def test_unknown_checkpoint_is_not_found(config: Config, take: Take) -> None:
    take()
    with pytest.raises(NotFoundError):
        bring_back(config, "nobody")


def terminal() -> dict[str, Any]:
    spec = ordinary()
    spec["process"]["terminal"] = True
    return spec


def test_terminal_with_a_log_goes_to_the_log_again(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take(terminal())
    requests: list[Any] = []
    containerd.hooks["Tasks/Create"] = requests.append
    done = bring_back(config)
    assert requests[0].terminal
    assert requests[0].stdout == done.log


def test_terminal_one_could_attach_to_can_be_attached_to_again(
    containerd: FakeContainerd, config: Config, take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_FIFO_ROOT", tmp_path / "fifo")
    take(terminal(), labels={"ai.cedana.attachable": "true"})
    requests: list[Any] = []
    containerd.hooks["Tasks/Create"] = requests.append
    bring_back(config)
    assert requests[0].terminal
    for path, name in ((requests[0].stdin, "stdin"), (requests[0].stdout, "stdout")):
        assert Path(path).name == f"c1-{name}"
        assert Path(path).is_fifo()
        assert Path(path).parent.parent == tmp_path / "fifo"
    assert requests[0].stderr == ""
    assert not [name for name in record_of(containerd)[0].labels if name.startswith("ai.cedana.")]


def test_fifos_of_a_failed_restore_are_removed(
    containerd: FakeContainerd, config: Config, take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_FIFO_ROOT", tmp_path / "fifo")
    take(terminal(), labels={"ai.cedana.attachable": "true"})
    containerd.failures["Tasks/Start"] = (grpc.StatusCode.UNKNOWN, "no")
    with pytest.raises(RestoreError):
        bring_back(config)
    assert list((tmp_path / "fifo").iterdir()) == []


def test_container_of_ctr_keeps_name_and_id_over_any_number_of_moves(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take(id="c1", name="c1", labels={"nerdctl/name": "c1", "nerdctl/namespace": "default"})
    assert bring_back(config).container_id == "c1"


def test_restart_policy_takes_effect_only_once_it_runs(
    containerd: FakeContainerd, config: Config, take: Take
) -> None:
    take(
        labels={
            "containerd.io/restart.policy": "always",
            "containerd.io/restart.status": "running",
            "containerd.io/restart.loguri": "binary:///bin/sh?-c=id",
        }
    )
    seen: list[dict[str, str]] = []
    containerd.hooks["Tasks/Start"] = lambda r: seen.append(dict(containerd.space.containers["c1"].labels))
    done = bring_back(config)
    assert not [name for name in seen[0] if "restart" in name]
    labels = record_of(containerd)[0].labels
    assert labels["containerd.io/restart.policy"] == "always"
    assert labels["containerd.io/restart.loguri"] == done.log


def _base(config: Config) -> Descriptor:
    base = Artifact.open(Layout(config.layout_dir), "c1").base
    assert base is not None
    return base


def _ended(
    containerd: FakeContainerd,
    config: Config,
    when: float,
    checkpoint_id: str = "",
    container_id: str = "c1",
) -> None:
    """A container as a destroying checkpoint left it at the time `when`; by default of this very one."""
    identity = checkpoint_id or Artifact.open(Layout(config.layout_dir), "c1").record.id
    containerd.space.containers[container_id] = api.Container(
        id=container_id,
        snapshotter="overlayfs",
        snapshot_key="old",
        labels={CHECKPOINTED_LABEL: f"{identity} {when:.3f}"},
    )
    containerd.space.snapshots["old"] = ""
