"""The test bed: two nodes and a registry on one machine, as real as namespaces make them.

Each machine (`hub`, which holds the switch and the registry, `node-a`, `node-b`) has its own mount, network,
pid, cgroup, uts and ipc namespaces, its own /run, /tmp and state directories, and its own host name. A
container's veth hangs on its node's bridge, and the bridges of both nodes on the hub's switch: an address
is reachable wherever the container runs, as in one rack.

    hub 10.88.0.1 ── switch ─┬─ node-a 10.88.1.1 ── bed0 ── containers 10.88.1.10…
                             └─ node-b 10.88.2.1 ── bed0 ── containers 10.88.2.10…

Nothing outlives the process that holds the `Bed`: each machine's init ends when its stdin closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.node import cgroups, images
from tests.node.cgroups import MachineCgroups
from tests.node.terminal import Terminal

ROOT = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("CEDANA_TOOLS_DIR", "/opt/cedana/node/bin"))
CONTAINERD_1_7 = Path("/opt/cedana/node-1.7/bin")
"""containerd's older line and its ctr (packaging/node/install --containerd-1.7)."""
MACHINE = Path(__file__).with_name("machine.py")
BASE_PREFIX = "cedana-bed-"
BASES = Path("/var/tmp")
HUB_ADDRESS = "10.88.0.1"
REGISTRY_PORT = 5000


class CommandFailed(AssertionError):
    """A command in a machine ended with another status than the test expected."""


