from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_containerd import FakeContainerd, Space
from google.protobuf import any_pb2

from agent import containers
from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.errors import NotRunningError
from base.errors import NotFoundError, UsageError
from runtime.errors import EngineError, IncompatibleError
from shim.api import options_pb2

WEB = "1a" + "0" * 62
DB = "1b" + "0" * 62


@pytest.fixture
def two(containerd: FakeContainerd) -> None:
    for identity, name in ((WEB, "web"), (DB, "db")):
        containerd.space.containers[identity] = api.Container(id=identity, labels={"nerdctl/name": name})


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("text", [WEB, "web", "1a", WEB[:12]])
def test_container_is_found_by_id_name_or_beginning(client: Client, text: str) -> None:
    assert containers.find(client, text).id == WEB


@pytest.mark.usefixtures("two")
def test_beginning_of_several_is_refused(client: Client) -> None:
    with pytest.raises(UsageError, match="2 containers"):
        containers.find(client, "1")


def test_id_wins_over_name_and_name_over_beginning(containerd: FakeContainerd, client: Client) -> None:
    space = containerd.space
    space.containers["ab"] = api.Container(id="ab")
    space.containers["abc"] = api.Container(id="abc", labels={"nerdctl/name": "ab"})
    space.containers["abd"] = api.Container(id="abd", labels={"nerdctl/name": "a"})
    assert containers.find(client, "ab").id == "ab"
    assert containers.find(client, "a").id == "abd"


def test_dot_in_a_name_is_a_dot(containerd: FakeContainerd, client: Client) -> None:
    containerd.space.containers["axb"] = api.Container(id="axb")
    with pytest.raises(NotFoundError):
        containers.find(client, "a.b")


def test_container_of_another_namespace_is_pointed_out(containerd: FakeContainerd, client: Client) -> None:
    containerd.spaces["k8s.io"] = Space(containers={"web": api.Container(id="web")})
    with pytest.raises(NotFoundError) as caught:
        containers.find(client, "web")
    assert "--namespace k8s.io" in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("text", ["", "a b", '"', 'x",labels.y==z', "../x", "a\0", "x" * 200, "a\n"])
def test_impossible_name_never_reaches_containerds_filters(
    containerd: FakeContainerd, client: Client, text: str
) -> None:
    with pytest.raises(UsageError):
        containers.find(client, text)
    assert containerd.calls == []


@pytest.fixture
def running(containerd: FakeContainerd, tmp_path: Path) -> api.Container:
    """A running container with runc's state and a bundle on disk."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps({"process": {}}))
    state = tmp_path / "runc" / "default" / "c1"
    state.mkdir(parents=True)
    (state / "state.json").write_text(json.dumps({"config": {"labels": ["x=y", f"bundle={bundle}"]}}))
    packed = options_pb2.Options(root=str(tmp_path / "runc"), binary_name="crun", systemd_cgroup=True)
    options = any_pb2.Any(type_url="containerd.runc.v1.Options", value=packed.SerializeToString())
    container = api.Container(
        id="c1",
        image="img",
        labels={"nerdctl/name": "web", "team": "db"},
        runtime=api.Container.Runtime(name="io.containerd.runc.v2", options=options),
    )
    containerd.space.containers["c1"] = container
    containerd.space.tasks["c1"] = api.Process(id="c1", pid=77, status=api.RUNNING)
    return container


def test_running_container_is_described_to_the_engine(
    client: Client, running: api.Container, tmp_path: Path
) -> None:
    described = containers.describe(client, running)
    assert (described.id, described.name, described.pid) == ("c1", "web", 77)
    assert described.bundle == tmp_path / "bundle"
    assert described.runc_root == tmp_path / "runc" / "default"
    assert (described.runc_binary, described.systemd_cgroup) == ("crun", True)
    assert described.spec == {"process": {}}
    assert described.labels["team"] == "db"


def test_usual_runtime_has_the_usual_root(
    client: Client, running: api.Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.runtime.ClearField("options")
    state = tmp_path / "usual"
    monkeypatch.setattr("shim.options.DEFAULT_ROOT", str(state))
    (tmp_path / "runc").rename(state)
    described = containers.describe(client, running)
    assert (described.runc_root, described.runc_binary) == (state / "default", "runc")


@pytest.mark.parametrize("status", [api.STOPPED, api.CREATED, api.UNKNOWN])
def test_container_that_does_not_run_is_said_so(
    containerd: FakeContainerd, client: Client, running: api.Container, status: api.Status
) -> None:
    containerd.space.tasks["c1"].status = status
    with pytest.raises(NotRunningError, match="web is not running"):
        containers.describe(client, running)


def test_paused_container_can_be_described(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    containerd.space.tasks["c1"].status = api.PAUSED
    assert containers.describe(client, running).pid == 77


def test_container_without_a_task_is_said_so(
    containerd: FakeContainerd, client: Client, running: api.Container
) -> None:
    containerd.space.tasks.clear()
    with pytest.raises(NotRunningError):
        containers.describe(client, running)


def test_container_of_a_virtual_machine_cannot_be_checkpointed(
    client: Client, running: api.Container
) -> None:
    running.runtime.name = "io.containerd.kata.v2"
    with pytest.raises(IncompatibleError, match="kata"):
        containers.describe(client, running)


def test_missing_runc_state_is_the_engines_error(
    client: Client, running: api.Container, tmp_path: Path
) -> None:
    (tmp_path / "runc" / "default" / "c1" / "state.json").unlink()
    with pytest.raises(EngineError):
        containers.describe(client, running)


def test_state_without_a_bundle_is_said_so(client: Client, running: api.Container, tmp_path: Path) -> None:
    (tmp_path / "runc" / "default" / "c1" / "state.json").write_text('{"config": {"labels": null}}')
    with pytest.raises(IncompatibleError, match="bundle"):
        containers.describe(client, running)
