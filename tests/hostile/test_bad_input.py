"""Whatever is wrong is said in a sentence within seconds; the container goes on, nothing is left behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.node import images
from tests.node.bed import Bed, Node, wait_until
from tests.node.registries import failing_registry

CRIU = "application/vnd.cedana.checkpoint.criu.v1.tar+zstd"
INDEX = "application/vnd.cedana.checkpoint.index.v1+zstd"
PAGES = "application/vnd.cedana.checkpoint.pages.v1+zstd"
SPEC = "application/vnd.cedana.checkpoint.spec.v1+json"
ROOTFS = "application/vnd.oci.image.layer.v1.tar+zstd"

USAGE, NOT_FOUND, INCOMPATIBLE, STORE, ENGINE = 2, 3, 4, 5, 6


VICTIM = "victim"


@pytest.fixture
def victim(bed: Bed) -> str:
    """A running Python program with 64 MiB of memory on node A, whose checkpoints all fail."""
    if bed.node_a.task_status(VICTIM) != "RUNNING":
        bed.node_a.remove_container(VICTIM)
        program = ("/usr/bin/python3", "/workloads/memory.py", "64")
        bed.node_a.run_container(bed.image("python"), VICTIM, *program)
        wait_until(lambda: bed.node_a.read(VICTIM, "/ticks"), "the program is ready")
    return VICTIM


@pytest.fixture(scope="module", autouse=True)
def no_victim_left(bed: Bed) -> Iterator[None]:
    yield
    bed.node_a.remove_container(VICTIM)


@pytest.fixture
def good(bed: Bed, victim: str) -> Path:
    """A good checkpoint of it (the tag `one` of an image layout)."""
    layout = bed.shared / "good"
    if not layout.exists():
        bed.node_a.cedana("checkpoint", victim, "--to", f"oci:{layout}:one", "--leave-running")
    return layout


# A checkpoint that fails


def test_unknown_container(bed: Bed, victim: str) -> None:
    with untouched(bed.node_a, victim):
        fails(bed.node_a, "checkpoint", "nobody", code=NOT_FOUND, says="nobody")


@pytest.mark.parametrize(
    "reference",
    [
        "10.88.0.1:5000/UPPER:x",
        "10.88.0.1:5000/x:bad tag",
        "oci:",
        "http://10.88.0.1:5000/x:y",
        "no-registry/UPPER",
    ],
)
def test_wrong_reference(bed: Bed, victim: str, reference: str) -> None:
    with untouched(bed.node_a, victim):
        fails(bed.node_a, "checkpoint", victim, "--to", reference, code=USAGE, says=reference)


@pytest.mark.parametrize("host", ["10.88.0.1:5999", "10.88.0.99:5000", "no-such-host.invalid"])
def test_registry_down(bed: Bed, victim: str, host: str) -> None:
    with untouched(bed.node_a, victim):
        fails(
            bed.node_a,
            "checkpoint",
            victim,
            "--to",
            f"{host}/x:y",
            code=STORE,
            says=host,
            env=plain_http(host),
        )


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_registry_refuses(bed: Bed, victim: str, status: int) -> None:
    with failing_registry(bed, status) as host, untouched(bed.node_a, victim):
        fails(
            bed.node_a, "checkpoint", victim, "--to", f"{host}/x:y",
            code=STORE, says=(host, str(status)), env=plain_http(host),
        )  # fmt: skip


@pytest.mark.parametrize("status", [401, 404, 500])
def test_registry_fails_in_the_middle_of_a_checkpoint(bed: Bed, victim: str, status: int) -> None:
    base_image = images.build("python").stat().st_size
    with failing_registry(bed, status, base_image + (10 << 20)) as host, untouched(bed.node_a, victim):
        fails(
            bed.node_a, "checkpoint", victim, "--to", f"{host}/x:y",
            code=STORE, says=(host, str(status)), env=plain_http(host),
        )  # fmt: skip


def test_full_disk_under_the_layout(bed: Bed, victim: str) -> None:
    with untouched(bed.node_a, victim), small_disk(bed.node_a) as directory:
        fails(
            bed.node_a, "checkpoint", victim, "--to", f"oci:{directory}/layout:one",
            code=STORE, says="No space left on device",
        )  # fmt: skip
        assert bed.node_a.ns_exec(["find", directory, "-path", "*/blobs/*", "-type", "f"]) == ""


def test_full_disk_under_the_run_directory(bed: Bed, victim: str) -> None:
    with untouched(bed.node_a, victim), small_disk(bed.node_a, "64k") as directory:
        fails(
            bed.node_a, "checkpoint", victim, "--to", bed.reference("full"),
            code=(STORE, ENGINE), says=("space",), env={"CEDANA_RUN_DIR": directory},
        )  # fmt: skip
        assert bed.node_a.ns_exec(["find", directory, "-type", "f"]) == ""


def test_full_disk_at_a_restore(bed: Bed, good: Path) -> None:
    with nothing_left(bed.node_b), small_disk(bed.node_b, "64k") as directory:
        fails(
            bed.node_b, "restore", f"oci:{good}:one",
            code=(STORE, ENGINE), says="space", env={"CEDANA_RUN_DIR": directory},
        )  # fmt: skip


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        ("io_uring", ("io_uring", "try:")),
        ("vsock", ("vsock", "try:")),
        ("unix", ("server.sock", "try:")),
        ("traced", ("traced", "try:")),
        ("packets", ("pipe", "try:")),
        ("semaphore", ("eventfd", "try:")),
        ("detached", ("CRIU could not dump", "Can't lookup mount", "try:", "log:")),
    ],
)
def test_what_criu_cannot_carry(bed: Bed, name: str, thing: str, says: tuple[str, ...]) -> None:
    outside = bed.node_a.base / "log" / name
    outside.mkdir()
    serve = (
        "import socket,time; s=socket.socket(socket.AF_UNIX); s.bind('server.sock'); s.listen();"
        " c=s.accept(); time.sleep(1000)"
    )
    server = bed.node_a.popen(["sh", "-c", f'cd /var/log/{name} && exec python3 -c "{serve}"'])
    wait_until((outside / "server.sock").exists, "the server listens")
    mount = f"type=bind,src=/var/log/{name},dst=/outside,options=rbind:ro"
    bed.node_a.run_container(
        bed.image("python"), name, "/usr/bin/python3", "/workloads/stubborn.py", thing,
        options=["--cap-add", "CAP_SYS_ADMIN", "--mount", mount],
    )  # fmt: skip
    try:
        wait_until(lambda: bed.node_a.read(name, "/ticks"), "the program is ready")
        with untouched(bed.node_a, name):
            fails(
                bed.node_a, "checkpoint", name, "--to", bed.reference(name),
                code=(INCOMPATIBLE, ENGINE), says=says,
            )  # fmt: skip
    finally:
        server.kill()
        server.wait()


# A restore that fails


def test_restore_of_what_is_not_there(bed: Bed) -> None:
    with nothing_left(bed.node_b):
        fails(bed.node_b, "restore", bed.reference("nothing"), code=NOT_FOUND, says="nothing")
        fails(bed.node_b, "restore", "oci:/nowhere:x", code=NOT_FOUND, says="/nowhere")


def test_restore_of_an_ordinary_image(bed: Bed) -> None:
    with nothing_left(bed.node_b):
        fails(bed.node_b, "restore", bed.image("base"), code=STORE, says="not a checkpoint")


@pytest.mark.parametrize("status", [401, 404, 500])
def test_restore_from_a_registry_that_refuses(bed: Bed, status: int) -> None:
    with failing_registry(bed, status) as host, nothing_left(bed.node_b):
        code = NOT_FOUND if status == 404 else STORE
        fails(bed.node_b, "restore", f"{host}/x:y", code=code, says=host, env=plain_http(host))


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("part", ["manifest", "config", CRIU, INDEX, PAGES, SPEC, ROOTFS])
def test_restore_of_a_damaged_checkpoint(bed: Bed, good: Path, name: str, part: str, damage: str) -> None:
    layout = copied(good, name)
    blob = blob_path(layout, part_digest(layout, part))
    if damage == "remove":
        blob.unlink()
    else:
        body = bytearray(blob.read_bytes())
        body[len(body) // 2] ^= 1
        blob.write_bytes(body if damage == "flip" else body[: len(body) // 2])
    with nothing_left(bed.node_b):
        code = (STORE, NOT_FOUND) if damage == "remove" else (STORE,)
        if part == ROOTFS:  # found by the shim, whose errors reach us through containerd as a sentence
            code = (*code, ENGINE)
        fails(bed.node_b, "restore", f"oci:{layout}:one", "--name", name, code=code, says="")
        assert bed.node_b.task_status(name) == ""


def test_restore_of_a_blob_tampered_with_in_the_registry(bed: Bed, good: Path, name: str) -> None:
    reference = bed.reference(name)
    bed.node_a.cedana("push", f"oci:{good}:one", reference)
    digest = part_digest(good, PAGES).removeprefix("sha256:")
    data = (
        bed.base
        / "hub"
        / "registry"
        / "docker"
        / "registry"
        / "v2"
        / "blobs"
        / "sha256"
        / digest[:2]
        / digest
    )
    body = bytearray((data / "data").read_bytes())
    try:
        (data / "data").write_bytes(bytes(body[:-1]) + bytes([body[-1] ^ 1]))
        with nothing_left(bed.node_b):
            fails(bed.node_b, "restore", reference, "--name", name, code=STORE, says="")
    finally:
        (data / "data").write_bytes(body)


def version(record: dict[str, Any]) -> None:
    record["checkpoint"]["format_version"] = 99


def architecture(record: dict[str, Any]) -> None:
    record["architecture"] = record["checkpoint"]["node"]["architecture"] = "s390x"


def cpu_features(record: dict[str, Any]) -> None:
    record["checkpoint"]["node"]["cpu_features"].append("feature_of_tomorrow")


@pytest.mark.parametrize(
    ("edit", "code", "says"),
    [
        (version, STORE, ("version 99",)),
        (architecture, INCOMPATIBLE, ("s390x",)),
        (cpu_features, INCOMPATIBLE, ("feature_of_tomorrow",)),
    ],
)
def test_restore_of_what_this_node_cannot_run(
    bed: Bed, good: Path, name: str, edit: Callable[[dict[str, Any]], None], code: int, says: tuple[str, ...]
) -> None:
    layout = copied(good, name)
    rewrite_config(layout, edit)
    with nothing_left(bed.node_b):
        fails(bed.node_b, "restore", f"oci:{layout}:one", "--name", name, code=code, says=says)


def test_restore_over_an_existing_container(bed: Bed, victim: str, good: Path) -> None:
    with untouched(bed.node_a, victim):
        fails(
            bed.node_a, "restore", f"oci:{good}:one", "--name", victim, code=(USAGE, ENGINE, 1), says=victim
        )


def test_good_checkpoint_still_restores(bed: Bed, good: Path, name: str) -> None:
    bed.node_a.remove_container(VICTIM)  # it has the address
    bed.node_b.cedana("restore", f"oci:{good}:one", "--name", name)
    wait_until(lambda: bed.node_b.read(name, "/ticks"), "the program goes on")


# What the tests above are made of


def fails(
    node: Node,
    *arguments: str,
    code: int | tuple[int, ...],
    says: str | tuple[str, ...],
    env: Mapping[str, str] | None = None,
    within_s: float = 20,
) -> None:
    """`cedana ARGUMENTS` ends with `code`, says `says` and no traceback, and takes no more than seconds."""
    began = time.monotonic()
    done = node.cedana_fails(*arguments, env=env, timeout_s=within_s)
    assert time.monotonic() - began < within_s
    assert done.returncode in ((code,) if isinstance(code, int) else code), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.strip()
    for text in (says,) if isinstance(says, str) else says:
        assert text.lower() in unwrapped(done.stderr).lower()


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@contextmanager
def untouched(node: Node, name: str) -> Iterator[None]:
    """The container goes on as before, with the same pid, and the node has nothing that it had not before."""
    pid = node.task_pid(name)
    with nothing_left(node):
        yield
        assert node.task_status(name) == "RUNNING"
        assert node.task_pid(name) == pid
        ticks = int(node.read(name, "/ticks"))
        wait_until(lambda: int(node.read(name, "/ticks") or 0) > ticks + 5, "the container goes on")


@contextmanager
def nothing_left(node: Node) -> Iterator[None]:
    before = node.state()
    yield
    deadline = time.monotonic() + 15
    while left := node.state().left_behind(before):
        assert time.monotonic() < deadline, "left behind:\n" + "\n".join(left)
        time.sleep(0.5)


@contextmanager
def small_disk(node: Node, size: str = "16m") -> Iterator[str]:
    directory = f"/tmp/small-{os.urandom(2).hex()}"
    node.ns_exec(["mkdir", directory])
    node.ns_exec(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory])
    try:
        yield directory
    finally:
        node.ns_exec(["umount", directory])
        node.ns_exec(["rmdir", directory])


def plain_http(host: str) -> dict[str, str]:
    return {"CEDANA_PLAIN_HTTP": host}


def copied(layout: Path, name: str) -> Path:
    target = layout.with_name(f"layout-{name}")
    shutil.copytree(layout, target)
    return target


def blob_path(layout: Path, digest: str) -> Path:
    return layout / "blobs" / "sha256" / digest.removeprefix("sha256:")


def entry(layout: Path) -> dict[str, Any]:
    """The index's descriptor of the tag `one`."""
    index = json.loads((layout / "index.json").read_text())
    tag = "org.opencontainers.image.ref.name"
    found = [m for m in index["manifests"] if m.get("annotations", {}).get(tag) == "one"]
    assert len(found) == 1
    return dict(found[0])


def part_digest(layout: Path, part: str) -> str:
    """Digest of the manifest, the config, or the last layer of the media type `part`."""
    digest = str(entry(layout)["digest"])
    if part == "manifest":
        return digest
    manifest = json.loads(blob_path(layout, digest).read_text())
    if part == "config":
        return str(manifest["config"]["digest"])
    return [str(layer["digest"]) for layer in manifest["layers"] if layer["mediaType"] == part][-1]


def rewrite_config(layout: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the checkpoint's config as someone would who knows how: every digest is right again."""
    old = str(entry(layout)["digest"])
    manifest = json.loads(blob_path(layout, old).read_text())
    config = json.loads(blob_path(layout, manifest["config"]["digest"]).read_text())
    edit(config)
    manifest["config"] |= put(layout, config)
    index = json.loads((layout / "index.json").read_text())
    for descriptor in index["manifests"]:
        if descriptor["digest"] == old:
            descriptor |= put(layout, manifest)
    (layout / "index.json").write_text(json.dumps(index))


def put(layout: Path, value: object) -> dict[str, Any]:
    body = json.dumps(value).encode()
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    blob_path(layout, digest).write_bytes(body)
    return {"digest": digest, "size": len(body)}
