"""`make demo`: redis moves from one node to another under a client that never stops writing.

Two nodes (each with its own network, containerd and state) and a registry are set up on this machine, used,
and taken down; nothing stays.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.node import images
from tests.node.bed import Bed, Node, bed
from tests.node.clients import RedisClient

NAME = "demo-redis"


def main() -> None:
    began = time.monotonic()
    with step("build the redis image from Debian packages (kept in .cache)"):
        images.build("redis")
    print("set up a registry and two nodes ...", flush=True)
    with bed() as made:
        done("registry and two nodes", began)
        run(made)
        print("take everything down ...", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s in all; nothing is left behind.")


def run(made: Bed) -> None:
    node_a, node_b = made.nodes
    reference = f"{made.registry}/demo/redis:moving"
    with step("push the image to the registry, and start redis on node A"):
        node_a.run_container(made.image("redis"), NAME)
    address = node_a.container_address(NAME)
    with RedisClient(made.hub, address) as client:
        before = identity(client, node_a)
        client.start()
        client.wait_for(2000)
        print(f"  a client at {made.hub.name} is connected to {address}:6379 and sends INCR without pause\n")
        cedana(node_a, "checkpoint", NAME, "--to", reference)
        sent = len(client.values)
        cedana(node_b, "restore", reference)
        client.wait_for(2000)
        client.stop()
        after = identity(client, node_b)
        lost = len(client.values) - client.values[-1]

        print("\nproof")
        prove("the client's answers", f"1 … {client.values[-1]}, none lost, none twice",
              client.values == list(range(1, len(client.values) + 1)) and lost == 0)  # fmt: skip
        prove("answers before and after the move", f"{sent} and {len(client.values) - sent}", sent > 0)
        prove("the key in redis", client.command("GET", "counter"),
              client.command("GET", "counter") == str(client.values[-1]))  # fmt: skip
        for what, value in after.items():
            prove(what, value, value == before[what])
        prove("reconnects", "0: one socket from beginning to end", client.error is None)
        prove("longest the client waited", f"{client.longest_gap_s:.2f} s", True)
        prove("on node A", node_a.task_status(NAME) or "gone", node_a.task_status(NAME) in ("", "STOPPED"))
        prove("on node B", node_b.task_status(NAME), node_b.task_status(NAME) == "RUNNING")
        print()


def identity(client: RedisClient, node: Node) -> dict[str, str]:
    """What is the same only if it is the same process, and the same connection."""
    info = dict(line.split(":", 1) for line in client.command("INFO", "server").split("\r\n") if ":" in line)
    return {
        "redis's run id": info["run_id"],
        "redis's process id in the container": info["process_id"],
        "the connection, as redis numbers it": client.command("CLIENT", "ID"),
        "the client's port": str(client.local_port),
        "the container's address": node.container_address(NAME),
    }


def prove(what: str, value: str, holds: bool) -> None:
    print(f"  {'✓' if holds else '✗'} {what:<36} {value}")
    if not holds:
        sys.exit(f"the demo failed: {what}")


@contextmanager
def step(what: str) -> Iterator[None]:
    print(f"{what} ...", flush=True)
    began = time.monotonic()
    yield
    done("", began)


def cedana(node: Node, *arguments: str) -> None:
    """A command as a person types it, with what it answers: its result, and each step and its duration."""
    print(f"{node.name}# cedana {' '.join(arguments)} --trace", flush=True)
    began = time.monotonic()
    answer = node.cedana(*arguments, "--trace")
    print("".join(f"  {line}\n" for line in answer.rstrip().splitlines()), end="")
    done("", began)


def done(what: str, began: float) -> None:
    print(f"  ✓ {what}{': ' if what else ''}{time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
