"""`--node NAME`: the same command, run on another node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import NoReturn

from base.config import Config, Node
from base.errors import CedanaError, UsageError


def command_line(node: Node, arguments: Sequence[str]) -> list[str]:
    """What runs `cedana ARGUMENTS` on `node`: its command, and ours without the `--node`."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith("--node="):
            skip = False
        elif argument == "--node":
            skip = True
        else:
            kept.append(argument)
    remote = ["cedana", *kept]
    # ssh joins its arguments with spaces and hands them to the shell of the other side.
    if os.path.basename(node.command[0]) == "ssh":
        remote = [shlex.quote(word) for word in remote]
    return [*node.command, *remote]


def run(name: str, arguments: Sequence[str], config: Config) -> NoReturn:
    """Become the command on the node called `name` in the configuration."""
    node = config.nodes.get(name)
    if node is None or not node.command:
        raise UsageError(
            f"there is no node {name!r} in the configuration",
            hint=f"known: {', '.join(sorted(config.nodes))}"
            if config.nodes
            else f'add to /etc/cedana/config.toml: nodes.{name}.command = ["ssh", "root@{name}"]',
        )
    argv = command_line(node, arguments)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        raise CedanaError(
            f"the command of node {name!r} cannot be run: {argv[0]}: {error.strerror}"
        ) from error
