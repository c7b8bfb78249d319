"""System calls that Python's standard library lacks, in one place, through ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.mmap.restype = _libc.sbrk.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_python = ctypes.PyDLL(None, use_errno=True)
"""Calls with the interpreter's lock held."""
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
# The same numbers on every architecture (linux, include/uapi/asm-generic/unistd.h).
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_OPENAT2 = 437
_SYS_PIDFD_GETFD = 438
_SYS_MOUNT_SETATTR = 442

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36
_MADV_MERGEABLE = 12

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_SYNCHRONOUS = 0x10
MS_REMOUNT = 0x20
MS_MANDLOCK = 0x40
MS_DIRSYNC = 0x80
MS_NOATIME = 0x400
MS_NODIRATIME = 0x800
MS_BIND = 0x1000
MS_REC = 0x4000
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MS_STRICTATIME = 1 << 24
MNT_FORCE = 1
MNT_DETACH = 2

IN_MODIFY = 0x2
IN_DELETE_SELF = 0x400

_RESOLVE = 0x01 | 0x02 | 0x04 | 0x08
"""RESOLVE_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH (linux/openat2.h)."""

MOUNT_ATTR_RDONLY = 0x1
_MOUNT_ATTR_IDMAP = 0x100000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 4
_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_CLONE_NEWUSER = 0x10000000


class _MountAttr(ctypes.Structure):
    """struct mount_attr (linux, include/uapi/linux/mount.h)."""

    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """A duplicate of descriptor `fd` of the process `pidfd` (pidfd_getfd(2)); raises `OSError`."""
    return _check(_libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0), "pidfd_getfd")


def open_beneath(root: int, path: str, flags: int) -> int:
    """openat2(2) of `path` beneath `root`: no symbolic link on the way, no other mount, no way out."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE)
    return _check(_libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how)), path)


def set_child_subreaper() -> None:
    """Make this process the parent of every orphan below it (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def set_parent_death_signal(signal: int) -> None:
    """Ask for `signal` when the parent thread ends (prctl(2), PR_SET_PDEATHSIG)."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, int(signal), 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def set_name(name: str) -> None:
    """Set what `ps -o comm` shows of this process; cut to 15 bytes by the kernel."""
    _check(_libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0), "prctl PR_SET_NAME")


def merge_memory() -> None:
    """Let ksmd share what this process holds in memory now, and its forks have of it (MADV_MERGEABLE).

    Nothing happens where the node does not run ksmd (/sys/kernel/mm/ksm/run), or the kernel has none. Not
    prctl(2)'s PR_SET_MEMORY_MERGE: that passes to what is executed, and a container must not share its memory
    because we did.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and name != ["[stack]"]:
            start, end = (int(address, 16) for address in span.split("-"))
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_MERGEABLE)


class _MemoryMap(ctypes.Structure):
    """struct prctl_mm_map (linux, include/uapi/linux/prctl.h)."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
            "arg_start", "arg_end", "env_start", "env_end", "auxv",
        )),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )  # fmt: skip


def set_command_line(argv: Sequence[str]) -> None:
    """Set what /proc/PID/cmdline shows of this process (prctl(2), PR_SET_MM_MAP)."""
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)
    address = _libc.mmap(None, len(text), 0x3, 0x22, -1, 0)  # read and write; private, anonymous; for good
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap failed")
    ctypes.memmove(address, text, len(text))
    fields = [int(word) for word in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:]]
    # Numbers of proc_pid_stat(5); `fields` begins with the fourth.
    start_code, end_code, start_stack, start_data, end_data, start_brk = (
        fields[n - 4] for n in (26, 27, 28, 45, 46, 47)
    )
    whole = _MemoryMap(
        start_code=start_code, end_code=end_code, start_data=start_data, end_data=end_data,
        start_brk=start_brk, brk=_libc.sbrk(0), start_stack=start_stack,
        arg_start=address, arg_end=address + len(text), env_start=fields[50 - 4], env_end=fields[51 - 4],
        exe_fd=0xFFFFFFFF,
    )  # fmt: skip
    size = ctypes.c_ulong(ctypes.sizeof(whole))
    _check(_libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(whole), size, 0), "prctl PR_SET_MM_MAP")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2); raises `OSError` naming the target."""
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        os.fsencode(kind) or None,
        ctypes.c_ulong(flags),
        os.fsencode(data) or None,
    )
    _check(result, f"mount {source} on {target}")


