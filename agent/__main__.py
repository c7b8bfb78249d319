"""The agent as a program, for the shim: `python -m agent locate-image ID`.

Prints where the image of a container is: {"content": containerd's content directory, "manifest": digest}.
containerd and its namespace come from CONTAINERD_ADDRESS and CONTAINERD_NAMESPACE.
"""

from __future__ import annotations

import json
import sys

from agent import environment, images
from agent.containerd import Client
from base.errors import CedanaError


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[1] != "locate-image":
        print("usage: python -m agent locate-image ID", file=sys.stderr)
        return 2
    try:
        config = environment.load()
        with Client(config.containerd_address, config.containerd_namespace) as client:
            directory, digest = images.locate(client, client.container(argv[2]))
    except CedanaError as error:
        print(f"cedana: {error.message}: {error.details or error.hint}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"content": str(directory), "manifest": digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
