"""The Task service from its socket down to (a fake) runc: whole lives, errors, races."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any

from shim.api import options_pb2
from shim.api import task_pb2 as api
from tests.unit.shim.harness import CallFailed, Shim, run

ZERO_TIME_S = -62135596800


def test_a_life_from_create_to_delete(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        created = await shim.create("one", "exit 7")
        assert created.pid > 0
        state = await shim.state("one")
        assert (state.status, state.pid, state.exited_at.seconds) == (api.CREATED, created.pid, ZERO_TIME_S)
        assert await shim.start("one") == created.pid
        assert await shim.wait("one") == 7
        state = await shim.state("one")
        assert (state.status, state.exit_status) == (api.STOPPED, 7)
        deleted = await shim.delete("one")
        assert (deleted.pid, deleted.exit_status) == (created.pid, 7)
        assert deleted.exited_at.seconds > 0
        assert shim.told("one") == ["TaskCreate", "TaskStart", "TaskExit", "TaskDelete"]
        assert not (shim.runc_root / "one").exists()

    run(tmp_path, life)


def test_a_signal_is_told_as_128_plus_its_number(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.kill("one", 15)
        assert await shim.wait("one") == 128 + 15

    run(tmp_path, life)


def test_many_containers_that_end_at_once_lose_no_exit(tmp_path: Path) -> None:
    """Their exits arrive before anyone knows their pids."""

    async def life(shim: Shim) -> None:
        async def one(number: int) -> int:
            name = f"c{number}"
            await shim.run(name, f"exit {number}")
            return await shim.wait(name)

        assert await asyncio.gather(*(one(number) for number in range(12))) == list(range(12))
        for number in range(12):
            assert shim.told(f"c{number}") == ["TaskCreate", "TaskStart", "TaskExit"]

    run(tmp_path, life)


def test_an_exec_has_a_life_of_its_own(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.add_exec("one", "e", ["/bin/sh", "-c", "exit 3"])
        assert (await shim.state("one", "e")).status == api.CREATED
        pid = await shim.start("one", "e")
        assert await shim.wait("one", "e") == 3
        state = await shim.state("one", "e")
        assert (state.id, state.pid, state.status) == ("e", pid, api.STOPPED)
        await shim.delete("one", "e")
        with pytest.raises(CallFailed, match="process does not exist e: not found"):
            await shim.state("one", "e")
        assert shim.told("one")[2:] == ["TaskExecAdded:e", "TaskExecStarted:e", "TaskExit:e"]

    run(tmp_path, life)


def test_the_exit_of_init_is_told_after_every_execs(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        pid = await shim.exec("one", "e", "exec sleep 60")
        await shim.kill("one")
        await asyncio.sleep(0.2)
        assert "TaskExit" not in shim.told("one")
        assert (await shim.state("one")).status == api.RUNNING
        os.kill(pid, 9)
        assert await shim.wait("one") == 137
        assert shim.told("one")[-2:] == ["TaskExit:e", "TaskExit"]

    run(tmp_path, life)


def test_without_a_pid_namespace_the_rest_dies_with_init(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one", spec={"linux": {"namespaces": [{"type": "pid", "path": "/proc/1/ns/pid"}]}})
        await shim.exec("one", "e", "exec sleep 60")
        await shim.kill("one")
        assert await shim.wait("one", "e") == 137
        assert await shim.wait("one") == 137

    run(tmp_path, life)


def test_no_exec_starts_once_init_has_ended(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.add_exec("one", "late", ["/bin/true"])
        holding = await shim.exec("one", "e", "exec sleep 60")
        await shim.kill("one")
        await asyncio.sleep(0.2)
        with pytest.raises(CallFailed, match="init process is not running") as refused:
            await shim.start("one", "late")
        assert refused.value.code == 9
        os.kill(holding, 9)
        await shim.wait("one")

    run(tmp_path, life)


def test_pause_and_resume(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.add_exec("one", "e", ["/bin/true"])
        await shim.call("Pause", api.PauseRequest(id="one"))
        assert (await shim.state("one")).status == api.PAUSED
        assert (await shim.state("one", "e")).status == api.PAUSED
        with pytest.raises(CallFailed, match="cannot exec in a paused state"):
            await shim.add_exec("one", "e2", ["/bin/true"])
        await shim.call("Resume", api.ResumeRequest(id="one"))
        assert (await shim.state("one")).status == api.RUNNING
        assert shim.told("one")[-2:] == ["TaskPaused", "TaskResumed"]

    run(tmp_path, life)


def test_a_paused_container_that_dies_is_thawed(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        pid = await shim.run("one")
        await shim.call("Pause", api.PauseRequest(id="one"))
        os.kill(pid, 9)
        assert await shim.wait("one") == 137
        assert shim.runc_calls()[-1] == "resume one"
        await shim.delete("one")

    run(tmp_path, life)


def test_pids_name_the_execs(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        init = await shim.run("one")
        exec_pid = await shim.exec("one", "e", "exec sleep 60")
        answer = await shim.call("Pids", api.PidsRequest(id="one"))
        found = {info.pid: info.info for info in answer.processes}
        assert set(found) == {init, exec_pid}
        assert found[exec_pid].type_url == "containerd.runc.v1.ProcessDetails"
        assert options_pb2.ProcessDetails.FromString(found[exec_pid].value).exec_id == "e"
        assert not found[init].type_url

    run(tmp_path, life)


def test_update_goes_through_runc(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        resources = Any(type_url="LinuxResources", value=b'{"memory":{"limit":33554432}}')
        await shim.call("Update", api.UpdateTaskRequest(id="one", resources=resources))
        assert (shim.runc_root / "one" / "resources").read_bytes() == resources.value

    run(tmp_path, life)


def test_stats_are_the_metrics_of_this_machines_cgroups(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        answer = await shim.call("Stats", api.StatsRequest(id="one"))
        assert answer.stats.type_url in (
            "io.containerd.cgroups.v1.Metrics",
            "io.containerd.cgroups.v2.Metrics",
        )
        assert answer.stats.value

    run(tmp_path, life)


def test_a_created_container_can_be_deleted_and_its_exit_is_told_first(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.create("one")
        deleted = await shim.delete("one")
        assert deleted.exit_status == 137
        assert shim.told("one") == ["TaskCreate", "TaskExit", "TaskDelete"]

    run(tmp_path, life)


@pytest.mark.parametrize(
    ("method", "request_", "code", "message"),
    [
        ("State", api.StateRequest(id="none"), 5, "container not created: not found"),
        ("Start", api.StartRequest(id="none"), 5, "container not created: not found"),
        ("Delete", api.DeleteRequest(id="none"), 5, "container not created: not found"),
        ("Kill", api.KillRequest(id="none"), 5, "container not created: not found"),
        ("State", api.StateRequest(id="one", exec_id="nope"), 5, "process does not exist nope: not found"),
        ("Kill", api.KillRequest(id="one", exec_id="nope"), 5, "process does not exist nope: not found"),
        ("Resume", api.ResumeRequest(id="one"), 2, "cannot resume a running process"),
        ("Delete", api.DeleteRequest(id="one"), 2, "cannot delete a running process"),
        ("Start", api.StartRequest(id="one"), 2, "cannot start a running process"),
    ],
)
def test_refusals_are_containerds_own(
    tmp_path: Path, method: str, request_: api.StateRequest, code: int, message: str
) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        with pytest.raises(CallFailed) as refused:
            await shim.call(method, request_)
        assert (refused.value.code, refused.value.message) == (code, message)

    run(tmp_path, life)


def test_killing_what_has_ended_is_not_found(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one", "exit 0")
        await shim.wait("one")
        with pytest.raises(CallFailed, match=r"^process already finished: not found") as refused:
            await shim.kill("one")
        assert refused.value.code == 5

    run(tmp_path, life)


def test_runcs_own_error_is_what_the_client_sees(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        shim.runc_fails("create", "runc create failed: no space left")
        with pytest.raises(CallFailed) as refused:
            await shim.create("one")
        assert refused.value.message == "OCI runtime create failed: runc create failed: no space left"
        assert refused.value.code == 2
        with pytest.raises(CallFailed, match="container not created"):
            await shim.state("one")
        assert not list((tmp_path / "bundles" / "one").glob("*log*"))

    run(tmp_path, life)


def test_a_runtime_that_is_missing_is_named(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        bundle = shim.bundle("one", ["/bin/true"])
        options = options_pb2.Options(binary_name="/no/such/runc", root=str(shim.runc_root))
        request = api.CreateTaskRequest(
            id="one",
            bundle=str(bundle),
            options=Any(type_url="containerd.runc.v1.Options", value=options.SerializeToString()),
        )
        with pytest.raises(CallFailed, match=r"OCI runtime create failed: .*/no/such/runc"):
            await shim.call("Create", request)

    run(tmp_path, life)


def test_an_exec_that_cannot_start_leaves_no_trace(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.add_exec("one", "e", ["/nope"])
        with pytest.raises(CallFailed, match=r"OCI runtime exec failed: exec failed: .*/nope"):
            await shim.start("one", "e")
        assert await shim.wait("one", "e") == 0
        await shim.delete("one", "e")
        await shim.remove("one")
        assert shim.told("one")[-2:] == ["TaskExit", "TaskDelete"]

    run(tmp_path, life)


def test_names_are_taken_once(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.add_exec("one", "e", ["/bin/true"])
        with pytest.raises(CallFailed, match="id e: already exists") as refused:
            await shim.add_exec("one", "e", ["/bin/true"])
        assert refused.value.code == 6
        with pytest.raises(CallFailed, match="container one: already exists"):
            await shim.call("Create", api.CreateTaskRequest(id="one"))

    run(tmp_path, life)


@pytest.mark.parametrize("name", ["../up", "a/b", "", "x" * 77, "-x", "a b"])
def test_names_that_are_no_identifiers_are_refused(tmp_path: Path, name: str) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        with pytest.raises(CallFailed) as refused:
            await shim.add_exec("one", name, ["/bin/true"])
        assert refused.value.code == 3

    run(tmp_path, life)


def test_a_bundle_without_a_config_is_refused(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        with pytest.raises(CallFailed, match=r"no readable config\.json") as refused:
            await shim.call("Create", api.CreateTaskRequest(id="one", bundle=str(tmp_path)))
        assert refused.value.code == 2

    run(tmp_path, life)


def test_connect_always_answers(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        answer = await shim.call("Connect", api.ConnectRequest(id="none"))
        assert (answer.shim_pid, answer.task_pid) == (os.getpid(), 0)
        pid = await shim.run("one")
        assert (await shim.call("Connect", api.ConnectRequest(id="one"))).task_pid == pid

    run(tmp_path, life)


def test_shutdown_waits_for_the_last_container(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        await shim.call("Shutdown", api.ShutdownRequest(id="one"))
        assert not shim.service.shutdown.is_set()
        await shim.remove("one")
        await shim.call("Shutdown", api.ShutdownRequest(id="one"))
        assert shim.service.shutdown.is_set()

    run(tmp_path, life)


def test_a_client_that_is_tired_of_waiting_is_told_so(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one")
        with pytest.raises((CallFailed, TimeoutError)):
            await shim.call("Wait", api.WaitRequest(id="one"), timeout_s=0.2)
        await shim.kill("one")
        assert await shim.wait("one") == 137

    run(tmp_path, life)


def test_unknown_methods_are_unimplemented(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        with pytest.raises(CallFailed) as refused:
            await shim.call("Dance", api.StateRequest())
        assert refused.value.code == 12

    run(tmp_path, life)
