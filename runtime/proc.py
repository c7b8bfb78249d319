"""What the kernel tells of a process in /proc/PID (proc(5)), as far as more than one module asks for it."""

from __future__ import annotations

from pathlib import Path


def status(pid: int | str) -> dict[str, str]:
    """The fields of /proc/PID/status; {} when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_bytes().decode(errors="replace")  # a name is any bytes
    except OSError:
        return {}
    return dict(line.split(":\t", 1) for line in text.split("\n") if ":\t" in line)


def stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on (proc_pid_stat(5)); raises `OSError`."""
    return Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rpartition(")")[2].split()
