"""The shim's log: logrus text lines on stderr, which the daemon points at containerd's `log` FIFO.

Not `logging`: importing it costs the short-lived paths more than the rest of them together.
"""

from __future__ import annotations

import os
import sys
import time

RUNTIME = "io.containerd.cedana.v1"

debugging = False
"""Set once from `-debug`."""


def debug(message: str, **fields: object) -> None:
    if debugging:
        _write("debug", message, fields)


def info(message: str, **fields: object) -> None:
    _write("info", message, fields)


def warning(message: str, **fields: object) -> None:
    _write("warning", message, fields)


def error(message: str, **fields: object) -> None:
    _write("error", message, fields)


def _write(level: str, message: str, fields: dict[str, object]) -> None:
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e9):09d}Z"
    pairs = "".join(f" {name}={_quote(str(value))}" for name, value in fields.items())
    line = f'time="{stamp}" level={level} msg={_quote(message)}{pairs} runtime={RUNTIME}\n'
    try:
        os.write(sys.stderr.fileno(), line.encode(errors="replace"))
    except OSError:
        # The FIFO is full or gone with containerd: a lost line is better than a container that waits.
        return


def _quote(text: str) -> str:
    plain = text.replace("-", "").replace("_", "").replace(".", "").replace("/", "").replace(":", "")
    if plain.isascii() and plain.isalnum():
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
