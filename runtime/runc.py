"""runc as a command line: what each verb is called with, and what its log says went wrong.

Nothing here starts a process. The shim's daemon runs these command lines from its event loop, its
short-lived `delete` and the engine run them and wait; all of them read the same log afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Runc:
    """One runc state directory, of one containerd namespace, and how runc is called for it."""

    binary: str
    root: Path
    """`<root>/<namespace>`."""
    log: Path
    """Where runc writes what went wrong, as JSON lines."""
    systemd_cgroup: bool = False

    def create(
        self,
        container_id: str,
        bundle: Path,
        pid_file: Path,
        *,
        console_socket: str = "",
        no_pivot: bool = False,
        no_new_keyring: bool = False,
    ) -> list[str]:
        options = ["--bundle", str(bundle), "--pid-file", str(pid_file)]
        if console_socket:
            options += ["--console-socket", console_socket]
        if no_pivot:
            options.append("--no-pivot")
        if no_new_keyring:
            options.append("--no-new-keyring")
        return self._argv("create", *options, container_id)

    def start(self, container_id: str) -> list[str]:
        return self._argv("start", container_id)

    def exec(
        self, container_id: str, process: Path, pid_file: Path, *, console_socket: str = ""
    ) -> list[str]:
        """Run the process described by the JSON file `process` inside the container, detached."""
        options = ["--process", str(process), "--detach", "--pid-file", str(pid_file)]
        if console_socket:
            options += ["--console-socket", console_socket]
        return self._argv("exec", *options, container_id)

    def kill(self, container_id: str, signal: int, *, every_process: bool = False) -> list[str]:
        return self._argv("kill", *(["--all"] if every_process else []), container_id, str(signal))

    def pause(self, container_id: str) -> list[str]:
        return self._argv("pause", container_id)

    def resume(self, container_id: str) -> list[str]:
        return self._argv("resume", container_id)

    def processes(self, container_id: str) -> list[str]:
        """Print the host pids of the container as a JSON array (null when there are none)."""
        return self._argv("ps", "--format", "json", container_id)

    def update(self, container_id: str) -> list[str]:
        """Apply the OCI LinuxResources that come on standard input."""
        return self._argv("update", "--resources", "-", container_id)

    def delete(self, container_id: str, *, force: bool = False) -> list[str]:
        return self._argv("delete", *(["--force"] if force else []), container_id)

    def features(self) -> list[str]:
        """Print what this runtime supports (OCI runtime-spec, features.md)."""
        return [self.binary, "features"]

    def _argv(self, *words: str) -> list[str]:
        return [
            self.binary,
            *("--root", str(self.root), "--log", str(self.log), "--log-format", "json"),
            *(["--systemd-cgroup"] if self.systemd_cgroup else []),
            *words,
        ]


def last_error(log: Path) -> str:
    """The message of the last error in the JSON log of runc (one line each) or crun (several); '' if none."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    decoder, position, found = json.JSONDecoder(), 0, ""
    while (position := text.find("{", position)) >= 0:
        try:
            entry, position = decoder.raw_decode(text, position)
        except ValueError:
            position += 1
            continue
        if entry.get("level") in ("error", "fatal"):
            found = str(entry.get("msg", "")).strip()
    return found
