"""`delete`: cleans up after a container whose shim is gone, or has just finished with it.

containerd runs it in the bundle after every life, and reads a DeleteResponse from stdout. It must always
succeed: what fails is said on stderr, which becomes a "cleanup warnings" line of containerd's log.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from base.config import Config, load
from base.errors import CedanaError
from runtime.runc import Runc, last_error
from shim import group, mounts, options, wire
from shim.flags import Flags
from shim.options import RESTORE_MARK

_KILLED = 128 + 9
_UNMOUNT_TRIES = 25
_UNMOUNT_PAUSE_S = 0.02
_RUNC_TIMEOUT_S = 2.5
_DISCARD_TIMEOUT_S = 1.5
"""containerd gives the whole command five seconds."""


def delete(flags: Flags) -> int:
    bundle = Path(flags.bundle) if flags.bundle else Path.cwd().parent / flags.id
    pid = _pid(bundle)
    config = _config()
    group.end_orphans(bundle)
    _delete_container(bundle, flags, config)
    _unmount(bundle / "rootfs")
    _discard(bundle, flags)
    now = time.time_ns()
    exited_at = wire.field(1, now // 10**9) + wire.field(2, now % 10**9)
    response = wire.field(1, pid) + wire.field(2, _KILLED) + wire.field(3, exited_at)
    sys.stdout.buffer.write(response)
    sys.stdout.flush()
    return 0


def _delete_container(bundle: Path, flags: Flags, config: Config) -> None:
    settings = options.read(bundle)
    root = settings.runc_root(flags.namespace)
    if not (root / flags.id).exists() and not settings.binary_name:
        return  # the usual case: the shim has deleted it
    log = bundle / "runc-delete.json"
    runc = Runc(config.tool(settings.binary_name or "runc"), root, log, settings.systemd_cgroup)
    argv = runc.delete(flags.id, force=True)
    environment = {"PATH": config.tool_path()}
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=_RUNC_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _warn(f"failed to remove runc container: {error}")
        return
    if done.returncode != 0 and "does not exist" not in (said := last_error(log) or done.stderr.strip()):
        _warn(f"failed to remove runc container: {said}")


def _unmount(rootfs: Path) -> None:
    for attempt in range(_UNMOUNT_TRIES):
        try:
            mounts.unmount_recursive(rootfs)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or attempt == _UNMOUNT_TRIES - 1:
                _warn(f"failed to cleanup rootfs mount: {error}")
                return
        time.sleep(_UNMOUNT_PAUSE_S)


def _discard(bundle: Path, flags: Flags) -> None:
    """Have the engine remove what a restore made; the mark is there if the shim did not come to it."""
    if not (bundle / RESTORE_MARK).exists():
        return
    request = {"id": flags.id, "namespace": flags.namespace, "bundle": str(bundle)}
    try:
        subprocess.run(
            [sys.executable, "-P", "-m", "runtime", "discard"],
            input=json.dumps(request).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=_DISCARD_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        _warn(f"failed to clean up after a restore: {error}")


def _pid(bundle: Path) -> int:
    try:
        return int((bundle / "init.pid").read_text())
    except (OSError, ValueError):
        return 0


def _config() -> Config:
    try:
        return load()
    except CedanaError as error:
        _warn(f"{error}; using the defaults")
        return Config()


def _warn(message: str) -> None:
    os.write(2, f"{message}\n".encode(errors="replace"))
