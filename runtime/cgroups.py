"""The cgroups of one container: what it used, and when the kernel killed it for memory.

`Cgroup.of(pid)` finds them, in cgroup v1 hierarchies or the unified one. Statistics come back as nested
dictionaries whose keys are the field names of containerd's metrics messages (io.containerd.cgroups.v1
and .v2, `Metrics`), ready for the protobuf constructors; only the shim knows those. Missing files and
controllers are left out. Limits are changed through runc alone, which keeps its own record of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime import syscalls

_MAX = (1 << 64) - 1
"""What "max" stands for in a limit file."""

_PLAIN_V1 = """
    cache rss rss_huge mapped_file dirty writeback inactive_anon active_anon inactive_file active_file
    unevictable
"""
_MEMORY_V1 = {
    **{name: name for plain in _PLAIN_V1.split() for name in (plain, f"total_{plain}")},
    **{
        f"{prefix}{ours}": f"{prefix}{theirs}"
        for ours, theirs in (
            ("pg_pg_in", "pgpgin"),
            ("pg_pg_out", "pgpgout"),
            ("pg_fault", "pgfault"),
            ("pg_maj_fault", "pgmajfault"),
        )
        for prefix in ("", "total_")
    },
    "hierarchical_memory_limit": "hierarchical_memory_limit",
    "hierarchical_swap_limit": "hierarchical_memsw_limit",
}
"""Field of MemoryStat: its key in memory.stat."""

_MEMORY_V2 = """
    anon file kernel_stack slab sock shmem file_mapped file_dirty file_writeback anon_thp inactive_anon
    active_anon inactive_file active_file unevictable slab_reclaimable slab_unreclaimable pgfault
    pgmajfault workingset_refault workingset_activate workingset_nodereclaim pgrefill pgscan pgsteal
    pgactivate pgdeactivate pglazyfree pglazyfreed thp_fault_alloc thp_collapse_alloc
    workingset_refault_anon workingset_refault_file workingset_activate_anon workingset_activate_file
"""
_CPU_V2 = "usage_usec user_usec system_usec nr_periods nr_throttled throttled_usec nr_bursts burst_usec"
_EVENTS_V2 = "low high max oom oom_kill oom_group_kill"

_BLKIO_CFQ = {
    "sectors_recursive": "sectors_recursive",
    "io_service_bytes_recursive": "io_service_bytes_recursive",
    "io_serviced_recursive": "io_serviced_recursive",
    "io_queued_recursive": "io_queued_recursive",
    "io_service_time_recursive": "io_service_time_recursive",
    "io_wait_time_recursive": "io_wait_time_recursive",
    "io_merged_recursive": "io_merged_recursive",
    "io_time_recursive": "time_recursive",
}
_BLKIO_THROTTLE = {
    "io_serviced_recursive": "throttle.io_serviced",
    "io_service_bytes_recursive": "throttle.io_service_bytes",
}

Stats = dict[str, Any]


class OomWatch(Protocol):
    """A descriptor that becomes readable when the container may have run out of memory."""

    fd: int

    def read(self) -> bool | None:
        """Take the news: True for an OOM kill, False for none, None when the cgroup is gone."""

    def close(self) -> None: ...


class Cgroup(Protocol):
    unified: bool

    def stats(self) -> Stats: ...

    def watch_oom(self) -> OomWatch:
        """Raises `OSError` when the kernel offers no such watch."""


def of(pid: int) -> Cgroup | None:
    """The cgroup(s) process `pid` is in; None when the process is gone or is in none."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    mounts = hierarchies()
    paths: dict[str, Path] = {}
    unified: Path | None = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if (mount := mounts.get(controller)) is None:
                continue
            directory = mount / path.lstrip("/")
            if controller:
                paths[controller] = directory
            else:
                unified = directory
    if any(not name.startswith("name=") for name in paths):
        return CgroupV1(paths)
    return CgroupV2(unified) if unified else None


def hierarchies() -> dict[str, Path]:
    """The mount point of each cgroup hierarchy by controller; the controller of v2 is ''.

    The first one: CRIU mounts all of them once more while it works (`.criu.cgyard…`), for a moment.
    """
    mounts: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            mounts.setdefault("", Path(before.split()[4]))
        elif kind == "cgroup":
            mounts = dict.fromkeys(options.split(","), Path(before.split()[4])) | mounts
    return mounts