@dataclass
class Machine:
    """One set of namespaces, with an init that holds them."""

    name: str
    base: Path
    """What it keeps on disk; removed with the bed."""
    cgroup_version: int
    binds: Mapping[str, str] = field(default_factory=dict)
    """Directory name below `base` -> where it appears inside."""
    files: Mapping[str, str] = field(default_factory=dict)

    _cgroups: MachineCgroups = field(init=False)
    _init: subprocess.Popen[str] = field(init=False)
    pid: int = field(init=False, default=0)
    """Init's pid on the host."""

    def start(self) -> None:
        self.base.mkdir(mode=0o700)
        overlays = self.base / "overlays"
        overlays.mkdir(mode=0o700)
        self._cgroups = MachineCgroups.create(f"{self.base.parent.name}-{self.name}", self.cgroup_version)
        spec = {
            "name": self.name,
            "cgroup_version": self.cgroup_version,
            "overlays": str(overlays),
            "binds": {str(self.base / source): target for source, target in self.binds.items()},
            "files": self.files,
        }
        python = ["/usr/bin/python3", "-I", "-S", str(MACHINE)]
        unshare = ["unshare", "--mount", "--net", "--uts", "--ipc", "--cgroup", "--pid", "--fork"]
        self._init = subprocess.Popen(
            [*python, "join", *self._cgroups.procs(started=False), "--", *unshare, "--kill-child",
             "--propagation", "private", *python, "init", json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
            start_new_session=True,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "ready\n":
            raise RuntimeError(f"machine {self.name} did not start")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self.pid = int(children[0])

    def stop(self) -> None:
        """End every process of the machine and remove all it had."""
        assert self._init.stdin is not None
        with contextlib.suppress(OSError):
            self._init.stdin.close()
        try:
            self._init.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._init.kill()
            self._init.wait()
        self._cgroups.remove()

    def enter(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` inside."""
        return [
            *("/usr/bin/python3", "-I", "-S", str(MACHINE), "join", *self._cgroups.procs(started=True), "--"),
            *("nsenter", f"--target={self.pid}", "--mount", "--net", "--uts", "--ipc", "--cgroup", "--pid"),
            *("--wd=/", "--", *argv),
        ]

    def popen(self, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        options.setdefault("env", environment())
        return subprocess.Popen(self.enter([str(a) for a in argv]), start_new_session=True, **options)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        check: bool = True,
        input: str | None = None,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` inside; raises `CommandFailed` with everything it said unless it ended with 0."""
        process = self.popen(
            argv,
            stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**environment(), **(env or {})},
        )
        try:
            out, err = process.communicate(input, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise CommandFailed(
                f"{self.name}: {_line(argv)} took longer than {timeout_s} s\n{out}\n{err}"
            ) from None
        done = subprocess.CompletedProcess([str(a) for a in argv], process.returncode, out, err)
        if check and done.returncode != 0:
            raise CommandFailed(f"{self.name}: {_line(argv)} ended with {done.returncode}\n{out}\n{err}")
        return done

    def ns_exec(self, argv: Sequence[str | Path], **options: Any) -> str:
        """Run `argv` inside; returns what it printed."""
        return self.run(argv, **options).stdout

    def terminal(self, argv: Sequence[str | Path]) -> Terminal:
        """Run `argv` inside on a terminal of its own."""
        return Terminal(self.enter([str(a) for a in argv]), environment())

    def connect(self, host: str, port: int, timeout_s: float = 10) -> socket.socket:
        """A TCP connection made in this machine's network namespace; retried until the server listens."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self.network():
                    return socket.create_connection((host, port), timeout=timeout_s)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    @contextmanager
    def network(self) -> Iterator[None]:
        """This thread in the machine's network namespace."""
        with open("/proc/thread-self/ns/net") as before, open(f"/proc/{self.pid}/ns/net") as inside:
            _setns(inside.fileno())
            try:
                yield
            finally:
                _setns(before.fileno())


class Node(Machine):
    """A machine with a containerd of its own, configured as docs and packages do it, at the default paths."""

    def __init__(
        self, name: str, base: Path, number: int, registry: str, cgroup_version: int, containerd: Path
    ) -> None:
        self.address = f"10.88.{number}.1"
        self.registry = registry
        self.tools = containerd
        """Where this node's containerd and ctr are."""
        super().__init__(
            name,
            base,
            cgroup_version,
            binds={
                "containerd": "/var/lib/containerd",
                "cedana": "/var/lib/cedana",
                "nerdctl": "/var/lib/nerdctl",
                "cni": "/var/lib/cni",
                "log": "/var/log",
            },
            files={
                "/etc/containerd/config.toml": _containerd_config(containerd),
                "/etc/cedana/config.toml": f'plain_http = ["{registry}"]\ntools_dir = "{TOOLS}"\n',
                "/etc/cni/net.d/10-bed.conflist": json.dumps(_cni_config(number)),
                "/etc/nerdctl/nerdctl.toml": 'insecure_registry = true\ncni_path = "/opt/cni/bin"\n',
                f"/etc/containerd/certs.d/{registry}/hosts.toml": f'server = "http://{registry}"\n',
            },
        )
        self.containerd: subprocess.Popen[Any] | None = None

    def state(self) -> State:
        """All that an operation could leave behind on this node."""
        directories = ["/run/cedana", "/run/containerd", "/run/netns", "/tmp", "/var/lib/cedana",
                       "/var/lib/containerd/io.containerd.content.v1.content",
                       "/var/lib/containerd/io.containerd.runtime.v2.task"]  # fmt: skip
        found = json.loads(
            self.ns_exec(["/usr/bin/python3", "-I", "-S", str(MACHINE), "state", *directories])
        )
        for command in ("containers", "images", "snapshots", "leases"):
            found[command] = self.ctr(command, "ls").splitlines()[1:]
        found["files"] = [
            path
            for path in found["files"]
            if not path.startswith("/var/lib/cedana/log/") and "/rootfs/" not in path
        ]
        return State({kind: Counter(items) for kind, items in found.items()})

    def install_cni(self, plugins: Path) -> None:
        self.ns_exec(["mkdir", "-p", "/opt/cni/bin"])
        self.ns_exec(["mount", "--bind", plugins, "/opt/cni/bin"])

    def start_containerd(self) -> None:
        with open(self.base / "log" / "containerd.log", "ab") as log:
            self.containerd = self.popen(
                [self.tools / "containerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        ask = [self.tools / "ctr", "version"]
        wait_until(lambda: self.run(ask, check=False).returncode == 0, "containerd answers")

    def start_zygote(self) -> None:
        """From now on shims are forked, not started."""
        with open(self.base / "log" / "zygote.log", "ab") as log:
            self.popen(
                [_bin() / "containerd-shim-cedana-v1", "zygote"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ask = ["test", "-S", "/run/cedana/zygote.sock"]
        wait_until(lambda: self.run(ask, check=False).returncode == 0, "the zygote listens")

    def stop_containerd(self) -> None:
        """Stop containerd alone: its shims and containers go on."""
        assert self.containerd is not None
        terminate(self.containerd)

    def ctr(self, *arguments: str | Path, **options: Any) -> str:
        return self.ns_exec([self.tools / "ctr", *arguments], **options)

    def nerdctl(self, *arguments: str | Path, **options: Any) -> str:
        return self.ns_exec([TOOLS / "nerdctl", *arguments], **options)

    def cedana(self, *arguments: str | Path, **options: Any) -> str:
        return self.ns_exec([_bin() / "cedana", *arguments], **options)

    def cedana_fails(self, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """`cedana ARGUMENTS`, which must end with an error."""
        done = self.run([_bin() / "cedana", *arguments], check=False, **options)
        if done.returncode == 0:
            raise CommandFailed(f"{self.name}: cedana {_line(arguments)} should have failed\n{done.stdout}")
        return done

    def run_container(
        self,
        image: str,
        name: str,
        *argv: str,
        runtime: str = "io.containerd.cedana.v1",
        options: Sequence[str] = (),
        network: bool = True,
    ) -> None:
        """`ctr run -d`, with an address on the bed's network unless told not; its output goes to `log`."""
        log = f"file://{self.log_path(name)}"
        cni = ["--cni"] if network else []
        options = [*cni, "--runtime", runtime, "--log-uri", log, *self._limits(), *options]
        self.ctr("run", "--detach", *options, image, name, *argv)

    def _limits(self) -> list[str]:
        """ctr always asks for CPU shares; a v2 tree beside v1 hierarchies has no controller to give them."""
        if self.cgroup_version == 1 or cgroups.default_version() == 2:
            return []
        return ["--cpu-shares", "0"]

    def log_path(self, name: str) -> Path:
        return Path("/var/log") / f"{name}.out"

    def log(self, name: str) -> str:
        path = self.base / "log" / f"{name}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def read(self, name: str, path: str) -> str:
        """The file `path` of the container, as it is now; '' if there is none."""
        done = self.run(["cat", f"/proc/{self.task_pid(name)}/root{path}"], check=False)
        return done.stdout if done.returncode == 0 else ""

    def processes(self, name: str) -> dict[int, str]:
        """Every process of the container: pid as numbered inside -> name."""
        shown = self.exec(
            name, "sh", "-c", 'for p in /proc/[0-9]*; do echo "${p#/proc/} $(cat $p/comm)"; done'
        )
        pairs = (line.split(" ", 1) for line in shown.splitlines())
        return {int(pid): comm for pid, comm in pairs if comm}

    def exec(self, name: str, *argv: str, **options: Any) -> str:
        """`ctr tasks exec`: the command's output, inside the container."""
        return self.ctr("tasks", "exec", "--exec-id", f"x{os.urandom(4).hex()}", name, *argv, **options)

    def container_address(self, name: str) -> str:
        pid = self.task_pid(name)
        shown = self.ns_exec(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-4", "-json", "addr"])
        return next(
            str(address["local"])
            for link in json.loads(shown)
            for address in link["addr_info"]
            if address["scope"] == "global"
        )

    def task_pid(self, name: str) -> int:
        """The pid of the container's init as this node numbers it; 0 if it has no task."""
        for line in self.ctr("tasks", "ls").splitlines()[1:]:
            fields = line.split()
            if fields[0] == name:
                return int(fields[1])
        return 0

    def task_status(self, name: str) -> str:
        """RUNNING, STOPPED, …; '' if it has no task."""
        for line in self.ctr("tasks", "ls").splitlines()[1:]:
            if line.split()[0] == name:
                return line.split()[2]
        return ""

    def remove_container(self, name: str) -> None:
        """Whatever is left of the container `name`, away with it."""
        self.run([self.tools / "ctr", "tasks", "rm", "--force", name], check=False)
        self.run([self.tools / "ctr", "containers", "rm", name], check=False)
        self._release_address(name)

    def _release_address(self, name: str) -> None:
        """Give back what `ctr run --cni --detach` took: nothing else ever does."""
        for lease in (self.base / "cni" / "networks" / "bed").glob("10.*"):
            if lease.read_text().split()[:1] == [f"default-{name}"]:
                lease.unlink()


@dataclass(frozen=True)
class State:
    """What there is on a node, by kind."""

    items: Mapping[str, Counter[str]]

    def left_behind(self, before: State) -> list[str]:
        """What there is now and was not there `before`."""
        return [
            f"{kind}: {item}"
            for kind, items in self.items.items()
            for item in (items - before.items[kind]).elements()
        ]


@dataclass
class Bed:
    base: Path
    hub: Machine
    node_a: Node
    node_b: Node
    registry: str
    """host:port, plain HTTP."""
    registry_process: subprocess.Popen[Any] | None = None

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.node_a, self.node_b

    @property
    def shared(self) -> Path:
        """A directory that every machine sees at the same path."""
        return self.base / "shared"

    def start_registry(self) -> None:
        config = self.base / "hub" / "registry.yml"
        config.write_text(
            "version: 0.1\nlog:\n  level: warn\n  accesslog:\n    disabled: true\n"
            f"storage:\n  filesystem:\n    rootdirectory: {self.base / 'hub' / 'registry'}\n"
            f"  delete:\n    enabled: true\nhttp:\n  addr: {self.registry}\n"
        )
        with open(self.base / "hub" / "registry.log", "ab") as log:
            self.registry_process = self.hub.popen(
                [TOOLS / "docker-registry", "serve", config], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.hub.connect(HUB_ADDRESS, REGISTRY_PORT).close()

    def stop_registry(self) -> None:
        assert self.registry_process is not None
        terminate(self.registry_process)

    def image(self, name: str) -> str:
        """The reference of the workload image `name`: built, in the registry, and on node A."""
        reference = f"{self.registry}/{name}:1"
        if reference not in self.node_a.ctr("images", "ls", "--quiet").split():
            archive = images.build(name)
            self.node_a.ctr("images", "import", "--index-name", reference, archive)
            self.node_a.ctr("images", "push", "--plain-http", reference)
        return reference

    def move(self, name: str, *, checkpoint: Sequence[str] = (), restore: Sequence[str] = ()) -> str:
        """The container `name` from node A to node B through the registry; returns the checkpoint."""
        reference = self.reference(name)
        self.node_a.cedana("checkpoint", name, "--to", reference, *checkpoint)
        status = self.node_a.task_status(name)
        if status not in ("", "STOPPED"):
            raise CommandFailed(f"after the checkpoint {name} is {status} on node A")
        self.node_b.cedana("restore", reference, *restore)
        return reference

    def reference(self, name: str) -> str:
        """A fresh reference for a checkpoint in the registry."""
        return f"{self.registry}/checkpoints/{name}:{os.urandom(4).hex()}"


@contextmanager
def bed(cgroup_version: int = 0, containerd: Path = TOOLS, zygote: bool = True) -> Iterator[Bed]:
    """A running bed; everything of it is gone afterwards, whatever happened.

    `cgroup_version` 0 is the machine's own; `containerd` the directory of the nodes' containerd and ctr.
    """
    if os.geteuid() != 0:
        raise PermissionError("the test bed needs root: it makes namespaces, mounts and cgroups")
    for program in (containerd / "containerd", TOOLS / "docker-registry"):
        if not program.exists():
            raise FileNotFoundError(f"{program} is missing: run packaging/node/install")
    _remove_stale()
    version = cgroup_version or cgroups.default_version()
    plugins = images.cni_plugins()
    base = BASES / f"{BASE_PREFIX}{os.getpid()}-{os.urandom(2).hex()}"
    base.mkdir(mode=0o755)
    (base / "shared").mkdir()
    registry = f"{HUB_ADDRESS}:{REGISTRY_PORT}"
    hub = Machine("hub", base / "hub", version)
    nodes = [
        Node(name, base / name, number, registry, version, containerd)
        for number, name in ((1, "node-a"), (2, "node-b"))
    ]
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, base, ignore_errors=True)
        for machine in (hub, *nodes):
            machine.start()
            cleanup.callback(machine.stop)
        for machine in (hub, *nodes):
            machine.wait_until_ready()
        _connect(hub, nodes)
        made = Bed(base, hub, nodes[0], nodes[1], registry)
        made.start_registry()
        for node in nodes:
            node.install_cni(plugins)
            node.start_containerd()
            if zygote:
                node.start_zygote()
        yield made


def environment() -> dict[str, str]:
    """What programs inside a machine get: nothing of the test process leaks in."""
    path = [
        str(_bin()),
        str(TOOLS),
        "/usr/local/sbin",
        "/usr/local/bin",
        "/usr/sbin",
        "/usr/bin",
        "/sbin",
        "/bin",
    ]
    return {"PATH": ":".join(path), "HOME": "/root", "LANG": "C.UTF-8", "TERM": "xterm"}


def terminate(process: subprocess.Popen[Any], timeout_s: float = 20) -> None:
    """End a daemon started by `Machine.popen`, and wait until it is gone: `process` only waits for it."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=timeout_s)
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the daemon ended", timeout_s
    )


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)


def _connect(hub: Machine, nodes: Sequence[Node]) -> None:
    def ip(machine: Machine, *lines: str) -> None:
        argv = ["nsenter", f"--net=/proc/{machine.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(argv, input="\n".join(lines), text=True, check=True)

    ip(hub, "link set lo up", "link add switch type bridge forward_delay 0", "link set switch up",
       f"addr add {HUB_ADDRESS}/16 dev switch")  # fmt: skip
    for node in nodes:
        ip(
            hub,
            f"link add {node.name} type veth peer name uplink netns {node.pid}",
            f"link set {node.name} master switch up",
        )
        ip(
            node,
            "link set lo up",
            "link add bed0 type bridge forward_delay 0",
            "link set uplink master bed0 up",
            "link set bed0 up",
            f"addr add {node.address}/16 dev bed0",
        )


def _remove_stale() -> None:
    """What a bed left whose process was killed: its machines are gone, its files and cgroups are not."""
    for base in BASES.glob(f"{BASE_PREFIX}*"):
        pid = base.name.removeprefix(BASE_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            for hierarchy in cgroups.hierarchies():
                left = MachineCgroups(tuple(hierarchy.glob(f"{base.name}-*")), 1)
                left.remove()
            shutil.rmtree(base, ignore_errors=True)


def _containerd_config(tools: Path) -> str:
    shim = _bin() / "containerd-shim-cedana-v1"
    if _containerd_major(tools) == 1:
        return (
            'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.cedana]\n'
            f'  runtime_type = "io.containerd.runc.v2"\n  runtime_path = "{shim}"\n'
        )
    return (
        "version = 3\n"
        "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cedana]\n"
        f"  runtime_type = 'io.containerd.runc.v2'\n  runtime_path = '{shim}'\n"
    )


def _containerd_major(tools: Path) -> int:
    done = subprocess.run([tools / "containerd", "--version"], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[2].lstrip("v").split(".")[0])


def _cni_config(number: int) -> dict[str, Any]:
    addresses = {
        "subnet": "10.88.0.0/16",
        "rangeStart": f"10.88.{number}.10",
        "rangeEnd": f"10.88.{number}.250",
        "gateway": f"10.88.{number}.1",
    }
    ipam = {"type": "host-local", "ranges": [[addresses]], "routes": [{"dst": "0.0.0.0/0"}]}
    return {
        "cniVersion": "1.0.0",
        "name": "bed",
        "plugins": [{"type": "bridge", "bridge": "bed0", "ipam": ipam}],
    }


def _bin() -> Path:
    """Where `cedana` and the shim are: beside the Python that runs the tests."""
    return Path(sys.executable).parent


def _setns(fd: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, 0x40000000) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _line(argv: Sequence[str | Path]) -> str:
    return " ".join(str(word) for word in argv)
