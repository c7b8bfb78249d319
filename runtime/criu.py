"""CRIU as the engine uses it: its configuration file, its version, and what its log says went wrong.

runc drives CRIU; options runc does not expose reach it through a configuration file that runc finds by
the `org.criu.config` annotation and hands to CRIU, where it overrides everything else (criu(8),
"Configuration files").
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from base.config import Config
from hooks.participant import CriuSettings
from runtime.errors import EngineError

CONFIG_ANNOTATION = "org.criu.config"
MIN_VERSION = (4, 2)

_HINTS = (
    (r"vdso: Unexpected rt vDSO", "this CRIU is too old for this kernel; run packaging/node/install"),
    (r"Can't get 1:16 opt", "this CRIU cannot handle sockets on this kernel; CRIU 4.2 or later does"),
    (r"Can't bind inet socket.*(Cannot assign|requested address)", "the container's address is not on this"
     " node: give it (--bridge), or restore with --tcp close"),
    (r"Can't bind inet socket.*in use", "the port is taken in the target's network namespace"),
    (r"External socket is used|half of stream unix|without peer", "a process holds a unix socket whose other"
     " end is outside the container; close it before the checkpoint"),
    (r"Can't lookup mount=", "a process has a file open that is not inside the container's mounts"),
    (r"doesn't have a proper root mount|unreachable sharing", "a mount shares its propagation with the host;"
     " make it private (rprivate)"),
    (r"Can't fork for \d+: File exists", "a process id of the container is taken on this node: run it in its"
     " own pid namespace"),
    (r"Can't open file .* No such file", "a file that was open at the checkpoint is missing on this node"),
    (r"has bad (size|mode|build-id)", "a file that was open at the checkpoint is different on this node"),
    (r"mismatched lsm|lsm profile", "the security modules (AppArmor, SELinux) differ between the nodes"),
    (r"No space left on device", "free space under the run directory (run_dir in /etc/cedana/config.toml)"),
    (r"suspending seccomp", "CRIU needs CAP_SYS_ADMIN in the initial user namespace"),
    (r"failed to allocate all requested IPs", "the network (CNI) cannot give the container the"
     " address it had: free it on this node, or restore with --tcp close"),
    (r"CPU|cpu: .* (required|not supported)", "this node's CPU lacks features the program already uses"),
    (r"iptables-restore|nft", "install nftables, or set `network-lock skip`"),
    (r"fsnotify: Can't dump that handle|Can't find suitable path for handle",
     "an inotify watch on an overlay file cannot be resolved"),
)  # fmt: skip


_LITTLE_BYTES = 64 << 10
_HARMLESS = re.compile(r"rlimit: Can't setup RLIMIT_NOFILE for self")
"""Errors that CRIU logs and goes on from."""


@dataclass(frozen=True)
class Failure:
    """Why CRIU failed: its decisive log line, what to do, and where the whole log is kept."""

    line: str
    hint: str
    log: Path | None


def settings_json(settings: CriuSettings) -> dict[str, Any]:
    return {"flags": sorted(settings.flags), "values": [list(pair) for pair in settings.values]}


def write_config(path: Path, settings: CriuSettings) -> None:
    """Write a CRIU configuration file (0600).

    CRIU reads it line by line, and a line can name a program to run: raises `EngineError` for any option
    that is not plain text without blanks.
    """
    for text in (*settings.flags, *(word for pair in settings.values for word in pair)):
        if not is_plain(text):
            raise EngineError(f"{text!r} cannot be said in CRIU's configuration file")
    lines = [*sorted(settings.flags), *(f"{option} {value}" for option, value in settings.values)]
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text("".join(f"{line}\n" for line in lines))


def is_plain(text: str) -> bool:
    """Whether CRIU's configuration file can hold `text` as one word."""
    return re.fullmatch(r"[A-Za-z0-9_./:@=+,\[\]-]+", text) is not None


def failure(log: Path, keep_in: Path, name: str, runc_error: str = "") -> Failure:
    """What was decisive in CRIU's `log` and what runc said; the log is kept in `keep_in` under `name`."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return Failure("CRIU wrote no log", "check that `criu check` passes: run `cedana check`", None)
    errors = [line for line in text.splitlines() if "Error (" in line and not _HARMLESS.search(line)]
    decisive = errors[0] if errors else text.strip().rpartition("\n")[2][-200:]
    line = re.sub(r"^\(\d+\.\d+\)\s*", "", decisive).strip()
    if not errors and _is_full(log.parent):  # even the log did not fit
        line = f"No space left on device: {log.parent}"
    joined = "\n".join([*errors, runc_error, line])
    hint = next((hint for pattern, hint in _HINTS if re.search(pattern, joined)), "")
    keep_in.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = keep_in / f"{time.strftime('%Y%m%dT%H%M%S')}-{name}.log"
    try:
        shutil.copyfile(log, kept)
        kept.chmod(0o600)
    except OSError:
        return Failure(line, hint, None)
    return Failure(line, hint, kept)


def _is_full(directory: Path) -> bool:
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize < _LITTLE_BYTES


def version(config: Config) -> str:
    """CRIU's version, e.g. '4.2.1'; raises `EngineError` when there is none that will do."""
    output = tool_version(config, "criu")
    match = re.search(r"Version: (\d+)\.(\d+)(\S*)", output)
    if not match:
        raise EngineError(
            "CRIU is not installed on this node", hint="run packaging/node/install", details=output
        )
    found = (int(match[1]), int(match[2]))
    if found < MIN_VERSION:
        raise EngineError(
            f"CRIU {found[0]}.{found[1]} is too old: {MIN_VERSION[0]}.{MIN_VERSION[1]} is needed",
            hint="run packaging/node/install",
        )
    return f"{match[1]}.{match[2]}{match[3]}"


def tool_version(config: Config, name: str) -> str:
    """What `NAME --version` prints; '' when the program is missing."""
    try:
        done = subprocess.run(
            [config.tool(name), "--version"], capture_output=True, text=True, check=False, timeout=10
        )
    except OSError:
        return ""
    return done.stdout.strip()


def environment(config: Config, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment runc and CRIU run with: a PATH that finds our CRIU, and nothing else of ours."""
    return {"PATH": config.tool_path(), **{k: base[k] for k in ("LANG", "TMPDIR") if k in base}}
