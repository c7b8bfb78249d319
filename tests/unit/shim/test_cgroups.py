"""Statistics and OOM kills, read from directories like the kernel's, and from the kernel."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import cgroups
from runtime.cgroups import CgroupV1, CgroupV2
from shim.api import metrics_v1_pb2, metrics_v2_pb2

V1 = {
    "memory/memory.stat": "cache 4096\nrss 8192\npgpgin 3\ntotal_rss 9\nhierarchical_memsw_limit 77\n",
    "memory/memory.usage_in_bytes": "12288\n",
    "memory/memory.limit_in_bytes": "33554432\n",
    "memory/memory.max_usage_in_bytes": "20000\n",
    "memory/memory.failcnt": "1\n",
    "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 1\noom_kill 2\n",
    "cpuacct/cpuacct.usage": "123456789\n",
    "cpuacct/cpuacct.usage_percpu": "100 200 \n",
    "cpuacct/cpuacct.stat": "user 3\nsystem 4\n",
    "cpu/cpu.stat": "nr_periods 5\nnr_throttled 6\nthrottled_time 7\n",
    "pids/pids.current": "2\n",
    "pids/pids.max": "max\n",
    "blkio/blkio.throttle.io_serviced": "8:0 Read 10\n8:0 Write 20\nTotal 30\n",
    "blkio/blkio.throttle.io_service_bytes": "8:0 Read 4096\n",
    "hugetlb/hugetlb.2MB.usage_in_bytes": "2097152\n",
    "hugetlb/hugetlb.2MB.max_usage_in_bytes": "4194304\n",
    "hugetlb/hugetlb.2MB.failcnt": "0\n",
}
V2 = {
    "pids.current": "2\n",
    "pids.max": "max\n",
    "cpu.stat": "usage_usec 100\nuser_usec 60\nsystem_usec 40\nnr_periods 1\n",
    "memory.stat": "anon 4096\nfile 8192\nworkingset_refault_anon 3\nnew_counter_of_a_later_kernel 1\n",
    "memory.current": "12288\n",
    "memory.max": "33554432\n",
    "memory.swap.max": "max\n",
    "memory.events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 1\n",
    "memory.pressure": "some avg10=0.10 avg60=0.20 avg300=0.30 total=42\nfull avg10=0.00 total=1\n",
    "io.stat": "8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n8:16\n",
    "hugetlb.2MB.current": "2097152\n",
    "hugetlb.2MB.max": "max\n",
}


def _write(base: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_v1_statistics(tmp_path: Path) -> None:
    _write(tmp_path, V1)
    controllers = ("memory", "cpuacct", "cpu", "pids", "blkio", "hugetlb", "rdma")
    metrics = metrics_v1_pb2.Metrics(**CgroupV1({name: tmp_path / name for name in controllers}).stats())
    ticks = os.sysconf("SC_CLK_TCK")
    assert (metrics.memory.cache, metrics.memory.rss, metrics.memory.pg_pg_in) == (4096, 8192, 3)
    assert (metrics.memory.total_rss, metrics.memory.hierarchical_swap_limit) == (9, 77)
    assert (metrics.memory.usage.usage, metrics.memory.usage.limit) == (12288, 33554432)
    assert (metrics.memory_oom_control.under_oom, metrics.memory_oom_control.oom_kill) == (1, 2)
    assert metrics.cpu.usage.total == 123456789
    assert (list(metrics.cpu.usage.per_cpu), metrics.cpu.usage.user) == ([100, 200], 3 * 10**9 // ticks)
    assert (metrics.cpu.throttling.periods, metrics.cpu.throttling.throttled_time) == (5, 7)
    assert (metrics.pids.current, metrics.pids.limit) == (2, 0)
    assert [(e.op, e.value) for e in metrics.blkio.io_serviced_recursive] == [("Read", 10), ("Write", 20)]
    assert (metrics.hugetlb[0].pagesize, metrics.hugetlb[0].usage) == ("2MB", 2097152)


def test_v2_statistics(tmp_path: Path) -> None:
    _write(tmp_path, V2)
    metrics = metrics_v2_pb2.Metrics(**CgroupV2(tmp_path).stats())
    assert (metrics.pids.current, metrics.pids.limit) == (2, 2**64 - 1)
    assert (metrics.cpu.usage_usec, metrics.cpu.nr_periods) == (100, 1)
    assert (metrics.memory.anon, metrics.memory.workingset_refault_anon) == (4096, 3)
    assert (metrics.memory.usage, metrics.memory.usage_limit) == (12288, 33554432)
    assert metrics.memory.swap_limit == 2**64 - 1
    assert (metrics.memory.psi.some.avg60, metrics.memory.psi.some.total) == (0.2, 42)
    assert metrics.memory_events.oom_kill == 1
    assert [(entry.major, entry.wbytes) for entry in metrics.io.usage] == [(8, 8192), (8, 0)]
    assert metrics.hugetlb[0].max == 2**64 - 1


def test_a_cgroup_that_is_gone_has_no_statistics(tmp_path: Path) -> None:
    assert CgroupV1({"memory": tmp_path / "gone"}).stats() == {"cpu": {"usage": {}, "throttling": {}}}
    metrics_v2_pb2.Metrics(**CgroupV2(tmp_path / "gone").stats())


def test_a_process_that_is_gone_has_no_cgroup() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert cgroups.of(child.pid) is None


def test_our_own_cgroup_is_found() -> None:
    found = cgroups.of(os.getpid())
    assert found is not None
    assert found.stats()


def test_v2_tells_of_kills_and_of_nothing_else(tmp_path: Path) -> None:
    _write(tmp_path, {"memory.events": "oom 1\noom_kill 0\n"})
    watch = CgroupV2(tmp_path).watch_oom()
    try:
        assert watch.read() is False
        (tmp_path / "memory.events").write_text("oom 2\noom_kill 0\n")
        assert watch.read() is False
        (tmp_path / "memory.events").write_text("oom 2\noom_kill 1\n")
        assert select.select([watch.fd], [], [], 1)[0]
        assert watch.read() is True
        (tmp_path / "memory.events").unlink()
        assert watch.read() is None
    finally:
        watch.close()


def test_the_kernel_tells_of_a_kill_and_of_the_end() -> None:
    """With a real kill; which of the two watches it tries is up to the machine."""
    own = cgroups.of(os.getpid())
    assert own is not None
    if isinstance(own, CgroupV2):
        own.watch_oom().close()
        return
    assert isinstance(own, CgroupV1)
    group = own.paths["memory"] / f"cedana-shim-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(8 << 20))
        watch = CgroupV1({"memory": group}).watch_oom()
        try:
            script = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} -c 'bytearray(64 << 20)'"
            subprocess.run(["sh", "-c", script], check=False, stdout=subprocess.DEVNULL)
            assert select.select([watch.fd], [], [], 5)[0]
            assert watch.read() is True
            assert watch.read() is False
            group.rmdir()
            assert select.select([watch.fd], [], [], 5)[0]
            assert watch.read() is None
        finally:
            watch.close()
    finally:
        if group.exists():
            group.rmdir()


def test_where_else_a_hierarchy_is_mounted_for_a_moment_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CRIU does that in the middle of a dump or restore of some other container."""
    kinds = ("cgroup none rw,freezer", "cgroup2 none rw")
    lines = [
        f"{number} 20 0:{30 + number % 2} / {place} rw,relatime - {kinds[number % 2]}"
        for number, place in enumerate(
            ("/cg/freezer", "/cg/unified", "/w/.criu.cgyard.x/freezer", "/w/.criu.cgyard.x/unified")
        )
    ]
    monkeypatch.setattr(Path, "read_text", lambda _: "\n".join(lines))
    found = cgroups.hierarchies()
    assert found["freezer"] == Path("/cg/freezer")
    assert found[""] == Path("/cg/unified")
