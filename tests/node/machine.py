"""A machine of the test bed, seen from inside: the program that becomes init of a fresh set of namespaces.

    machine.py join PROCS... -- ARGV      move into cgroups, then become ARGV
    machine.py init SPEC                  lay out mounts, say "ready", reap children until stdin closes
    machine.py state DIRECTORY...         print all that an operation could leave behind, as JSON

It runs with nothing but the standard library, and with `-I -S`, because every command that enters a
machine passes through `join`. When the test process dies, its end of init's stdin closes, init ends, and
the kernel takes the whole pid namespace, its mounts and its network with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def join(arguments: Sequence[str]) -> None:
    split = arguments.index("--")
    for procs in arguments[:split]:
        with open(procs, "w") as file:
            file.write("0")
    argv = arguments[split + 1 :]
    os.execvp(argv[0], list(argv))


def init(spec: Mapping[str, Any]) -> None:
    with open("/proc/sys/kernel/hostname", "w") as file:
        file.write(spec["name"])
    _mount("-t", "proc", "proc", "/proc")
    _mount_sys(spec["cgroup_version"])
    for directory, mode in (("/run", "755"), ("/tmp", "1777"), ("/var/lib", "755")):
        _mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", directory)
    _mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", spec["overlays"])
    for directory in ("/etc", "/opt"):
        _overlay(directory, os.path.join(spec["overlays"], directory[1:]))
    for source, target in spec["binds"].items():
        os.makedirs(source, mode=0o700, exist_ok=True)
        os.makedirs(target, mode=0o700, exist_ok=True)
        _mount("--bind", source, target)
    for path, text in spec["files"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(text)
    print("ready", flush=True)
    _reap_until_stdin_closes()


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"mount {' '.join(arguments)}: {done.stderr.strip()}")


def _overlay(directory: str, scratch: str) -> None:
    upper, work = os.path.join(scratch, "upper"), os.path.join(scratch, "work")
    os.makedirs(upper, mode=0o755)
    os.makedirs(work, mode=0o700)
    _mount(
        "-t", "overlay", "-o", f"lowerdir={directory},upperdir={upper},workdir={work}", "overlay", directory
    )


def _mount_sys(cgroup_version: int) -> None:
    """Mount sysfs of this network namespace, and the hierarchies as this cgroup namespace sees them."""
    subprocess.run(["umount", "--recursive", "--lazy", "/sys"], check=False)
    _mount("-t", "sysfs", "sysfs", "/sys")
    if cgroup_version == 2:
        _mount("-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
        _leave_cgroup_root("/sys/fs/cgroup")
        return
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/sys/fs/cgroup")
    with open("/proc/self/cgroup") as file:
        hierarchies = [line.split(":")[1] for line in file]
    for controllers in hierarchies:
        directory = f"/sys/fs/cgroup/{controllers.removeprefix('name=') or 'unified'}"
        os.mkdir(directory)
        if controllers:
            _mount("-t", "cgroup", "-o", controllers, "cgroup", directory)
        else:
            _mount("-t", "cgroup2", "cgroup2", directory)


def _leave_cgroup_root(root: str) -> None:
    """Move to a leaf, so that controllers can be given to the containers' cgroups (no internal processes)."""
    leaf = os.path.join(root, "init")
    os.mkdir(leaf)
    with open(os.path.join(leaf, "cgroup.procs"), "w") as file:
        file.write("0")
    with open(os.path.join(root, "cgroup.controllers")) as file:
        controllers = file.read().split()
    for controller in controllers:
        with contextlib.suppress(OSError), open(os.path.join(root, "cgroup.subtree_control"), "w") as file:
            file.write(f"+{controller}")


def _reap_until_stdin_closes() -> None:
    while True:
        readable, _, _ = select.select([0], [], [], 0.2)
        if readable and not os.read(0, 4096):
            return
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def state(directories: Sequence[str]) -> dict[str, list[str]]:
    """Processes, mounts, network namespaces, links, nft rules, cgroups, and the files below `directories`."""
    processes: list[str] = []
    netns: dict[str, str] = {}
    mine = {os.getpid(), os.getppid()}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            netns.setdefault(os.readlink(f"/proc/{pid}/ns/net"), f"/proc/{pid}/ns/net")
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            if words and int(pid) not in mine and words.split()[0] not in ("sleep", "mv"):
                processes.append(words)
    with open("/proc/self/mountinfo") as file:
        mounts = [f"{line.split()[4]} {line.split(' - ')[1].split()[0]}" for line in file]
    inside = [["nsenter", f"--net={path}"] for path in netns.values()]
    return {
        "processes": processes,
        "mounts": mounts,
        "network namespaces": list(netns),
        "links": _links(inside),
        "nft rules": [line for enter in inside for line in _lines([*enter, "nft", "list", "ruleset"])],
        "cgroups": [directory for directory, _, _ in os.walk("/sys/fs/cgroup")],
        "files": [os.path.join(d, f) for top in directories for d, _, files in os.walk(top) for f in files],
    }


def _links(inside: Sequence[Sequence[str]]) -> list[str]:
    lines = [line for enter in inside for line in _lines([*enter, "ip", "-o", "link"])]
    return [line.split(":")[1].strip().split("@")[0] for line in lines]


def _lines(argv: Sequence[str]) -> list[str]:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.splitlines()


if __name__ == "__main__":
    if sys.argv[1] == "join":
        join(sys.argv[2:])
    elif sys.argv[1] == "state":
        print(json.dumps(state(sys.argv[2:])))
    else:
        init(json.loads(sys.argv[2]))
