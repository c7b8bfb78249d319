"""`make bench BENCH=imports`: what each dependency costs at import, for docs/dependencies.md."""

from __future__ import annotations

import subprocess
import sys

MODULES = (
    "blake3",
    "google.protobuf.timestamp_pb2",
    "grpc",
    "rich.progress",
    "urllib3",
    "zstandard",
)

ROUNDS = 15

_MEASURE = """
import time

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

before = resident()
began = time.perf_counter()
import {module}
took = time.perf_counter() - began
print(took * 1e3, (resident() - before) / 2**20)
"""


def main() -> None:
    print(f"{'module':<32} {'ms':>6} {'MiB':>6}")
    for module in MODULES:
        milliseconds, mebibytes = cost(module)
        print(f"{module:<32} {milliseconds:>6.0f} {mebibytes:>6.1f}")


def cost(module: str) -> tuple[float, float]:
    """The least time (ms) and memory (MiB) that importing `module` took in `ROUNDS` new processes."""
    code = _MEASURE.format(module=module)
    rounds = []
    for _ in range(ROUNDS):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        rounds.append([float(word) for word in done.stdout.split()])
    return min(one[0] for one in rounds), min(one[1] for one in rounds)


if __name__ == "__main__":
    main()