@dataclass(frozen=True)
class CgroupV1:
    """One directory per controller."""

    paths: Mapping[str, Path]
    unified = False

    def stats(self) -> Stats:
        readers: dict[str, Callable[[Path], Stats]] = {
            "hugetlb": _hugetlb_v1,
            "pids": _pids_v1,
            "cpuacct": _cpuacct,
            "cpu": _throttling,
            "memory": _memory_v1,
            "blkio": _blkio,
            "rdma": _rdma,
        }
        stats: Stats = {"cpu": {"usage": {}, "throttling": {}}}
        for controller, read in readers.items():
            directory = self.paths.get(controller)
            if directory is None or not directory.is_dir():
                continue
            for name, value in read(directory).items():
                if name == "cpu":
                    stats["cpu"].update(value)
                else:
                    stats[name] = value
        return stats

    def watch_oom(self) -> OomWatch:
        directory = self.paths.get("memory")
        if directory is None:
            raise FileNotFoundError("the container is in no memory cgroup")
        return _OomWatchV1(directory)


@dataclass(frozen=True)
class CgroupV2:
    """The one directory of the unified hierarchy."""

    path: Path
    unified = True

    def stats(self) -> Stats:
        return {
            "pids": _pids(self.path)["pids"],
            "cpu": self._cpu(),
            "memory": self._memory(),
            "memory_events": _select(_table(self.path / "memory.events"), _EVENTS_V2),
            "io": {"usage": list(self._io()), **_pressure(self.path / "io.pressure")},
            "rdma": _rdma(self.path).get("rdma", {}),
            "hugetlb": list(self._hugetlb()),
        }

    def watch_oom(self) -> OomWatch:
        return _OomWatchV2(self.path)

    def _cpu(self) -> Stats:
        return {**_select(_table(self.path / "cpu.stat"), _CPU_V2), **_pressure(self.path / "cpu.pressure")}

    def _memory(self) -> Stats:
        return {
            **_select(_table(self.path / "memory.stat"), _MEMORY_V2),
            "usage": _number(self.path / "memory.current"),
            "usage_limit": _number(self.path / "memory.max"),
            "max_usage": _number(self.path / "memory.peak"),
            "swap_usage": _number(self.path / "memory.swap.current"),
            "swap_limit": _number(self.path / "memory.swap.max"),
            "swap_max_usage": _number(self.path / "memory.swap.peak"),
            **_pressure(self.path / "memory.pressure"),
        }

    def _io(self) -> Iterator[Stats]:
        for line in _lines(self.path / "io.stat"):
            device, *pairs = line.split()
            major, _, minor = device.partition(":")
            if not (major.isdigit() and minor.isdigit()):
                continue
            values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            yield {
                "major": int(major),
                "minor": int(minor),
                **{name: int(values.get(name, 0)) for name in ("rbytes", "wbytes", "rios", "wios")},
            }

    def _hugetlb(self) -> Iterator[Stats]:
        for current in sorted(self.path.glob("hugetlb.*.current")):
            size = current.name.split(".")[1]
            if "rsvd" in current.name:
                continue
            events = _table(self.path / f"hugetlb.{size}.events")
            yield {
                "pagesize": size,
                "current": _number(current),
                "max": _number(self.path / f"hugetlb.{size}.max"),
                "failcnt": events.get("max", 0),
            }


