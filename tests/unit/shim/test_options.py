"""The options' three forms, and what is kept of them in the bundle."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.any_pb2 import Any
from hypothesis import given
from hypothesis import strategies as st

from shim import options
from shim.api import options_pb2
from shim.errors import InvalidArgument
from shim.options import RuncOptions


def _runtime_options(body: str = "", path: str = "") -> Any:
    message = options_pb2.RuntimeOptions(
        type_url="io.containerd.cedana.v1.Options", config_body=body.encode(), config_path=path
    )
    return Any(type_url="runtimeoptions.v1.Options", value=message.SerializeToString())


def test_runc_options_are_taken_field_by_field() -> None:
    message = options_pb2.Options(binary_name="crun", root="/r", systemd_cgroup=True, io_uid=5)
    decoded = options.decode(Any(type_url="containerd.runc.v1.Options", value=message.SerializeToString()))
    assert decoded == RuncOptions(binary_name="crun", root="/r", systemd_cgroup=True, io_uid=5)
    assert decoded.runc_root("ns") == Path("/r/ns")


@pytest.mark.parametrize("message", [Any(), Any(value=b"")])
def test_no_options_are_the_defaults(message: Any) -> None:
    """`ctr containers restore` sends a message that is present but empty."""
    assert options.decode(message) == RuncOptions()
    assert RuncOptions().runc_root("k8s.io") == Path("/run/containerd/runc/k8s.io")


def test_cris_toml_has_cris_names() -> None:
    decoded = options.decode(_runtime_options('BinaryName = "crun"\nSystemdCgroup = true\nOther = 1\n'))
    assert decoded == RuncOptions(binary_name="crun", systemd_cgroup=True)


def test_a_config_path_is_read(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text('root = "/elsewhere"\n')
    assert options.decode(_runtime_options(path=str(path))).root == "/elsewhere"


@pytest.mark.parametrize(
    "message",
    [
        _runtime_options("not toml ["),
        _runtime_options("SystemdCgroup = 1"),
        _runtime_options(path="/no/such/file"),
        Any(type_url="some.other.Options", value=b""),
        Any(type_url="containerd.runc.v1.Options", value=b"\xff"),
    ],
)
def test_options_that_make_no_sense_are_refused(message: Any) -> None:
    with pytest.raises(InvalidArgument):
        options.decode(message)


@given(
    st.builds(
        RuncOptions,
        binary_name=st.text(max_size=20).filter(lambda text: text.isprintable()),
        root=st.text(max_size=20).filter(lambda text: text.isprintable()),
        systemd_cgroup=st.booleans(),
        io_uid=st.integers(0, 2**32 - 1),
    )
)
def test_the_bundle_keeps_them(written: RuncOptions) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        written.write(Path(directory))
        assert options.read(Path(directory)) == written


def test_a_bundle_without_options_has_the_defaults(tmp_path: Path) -> None:
    assert options.read(tmp_path) == RuncOptions()
    (tmp_path / "options.json").write_text("[]")
    assert options.read(tmp_path) == RuncOptions()
