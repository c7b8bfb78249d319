"""`make bench BENCH=shim`: our shim beside containerd's own, `containerd-shim-runc-v2`, in pairs.

One containerd serves both, and the zygote runs as the package sets it up. Every round does the same with one
and with the other, in turns that change their order:

- run: `ctr run --rm IMAGE true`, and the time until its first output arrives;
- exec: `ctr tasks exec` in a running container;
- many: 50 `ctr run --detach` at once, until the last one returns; then, with all of them running, the memory
  (PSS) of their shims, how often those wake up, and their memory again where the node runs ksmd;
- output: 2 GiB from a container through its FIFO to ctr.

The limit of a run is `runc run` of the same program by itself: what no shim can save.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.figures import Figure, at_least, at_most, finish
from runtime import proc
from tests.node.containerds import IMAGE, TOOLS, Containerd, containerd

STOCK, OURS = "io.containerd.runc.v2", "io.containerd.cedana.v1"
SIDES = (OURS, STOCK)
_GIB = 1 << 30
_OUTPUT_BYTES = 2 * _GIB
_REST_S = 10.0
_KSM = Path("/sys/kernel/mm/ksm")

Samples = dict[str, list[float]]
"""Seconds (or bytes per second) by runtime."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.shim", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="pairs of runs, and of execs")
    parser.add_argument("--containers", type=int, default=50, help="how many at once")
    parser.add_argument("--many-rounds", type=int, default=5, help="pairs of so many at once, and of outputs")
    arguments = parser.parse_args()
    with containerd("2.x") as daemon:
        floor = runc_alone(daemon)
        run, first = runs(daemon, arguments.rounds)
        execs = executions(daemon, arguments.rounds)
        many, memory, merged, wakes = many_at_once(daemon, arguments.containers, arguments.many_rounds)
        output = outputs(daemon, arguments.many_rounds)
        zygote = pss(daemon.zygote_pid)
    for name, samples in (("run", run), ("first output", first), ("exec", execs), ("many at once", many)):
        show(name, samples, 1e3, "ms")
    show("shim memory", memory, 1 / 2**20, "MiB")
    show("with ksmd", merged, 1 / 2**20, "MiB")
    show("output", output, 1 / 2**30, "GiB/s")
    stock_run = statistics.median(run[STOCK])
    finish("shim", {
        "run_ratio": at_most(ratio(run), "x", 1.0, 0.9, floor / stock_run),
        "run_p99_ratio": Figure(percentile(run[OURS], 99) / percentile(run[STOCK], 99), "x"),
        "first_output_ratio": at_most(ratio(first), "x", 1.0, limit=floor / stock_run),
        "exec_ratio": at_most(ratio(execs), "x", 1.0),
        "many_ratio": at_most(ratio(many), "x", 1.0),
        "memory_ratio": at_most(ratio(memory), "x", 0.5),
        "memory_ratio_with_ksmd": at_most(ratio(merged), "x", 0.5),
        "zygote_memory": Figure(zygote / 2**20, "MiB"),
        "idle_wakeups": at_most(max(wakes[OURS]), "", 0),
        "output_ratio": at_least(ratio(output), "x", 1.0),
    })  # fmt: skip


def runc_alone(daemon: Containerd, rounds: int = 20) -> float:
    """Seconds that `runc run` needs for the same program, on the root filesystem of a running container."""
    with running(daemon, STOCK) as name:
        bundle = next(daemon.state.glob(f"io.containerd.runtime.v2.task/*/{name}"))
        spec = json.loads((bundle / "config.json").read_text())
        spec["process"]["args"] = ["true"]
        spec["root"]["path"] = str(bundle / "rootfs")
        spec["linux"]["cgroupsPath"] = f"/{name}-alone"
        alone = daemon.base / "alone"
        alone.mkdir()
        (alone / "config.json").write_text(json.dumps(spec))
        argv = [str(TOOLS / "runc"), "--root", str(alone / "state"), "run", "--bundle", str(alone), "alone"]
        return statistics.median(seconds(lambda: _done(argv, daemon)) for _ in range(rounds))


def runs(daemon: Containerd, rounds: int) -> tuple[Samples, Samples]:
    whole: Samples = {side: [] for side in SIDES}
    first: Samples = {side: [] for side in SIDES}
    for number in range(-3, rounds):
        for side in in_turn(number):
            began = time.monotonic()
            argv = [
                *daemon.ctr_line(),
                "run",
                "--rm",
                "--runtime",
                side,
                IMAGE,
                f"run{number + 3}",
                "echo",
                "x",
            ]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=daemon.environment())
            assert process.stdout
            if process.stdout.read(1) != b"x":
                raise SystemExit(f"{side}: the container said nothing")
            output = time.monotonic() - began
            if process.wait() != 0:
                raise SystemExit(f"{side}: ctr run ended with {process.returncode}")
            if number >= 0:
                whole[side].append(time.monotonic() - began)
                first[side].append(output)
    return whole, first


