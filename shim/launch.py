"""The first that runs of `containerd-shim-cedana-v1`: has the zygote run the command, or runs it here.

containerd starts this program two or three times per container, and an interpreter needs longer for its
modules than for the work. So this module imports only what is built into the interpreter, and hands command
line, environment, working directory and standard streams to a process that the zygote has ready
(`shim/zygote.py`). Where there is no zygote, or one of another version, or one that cannot be what this
process is, the same code runs here.

The conversation, over a SOCK_SEQPACKET connection: the zygote's process says who it is (`IDENTITY`), this one
sends a request (`encode`) with its descriptors, and gets the exit status as one byte. A connection that ends
before that means: do it yourself.
"""

import _socket
import posix
import sys

from base import __version__

IDENTITY = f"{__version__} {__file__} {sys.executable}".encode()
"""Code of another version, or in another place, must not run this command."""

SOCKET_NAME = "zygote.sock"
MESSAGE_LIMIT = 1 << 20
_RUN_DIR = b"/run/cedana"
_PATIENCE_S = 2.0
"""For the zygote's first word; it has work for milliseconds."""


def main(argv: list[str]) -> int:
    """`argv` is the whole command line; returns the exit status."""
    if argv[1:] != ["zygote"] and (status := _zygote_runs(argv)) is not None:
        posix._exit(status)  # the interpreter would take another millisecond to end
    from shim.__main__ import main

    return main(argv)


def socket_path() -> bytes:
    """Where the zygote listens. The configuration file is not read for it: that would take longer."""
    return posix.environ.get(b"CEDANA_RUN_DIR", _RUN_DIR) + b"/" + SOCKET_NAME.encode()


def _zygote_runs(argv: list[str]) -> int | None:
    """The status of the command, run by the zygote; None if it did not run it to its end."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_PATIENCE_S)
        connection.connect(socket_path())
        if connection.recv(len(IDENTITY) + 1) != IDENTITY:
            return None
        here = posix.open(".", posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2, here))
        connection.settimeout(None)
        connection.sendmsg([encode(argv, posix.environ)], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
        answer = connection.recv(1)
    except OSError:
        return None
    return answer[0] if answer else None


def encode(argv: list[str], environ: dict[bytes, bytes]) -> bytes:
    """Words, each ended by a zero byte: how many arguments there are, the arguments, the environment."""
    arguments = [word.encode(errors="surrogateescape") for word in argv]
    variables = [name + b"=" + value for name, value in environ.items()]
    return b"".join(word + b"\0" for word in (b"%d" % len(arguments), *arguments, *variables))
