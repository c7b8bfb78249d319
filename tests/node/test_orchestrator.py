"""To containerd, ctr and nerdctl a restored container is an ordinary one, however its restore was asked."""

from __future__ import annotations

import pytest

from tests.node.bed import Bed, Node, wait_until
from tests.node.test_move import (
    COUNT,
    RUNTIME,
    container_id,
    count,
    start_workload,
    verify_workload,
    wait_for_count,
)

RESTORE_FROM = "ai.cedana.restore-from"


PROGRAM = ("/usr/bin/python3", "/workloads/threads.py")


@pytest.fixture
def checkpoint(bed: Bed, name: str) -> str:
    """A checkpoint in the registry of a Python program with threads, which ctr ran on node A as `name`."""
    reference = bed.reference("threads")
    start_workload(bed, name, "threads")
    bed.node_a.cedana("checkpoint", name, "--to", reference)
    bed.node_a.remove_container(name)
    return reference


@pytest.fixture
def nerdctl_checkpoint(bed: Bed, name: str) -> str:
    """The same, of a container of nerdctl's: it has other mounts, hooks and a seccomp profile."""
    node, reference = bed.node_a, bed.reference("threads")
    node.nerdctl("run", "--detach", "--pull", "never", "--name", name, "--net", "bed", "--runtime", RUNTIME,
                 bed.image("python"), *PROGRAM)  # fmt: skip
    wait_until(lambda: node.read(container_id(node, name), "/ticks"), "the program is ready")
    node.cedana("checkpoint", name, "--to", reference)
    node.nerdctl("rm", "--force", name)
    return reference


def test_ctr_run_restores_from_the_annotation(bed: Bed, name: str, checkpoint: str) -> None:
    image = pull(bed.node_b, bed.image("python"))
    bed.node_b.run_container(image, name, *PROGRAM, network=False,
                             options=["--annotation", f"{RESTORE_FROM}={checkpoint}"])  # fmt: skip
    assert int(bed.node_b.read(name, "/ticks")) > 1
    verify_workload(bed.node_b, name)


def test_nerdctl_run_restores_from_the_annotation(bed: Bed, name: str, nerdctl_checkpoint: str) -> None:
    image = pull(bed.node_b, bed.image("python"))
    bed.node_b.nerdctl(
        "run", "--detach", "--name", name, "--net", "bed", "--runtime", RUNTIME,
        "--annotation", f"{RESTORE_FROM}={nerdctl_checkpoint}", image, *PROGRAM,
    )  # fmt: skip
    verify_nerdctl(bed.node_b, name)


def test_later_start_keeps_what_was_written_and_runs_the_program_anew(
    bed: Bed, name: str, nerdctl_checkpoint: str
) -> None:
    node = bed.node_b
    image = pull(node, bed.image("python"))
    node.nerdctl(
        "run", "--detach", "--name", name, "--net", "bed", "--runtime", RUNTIME,
        "--annotation", f"{RESTORE_FROM}={nerdctl_checkpoint}", image, *PROGRAM,
    )  # fmt: skip
    identity = container_id(node, name)
    restored = int(node.read(identity, "/ticks"))
    assert restored > 0
    node.exec(identity, "touch", "/written-since")
    node.nerdctl("restart", "--time", "1", name)
    wait_until(lambda: node.task_status(identity) == "RUNNING", "it runs again")
    node.exec(identity, "test", "-e", "/written-since")
    wait_until(lambda: 0 < int(node.read(identity, "/ticks") or 0) < restored, "the program began anew")
    node.nerdctl("rm", "--force", name)


def test_artifact_is_an_image_that_ctr_pulls_and_runs(bed: Bed, name: str, checkpoint: str) -> None:
    bed.node_b.run_container(pull(bed.node_b, checkpoint), name, network=False)
    verify_workload(bed.node_b, name)


def test_artifact_is_an_image_that_nerdctl_runs(bed: Bed, name: str, nerdctl_checkpoint: str) -> None:
    bed.node_b.nerdctl("run", "--detach", "--quiet", "--name", name, "--net", "bed", "--runtime", RUNTIME,
                       nerdctl_checkpoint)  # fmt: skip
    verify_nerdctl(bed.node_b, name)


def test_artifact_runs_as_a_plain_image_with_the_stock_runtime(bed: Bed, name: str, checkpoint: str) -> None:
    image = pull(bed.node_b, checkpoint)
    bed.node_b.run_container(
        image, name, "sh", "-c", f"[ -e /ticks ] && {COUNT}", runtime="io.containerd.runc.v2"
    )
    wait_for_count(bed.node_b, name, 3)


def test_cold_start_only_when_asked_for(bed: Bed, name: str, checkpoint: str) -> None:
    image = pull(bed.node_b, bed.image("base"))
    wrong = ["--mount", "type=bind,src=/nowhere,dst=/nowhere,options=rbind:ro",
             "--annotation", f"{RESTORE_FROM}={checkpoint}"]  # fmt: skip
    done = bed.node_b.run(
        ["ctr", "run", "-d", "--runtime", RUNTIME, *wrong, image, name, "true"], check=False
    )
    assert done.returncode != 0
    assert "/nowhere" in done.stderr


