"""A containerd of one's own: private directories and socket, in the machine's namespaces, of either line.

For tests of the shim alone, which need no second node and no network.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.node import images
from tests.node.terminal import Terminal

ROOT = Path(__file__).parents[2]
TOOLS = Path(os.environ.get("CEDANA_TOOLS_DIR", "/opt/cedana/node/bin"))
CACHE = ROOT / ".cache" / "containerd-1.7"
IMAGE = "shim.test/base:1"
_UNNEEDED = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime")


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


class Containerd:
    def __init__(self, line: str, binaries: Path, base: Path, path: Sequence[Path] = ()) -> None:
        self.line = line
        self.base = base
        self.socket = base / "c.sock"
        self.namespace = f"shim-{os.urandom(4).hex()}"
        """Its own: runc's state and the cgroups of a container are the whole machine's."""
        self.state = base / "state"
        self._binaries = binaries
        self._path = path
        self._process: subprocess.Popen[Any] | None = None
        self._zygote: subprocess.Popen[Any] | None = None
        base.mkdir(exist_ok=True)
        disabled = json.dumps(_UNNEEDED)
        (base / "config.toml").write_text(
            f'version = 2\nroot = "{base / "root"}"\nstate = "{self.state}"\ndisabled_plugins = {disabled}\n'
            f'[grpc]\n  address = "{self.socket}"\n'
        )

    def start(self) -> None:
        with open(self.base / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "containerd", "--config", self.base / "config.toml"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )
        wait_until(lambda: self.ctr("version").status == 0, "containerd answers")

    def stop(self) -> None:
        """End the daemon alone: shims and containers go on."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=20)

    def kill(self) -> None:
        """End the daemon as running out of memory does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(timeout=20)

    def start_zygote(self) -> None:
        """From now on shims are forked, not started."""
        with open(self.base / "log", "ab") as log:
            self._zygote = subprocess.Popen(
                [ROOT / ".venv" / "bin" / "containerd-shim-cedana-v1", "zygote"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
            )
        wait_until((self.base / "run" / "zygote.sock").exists, "the zygote listens")

    @property
    def zygote_pid(self) -> int:
        assert self._zygote is not None
        return self._zygote.pid

    def stop_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.terminate()
            self._zygote.wait(timeout=20)
            (self.base / "run" / "zygote.sock").unlink()
            self._zygote = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def ctr(self, *arguments: str, input: str = "") -> Done:
        return self._run([*self.ctr_line(), *arguments], input)

    def nerdctl(self, *arguments: str, input: str = "") -> Done:
        argv = [str(TOOLS / "nerdctl"), "--address", str(self.socket), "--namespace", self.namespace,
                "--data-root", str(self.base / "nerdctl"), "--cgroup-manager", "cgroupfs"]  # fmt: skip
        return self._run([*argv, *arguments], input)

    def terminal(self, *arguments: str) -> Terminal:
        return Terminal([*self.ctr_line(), *arguments], self.environment())

    def events(self) -> Events:
        return Events([*self.ctr_line(), "events"], self.environment(), self.base / "events")

    def shims(self) -> list[int]:
        """The shims this containerd has started, whatever they are written in."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                command = (directory / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            is_shim = any(b"containerd-shim-" in word for word in command[:3])
            if is_shim and str(self.socket).encode() in command:
                found.append(int(directory.name))
        return found

    def remove(self, name: str) -> None:
        """Whatever there is of a container."""
        self.ctr("tasks", "rm", "--force", name)
        self.ctr("containers", "rm", name)
        self.ctr("snapshots", "rm", name)

    def task(self, name: str) -> tuple[int, str]:
        """(pid, status) of a container's task; (0, '') without one."""
        for line in self.ctr("tasks", "ls").out.splitlines()[1:]:
            words = line.split()
            if words[0] == name:
                return int(words[1]), words[2]
        return 0, ""

    def wait_for(self, name: str, status: str) -> None:
        wait_until(lambda: self.task(name)[1] == status, f"{name} is {status or 'gone'}")

    def ctr_line(self) -> list[str]:
        return [str(self._binaries / "ctr"), "--address", str(self.socket), "--namespace", self.namespace]

    def _run(self, argv: Sequence[str], input: str) -> Done:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(), start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(input, timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{' '.join(argv)} hangs\n{out}\n{err}") from None
        return Done(process.returncode, out, err)

    def environment(self) -> dict[str, str]:
        """The shim's executable is beside the Python that runs the tests; its data stays in our directory."""
        path = [
            *self._path,
            ROOT / ".venv" / "bin",
            self._binaries,
            TOOLS,
            "/usr/sbin",
            "/usr/bin",
            "/sbin",
            "/bin",
        ]
        return {
            "PATH": ":".join(str(directory) for directory in path),
            "HOME": "/root",
            "TERM": "xterm",
            "LANG": "C.UTF-8",
            "CEDANA_RUN_DIR": str(self.base / "run"),
            "CEDANA_STATE_DIR": str(self.base / "cedana"),
        }


class Events:
    """`ctr events`, from now on."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], output: Path) -> None:
        self._output = output
        with open(output, "w") as file:
            self._process = subprocess.Popen(argv, stdout=file, env=env)
        time.sleep(0.5)  # ctr says nothing when it has subscribed

    def until(self, topic: str) -> list[str]:
        """The task events up to the first of `topic`, or those of the next seconds; without what differs
        from run to run."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: f" {topic} " in self._output.read_text(), f"the event {topic}", timeout_s=6)
        self._process.terminate()
        self._process.wait(timeout=10)
        lines = [line for line in self._output.read_text().splitlines() if " /tasks/" in line]
        found = [line[line.index("/tasks/") :] for line in lines]
        return [normal(re.sub(r'"rootfs":\[.*?\],?(?=")', "", line)) for line in found]


def normal(text: str) -> str:
    """`text` without ids, numbers of four digits and more, and times."""
    text = re.sub(r"\bshim-[0-9a-f]{8}\b", "NS", text)
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "ID", text)
    text = re.sub(r'time="[^"]*" ', "", text)
    text = re.sub(r'"(pid|nanos|seconds)":\d+', r'"\1":N', text)
    text = re.sub(r"\d+ (seconds?|minutes?) ago|Less than a second ago|(?<=Up )\d+ \w+", "AGO", text)
    return re.sub(r"\b\d{3,}\b", "N", text)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s} s")
        time.sleep(0.05)