def executions(daemon: Containerd, rounds: int) -> Samples:
    samples: Samples = {side: [] for side in SIDES}
    with running(daemon, OURS) as ours, running(daemon, STOCK) as stock:
        names = {OURS: ours, STOCK: stock}
        for number in range(-3, rounds):
            for side in in_turn(number):
                argv = [
                    *daemon.ctr_line(),
                    "tasks",
                    "exec",
                    "--exec-id",
                    f"e{number + 3}",
                    names[side],
                    "true",
                ]
                took = seconds(lambda argv=argv: _done(argv, daemon))  # type: ignore[misc]
                if number >= 0:
                    samples[side].append(took)
    return samples


def many_at_once(daemon: Containerd, count: int, rounds: int) -> tuple[Samples, Samples, Samples, Samples]:
    """Seconds to start `count` at once; then each shim's PSS, without ksmd and with it, and its wake-ups."""
    took, memory, merged, wakes = ({side: [] for side in SIDES} for _ in range(4))
    for number in range(rounds):
        for side in in_turn(number):
            names = [f"many{index}" for index in range(count)]
            lines = [
                [*daemon.ctr_line(), "run", "--detach", "--runtime", side, IMAGE, name, "sleep", "1000000"]
                for name in names
            ]
            took[side].append(seconds(lambda lines=lines: _all_done(lines, daemon)))  # type: ignore[misc]
            if number == rounds - 1:
                shims = daemon.shims()
                assert len(shims) == count
                time.sleep(2)
                before = wakeups(shims)
                time.sleep(_REST_S)
                wakes[side] = [after - earlier for after, earlier in zip(wakeups(shims), before, strict=True)]
                memory[side] = [pss(pid) for pid in shims]
                with ksmd():
                    merged[side] = [pss(pid) for pid in shims]
            for name in names:
                daemon.remove(name)
    return took, memory, merged, wakes


@contextmanager
def ksmd() -> Iterator[None]:
    """The kernel's ksmd runs, and has seen all mergeable memory three times (a page must rest for two)."""
    before = {name: (_KSM / name).read_text() for name in ("run", "pages_to_scan")}
    (_KSM / "pages_to_scan").write_text("20000")
    (_KSM / "run").write_text("1")
    try:
        began = _full_scans()
        while _full_scans() < began + 3:
            time.sleep(0.5)
        yield
    finally:
        (_KSM / "run").write_text("2")  # take apart what was merged
        for name, text in before.items():
            (_KSM / name).write_text(text)


def _full_scans() -> int:
    return int((_KSM / "full_scans").read_text())


def outputs(daemon: Containerd, rounds: int) -> Samples:
    """Bytes per second from a container to what reads its FIFO."""
    samples: Samples = {side: [] for side in SIDES}
    program = f"dd if=/dev/zero bs=1M count={_OUTPUT_BYTES >> 20} 2>/dev/null"
    for number in range(rounds):
        for side in in_turn(number):
            argv = [*daemon.ctr_line(), "run", "--rm", "--runtime", side, IMAGE, "out", "sh", "-c", program]
            took = seconds(lambda argv=argv: _done(argv, daemon))  # type: ignore[misc]
            samples[side].append(_OUTPUT_BYTES / took)
    return samples


@contextmanager
def running(daemon: Containerd, side: str) -> Iterator[str]:
    name = f"bench-{os.urandom(3).hex()}"
    started = daemon.ctr("run", "--detach", "--runtime", side, IMAGE, name, "sleep", "1000000")
    if started.status != 0:
        raise SystemExit(started.err)
    try:
        yield name
    finally:
        daemon.remove(name)


def in_turn(number: int) -> Sequence[str]:
    return SIDES if number % 2 else SIDES[::-1]


def wakeups(pids: Sequence[int]) -> list[int]:
    """How often each process has gone to sleep so far, which it does after every time it wakes up."""
    return [int(proc.status(pid)["voluntary_ctxt_switches"]) for pid in pids]


def pss(pid: int) -> float:
    """Bytes; shared pages count in parts (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("Pss:"))


def seconds(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def ratio(samples: Samples) -> float:
    """Ours to the stock shim's, medians."""
    return statistics.median(samples[OURS]) / statistics.median(samples[STOCK])


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def show(name: str, samples: Samples, scale: float, unit: str) -> None:
    for side in SIDES:
        values = [value * scale for value in samples[side]]
        middle, rare = statistics.median(values), percentile(values, 99)
        print(
            f"{name:<15} {'ours' if side == OURS else 'stock':<6} p50 {middle:8.2f} p99 {rare:8.2f}"
            f" least {min(values):8.2f} most {max(values):8.2f} {unit}"
        )


def _done(argv: Sequence[str], daemon: Containerd) -> None:
    subprocess.run(argv, stdout=subprocess.DEVNULL, env=daemon.environment(), check=True)


def _all_done(lines: Sequence[Sequence[str]], daemon: Containerd) -> None:
    environment = daemon.environment()
    processes = [subprocess.Popen(line, stdout=subprocess.DEVNULL, env=environment) for line in lines]
    if any([process.wait() for process in processes]):
        raise SystemExit(f"not all of {len(lines)} containers started")


if __name__ == "__main__":
    main()
