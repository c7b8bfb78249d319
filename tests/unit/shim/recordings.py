"""Recorded lives of containerd's own shim under containerd 2.1: what was called, and every ttrpc frame."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRACES = Path(__file__).with_name("traces")
NAMES = sorted(path.stem for path in TRACES.glob("*.jsonl"))


@dataclass(frozen=True)
class Frame:
    channel: str
    """`task` (containerd is the client) or `event` (the shim is)."""
    sent_by_client: bool
    stream_id: int
    service: str
    method: str
    """Of a response: those of its request."""
    payload: bytes
    status: bytes
    timeout_nano: int
    metadata: tuple[bytes, ...]
    length: int


def frames(name: str) -> Iterator[Frame]:
    methods: dict[tuple[str, int], tuple[str, str]] = {}
    for entry in _entries(name):
        if "stream" not in entry or "type" not in entry:
            continue
        key = (entry["chan"], entry["stream"])
        if "method" in entry:
            methods[key] = (entry["service"], entry["method"])
        service, method = methods[key]
        yield Frame(
            channel=entry["chan"],
            sent_by_client="method" in entry,
            stream_id=entry["stream"],
            service=service,
            method=method,
            payload=bytes.fromhex(entry.get("payload", "")),
            status=bytes.fromhex(entry.get("status", "")),
            timeout_nano=entry.get("timeout_nano", 0),
            metadata=tuple(bytes.fromhex(pair) for pair in entry.get("md", ())),
            length=entry["len"],
        )


def calls(name: str) -> Iterator[dict[str, Any]]:
    """How the executable was called: argv, environment, stdin."""
    for entry in _entries(name):
        if "call" in entry:
            yield entry


def answers(name: str) -> Iterator[dict[str, Any]]:
    """What the executable printed."""
    for entry in _entries(name):
        if "start_rc" in entry or "action" in entry:
            yield entry


def _entries(name: str) -> Iterator[dict[str, Any]]:
    for line in (TRACES / f"{name}.jsonl").read_text().splitlines():
        yield json.loads(line)
