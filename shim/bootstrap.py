"""`start`: finds or makes the shim that serves a container, and tells containerd its address.

containerd runs it in the bundle and waits until every holder of its output is gone, so the server must not
inherit descriptors 1 and 2. The server is a fork of this process, or, forked by the zygote, this process
itself: no second interpreter has to start. What containerd sends on stdin and reads from stdout depends on
its version (`Parameters`); the plain address and `<bundle>/address` suit all before 2.3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from base.errors import CedanaError
from shim import wire
from shim.flags import Flags

GROUP_ANNOTATIONS = ("io.containerd.runc.v2.group", "io.kubernetes.cri.sandbox-id")
"""Containers with the same value of the first of these share one shim."""

_SOCKET_DIR = "/run/containerd/s"
_SOCKET_PATH_LIMIT = 106
_CONNECT_TIMEOUT_S = 0.1
_STDIN_LIMIT = 10 << 20
_DEBUG_LEVEL = -4
_OOM_SCORE_MAX = 1000


class BootstrapError(CedanaError):
    """The shim cannot be started; containerd shows the sentence."""


class Parameters:
    """What containerd says on stdin: nothing, `Any(options)`, or (from 2.3 on) BootstrapParams.

    The two messages cannot be told apart by their form; BootstrapParams repeats id and namespace.
    """

    def __init__(self, data: bytes, flags: Flags) -> None:
        self.bootstrap_protocol = False
        self.socket_dir = _SOCKET_DIR
        self.debug = flags.debug
        self.shim_cgroup = ""
        self.events_address = os.environ.get("TTRPC_ADDRESS", "")
        identity = (flags.id.encode(), flags.namespace.encode())
        try:
            fields = list(wire.decode(data))
            if (dict(fields).get(1), dict(fields).get(2)) == identity:
                self._read_bootstrap(fields)
            else:
                self._read_options(fields)
        except ValueError as error:  # WireError, UnicodeDecodeError
            raise BootstrapError(f"the parameters on stdin are malformed: {error}") from error

    def _read_bootstrap(self, fields: list[tuple[int, int | bytes]]) -> None:
        self.bootstrap_protocol = True
        for number, value in fields:
            if number == 3 and isinstance(value, int):
                level = value - (1 << 64) if value >> 63 else value
                self.debug = self.debug or level <= _DEBUG_LEVEL
            elif number == 5 and isinstance(value, bytes) and value:
                self.events_address = value.decode()
            elif number == 8 and isinstance(value, bytes):
                for inner, extension in wire.decode(value):
                    if inner == 1 and isinstance(extension, bytes):
                        self._read_options(list(wire.decode(extension)))
            elif number == 9 and isinstance(value, bytes) and value:
                self.socket_dir = value.decode()

    def _read_options(self, fields: list[tuple[int, int | bytes]]) -> None:
        values = dict(fields)
        if values.get(1) == b"containerd.runc.v1.Options" and isinstance(body := values.get(2), bytes):
            self.shim_cgroup = _text(dict(wire.decode(body)).get(3))
        elif values.get(1) == b"runtimeoptions.v1.Options" and isinstance(body := values.get(2), bytes):
            from shim import errors, options  # seldom, and costs milliseconds

            inner = dict(wire.decode(body))
            config = inner.get(3, b"")
            if isinstance(config, bytes):
                with suppress(errors.InvalidArgument):  # Create reads them too, and says what is wrong
                    self.shim_cgroup = options.from_toml(config, _text(inner.get(2))).shim_cgroup


def _text(value: int | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else ""


class Zygote(NamedTuple):
    """This process was forked by the zygote to run the command of another."""

    containerd: int
    """The parent of that process."""
    detach: Callable[[], None]
    """Let that process end with status 0; this one goes on."""


def start(flags: Flags, zygote: Zygote | None = None) -> int:
    """Prints the address; in the server, serves until containerd shuts it down."""
    parameters = Parameters(_read_stdin(), flags)
    path = socket_path(parameters.socket_dir, flags, _group(flags))
    address = f"unix://{path}"
    listener = listen(path, socket.SOCK_STREAM)
    if listener is None:
        _write_address(address)
        _answer(parameters, address)
        return 0
    pid = os.getpid() if zygote else os.fork()
    if pid == 0:
        return _serve(flags, listener, address, parameters)
    try:
        _place(pid, parameters.shim_cgroup, zygote.containerd if zygote else os.getppid())
    except OSError as error:
        if not zygote:
            os.kill(pid, 9)
        os.unlink(path)
        raise BootstrapError(f"failed to place the shim: {error}") from error
    _write_address(address)
    _answer(parameters, address)
    if zygote:
        zygote.detach()
        return _serve(flags, listener, address, parameters)
    listener.close()
    return 0


def socket_path(directory: str, flags: Flags, group: str) -> str:
    """The socket of the shim that serves `group` for this containerd and namespace."""
    name = hashlib.sha256(os.path.join(flags.address, flags.namespace, group).encode()).hexdigest()
    path = os.path.join(directory, name)
    if len(path) > _SOCKET_PATH_LIMIT:
        raise BootstrapError(f"the socket path {path} is longer than {_SOCKET_PATH_LIMIT} bytes")
    return path


def _read_stdin() -> bytes:
    data = b""
    while chunk := os.read(0, 1 << 16):
        data += chunk
        if len(data) > _STDIN_LIMIT:
            raise BootstrapError("the parameters on stdin are too long")
    return data


def _group(flags: Flags) -> str:
    try:
        with open("config.json", encoding="utf-8") as file:
            spec = json.load(file)
    except (OSError, ValueError) as error:
        raise BootstrapError(f"open config.json: {error}") from error
    annotations = spec.get("annotations") if isinstance(spec, dict) else None
    if isinstance(annotations, Mapping):
        for name in GROUP_ANNOTATIONS:
            if name in annotations:
                return str(annotations[name])
    return flags.id


def listen(path: str, kind: int, backlog: int = 128) -> socket.socket | None:
    """A listening socket, ours alone; None when somebody already answers there."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    for _ in range(2):
        listener = socket.socket(socket.AF_UNIX, kind)
        try:
            before = os.umask(0o177)
            try:
                listener.bind(path)
            finally:
                os.umask(before)
            listener.listen(backlog)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise BootstrapError(f"create new shim socket: {error}") from error
            if _answers(path, kind):
                return None
            os.unlink(path)
        else:
            return listener
    raise BootstrapError(f"try create new shim socket 2x: {path} is in use")


