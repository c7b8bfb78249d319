"""Does this CRIU work on this kernel? Dump and restore a process that holds an open TCP connection.

`criu check` does not tell: CRIU 4.1 passes it and fails on every inet socket from Linux 6.16 on. Called by
packaging/node/install, which has nothing but the system's Python, and by `cedana check`. The trial itself is
this file run as a program with the path of a CRIU, in network and pid namespaces of its own.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ADDRESS = ("127.0.0.1", 7000)

_COUNTER = f"""
import socket
connection = socket.create_server({ADDRESS!r}).accept()[0]
count = 0
while connection.recv(1):
    count += 1
    connection.sendall(b"%d" % count)
"""


def failure(criu: str) -> str:
    """Try `criu`; why it does not work here, '' if it does."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "unshare and ip are needed to try it: apt install util-linux iproute2"
    isolated = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    try:
        done = subprocess.run(
            [*isolated, sys.executable, "-I", __file__, criu],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "it hung"
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


def _try(criu: str, images: Path) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    counter = subprocess.Popen(
        [sys.executable, "-I", "-c", _COUNTER],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True, cwd="/",
    )  # fmt: skip
    with _connect() as client:
        if _next(client) != b"1":
            raise SystemExit("the process to be dumped does not answer")
        _criu(criu, images, "dump", "--tree", str(counter.pid))
        counter.wait()
        _criu(criu, images, "restore", "--restore-detached")
        if (answer := _next(client)) != b"2":
            raise SystemExit(f"after the restore the process answered {answer!r}, not 2")


def _connect() -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(ADDRESS, timeout=10)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _next(client: socket.socket) -> bytes:
    client.sendall(b"?")
    return client.recv(16)


def _criu(criu: str, images: Path, verb: str, *arguments: str) -> None:
    log = f"{verb}.log"
    done = subprocess.run(
        [criu, verb, *arguments, "--images-dir", str(images), "--log-file", log, "-v4", "--tcp-established",
         "--network-lock", "nftables", "--manage-cgroups=ignore"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        text = (images / log).read_text(errors="replace") if (images / log).exists() else done.stderr
        errors = [line for line in text.splitlines() if "Error (" in line] or [text.strip()[-200:]]
        raise SystemExit(f"criu {verb}: {errors[0]}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="cedana-criu-trial-") as folder:
        _try(sys.argv[1], Path(folder))