def binaries(line: str) -> Path:
    """Where containerd and ctr of a line are: 2.x is the node's, 1.7 is Debian 13's package."""
    if line == "2.x":
        return TOOLS
    if not (CACHE / "usr" / "bin" / "containerd").exists():
        packages = CACHE.with_name("containerd-1.7-packages")
        packages.mkdir(parents=True, exist_ok=True)
        installer = ROOT / "packaging" / "node" / "install"
        subprocess.run([installer, "--packages", packages, "containerd"], check=True)
        (package,) = packages.glob("containerd_*.deb")
        unpacked = Path(tempfile.mkdtemp(dir=packages.parent))
        subprocess.run(["dpkg-deb", "--extract", package, unpacked], check=True)
        unpacked.rename(CACHE)
    return CACHE / "usr" / "bin"


@contextmanager
def containerd(line: str, *, zygote: bool = True, path: Sequence[Path] = ()) -> Iterator[Containerd]:
    """Runs until the block ends, with the image `IMAGE`; nothing of it stays. `path` is searched first."""
    base = Path(tempfile.mkdtemp(prefix="cedana-shim-", dir="/var/tmp"))
    made = Containerd(line, binaries(line), base, path)
    try:
        made.start()
        if zygote:
            made.start_zygote()
        imported = made.ctr("images", "import", "--index-name", IMAGE, str(images.build("base")))
        assert imported.status == 0, imported.err
        yield made
    finally:
        for line_ in made.ctr("tasks", "ls").out.splitlines()[1:]:
            made.remove(line_.split()[0])
        made.stop()
        made.stop_zygote()
        for pid in made.shims():
            os.kill(pid, signal.SIGKILL)
        for mount in reversed(_mounts_below(base)):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(base, ignore_errors=True)


def _mounts_below(base: Path) -> list[str]:
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{base}/")]
