"""Network namespaces: made, named by a bind mount, entered by the calling thread, and their tools run."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from base.errors import CedanaError

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MNT_DETACH = 0x2
_libc = ctypes.CDLL(None, use_errno=True)


class NetworkError(CedanaError):
    """The kernel, `ip` or `nft` refused."""

    exit_code = 6


def open_of(pid: int | str) -> int:
    """A descriptor of the network namespace of process `pid` (or "self")."""
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def identity(where: int | str) -> tuple[int, int]:
    """What tells one namespace from another; `where` is a descriptor or a path."""
    info = os.stat(where)
    return info.st_dev, info.st_ino


def find(namespace: tuple[int, int]) -> int | None:
    """A descriptor of a namespace that a process or a mount keeps alive; None if none does."""
    paths = ["/proc/thread-self/ns/net", *(f"/proc/{pid}/ns/net" for pid in processes(namespace))]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[3] == f"net:[{namespace[1]}]":
            paths.append(fields[4].encode("latin-1").decode("unicode_escape"))
    for path in paths:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if identity(fd) == namespace:
                return fd
            os.close(fd)
    return None


def processes(namespace: tuple[int, int], apart_from: Collection[int] = ()) -> list[int]:
    """Processes that live in a namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in apart_from:
            with suppress(OSError):
                if identity(f"/proc/{name}/ns/net") == namespace:
                    found.append(int(name))
    return found


@contextmanager
def inside(where: int | str | Path) -> Iterator[None]:
    """Work in the namespace of a process, or in the one named by a path."""
    fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC) if isinstance(where, Path) else open_of(where)
    try:
        with entered(fd):
            yield
    finally:
        os.close(fd)


@contextmanager
def entered(fd: int) -> Iterator[None]:
    """Put the calling thread, and what it starts, into the namespace `fd`. Other threads stay."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", fd, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", home, _CLONE_NEWNET)
    finally:
        os.close(home)


def create(path: Path) -> None:
    """Make a namespace and name it `path`, so that it lives until `delete`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600, exist_ok=False)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", _CLONE_NEWNET)
        try:
            _call("mount", b"/proc/thread-self/ns/net", os.fsencode(path), b"", _MS_BIND, None)
        finally:
            _call("setns", home, _CLONE_NEWNET)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(home)


def delete(path: Path) -> None:
    """Undo `create`; nothing happens when there is no such name."""
    with suppress(OSError):
        _call("umount2", os.fsencode(path), _MNT_DETACH)
    path.unlink(missing_ok=True)


def run(argv: Sequence[str], text: str = "") -> str:
    """Run a tool in the thread's namespace with `text` as its input; returns its output.

    Raises `NetworkError` with what it said.
    """
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError as error:
        raise NetworkError(
            f"{argv[0]} is not installed on this node", hint="install nftables and iproute2"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NetworkError(f"{argv[0]} did not end within 30 s") from error
    if done.returncode != 0:
        raise NetworkError(
            f"{' '.join(argv)} failed with status {done.returncode}",
            details=" / ".join(line.strip() for line in done.stderr.splitlines() if line.strip())[-500:],
        )
    return done.stdout


def _call(name: str, *arguments: object) -> None:
    function = getattr(_libc, name)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
