"""What containerd says to `start`, `delete` and `-info`, and the address it gets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any
from hypothesis import given
from hypothesis import strategies as st

from base import __version__
from shim import bootstrap, wire
from shim.api import options_pb2, task_pb2
from shim.flags import FlagError, Flags, parse
from tests.unit.shim import recordings

FLAGS = Flags(namespace="ns", id="one", address="/run/c.sock")


@pytest.mark.parametrize("name", recordings.NAMES)
def test_recorded_command_lines_are_understood(name: str) -> None:
    for call in recordings.calls(name):
        flags = parse(call["call"])
        assert flags.action in ("start", "delete")
        assert flags.id == name
        assert flags.namespace in ("testing", f"testing-{name}", "rshim")


@pytest.mark.parametrize("name", [name for name in recordings.NAMES if name.startswith("Test")])
def test_the_socket_is_where_containerds_own_shim_has_it(name: str) -> None:
    call, answer = next(recordings.calls(name)), next(recordings.answers(name))
    flags = parse(call["call"])
    recorded = json.loads(answer["stdout"])["address"]
    assert f"unix://{bootstrap.socket_path('/run/containerd/s', flags, flags.id)}" == recorded


@pytest.mark.parametrize(
    "arguments",
    [
        ["-id", "x", "-namespace", "ns", "-debug", "start"],
        ["--id=x", "--namespace=ns", "--debug=true", "start"],
        ["-debug=1", "-id=x", "-namespace", "ns", "start", "-version"],
    ],
)
def test_flags_have_gos_syntax(arguments: list[str]) -> None:
    flags = parse(arguments)
    assert (flags.id, flags.namespace, flags.debug, flags.action) == ("x", "ns", True, "start")
    assert not flags.version


@pytest.mark.parametrize("arguments", [["-nope"], ["-id"], ["-debug=maybe"]])
def test_other_flags_are_refused(arguments: list[str]) -> None:
    with pytest.raises(FlagError):
        parse(arguments)


def test_a_socket_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(bootstrap.BootstrapError, match="longer than"):
        bootstrap.socket_path("/a/very/long/directory/for/a/socket/indeed", FLAGS, "one")


def test_nothing_on_stdin_means_defaults() -> None:
    parameters = bootstrap.Parameters(b"", FLAGS)
    assert not parameters.bootstrap_protocol
    assert parameters.shim_cgroup == ""


def test_runtime_options_name_the_shims_cgroup() -> None:
    options = options_pb2.Options(shim_cgroup="/shims", binary_name="crun")
    sent = Any(type_url="containerd.runc.v1.Options", value=options.SerializeToString())
    assert bootstrap.Parameters(sent.SerializeToString(), FLAGS).shim_cgroup == "/shims"


def test_options_in_toml_name_it_too(tmp_path: Path) -> None:
    for options in (
        options_pb2.RuntimeOptions(config_body=b'ShimCgroup = "/shims"\n'),
        options_pb2.RuntimeOptions(config_path=str(tmp_path / "options.toml")),
    ):
        (tmp_path / "options.toml").write_text('ShimCgroup = "/shims"\n')
        sent = Any(type_url="runtimeoptions.v1.Options", value=options.SerializeToString())
        assert bootstrap.Parameters(sent.SerializeToString(), FLAGS).shim_cgroup == "/shims"


def test_options_of_other_runtimes_are_let_through() -> None:
    call = next(recordings.calls("n4"))
    parameters = bootstrap.Parameters(bytes.fromhex(call["stdin"]), FLAGS)
    assert not parameters.bootstrap_protocol


def _bootstrap_params(container_id: str, **extra: bytes) -> bytes:
    options = options_pb2.Options(shim_cgroup="/shims").SerializeToString()
    extension = wire.field(1, wire.any_message("containerd.runc.v1.Options", options))
    return (
        wire.field(1, container_id)
        + wire.field(2, "ns")
        + wire.field(3, -4)
        + wire.field(5, "/run/c.sock.ttrpc")
        + wire.field(8, extension)
        + wire.field(9, "/run/short")
    )


def test_bootstrap_parameters_of_new_containerd_are_read() -> None:
    parameters = bootstrap.Parameters(_bootstrap_params("one"), FLAGS)
    assert parameters.bootstrap_protocol
    assert parameters.debug
    assert parameters.socket_dir == "/run/short"
    assert parameters.events_address == "/run/c.sock.ttrpc"
    assert parameters.shim_cgroup == "/shims"


def test_bootstrap_parameters_of_another_container_are_not_ours() -> None:
    assert not bootstrap.Parameters(_bootstrap_params("two"), FLAGS).bootstrap_protocol


def test_parameters_that_are_no_message_are_refused() -> None:
    with pytest.raises(bootstrap.BootstrapError, match="malformed"):
        bootstrap.Parameters(b"\xff", FLAGS)


@given(st.binary(max_size=200))
def test_garbage_on_stdin_is_refused_or_ignored(data: bytes) -> None:
    try:
        bootstrap.Parameters(data, FLAGS)
    except bootstrap.BootstrapError:
        return


@given(pid=st.integers(0, 2**32 - 1), status=st.integers(0, 255), path=st.text(max_size=300))
def test_our_wire_format_is_protobufs(pid: int, status: int, path: str) -> None:
    delete = task_pb2.DeleteResponse.FromString(wire.field(1, pid) + wire.field(2, status))
    assert (delete.pid, delete.exit_status) == (pid, status)
    create = task_pb2.CreateTaskRequest(id="x", bundle=path, terminal=True)
    fields = dict(wire.decode(create.SerializeToString()))
    assert fields.get(2, b"") == path.encode()
    assert fields[4] == 1


@given(st.binary(max_size=200))
def test_wire_garbage_is_a_wire_error(data: bytes) -> None:
    try:
        list(wire.decode(data))
    except wire.WireError:
        return


def _shim(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "shim", *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={**os.environ, **env},
    )


def test_a_second_start_of_a_group_shares_the_first_ones_shim(tmp_path: Path) -> None:
    """The first container of a pod starts the shim; the others find it listening."""
    spec = {"annotations": {"io.kubernetes.cri.sandbox-id": f"pod-{os.getpid()}"}}
    (tmp_path / "config.json").write_text(json.dumps(spec))
    path = bootstrap.socket_path("/run/containerd/s", FLAGS, f"pod-{os.getpid()}")
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    arguments = ("-namespace", "ns", "-address", "/run/c.sock", "-id", "one", "start")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        try:
            done = _shim(*arguments, cwd=tmp_path)
        finally:
            os.unlink(path)
    assert done.stdout.decode() == f"unix://{path}"
    assert done.stderr == b""
    assert (tmp_path / "address").read_text() == f"unix://{path}"


def test_start_without_a_bundle_says_so_and_leaves_no_socket(tmp_path: Path) -> None:
    done = _shim("-namespace", "ns", "-address", "/run/c.sock", "-id", "nope", "start", cwd=tmp_path)
    assert done.returncode == 1
    assert b"config.json" in done.stderr
    assert not os.path.exists(bootstrap.socket_path("/run/containerd/s", FLAGS, "nope"))


def test_delete_of_what_is_gone_succeeds(tmp_path: Path) -> None:
    bundle = tmp_path / "gone"
    bundle.mkdir()
    (bundle / "init.pid").write_text("4242")
    done = _shim("-namespace", "ns", "-id", "gone", "-bundle", str(bundle), "delete", cwd=bundle)
    assert done.returncode == 0
    response = task_pb2.DeleteResponse.FromString(done.stdout)
    assert (response.pid, response.exit_status) == (4242, 137)
    assert response.exited_at.seconds > 0


def test_info_describes_the_runtime_and_what_runc_can_do(tmp_path: Path) -> None:
    (tmp_path / "runc").symlink_to(Path(__file__).with_name("fake_runc.py"))
    options = Any(type_url="containerd.runc.v1.Options", value=b"")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shim", "-info"],
        input=options.SerializeToString(),
        capture_output=True,
        check=True,
        env={**os.environ, "CEDANA_TOOLS_DIR": str(tmp_path)},
    )
    fields = dict(wire.decode(done.stdout))
    assert fields[1] == b"io.containerd.cedana.v1"
    assert Any.FromString(bytes(fields[3])).type_url == "containerd.runc.v1.Options"
    features = Any.FromString(bytes(fields[4]))
    assert features.type_url == "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
    assert json.loads(features.value) == {"ociVersionMin": "1.0.0"}


def test_a_version_is_printed(tmp_path: Path) -> None:
    assert f"Version:  {__version__}\n".encode() in _shim("-v", cwd=tmp_path).stdout


@pytest.mark.parametrize("arguments", [("-nope",), ("start",), ("-namespace", "ns", "dance")])
def test_a_wrong_call_is_one_line_of_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = _shim(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == b""
    assert len(done.stderr.splitlines()) == 1


def test_the_short_lived_commands_import_nothing_heavy(tmp_path: Path) -> None:
    """containerd starts them two or three times per container."""
    code = (
        "import sys; from shim import bootstrap, delete, info; "
        "heavy = {'asyncio', 'google.protobuf', 'grpc', 'pyroute2', 'logging'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