def test_nerdctl_checkpoint_create_list_start_and_remove(bed: Bed, name: str) -> None:
    node = bed.node_a
    node.nerdctl("run", "--detach", "--pull", "never", "--name", name, "--net", "none", "--runtime", RUNTIME,
                 bed.image("base"), "sh", "-c", COUNT)  # fmt: skip
    identity = container_id(node, name)
    wait_for_count(node, identity, 20)

    node.nerdctl("checkpoint", "create", name, "first")
    assert "first" in node.nerdctl("checkpoint", "ls", name)
    # nerdctl asks other runtimes than runc's own to leave the container running, whatever its user says.
    node.nerdctl("kill", name)
    wait_until(lambda: node.task_status(identity) in ("", "STOPPED"), "the container stopped")
    node.nerdctl("start", "--checkpoint", "first", name)
    assert wait_for_count(node, identity, 21) >= 20
    moved = count(node, identity)
    wait_for_count(node, identity, moved + 20)

    node.nerdctl("checkpoint", "create", "--leave-running", name, "second")
    wait_for_count(node, identity, moved + 40)
    node.nerdctl("checkpoint", "rm", name, "first")
    assert "first" not in node.nerdctl("checkpoint", "ls", name)
    node.nerdctl("checkpoint", "rm", name, "second")
    node.nerdctl("rm", "--force", name)


def test_ctr_container_checkpoint_and_restore_live(bed: Bed, name: str) -> None:
    node = bed.node_a
    node.run_container(bed.image("base"), name, "sh", "-c", COUNT, network=False)
    wait_for_count(node, name, 20)
    image = f"checkpoint/{name}:1"
    node.ctr("containers", "checkpoint", "--task", "--rw", "--image", name, image)
    saved = count(node, name)
    wait_for_count(node, name, saved + 10)
    node.remove_container(name)
    node.ctr("containers", "restore", "--rw", "--live", name, image)
    assert saved - 5 <= count(node, name)
    wait_for_count(node, name, saved + 30)
    node.ctr("images", "rm", image)


def test_ctr_tasks_checkpoint_writes_images(bed: Bed, name: str) -> None:
    node = bed.node_a
    node.run_container(bed.image("base"), name, "sh", "-c", COUNT, network=False)
    wait_for_count(node, name, 5)
    node.ctr("tasks", "checkpoint", "--image-path", f"/run/{name}", "--exit", name)
    assert "inventory.img" in node.ns_exec(["ls", f"/run/{name}"])
    wait_until(lambda: node.task_status(name) in ("", "STOPPED"), "the container stopped")


def test_restored_container_is_an_ordinary_one_for_ctr(bed: Bed, name: str, checkpoint: str) -> None:
    node = bed.node_b
    node.cedana("restore", checkpoint, "--name", name)
    assert node.task_status(name) == "RUNNING"
    assert name in node.ctr("containers", "ls")
    assert node.exec(name, "cat", "/proc/1/comm").strip() == "python3"
    assert str(node.task_pid(name)) in node.ctr("tasks", "ps", name)
    assert "memory" in node.ctr("tasks", "metrics", name)
    node.ctr("tasks", "pause", name)
    assert node.task_status(name) == "PAUSED"
    node.ctr("tasks", "resume", name)
    verify_workload(node, name)
    node.ctr("tasks", "kill", "--signal", "SIGKILL", name)
    wait_until(lambda: node.task_status(name) in ("", "STOPPED"), "the container stopped")
    node.ctr("tasks", "rm", name)
    node.ctr("containers", "rm", name)


def test_restored_container_is_an_ordinary_one_for_nerdctl(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    node_a.nerdctl("run", "--detach", "--pull", "never", "--name", name, "--net", "bed", "--runtime", RUNTIME,
                   bed.image("base"), "sh", "-c", COUNT)  # fmt: skip
    wait_for_count(node_a, container_id(node_a, name), 20)
    reference = bed.reference(name)
    node_a.cedana("checkpoint", name, "--to", reference)
    assert name in node_a.nerdctl("ps", "--all")
    node_b.cedana("restore", reference)

    identity = container_id(node_b, name)
    assert name in node_b.nerdctl("ps")
    before = count(node_b, identity)
    wait_for_count(node_b, identity, before + 20)
    assert f"line {before + 10}\n" in node_b.nerdctl("logs", name)
    assert node_b.nerdctl("exec", name, "cat", "/proc/1/comm").strip() == "sh"
    node_b.nerdctl("stop", "--time", "1", name)
    assert name not in node_b.nerdctl("ps")
    node_b.nerdctl("rm", name)
    node_a.nerdctl("rm", name)


def pull(node: Node, reference: str) -> str:
    node.ctr("images", "pull", "--plain-http", reference)
    return reference


def verify_nerdctl(node: Node, name: str) -> None:
    verify_workload(node, container_id(node, name))
    assert node.nerdctl("ps", "--format", "{{.Names}}").split() == [name]
    node.nerdctl("rm", "--force", name)