def unmount(target: str, flags: int = 0) -> None:
    """umount2(2); raises `OSError` naming the target."""
    _check(_libc.umount2(os.fsencode(target), flags), f"unmount {target}")


def inotify(path: str, mask: int) -> int:
    """A nonblocking inotify descriptor that watches `path` for `mask`."""
    fd = _check(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), "inotify_init1")
    try:
        _check(_libc.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(mask)), f"watch {path}")
    except OSError:
        os.close(fd)
        raise
    return fd


def mount_idmapped(source: str, target: str, userns: int, attributes: int = 0) -> None:
    """Mount a copy of the tree at `source` on `target`, its ids mapped as in `userns` (mount_setattr(2))."""
    tree = _check(
        _libc.syscall(
            _SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
        ),
        f"open_tree {source}",
    )
    try:
        attr = _MountAttr(attr_set=_MOUNT_ATTR_IDMAP | attributes, userns_fd=userns)
        result = _libc.syscall(
            _SYS_MOUNT_SETATTR,
            tree,
            b"",
            _AT_EMPTY_PATH | _AT_RECURSIVE,
            ctypes.byref(attr),
            ctypes.c_size_t(ctypes.sizeof(attr)),
        )
        _check(result, f"mount_setattr {source}")
        result = _libc.syscall(
            _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH
        )
        _check(result, f"move_mount {target}")
    finally:
        os.close(tree)


def user_namespace(uid_map: str, gid_map: str) -> int:
    """A descriptor of a new user namespace with these maps (user_namespaces(7)) and no process in it."""
    release, parent_done = os.pipe()
    # Not os.fork: handlers that libraries have registered may start threads, and ours may be in any state.
    flags = _CLONE_NEWUSER | signal.SIGCHLD
    pid = _python.syscall(_SYS_CLONE[platform.machine()], *map(ctypes.c_ulong, (flags, 0, 0, 0, 0)))
    if pid == 0:  # only system calls here
        os.close(parent_done)
        os.read(release, 1)
        os._exit(0)
    os.close(release)
    try:
        if pid < 0:
            raise OSError(ctypes.get_errno(), "the kernel refused a new user namespace")
        for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(text)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(parent_done)
        if pid > 0:
            os.waitpid(pid, 0)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def process_vm_readv(pid: int, address: int, into: bytearray | memoryview) -> int:
    """Read memory of process `pid` from `address` on (process_vm_readv(2)); returns how many bytes."""
    buffer = (ctypes.c_char * len(into)).from_buffer(into)
    local = _IoVec(ctypes.addressof(buffer), len(into))
    remote = _IoVec(address, len(into))
    read = _libc.process_vm_readv(
        ctypes.c_int(pid), ctypes.byref(local), 1, ctypes.byref(remote), 1, ctypes.c_ulong(0)
    )
    return _check(read, "process_vm_readv")


def _check(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


class _BpfProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(ctypes.c_char)))


def bpf_program(instructions: Sequence[tuple[int, int, int, int]]) -> ctypes.Structure:
    """A `struct sock_fprog` of (code, jump if true, jump if false, constant) (linux/filter.h)."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    program = _BpfProgram(len(instructions))
    program.instructions = ctypes.cast(
        ctypes.create_string_buffer(code, len(code)), ctypes.POINTER(ctypes.c_char)
    )
    return program


def seccomp_listener(program: ctypes.Structure) -> int:
    """Filter this process with `program`; returns the descriptor that is notified (seccomp(2))."""
    number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    set_mode_filter, new_listener = 1, 1 << 3
    return _check(_libc.syscall(number, set_mode_filter, new_listener, ctypes.byref(program)), "seccomp")
