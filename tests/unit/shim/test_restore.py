"""Restores inside Create and Start, and the Task API's Checkpoint: what the engine is asked, and when."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any

from shim.api import events_pb2, options_pb2
from shim.api import task_pb2 as api
from tests.unit.shim.harness import CallFailed, Shim, run

ANNOTATED = {"annotations": {"ai.cedana.restore-from": "registry.example/app:ckpt"}}
COLD = {"annotations": {**ANNOTATED["annotations"], "ai.cedana.on-incompatible": "cold-start"}}
MARKED = {"process": {"args": ["/bin/sh", "-c", "exec sleep 60"], "env": ["A=1", "CEDANA_CHECKPOINT=abc"]}}
LOCATED = {"content": "/var/lib/containerd/content", "manifest": "sha256:" + "0" * 64}


def _restored(shim: Shim, script: str) -> None:
    (shim.engine / "restored").write_text(script)


def test_a_checkpoint_in_the_request_is_restored_at_start(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        _restored(shim, "exit 9")
        created = await shim.create("one", checkpoint="/tmp/ctrd-checkpoint")
        assert created.pid == 0
        state = await shim.state("one")
        assert (state.status, state.pid) == (api.CREATED, 0)
        assert shim.engine_calls() == []
        pid = await shim.start("one")
        assert pid > 0
        assert await shim.wait("one") == 9
        await shim.delete("one")
        restore, discard = shim.engine_calls()
        assert (restore["verb"], restore["images"]) == ("restore", "/tmp/ctrd-checkpoint")
        assert (restore["id"], restore["namespace"]) == ("one", "ns")
        assert restore["runc_root"] == str(shim.runc_root)
        assert discard["verb"] == "discard"
        assert shim.told("one") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]
        assert isinstance(event := shim.events[0], events_pb2.TaskCreate)
        assert (event.pid, event.checkpoint) == (0, "/tmp/ctrd-checkpoint")
        assert not any(call.startswith(("create", "start")) for call in shim.runc_calls())

    run(tmp_path, life)


def test_an_annotation_is_prepared_at_create_before_the_rootfs(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        _restored(shim, "exit 0")
        await shim.create("one", spec=ANNOTATED)
        (prepare,) = shim.engine_calls()
        assert (prepare["verb"], prepare["source"]) == ("prepare", "registry.example/app:ckpt")
        assert prepare["rootfs"] == []
        await shim.start("one")
        assert shim.engine_calls()[1]["images"] == str(shim.engine / "images")
        await shim.wait("one")

    run(tmp_path, life)


def test_an_image_that_is_a_checkpoint_is_looked_up(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        (shim.engine / "located").write_text(json.dumps(LOCATED))
        await shim.create("one", spec=MARKED)
        assert shim.engine_calls()[0]["source"] == LOCATED

    run(tmp_path, life)


def test_a_marker_without_such_an_image_means_an_ordinary_start(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        assert await shim.run("one", spec=MARKED) > 0
        assert shim.engine_calls() == []
        assert "create one" in shim.runc_calls()

    run(tmp_path, life)


def test_the_annotation_wins_over_the_marker(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        (shim.engine / "located").write_text(json.dumps(LOCATED))
        await shim.create("one", spec={**MARKED, **ANNOTATED})
        assert shim.engine_calls()[0]["source"] == "registry.example/app:ckpt"

    run(tmp_path, life)


def test_a_restored_process_speaks_through_the_clients_fifos(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        _restored(shim, "read line; echo got $line; echo err >&2")
        fifos = [tmp_path / name for name in ("in", "out", "err")]
        for fifo in fifos:
            os.mkfifo(fifo)
        out, err = (os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) for fifo in fifos[1:])
        await shim.create(
            "one", spec=ANNOTATED, stdin=str(fifos[0]), stdout=str(fifos[1]), stderr=str(fifos[2])
        )
        await shim.start("one")
        with open(fifos[0], "w") as stdin:
            stdin.write("hello\n")
        assert await shim.wait("one") == 0
        await shim.delete("one")
        assert (os.read(out, 100), os.read(err, 100)) == (b"got hello\n", b"err\n")

    run(tmp_path, life)


def test_a_failed_preparation_fails_create_and_is_cleaned_up(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        shim.engine_fails("prepare", "the registry is down", hint="start it", details="connection refused")
        with pytest.raises(CallFailed) as refused:
            await shim.create("one", spec=ANNOTATED)
        assert refused.value.message == "the registry is down (connection refused); start it"
        assert [call["verb"] for call in shim.engine_calls()] == ["prepare", "discard"]
        with pytest.raises(CallFailed, match="container not created"):
            await shim.state("one")

    run(tmp_path, life)


def test_an_incompatible_checkpoint_is_an_error(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        shim.engine_fails("prepare", "this node's CPU lacks avx512", code=4)
        with pytest.raises(CallFailed, match="CPU lacks") as refused:
            await shim.create("one", spec=ANNOTATED)
        assert refused.value.code == 9

    run(tmp_path, life)


def test_an_incompatible_checkpoint_starts_cold_where_that_is_wanted(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        shim.engine_fails("prepare", "this node's CPU lacks avx512", code=4)
        assert await shim.run("one", spec=COLD) > 0
        assert shim.runc_calls()[:2] == ["create one", "start one"]
        assert shim.told("one") == ["TaskCreate", "TaskStart"]

    run(tmp_path, life)


def test_a_restore_refused_at_start_starts_cold_where_that_is_wanted(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        shim.engine_fails("restore", "a mount is missing", code=4)
        assert (await shim.create("one", "exit 6", spec=COLD)).pid == 0
        assert await shim.start("one") > 0
        assert await shim.wait("one") == 6
        assert shim.told("one") == ["TaskCreate", "TaskStart", "TaskExit"]

    run(tmp_path, life)


def test_a_failed_restore_never_starts_cold(tmp_path: Path) -> None:
    """Only a probe that touched nothing may: a restore that broke halfway may have spoken to someone."""

    async def life(shim: Shim) -> None:
        shim.engine_fails("restore", "CRIU could not restore", code=6)
        await shim.create("one", spec=COLD)
        with pytest.raises(CallFailed, match="CRIU could not restore"):
            await shim.start("one")
        await shim.delete("one")
        assert shim.told("one") == ["TaskCreate", "TaskDelete"]
        assert shim.engine_calls()[-1]["verb"] == "discard"

    run(tmp_path, life)


def test_a_kill_stops_a_restore_under_way(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        (shim.engine / "restore.hangs").touch()
        await shim.create("one", spec=ANNOTATED)
        starting = asyncio.create_task(shim.start("one"))
        while len(shim.engine_calls()) < 2:
            await asyncio.sleep(0.02)
        await shim.kill("one")
        with pytest.raises(CallFailed, match="the engine ended without an answer"):
            await starting
        await shim.delete("one")

    run(tmp_path, life)


async def _checkpoint(shim: Shim, path: Path, options: options_pb2.CheckpointOptions | None) -> None:
    packed = Any()
    if options is not None:
        packed = Any(type_url="containerd.runc.v1.CheckpointOptions", value=options.SerializeToString())
    await shim.call("Checkpoint", api.CheckpointTaskRequest(id="one", path=str(path), options=packed))


def test_a_checkpoint_without_options_leaves_the_container_running(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        pid = await shim.run("one")
        await _checkpoint(shim, tmp_path / "images", None)
        (dump,) = shim.engine_calls()
        assert (dump["verb"], dump["pid"], dump["leave_running"]) == ("dump", pid, True)
        assert dump["image_path"] == str(tmp_path / "images")
        assert dump["work_path"] == str(tmp_path / "bundles" / "one" / "work" / "criu-work")
        assert (await shim.state("one")).status == api.RUNNING
        assert shim.told("one")[-1] == "TaskCheckpointed"

    run(tmp_path, life)


def test_a_checkpoint_that_is_to_exit_ends_with_the_exit_event(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        options = options_pb2.CheckpointOptions(
            exit=True, open_tcp=True, file_locks=True, empty_namespaces=["network"], work_path="/tmp/w"
        )
        await _checkpoint(shim, tmp_path / "images", options)
        (dump,) = shim.engine_calls()
        assert (dump["leave_running"], dump["work_path"]) == (False, "/tmp/w")
        assert dump["options"] == {
            "open_tcp": True,
            "external_unix_sockets": False,
            "terminal": False,
            "file_locks": True,
            "empty_namespaces": ["network"],
            "cgroups_mode": "",
        }
        assert await shim.wait("one") == 137
        assert (await shim.state("one")).status == api.STOPPED
        assert shim.told("one")[-2:] == ["TaskCheckpointed", "TaskExit"]

    run(tmp_path, life)


def test_a_failed_checkpoint_says_what_the_engine_said(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        shim.engine_fails("dump", "CRIU could not dump container one", details="Error (criu/x.c:1): no")
        with pytest.raises(CallFailed) as refused:
            await _checkpoint(shim, tmp_path / "images", None)
        assert refused.value.message == "CRIU could not dump container one (Error (criu/x.c:1): no)"
        assert (await shim.state("one")).status == api.RUNNING

    run(tmp_path, life)


def test_options_of_another_kind_are_refused(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        request = api.CheckpointTaskRequest(id="one", options=Any(type_url="some.Options", value=b"x"))
        with pytest.raises(CallFailed, match=r"some\.Options are not supported"):
            await shim.call("Checkpoint", request)

    run(tmp_path, life)
