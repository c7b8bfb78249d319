"""What this node can do, feature by feature: `cedana check`.

Every "no" carries what it costs and what to do about it. Nothing is changed by looking; each check takes a
fraction of a second, and those that start a program run side by side.
"""

from __future__ import annotations

import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from base.config import Config
from base.errors import CedanaError
from runtime import criu, criu_trial

INSTALL = "run packaging/node/install"

MIN_KERNEL = (5, 13)
"""PTRACE_GET_RSEQ_CONFIGURATION: CRIU needs it for every program linked with glibc 2.35 or later."""
MIN_RUNC = (1, 1, 15)
MIN_CONTAINERD = (1, 7)
MIN_CUDA_DRIVER = (570,)
"""The first driver whose checkpoint API takes a GPU map (CUDA 12.8, cuCheckpointProcessRestore)."""

_ARCHITECTURES = ("x86_64", "aarch64")
_TIMEOUT_S = 10


@dataclass(frozen=True)
class Feature:
    """One thing a node has or has not. `consequence` and `remedy` are '' where it has it.

    Without a `required` feature nothing can be moved; without another one, only some containers.
    """

    name: str
    ok: bool
    value: str
    """What was found: a version, a kind, or why it does not do."""
    consequence: str = ""
    remedy: str = ""
    required: bool = True


