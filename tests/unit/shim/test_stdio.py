"""Standard streams: FIFOs whose clients come and go, files, log drivers, terminals."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from shim.api import task_pb2 as api
from tests.unit.shim.harness import CallFailed, Shim, run

LOGGER = """#!/bin/sh
[ -n "$SLOW" ] && sleep 1
env > "{out}/env"
echo "$@" > "{out}/arguments"
{ready}
exec 5>&-
cat <&4 > "{out}/stderr" &
cat <&3 > "{out}/stdout"
wait
echo done > "{out}/done"
"""


def _fifo(path: Path) -> int:
    """A FIFO as a client makes it, and its end for reading what the process says."""
    os.mkfifo(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def _logger(tmp_path: Path, ready: str = "printf x >&5") -> Path:
    program = tmp_path / "logger"
    program.write_text(LOGGER.format(out=tmp_path, ready=ready))
    program.chmod(0o755)
    return program


def test_output_goes_to_fifos(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        out, err = _fifo(tmp_path / "out"), _fifo(tmp_path / "err")
        await shim.run(
            "one", "echo out; echo err >&2", stdout=str(tmp_path / "out"), stderr=str(tmp_path / "err")
        )
        await shim.wait("one")
        await shim.delete("one")
        assert (os.read(out, 100), os.read(err, 100)) == (b"out\n", b"err\n")
        assert os.read(out, 1) == b"", "the client sees the end once the container is deleted"

    run(tmp_path, life)


def test_large_output_arrives_whole_though_the_reader_is_slow(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        out = _fifo(tmp_path / "out")
        await shim.run("one", "head -c 2000000 /dev/zero", stdout=str(tmp_path / "out"))
        received = 0
        while received < 2_000_000:
            await asyncio.sleep(0.001)
            try:
                received += len(os.read(out, 1 << 16))
            except BlockingIOError:
                continue
        assert await shim.wait("one") == 0

    run(tmp_path, life)


def test_a_reader_that_leaves_and_comes_back_misses_nothing(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        out = _fifo(tmp_path / "out")
        go = tmp_path / "go"
        script = f"echo a; while [ ! -e {go} ]; do sleep 0.02; done; echo b; sleep 60"
        await shim.run("one", script, stdout=str(tmp_path / "out"))
        while not (said := _available(out)):
            await asyncio.sleep(0.01)
        assert said == b"a\n"
        os.close(out)
        go.touch()
        await asyncio.sleep(0.3)
        assert (await shim.state("one")).status == api.RUNNING, "its output broke"
        again = os.open(tmp_path / "out", os.O_RDONLY | os.O_NONBLOCK)
        assert _available(again) == b"b\n"

    run(tmp_path, life)


def test_close_io_ends_the_input_once_the_client_has_closed_it(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        os.mkfifo(tmp_path / "in")
        out = _fifo(tmp_path / "out")
        await shim.run("one", "cat", stdin=str(tmp_path / "in"), stdout=str(tmp_path / "out"))
        with open(tmp_path / "in", "wb") as stdin:
            stdin.write(b"hello")
        await asyncio.sleep(0.2)
        assert (await shim.state("one")).status == api.RUNNING, "no CloseIO yet: more input may come"
        await shim.call("CloseIO", api.CloseIORequest(id="one", stdin=True))
        assert await shim.wait("one") == 0
        assert _available(out) == b"hello"

    run(tmp_path, life)


def test_an_exec_has_streams_of_its_own(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        out = _fifo(tmp_path / "out")
        await shim.run("one")
        await shim.exec("one", "e", "echo hi", stdout=str(tmp_path / "out"))
        await shim.wait("one", "e")
        await shim.delete("one", "e")
        assert _available(out) == b"hi\n"

    run(tmp_path, life)


def test_files_are_appended_to(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        path = tmp_path / "logs" / "deep" / "log"
        for name in ("one", "two"):
            await shim.run(
                name, f"echo {name}; echo err >&2", stdout=f"file://{path}", stderr=f"file://{path}"
            )
            await shim.wait(name)
            await shim.delete(name)
        assert sorted(path.read_text().split()) == ["err", "err", "one", "two"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~_umask()

    run(tmp_path, life)


def test_a_log_driver_gets_both_streams_and_time_to_finish(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        uri = f"binary://{_logger(tmp_path)}?format=json&empty="
        await shim.run("one", "echo out; echo err >&2", stdout=uri, stderr=uri)
        await shim.wait("one")
        await shim.delete("one")
        assert (tmp_path / "stdout").read_text() == "out\n"
        assert (tmp_path / "stderr").read_text() == "err\n"
        assert (tmp_path / "done").exists()
        assert (tmp_path / "arguments").read_text().split() == ["format", "json", "empty"]
        variables = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
        assert variables["CONTAINER_ID"] == "one"
        assert variables["CONTAINER_NAMESPACE"] == "ns"
        assert set(variables) <= {"CONTAINER_ID", "CONTAINER_NAMESPACE", "PWD", "SHLVL", "_", "OLDPWD"}

    run(tmp_path, life)


def test_a_log_driver_that_only_closes_is_ready_unless_it_must_speak(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        program = _logger(tmp_path, ready=":")
        await shim.run("one", "echo out", stdout=f"binary://{program}", stderr=f"binary://{program}")
        await shim.wait("one")
        await shim.delete("one")
        assert (tmp_path / "stdout").read_text() == "out\n"
        with pytest.raises(CallFailed, match="did not call ready"):
            await shim.create("two", stdout=f"binary-v2://{program}", stderr=f"binary-v2://{program}")

    run(tmp_path, life)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("binary:///no/such/logger", "failed to start binary process"),
        ("http://example", "unknown STDIO scheme http"),
        ("/no/such/fifo", "failed to start io pipe copy"),
    ],
)
def test_streams_that_cannot_be_are_refused(tmp_path: Path, uri: str, message: str) -> None:
    async def life(shim: Shim) -> None:
        with pytest.raises(CallFailed, match=message):
            await shim.create("one", stdout=uri, stderr=uri)
        assert not (shim.runc_root / "one").exists(), "the container stayed"
        await shim.run("two")
        with pytest.raises(CallFailed, match=message):
            await shim.exec("two", "e", "exec sleep 60", stdout=uri, stderr=uri)
        pids = (await shim.call("Pids", api.PidsRequest(id="two"))).processes
        assert len(pids) == 1, "the exec'd process stayed"
        await shim.delete("two", "e")

    run(tmp_path, life)


def test_a_terminal_is_copied_resized_and_survives_the_end(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        os.mkfifo(tmp_path / "in")
        out = _fifo(tmp_path / "out")
        await shim.run(
            "one",
            "read line; stty size; echo got $line; exit 4",
            terminal=True,
            stdin=str(tmp_path / "in"),
            stdout=str(tmp_path / "out"),
        )
        await shim.call("ResizePty", api.ResizePtyRequest(id="one", width=90, height=30))
        with open(tmp_path / "in", "wb") as stdin:
            stdin.write(b"hello\n")
        assert await shim.wait("one") == 4
        await shim.delete("one")
        text = _available(out).decode()
        assert "30 90" in text
        assert "got hello" in text

    run(tmp_path, life)


def test_a_terminal_can_be_logged_by_a_driver(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        uri = f"binary://{_logger(tmp_path)}"
        await shim.run("one", "echo on a tty; tty", terminal=True, stdout=uri)
        assert await shim.wait("one") == 0
        await shim.delete("one")
        assert "on a tty" in (tmp_path / "stdout").read_text()

    run(tmp_path, life)


def test_no_streams_at_all(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        await shim.run("one", "read x; echo lost; exit 3")
        assert await shim.wait("one") == 3

    run(tmp_path, life)


def test_nothing_stays_open_after_a_life(tmp_path: Path) -> None:
    async def life(shim: Shim) -> None:
        async def one(name: str) -> None:
            for fifo in ("in", "out"):
                os.mkfifo(tmp_path / f"{name}-{fifo}")
            reader = os.open(tmp_path / f"{name}-out", os.O_RDONLY | os.O_NONBLOCK)
            streams = {"stdin": str(tmp_path / f"{name}-in"), "stdout": str(tmp_path / f"{name}-out")}
            await shim.run(name, **streams)
            await shim.exec(name, "e", "echo hi", terminal=True)
            await shim.wait(name, "e")
            await shim.delete(name, "e")
            await shim.remove(name)
            os.close(reader)

        await one("warm")
        before = os.listdir("/proc/self/fd")
        for number in range(4):
            await one(f"c{number}")
        assert os.listdir("/proc/self/fd") == before

    run(tmp_path, life)


def _available(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
