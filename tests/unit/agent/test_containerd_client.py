from __future__ import annotations

import hashlib
from pathlib import Path

import grpc
import pytest
from fake_containerd import FakeContainerd

from agent.api import containerd_pb2 as api
from agent.containerd import Client
from agent.errors import AlreadyExistsError, ContainerdError, ContainerdNotFoundError
from base.errors import NotFoundError


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def test_every_call_carries_the_namespace(containerd: FakeContainerd) -> None:
    with Client(containerd.address, "k8s.io") as client:
        client.containers()
    assert containerd.metadata[-1]["containerd-namespace"] == "k8s.io"


def test_missing_container_is_not_found_with_exit_code_3(client: Client) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.container("nobody")
    assert caught.value.exit_code == 3
    assert "nobody" in caught.value.message


def test_missing_task_and_image_and_snapshot_are_none(client: Client) -> None:
    assert client.task("nobody") is None
    assert client.image("nothing") is None
    assert client.snapshot_parent("overlayfs", "nothing") is None


def test_container_that_exists_is_said_so(client: Client) -> None:
    client.create_container(api.Container(id="a"))
    with pytest.raises(AlreadyExistsError):
        client.create_container(api.Container(id="a"))


def test_containerd_that_does_not_run_names_the_socket_and_what_to_do(tmp_path: Path) -> None:
    with Client(tmp_path / "no.sock", "default") as client, pytest.raises(ContainerdError) as caught:
        client.containers()
    assert str(tmp_path / "no.sock") in caught.value.message
    assert "CONTAINERD_ADDRESS" in caught.value.hint


def test_other_failures_keep_containerds_words(containerd: FakeContainerd, client: Client) -> None:
    containerd.failures["Tasks/Start"] = (grpc.StatusCode.UNKNOWN, "runc said: no space left on device")
    with pytest.raises(ContainerdError) as caught:
        client.start_task("a")
    assert caught.value.details == "runc said: no space left on device"


def test_lease_is_used_inside_the_block_and_deleted_after_it(
    containerd: FakeContainerd, client: Client
) -> None:
    with client.lease():
        client.keep("snapshots/overlayfs", "key")
        assert list(containerd.space.leases.values()) == [["snapshots/overlayfs key"]]
        client.containers()
        assert containerd.metadata[-1]["containerd-lease"] in containerd.space.leases
    assert not containerd.space.leases
    client.containers()
    assert "containerd-lease" not in containerd.metadata[-1]


def test_content_is_written_in_pieces_and_labelled(containerd: FakeContainerd, client: Client) -> None:
    body = bytes(range(256)) * 20000
    client.write_content(_digest(body), len(body), [body[:100], body[100:]], {"a": "b"})
    assert containerd.space.content[_digest(body)] == body
    assert containerd.space.content_labels[_digest(body)] == {"a": "b"}


def test_empty_content_is_written(containerd: FakeContainerd, client: Client) -> None:
    client.write_content(_digest(b""), 0, [])
    assert containerd.space.content[_digest(b"")] == b""


def test_content_that_is_there_is_no_error(containerd: FakeContainerd, client: Client) -> None:
    for _ in range(2):
        client.write_content(_digest(b"x"), 1, [b"x"])
    assert containerd.space.content[_digest(b"x")] == b"x"


def test_content_of_another_digest_is_refused_and_aborted(containerd: FakeContainerd, client: Client) -> None:
    with pytest.raises(ContainerdError, match="Content"):
        client.write_content(_digest(b"x"), 1, [b"y"])
    assert containerd.calls[-1] == "Content/Abort"
    assert not containerd.space.content


def test_source_that_fails_while_content_is_written_raises_its_own_error(client: Client) -> None:
    def chunks():  # type: ignore[no-untyped-def]
        yield b"x"
        raise ContainerdNotFoundError("the registry went away")

    with pytest.raises(ContainerdNotFoundError, match="went away"):
        client.write_content(_digest(b"xy"), 2, chunks())


def test_empty_label_is_removed(containerd: FakeContainerd, client: Client) -> None:
    client.create_container(api.Container(id="a", labels={"keep": "1", "drop": "2"}))
    client.update_labels("a", {"drop": "", "new": "3"})
    assert dict(containerd.space.containers["a"].labels) == {"keep": "1", "new": "3"}