@dataclass(frozen=True)
class Roots:
    """Where the kernel shows itself; tests look at others."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    modules: Path = Path("/lib/modules")


def check(config: Config, roots: Roots | None = None) -> list[Feature]:
    """Look at this node; features in the order a person wants to read them."""
    where = roots or Roots()
    checks: tuple[Callable[[], Feature], ...] = (
        _kernel,
        lambda: _criu(config),
        lambda: _runc(config),
        lambda: _containerd(config),
        lambda: _cgroups(where),
        lambda: _freezer(where),
        lambda: _overlayfs(where),
        lambda: _fuse(where),
        lambda: _nftables(config),
        _socket_tools,
        lambda: _userfaultfd(config),
        lambda: _lazy_pages(config),
        lambda: _cuda_driver(where),
        lambda: _gpu(where),
    )
    with ThreadPoolExecutor(len(checks)) as pool:
        return list(pool.map(lambda one: one(), checks))


def _kernel() -> Feature:
    release, machine = platform.release(), platform.machine()
    no = _Missing("kernel", "programs of current distributions cannot be checkpointed")
    if machine not in _ARCHITECTURES:
        return no(f"{release} {machine}", f"use a node of {' or '.join(_ARCHITECTURES)}")
    if version(release) < MIN_KERNEL:
        return no(f"{release} {machine}", f"boot Linux {_dotted(MIN_KERNEL)} or later")
    return Feature("kernel", True, f"{release} {machine}")


def _criu(config: Config) -> Feature:
    no = _Missing("CRIU", "no container can be checkpointed or restored")
    try:
        found = criu.version(config)
    except CedanaError as error:
        return no(error.message, error.hint)
    program = config.tool("criu")
    done = _run(program, "check")
    if done is None or done.returncode != 0:
        said = (done.stderr + done.stdout).strip() if done else "it does not start"
        return no(f"{found}; criu check: {_last_line(said)}", "run as root, on a kernel that CRIU supports")
    if reason := criu_trial.failure(program):
        return no(f"{found} fails on a live connection: {_last_line(reason)}", f"run as root; {INSTALL}")
    return Feature("CRIU", True, found)


def _runc(config: Config) -> Feature:
    return _program(config, MIN_RUNC, _Missing("runc", "containers can be neither started nor restored"))


def _containerd(config: Config) -> Feature:
    no = _Missing("containerd", "there are no containers to move")
    feature = _program(config, MIN_CONTAINERD, no)
    if not feature.ok:
        return feature
    address = config.containerd_address
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(address))
    except OSError as error:
        return no(
            f"{feature.value}, but {address} does not answer ({error.strerror or error})",
            "start containerd, or name its socket: CEDANA_CONTAINERD_ADDRESS, or containerd_address in"
            " /etc/cedana/config.toml",
        )
    return Feature("containerd", True, f"{feature.value} at {address}")


def _program(config: Config, minimum: tuple[int, ...], no: _Missing) -> Feature:
    """Is the program there, and new enough?"""
    found = re.search(r"\d+(?:\.\d+)+", criu.tool_version(config, no.name))
    if not found:
        return no("not installed", INSTALL)
    if version(found[0]) < minimum:
        return no(f"{found[0]} is too old: {_dotted(minimum)} is needed", INSTALL)
    return Feature(no.name, True, found[0])


def _cgroups(roots: Roots) -> Feature:
    if kind := _cgroup_version(roots):
        return Feature("cgroups", True, kind)
    no = _Missing("cgroups", "runc can start no container")
    return no("not mounted", "mount cgroup2 on /sys/fs/cgroup")


def _cgroup_version(roots: Roots) -> str:
    """'v1' or 'v2', by the hierarchy that controls resources; '' if neither is mounted."""
    root = roots.sys / "fs/cgroup"
    if (root / "cgroup.controllers").exists():
        return "v2"
    return "v1" if (root / "memory").is_dir() or (root / "freezer").is_dir() else ""


def _freezer(roots: Roots) -> Feature:
    root = roots.sys / "fs/cgroup"
    # The root of the unified hierarchy cannot be frozen and has no such file; any cgroup below it has.
    if _cgroup_version(roots) == "v2":
        available = any(root.glob("*/cgroup.freeze"))
    else:
        available = (root / "freezer").is_dir()
    if available:
        return Feature("freezer", True, "yes")
    no = _Missing("freezer", "a container cannot be stopped as one: no checkpoints")
    return no("none", "use a kernel with CONFIG_CGROUP_FREEZER, or Linux 5.2 for cgroup v2")


def _overlayfs(roots: Roots) -> Feature:
    no = _Missing("overlayfs", "what a container changed in its root file system cannot be told")
    return _file_system(roots, "overlay", no, "use a kernel with CONFIG_OVERLAY_FS")


def _fuse(roots: Roots) -> Feature:
    no = _Missing("FUSE", "no container can be restored: CRIU is given the memory through it")
    return _file_system(roots, "fuse", no, "use a kernel with CONFIG_FUSE_FS")


def _file_system(roots: Roots, name: str, no: _Missing, remedy: str) -> Feature:
    if f"\t{name}\n" in _text(roots.proc / "filesystems"):
        return Feature(no.name, True, "yes")
    modules = roots.modules / platform.release()
    if f"/{name}.ko" in _text(modules / "modules.dep") + _text(modules / "modules.builtin"):
        return Feature(no.name, True, "a module, loaded when first used")
    return no("none", remedy)


def _nftables(config: Config) -> Feature:
    no = _Missing(
        "nftables", "open connections cannot be kept across a move (--tcp close still works)", False
    )
    return _criu_feature(config, "network_lock_nftables", no, "use a kernel with CONFIG_NF_TABLES")


def _socket_tools() -> Feature:
    missing = [name for name in ("ss", "nsenter") if shutil.which(name) is None]
    if not missing:
        return Feature("socket tools", True, "ss, nsenter")
    no = _Missing("socket tools", "what a container is connected to cannot be seen before the freeze")
    return no(f"{' and '.join(missing)} not installed", "apt install iproute2 util-linux")


def _userfaultfd(config: Config) -> Feature:
    no = _Missing("userfaultfd", "memory cannot be tracked or filled in while a container runs", False)
    return _criu_feature(config, "uffd", no, "use a kernel with CONFIG_USERFAULTFD")


def _lazy_pages(config: Config) -> Feature:
    no = _Missing("lazy pages", "a restored container waits for all of its memory before it runs", False)
    return _criu_feature(
        config, "uffd-noncoop", no, "use Linux 4.11 or later with CONFIG_USERFAULTFD, as root"
    )


def _criu_feature(config: Config, feature: str, no: _Missing, remedy: str) -> Feature:
    """What `criu check --feature` says."""
    done = _run(config.tool("criu"), "check", "--feature", feature)
    if done is None:
        return no("unknown: CRIU is not installed", INSTALL)
    return Feature(no.name, True, "yes", required=False) if done.returncode == 0 else no("no", remedy)


def _cuda_driver(roots: Roots) -> Feature:
    no = _Missing("CUDA driver", "containers that use a GPU cannot be moved", False)
    needed = f"on a node with an NVIDIA GPU, install its driver, {MIN_CUDA_DRIVER[0]} or later"
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _text(roots.proc / "driver/nvidia/version"))
    if not found:
        return no("none", needed)
    if version(found[1]) < MIN_CUDA_DRIVER:
        return no(f"{found[1]} is too old", needed)
    return Feature(no.name, True, found[1], required=False)


def _gpu(roots: Roots) -> Feature:
    information = sorted((roots.proc / "driver/nvidia/gpus").glob("*/information"))
    models = [found[1].strip() for path in information if (found := re.search(r"Model:\s*(.+)", _text(path)))]
    if not models:
        no = _Missing("GPU", "containers that use a GPU cannot run here", False)
        return no("none", "use another node for them, or install the NVIDIA driver if this node has a GPU")
    counted = (f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
    return Feature("GPU", True, ", ".join(counted), required=False)


@dataclass(frozen=True)
class _Missing:
    """Makes the "no" of one feature: what it costs is the same whatever the reason."""

    name: str
    consequence: str
    required: bool = True

    def __call__(self, value: str, remedy: str) -> Feature:
        return Feature(self.name, False, value, self.consequence, remedy, self.required)


def version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: '1.7.24~ds1' is (1, 7, 24); () if there are none."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _last_line(text: str) -> str:
    return text.splitlines()[-1] if text else "no"


def _run(*argv: str) -> subprocess.CompletedProcess[str] | None:
    """Run a program to its end; None when it cannot be started or hangs."""
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