def _answers(path: str, kind: int) -> bool:
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(_CONNECT_TIMEOUT_S)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _serve(flags: Flags, listener: socket.socket, address: str, parameters: Parameters) -> int:
    """In the fork: cut every tie to containerd's pipes, then serve."""
    os.setpgid(0, 0)
    fd = os.dup(listener.detach())
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    if os.path.exists("log"):
        # containerd holds the FIFO open; both ways, so that its restart neither blocks nor breaks us.
        log = os.open("log", os.O_RDWR | os.O_NONBLOCK)
        os.dup2(log, 2)
    for start, end in ((3, fd), (fd + 1, os.sysconf("SC_OPEN_MAX"))):
        os.closerange(start, end)
    try:
        from shim import daemon

        return daemon.serve(
            namespace=flags.namespace,
            containerd_address=flags.address,
            events_address=parameters.events_address,
            listener=socket.socket(fileno=fd),
            address=address,
            debug=parameters.debug,
        )
    except Exception:
        import traceback

        traceback.print_exc()
        return 1


def _place(pid: int, cgroup: str, containerd: int) -> None:
    """Put the server where it belongs: one step likelier than containerd to be killed for memory."""
    with open(f"/proc/{containerd}/oom_score_adj") as file:
        score = int(file.read())
    with open(f"/proc/{pid}/oom_score_adj", "w") as file:
        file.write(str(min(score + 1, _OOM_SCORE_MAX)))
    if not cgroup:
        return
    found = False
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            directory = os.path.join(before.split()[4], cgroup.lstrip("/"))
            if after.split()[0] in ("cgroup", "cgroup2") and os.path.isdir(directory):
                with open(os.path.join(directory, "cgroup.procs"), "w") as file:
                    file.write(str(pid))
                found = True
    if not found:
        raise FileNotFoundError(errno.ENOENT, "no such cgroup", cgroup)


def _write_address(address: str) -> None:
    """containerd reads it when it restarts."""
    fd = os.open(".address", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    with open(fd, "w") as file:
        file.write(address)
        file.flush()
        os.fsync(fd)
    os.rename(".address", "address")


def _answer(parameters: Parameters, address: str) -> None:
    if parameters.bootstrap_protocol:
        result = wire.field(1, 3) + wire.field(2, address) + wire.field(3, "ttrpc")
        sys.stdout.buffer.write(result)
    else:
        sys.stdout.write(address)
    sys.stdout.flush()