class _OomWatchV1:
    """An eventfd that the memory controller signals (linux, admin-guide/cgroup-v1/memory.rst, 10)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            control = os.open(directory / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                (directory / "cgroup.event_control").write_text(f"{self.fd} {control}")
            finally:
                os.close(control)
        except OSError:
            os.close(self.fd)
            raise

    def read(self) -> bool | None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        # Removing the cgroup signals the eventfd too.
        return True if (self._directory / "cgroup.event_control").exists() else None

    def close(self) -> None:
        os.close(self.fd)


class _OomWatchV2:
    """inotify on memory.events, whose `oom_kill` counts the kills (linux, admin-guide/cgroup-v2.rst)."""

    def __init__(self, directory: Path) -> None:
        self._events = directory / "memory.events"
        self._seen = self._kills()
        self.fd = syscalls.inotify(str(self._events), syscalls.IN_MODIFY | syscalls.IN_DELETE_SELF)

    def read(self) -> bool | None:
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return False
        if not self._events.exists():
            return None
        kills = self._kills()
        grown, self._seen = kills > self._seen, kills
        return grown

    def close(self) -> None:
        os.close(self.fd)

    def _kills(self) -> int:
        return _table(self._events).get("oom_kill", 0)


def _hugetlb_v1(directory: Path) -> Stats:
    return {
        "hugetlb": [
            {
                "pagesize": (size := usage.name.split(".")[1]),
                "usage": _number(usage),
                "max": _number(directory / f"hugetlb.{size}.max_usage_in_bytes"),
                "failcnt": _number(directory / f"hugetlb.{size}.failcnt"),
            }
            for usage in sorted(directory.glob("hugetlb.*.usage_in_bytes"))
            if "rsvd" not in usage.name
        ]
    }


def _pids(directory: Path) -> Stats:
    return {
        "pids": {"current": _number(directory / "pids.current"), "limit": _number(directory / "pids.max")}
    }


def _pids_v1(directory: Path) -> Stats:
    stats = _pids(directory)
    if stats["pids"]["limit"] == _MAX:
        stats["pids"]["limit"] = 0  # what containerd reports for v1; for v2 it reports the largest number
    return stats


def _cpuacct(directory: Path) -> Stats:
    ticks = os.sysconf("SC_CLK_TCK")
    table = _table(directory / "cpuacct.stat")
    usage: Stats = {
        "total": _number(directory / "cpuacct.usage"),
        "user": table.get("user", 0) * 1_000_000_000 // ticks,
        "kernel": table.get("system", 0) * 1_000_000_000 // ticks,
        "per_cpu": [int(word) for word in _text(directory / "cpuacct.usage_percpu").split()],
    }
    return {"cpu": {"usage": usage}}


def _throttling(directory: Path) -> Stats:
    table = _table(directory / "cpu.stat")
    return {
        "cpu": {
            "throttling": {
                "periods": table.get("nr_periods", 0),
                "throttled_periods": table.get("nr_throttled", 0),
                "throttled_time": table.get("throttled_time", 0),
            }
        }
    }


def _memory_v1(directory: Path) -> Stats:
    table = _table(directory / "memory.stat")
    memory: Stats = {field: table.get(key, 0) for field, key in _MEMORY_V1.items()}
    for field, prefix in (
        ("usage", ""),
        ("swap", "memsw."),
        ("kernel", "kmem."),
        ("kernel_tcp", "kmem.tcp."),
    ):
        memory[field] = {
            "usage": _number(directory / f"memory.{prefix}usage_in_bytes"),
            "limit": _number(directory / f"memory.{prefix}limit_in_bytes"),
            "max": _number(directory / f"memory.{prefix}max_usage_in_bytes"),
            "failcnt": _number(directory / f"memory.{prefix}failcnt"),
        }
    oom = _table(directory / "memory.oom_control")
    control = {name: oom.get(name, 0) for name in ("oom_kill_disable", "under_oom", "oom_kill")}
    return {"memory": memory, "memory_oom_control": control}


def _blkio(directory: Path) -> Stats:
    devices = _block_devices()
    entries = _blkio_entries(directory, _BLKIO_CFQ, devices)
    if not any(entries.values()):
        entries = _blkio_entries(directory, _BLKIO_THROTTLE, devices)
    return {"blkio": entries}


def _blkio_entries(
    directory: Path, files: Mapping[str, str], devices: Mapping[str, str]
) -> dict[str, list[Stats]]:
    return {field: list(_blkio_file(directory / f"blkio.{name}", devices)) for field, name in files.items()}


def _blkio_file(path: Path, devices: Mapping[str, str]) -> Iterator[Stats]:
    for line in _lines(path):
        match = re.fullmatch(r"(\d+):(\d+)(?: (\w+))? (\d+)", line.strip())
        if match:
            major, minor, op, value = match.groups()
            yield {
                "major": int(major),
                "minor": int(minor),
                "op": op or "",
                "device": devices.get(f"{major}:{minor}", ""),
                "value": int(value),
            }


def _block_devices() -> dict[str, str]:
    """`MAJOR:MINOR`: device node, of every disk and partition."""
    devices = {}
    for line in _lines(Path("/proc/partitions")):
        words = line.split()
        if len(words) == 4 and words[0].isdigit():
            devices[f"{words[0]}:{words[1]}"] = f"/dev/{words[3]}"
    return devices


def _rdma(directory: Path) -> Stats:
    entries = {
        field: list(_rdma_file(directory / f"rdma.{name}"))
        for field, name in (("current", "current"), ("limit", "max"))
    }
    return {"rdma": entries} if any(entries.values()) else {}


def _rdma_file(path: Path) -> Iterator[Stats]:
    for line in _lines(path):
        device, *pairs = line.split()
        values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        counts = {
            field: (1 << 32) - 1 if values.get(key) == "max" else int(values.get(key, 0))
            for field, key in (("hca_handles", "hca_handle"), ("hca_objects", "hca_object"))
        }
        yield {"device": device, **counts}


def _pressure(path: Path) -> Stats:
    """{"psi": …} from a pressure stall file (linux, accounting/psi.rst), {} where there is none."""
    psi: Stats = {}
    for line in _lines(path):
        kind, *pairs = line.split()
        values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        psi[kind] = {
            **{name: float(values.get(name, 0)) for name in ("avg10", "avg60", "avg300")},
            "total": int(values.get("total", 0)),
        }
    return {"psi": psi} if psi else {}


def _select(table: Mapping[str, int], names: str) -> Stats:
    return {name: table[name] for name in names.split() if name in table}


def _table(path: Path) -> dict[str, int]:
    """A file of `key number` lines."""
    table = {}
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if value.strip().isdigit():
            table[key] = int(value)
    return table


def _number(path: Path) -> int:
    text = _text(path).strip()
    if text == "max":
        return _MAX
    return int(text) if text.isdigit() else 0


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # absent, or gone with the container between two reads
        return ""
