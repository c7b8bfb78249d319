"""The options a container is created with, whichever of their three forms they come in.

containerd sends `containerd.runc.v1.Options`, or (for runtimes it does not know, and from CRI's
configuration) `runtimeoptions.v1.Options`, whose TOML has the same settings under CRI's names. They are
kept in the bundle as `options.json` and `runtime`, as containerd's own shim does: `delete` and other tools
read them there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shim.errors import InvalidArgument

if TYPE_CHECKING:
    from google.protobuf.any_pb2 import Any as AnyMessage

RUNC_OPTIONS = "containerd.runc.v1.Options"
RUNTIME_OPTIONS = "runtimeoptions.v1.Options"
CHECKPOINT_OPTIONS = "containerd.runc.v1.CheckpointOptions"
PROCESS_DETAILS = "containerd.runc.v1.ProcessDetails"

RESTORE_MARK = "cedana-restore"
"""A file in the bundle of a container that is (to be) restored, until what that made is removed."""

DEFAULT_ROOT = "/run/containerd/runc"


@dataclass(frozen=True)
class RuncOptions:
    """containerd.runc.v1.Options, field by field (those that still mean something)."""

    no_pivot_root: bool = False
    no_new_keyring: bool = False
    shim_cgroup: str = ""
    io_uid: int = 0
    io_gid: int = 0
    binary_name: str = ""
    root: str = ""
    systemd_cgroup: bool = False
    criu_work_path: str = ""

    def runc_root(self, namespace: str) -> Path:
        return Path(self.root or DEFAULT_ROOT) / namespace

    def write(self, bundle: Path) -> None:
        (bundle / "options.json").write_text(json.dumps({k: v for k, v in asdict(self).items() if v}))
        (bundle / "runtime").write_text(self.binary_name)


@dataclass(frozen=True)
class CheckpointOptions:
    """containerd.runc.v1.CheckpointOptions. All defaults, as when none are sent: leave it running."""

    exit: bool = False
    open_tcp: bool = False
    external_unix_sockets: bool = False
    terminal: bool = False
    file_locks: bool = False
    empty_namespaces: tuple[str, ...] = ()
    cgroups_mode: str = ""
    work_path: str = ""


def read(bundle: Path) -> RuncOptions:
    """The options `RuncOptions.write` left in a bundle; the defaults if there are none."""
    try:
        values = json.loads((bundle / "options.json").read_text())
    except (OSError, ValueError):
        return RuncOptions()
    return _checked(values if isinstance(values, dict) else {})


def decode(message: AnyMessage) -> RuncOptions:
    """Raises `InvalidArgument` for options of another kind, or malformed ones."""
    from google.protobuf.message import DecodeError

    from shim.api import options_pb2

    kind = message.type_url.rsplit("/", 1)[-1]
    if not kind:
        return RuncOptions()
    try:
        if kind == RUNC_OPTIONS:
            sent = options_pb2.Options.FromString(message.value)
            return RuncOptions(**{f.name: getattr(sent, f.name) for f in fields(RuncOptions)})
        if kind == RUNTIME_OPTIONS:
            runtime = options_pb2.RuntimeOptions.FromString(message.value)
            return from_toml(runtime.config_body, runtime.config_path)
    except DecodeError as error:
        raise InvalidArgument(f"malformed options {kind}: {error}") from error
    raise InvalidArgument(f"options of type {kind} are not supported")


def decode_checkpoint(message: AnyMessage) -> CheckpointOptions:
    from google.protobuf.message import DecodeError

    from shim.api import options_pb2

    kind = message.type_url.rsplit("/", 1)[-1]
    if not kind:
        return CheckpointOptions()
    if kind != CHECKPOINT_OPTIONS:
        raise InvalidArgument(f"checkpoint options of type {kind} are not supported")
    try:
        sent = options_pb2.CheckpointOptions.FromString(message.value)
    except DecodeError as error:
        raise InvalidArgument(f"malformed checkpoint options: {error}") from error
    values = {f.name: getattr(sent, f.name) for f in fields(CheckpointOptions)}
    return CheckpointOptions(**{**values, "empty_namespaces": tuple(sent.empty_namespaces)})


def from_toml(body: bytes, path: str) -> RuncOptions:
    """The options in TOML, given or in a file; raises `InvalidArgument`."""
    try:
        text = body.decode() if body else Path(path).read_text() if path else ""
        table = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the runtime's options ({path or 'from CRI'}) are unreadable: {error}"
        ) from error
    ours = {field.name.replace("_", ""): field.name for field in fields(RuncOptions)}
    named = {key.replace("_", "").lower(): value for key, value in table.items()}
    return _checked({ours[key]: value for key, value in named.items() if key in ours})


def _checked(values: Mapping[str, Any]) -> RuncOptions:
    known = {f.name: f.default for f in fields(RuncOptions)}
    for name, value in values.items():
        if name in known and type(value) is not type(known[name]):
            raise InvalidArgument(f"the runtime option {name} has the wrong type")
    return RuncOptions(**{name: value for name, value in values.items() if name in known})
