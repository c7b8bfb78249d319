"""`containerd-shim-cedana-v1`: what containerd starts for the runtime io.containerd.cedana.v1.

Each action imports only what it needs: containerd starts this program two or three times per container.
"""

from __future__ import annotations

import sys

from base import __version__
from base.errors import CedanaError
from shim.flags import FlagError, Flags, parse

_USAGE = 2


def main(argv: list[str]) -> int:
    """`argv` is the whole command line; returns the exit status."""
    try:
        flags = parse(argv[1:])
    except FlagError as error:
        print(error, file=sys.stderr)
        return _USAGE
    try:
        return _run(flags, argv[0])
    except (CedanaError, OSError, ValueError) as error:
        return _fail(str(error))


def _run(flags: Flags, program: str) -> int:
    if flags.version:
        print(f"{program.rsplit('/', 1)[-1]}:\n  Version:  {__version__}\n")
        return 0
    if flags.info:
        from shim.info import info

        return info()
    if not flags.namespace:
        return _fail("shim namespace cannot be empty")
    if flags.action == "start":
        from shim.bootstrap import start

        return start(flags)
    if flags.action == "delete":
        from shim.delete import delete

        return delete(flags)
    return _fail(f"unknown action {flags.action!r}: start or delete")


def _fail(message: str) -> int:
    from shim.log import RUNTIME

    print(f"{RUNTIME}: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
