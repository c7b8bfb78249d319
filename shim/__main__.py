"""`containerd-shim-cedana-v1`: what containerd starts for the runtime io.containerd.cedana.v1.

Each action imports only what it needs: containerd starts this program two or three times per container.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from base import __version__
from base.errors import CedanaError
from shim.flags import FlagError, Flags, parse

if TYPE_CHECKING:
    from shim.bootstrap import Zygote

_USAGE = 2


def main(argv: list[str], zygote: Zygote | None = None) -> int:
    """`argv` is the whole command line; returns the exit status. `zygote`: this runs for another process."""
    try:
        flags = parse(argv[1:])
    except FlagError as error:
        print(error, file=sys.stderr)
        return _USAGE
    try:
        return _run(flags, argv[0], zygote)
    except (CedanaError, OSError, ValueError) as error:
        return _fail(str(error))


def _run(flags: Flags, program: str, zygote: Zygote | None) -> int:
    if flags.version:
        print(f"{program.rsplit('/', 1)[-1]}:\n  Version:  {__version__}\n")
        return 0
    if flags.info:
        from shim.info import info

        return info()
    if flags.action == "zygote":
        from shim.zygote import run

        return run()
    if not flags.namespace:
        return _fail("shim namespace cannot be empty")
    if flags.action == "start":
        from shim.bootstrap import start

        return start(flags, zygote)
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
