"""`containerd-shim-cedana-v1`: what containerd starts for the runtime io.containerd.cedana.v1.

Each action imports only what it needs: containerd starts this program two or three times per container.
"""

from __future__ import annotations

import sys

from shim.flags import FlagError, parse

_USAGE = 2


def main(argv: list[str]) -> int:
    """`argv` is the whole command line; returns the exit status."""
    try:
        flags = parse(argv[1:])
    except FlagError as error:
        print(error, file=sys.stderr)
        return _USAGE
    if flags.version:
        from shim.info import cedana_version

        print(f"{argv[0].rsplit('/', 1)[-1]}:\n  Version:  {cedana_version()}\n")
        return 0
    if flags.info:
        from shim.info import info

        return info()
    if not flags.namespace:
        return _fail("shim namespace cannot be empty")
    if flags.action == "start":
        from shim.bootstrap import BootstrapError, start

        try:
            return start(flags)
        except (BootstrapError, OSError) as error:
            return _fail(str(error))
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
