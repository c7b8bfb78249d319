from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.node import Entry, Inspection
from cli import report
from oci.artifact import CRIU, INDEX, SPEC, Artifact
from oci.layout import Layout
from oci.record import (
    CheckpointRecord,
    ContainerRecord,
    FileRecord,
    MemoryRecord,
    NodeRecord,
    ProcessRecord,
    SocketRecord,
    StepRecord,
)
from oci.reference import parse
from oci.store import Descriptor

EVIL = "\x1b]0;owned\x07\r\n\u202e"


def blob(media_type: str, size: int) -> Descriptor:
    return Descriptor(media_type, f"sha256:{'b' * 64}", size)


def artifact(**fields: Any) -> Artifact:
    record = CheckpointRecord(
        id="0123456789abcdef",
        created="2026-12-03T07:00:00.000+00:00",
        node=NodeRecord("node-a", "6.18", "amd64"),
        container=ContainerRecord(id="c" * 64, name="web", namespace="default", image="redis:7"),
        **fields,
    )
    return Artifact(
        store=Layout(Path("/nowhere")),
        manifest=blob("application/vnd.oci.image.manifest.v1+json", 1),
        record=record,
        image_config={},
        base=None,
        config=blob("application/json", 10),
        base_layers=(blob("application/vnd.oci.image.layer.v1.tar+gzip", 1000),),
        rootfs_layer=None,
        criu_layer=blob(CRIU, 20),
        index_layer=blob(INDEX, 30),
        packs=(blob("application/vnd.cedana.checkpoint.pages.v1+zstd", 4 << 20),),
        spec_layer=blob(SPEC, 40),
    )


@pytest.fixture
def full() -> Inspection:
    return Inspection(
        parse("oci:/x:web"),
        artifact(
            processes=(
                ProcessRecord(1, 0, "sh", 1, 1 << 20, ("sh", "-c", "run")),
                ProcessRecord(7, 1, "redis", 5, 64 << 20, ("redis-server", "*:6379")),
                ProcessRecord(9, 7, "kid", 1, 0),
                ProcessRecord(8, 1, "sleep", 1, 4096, ("sleep", "1")),
                ProcessRecord(20, 19, "orphan", 1, 4096),
            ),
            memory=MemoryRecord(100 << 20, 20 << 20, 4 << 20),
            sockets=(SocketRecord(7, "inet", "stream", "established", "10.0.0.2:6379", "10.0.0.9:50000"),),
            files=(FileRecord(7, 3, "/data/dump.rdb", True), FileRecord(7, 4, "/dev/null")),
            mounts=("/proc", "/data"),
            steps=(StepRecord("freeze", 0.0, 0.1), StepRecord("dump", 0.1, 0.3)),
        ),
    )


def test_inspect_shows_the_tree_of_processes(full: Inspection) -> None:
    text = report.inspection(full)
    assert "  1  sh -c run  (1.0 MiB)\n  ├─ 7  redis-server *:6379  (64.0 MiB, 5 threads)\n" in text
    assert "  │  └─ 9  [kid]  (0 B)\n  └─ 8  sleep 1  (4.0 KiB)\n  20  [orphan]" in text


def test_inspect_shows_memory_sockets_files_sizes_and_timings(full: Inspection) -> None:
    text = report.inspection(full)
    for part in (
        "100.0 MiB: 20.0 MiB zero, 4.0 MiB stored",
        "7: inet stream established 10.0.0.2:6379 → 10.0.0.9:50000",
        "7:3  /data/dump.rdb  (deleted)",
        "base image  1000 B",
        "timings",
        "300 ms",
    ):
        assert part in text


def test_inspect_as_json_has_everything(full: Inspection) -> None:
    value = json.loads(json.dumps(report.inspection_json(full)))
    assert value["sizes"]["memory"] == (4 << 20) + 30
    assert [p["pid"] for p in value["checkpoint"]["processes"]] == [1, 7, 9, 8, 20]


def test_processes_that_are_their_own_ancestors_do_not_hang_it() -> None:
    loop = artifact(processes=(ProcessRecord(2, 3, "a"), ProcessRecord(3, 2, "b"), ProcessRecord(4, 4, "c")))
    assert "[c]" in report.inspection(Inspection(parse("oci:/x:t"), loop))


def test_long_lists_are_cut() -> None:
    many = artifact(files=tuple(FileRecord(1, n, f"/f{n}") for n in range(100)))
    text = report.inspection(Inspection(parse("oci:/x:t"), many))
    assert "files (100)" in text
    assert "… and 60 more" in text


def test_nothing_in_an_artifact_can_steer_the_terminal() -> None:
    evil = artifact(
        processes=(ProcessRecord(1, 0, EVIL, 1, 0, (EVIL,)),),
        sockets=(SocketRecord(1, EVIL, EVIL, EVIL, EVIL, EVIL),),
        files=(FileRecord(1, 1, EVIL),),
        mounts=(EVIL,),
        tools={EVIL: EVIL},
        steps=(StepRecord(EVIL, 0, 1),),
    )
    texts = [
        report.inspection(Inspection(parse("oci:/x:t"), evil)),
        report.entries(parse("oci:/x"), [Entry("t", evil), Entry("t2", None, EVIL)]),
    ]
    for text in texts:
        assert not [c for c in text if not c.isprintable() and c != "\n"]
        assert "owned" not in text.replace("\\x1b]0;owned\\x07", "")


def test_list_has_one_line_per_checkpoint() -> None:
    text = report.entries(
        parse("oci:/x"), [Entry("web-1", artifact()), Entry("odd", None, "not a checkpoint")]
    )
    head, first, second = text.splitlines()
    assert head.split() == ["TAG", "ID", "CONTAINER", "IMAGE", "CREATED", "(UTC)", "SIZE"]
    assert first.split() == [
        "web-1",
        "0123456789ab",
        "web",
        "redis:7",
        "2026-12-03",
        "07:00:00",
        "4.0",
        "MiB",
    ]
    assert second.split(maxsplit=2) == ["odd", "-", "not a checkpoint"]
    assert report.entries_json(parse("oci:/x"), [Entry("odd", None, "no")])["checkpoints"] == [
        {"tag": "odd", "error": "no"}
    ]


def test_empty_list_says_so() -> None:
    assert report.entries(parse("oci:/x"), []) == "no checkpoints in oci:/x"
