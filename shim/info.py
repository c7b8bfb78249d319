"""`-info`: what this runtime is and can do, for `ctr info`, `nerdctl info` and containerd's introspection."""

from __future__ import annotations

import os
import subprocess
import sys

from base import __version__
from base.config import load
from shim import wire
from shim.log import RUNTIME

_FEATURES = "types.containerd.io/opencontainers/runtime-spec/1/features/Features"
_RUNC_OPTIONS = "containerd.runc.v1.Options"
_KIND, _VALUE = 1, 2
"""The fields of google.protobuf.Any."""
_TIMEOUT_S = 10.0


def info() -> int:
    """Print a containerd.types.RuntimeInfo for the options on stdin."""
    options = _read_options()
    binary = "runc"
    if options.get(_KIND) == _RUNC_OPTIONS.encode():
        named = dict(wire.decode(options.get(_VALUE, b""))).get(6)
        binary = named.decode() if isinstance(named, bytes) else binary
    features = _features(binary)
    body = wire.field(1, RUNTIME) + wire.field(2, wire.field(1, __version__))
    if options:
        body += wire.field(3, wire.any_message(options[_KIND].decode(), options.get(_VALUE, b"")))
    if features:
        body += wire.field(4, wire.any_message(_FEATURES, features))
    sys.stdout.buffer.write(body)
    sys.stdout.flush()
    return 0


def _read_options() -> dict[int, bytes]:
    data = b""
    while chunk := os.read(0, 1 << 16):
        data += chunk
    return {number: value for number, value in wire.decode(data) if isinstance(value, bytes)}


def _features(binary: str) -> bytes:
    """runc's own description of itself; b'' from a runtime that has none."""
    config = load()
    runc = config.tool(binary)
    try:
        done = subprocess.run(
            [runc, "features"],
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
            env={"PATH": config.tool_path()},
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout.strip() if done.returncode == 0 else b""
