"""The OCI runtime spec of a container that `cedana restore` makes: this node's own, never the artifact's.

The spec inside an artifact is a claim by whoever wrote the artifact. What gives no power over the node is
taken over from it, checked (arguments, environment, user, host name, limits, the places of ordinary
mounts); what does (capabilities, devices, bind mounts, the host's namespaces, unmasked kernel files) is
granted only if named with `--allow`; everything else (hooks, annotations, security profiles, paths of the
other node) does not exist here. The defaults are those of containerd's own client, `ctr run`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from agent.errors import NotAllowedError
from base.annotations import ENV_MARKER
from base.errors import UsageError
from oci.errors import ArtifactError
from runtime.errors import IncompatibleError

Json = dict[str, Any]

ALLOWABLE = (
    "mounts",
    "capabilities",
    "devices",
    "host-network",
    "host-pid",
    "host-ipc",
    "host-uts",
    "privileged",
)
"""What `--allow` can name; "all" is all of them."""

DEFAULT_CAPABILITIES = frozenset(
    {
        "CAP_CHOWN",
        "CAP_DAC_OVERRIDE",
        "CAP_FSETID",
        "CAP_FOWNER",
        "CAP_MKNOD",
        "CAP_NET_RAW",
        "CAP_SETGID",
        "CAP_SETUID",
        "CAP_SETFCAP",
        "CAP_SETPCAP",
        "CAP_NET_BIND_SERVICE",
        "CAP_SYS_CHROOT",
        "CAP_KILL",
        "CAP_AUDIT_WRITE",
    }
)
MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
)
READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_DEFAULT_DEVICES = (
    ("c", 1, 3),  # null
    ("c", 1, 5),  # zero
    ("c", 1, 7),  # full
    ("c", 1, 8),  # random
    ("c", 1, 9),  # urandom
    ("c", 5, 0),  # tty
    ("c", 5, 1),  # console
    ("c", 5, 2),  # ptmx
    ("c", 136, None),  # pts
)
_DEFAULT_DEVICE_PATH = re.compile(r"/dev/(null|zero|full|random|urandom|tty|console|ptmx)")
_PLACES = {
    "proc": frozenset({"/proc"}),
    "sysfs": frozenset({"/sys"}),
    "devpts": frozenset({"/dev/pts"}),
    "mqueue": frozenset({"/dev/mqueue"}),
    "cgroup": frozenset({"/sys/fs/cgroup"}),
    "cgroup2": frozenset({"/sys/fs/cgroup"}),
}
"""Where a file system of the kernel's own may be mounted; a tmpfs may be anywhere below the root."""
_READ_ONLY_TYPES = frozenset({"sysfs", "cgroup", "cgroup2"})
_MOUNT_OPTION = re.compile(
    r"r[ow]|(no)?(suid|dev|exec|atime|diratime|strictatime|relatime)|sync|async|dirsync|r?private"
    r"|newinstance|(ptmx)?mode=[0-7]{1,5}|[ug]id=\d{1,10}"
    r"|(size|nr_inodes|nr_blocks)=\d{1,15}[kmgKMG%]?"
)
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?")
_CAPABILITY = re.compile(r"CAP_[A-Z_]{1,40}")
_SYSCTL = re.compile(
    r"net\.[A-Za-z0-9_./-]{1,128}|kernel\.(msgmax|msgmnb|msgmni|sem|shmall|shmmax|shmmni|shm_rmid_forced)"
    r"|fs\.mqueue\.[a-z_]{1,64}"
)
_MAX_STRINGS = 65536
_MAX_STRING_BYTES = 2 << 20
_MAX_MOUNTS = 1024
_MAX_REASONS = 5
_MAX_ID = (1 << 32) - 2
_DEVICE_NUMBERS = (("major", 4095), ("minor", (1 << 20) - 1), ("uid", _MAX_ID), ("gid", _MAX_ID))
_SHAREABLE = {"network": "host-network", "pid": "host-pid", "ipc": "host-ipc", "uts": "host-uts"}


def parse_allow(names: Iterable[str]) -> frozenset[str]:
    """What `--allow` names (each value may be a comma-separated list); raises `UsageError`."""
    allowed = {part for name in names for part in name.split(",") if part}
    if unknown := sorted(allowed - {*ALLOWABLE, "all"}):
        raise UsageError(
            f"--allow {unknown[0]}: nothing of that name can be allowed",
            hint=f"one of: {', '.join(ALLOWABLE)}, all",
        )
    return frozenset(ALLOWABLE) if "all" in allowed else frozenset(allowed)


def target_spec(
    claimed: Mapping[str, Any],
    *,
    namespace: str,
    container_id: str,
    files: Mapping[str, Path],
    allow: frozenset[str] = frozenset(),
) -> Json:
    """The spec to restore with, from the one the artifact claims the container had.

    `files` are this node's own files by the places that engines mount such files on. Raises
    `NotAllowedError` listing all that would have to be allowed, `IncompatibleError` for what no option
    allows, `ArtifactError` if the claimed spec is malformed.
    """
    builder = _Builder(_object(claimed, "spec"), allow)
    process = builder.process()
    mounts = builder.mounts(files)
    linux = builder.linux(f"/{namespace}/{container_id}")
    root = _optional_object(claimed, "root", "spec")
    spec: Json = {
        "ociVersion": "1.1.0",
        "process": process,
        "root": {"path": "rootfs", "readonly": _boolean(root, "readonly", "root")},
        "mounts": mounts,
        "linux": linux,
        "annotations": {},
        **builder.names(),
    }
    builder.refuse()
    return spec


@dataclass
class _Builder:
    claimed: Mapping[str, Any]
    allow: frozenset[str]
    wanted: dict[str, list[str]] = field(default_factory=dict)
    """What `--allow` would have to name → what it is wanted for."""

    def ask(self, what: str, reason: str) -> bool:
        """Whether `what` is allowed; if not, it is remembered for `refuse`."""
        if what in self.allow:
            return True
        self.wanted.setdefault(what, []).append(reason)
        return False

    def refuse(self) -> None:
        if not self.wanted:
            return
        raise NotAllowedError(
            "the checkpoint asks for more than a container gets here unless it is allowed",
            hint="if you trust its origin: " + " ".join(f"--allow {what}" for what in self.wanted),
            details="; ".join(_some(reasons) for reasons in self.wanted.values()),
        )

    def process(self) -> Json:
        process = _object(self.claimed.get("process"), "process")
        user = _optional_object(process, "user", "process")
        kept: Json = {
            "terminal": _boolean(process, "terminal", "process"),
            "user": {
                "uid": _integer(user, "uid", 0, _MAX_ID, "user"),
                "gid": _integer(user, "gid", 0, _MAX_ID, "user"),
                "additionalGids": [
                    _checked_integer(gid, 0, _MAX_ID, "user.additionalGids")
                    for gid in _list(user, "additionalGids", "user")
                ],
            },
            "args": _strings(process, "args", "process"),
            "env": [
                variable
                for variable in _strings(process, "env", "process")
                if "=" in variable and not variable.startswith(f"{ENV_MARKER}=")
            ],
            "cwd": _absolute(process.get("cwd", "/"), "process.cwd"),
            "capabilities": self._capabilities(process),
            "noNewPrivileges": _boolean(process, "noNewPrivileges", "process"),
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 1024}],
        }
        if not kept["args"]:
            _malformed("process.args is empty")
        if "umask" in user:
            kept["user"]["umask"] = _integer(user, "umask", 0, 0o777, "user")
        if "oomScoreAdj" in process:
            # Below zero would shield the container from the kernel's choice of whom to kill.
            kept["oomScoreAdj"] = max(0, _integer(process, "oomScoreAdj", -1000, 1000, "process"))
        return kept

    def _capabilities(self, process: Mapping[str, Any]) -> Json:
        claimed = _optional_object(process, "capabilities", "process")
        sets: Json = {}
        for name in ("bounding", "effective", "inheritable", "permitted", "ambient"):
            capabilities = _strings(claimed, name, "capabilities")
            for capability in capabilities:
                if not _CAPABILITY.fullmatch(capability):
                    _malformed(f"{capability!r} is not a capability")
            sets[name] = list(dict.fromkeys(capabilities))
        extra = sorted({c for capabilities in sets.values() for c in capabilities} - DEFAULT_CAPABILITIES)
        for capability in extra:
            self.ask("capabilities", f"capability {capability}")
        return sets

    def mounts(self, files: Mapping[str, Path]) -> list[Json]:
        claimed = _list(self.claimed, "mounts", "spec")
        if len(claimed) > _MAX_MOUNTS:
            _malformed(f"{len(claimed)} mounts")
        mounts = [self._mount(_object(mount, "mount"), files) for mount in claimed]
        if not any(mount["destination"] == "/proc" for mount in mounts):
            _malformed("there is no /proc")
        return mounts

    def _mount(self, claimed: Mapping[str, Any], files: Mapping[str, Path]) -> Json:
        place = _absolute(claimed.get("destination"), "mount.destination")
        if place == "/":
            _malformed("a mount covers the root")
        kind = _string(claimed, "type", "mount")
        source = _string(claimed, "source", "mount")
        options = _strings(claimed, "options", "mount")
        bind = kind == "bind" or {"bind", "rbind"} & set(options)
        if bind and place in files:
            read_only = ["ro"] if "ro" in options else []
            return _mount_json(place, "bind", str(files[place]), ["bind", "rprivate", *read_only])
        if bind:
            self.ask("mounts", f"bind mount of {source!r} on {place}")
            return _mount_json(place, "bind", _absolute(source or "/", "mount.source"), options)
        if kind == "tmpfs" or place in _PLACES.get(kind, ()):
            return _mount_json(place, kind, kind, self._mount_options(place, kind, options))
        self.ask("mounts", f"{kind or 'unnamed'} file system {source!r} on {place}")
        return _mount_json(place, kind, source, options)

    def _mount_options(self, place: str, kind: str, options: Sequence[str]) -> list[str]:
        known = [option for option in options if _MOUNT_OPTION.fullmatch(option)]
        if shared := [o for o in options if o in {"shared", "rshared", "slave", "rslave"}]:
            self.ask("mounts", f"{shared[0]} propagation of {place}")
        if kind in _READ_ONLY_TYPES and "ro" not in known:
            if self.ask("privileged", f"writable {kind} on {place}"):
                return known
            return ["ro", *(o for o in known if o != "rw")]
        return known

    def linux(self, cgroups_path: str) -> Json:
        claimed = _optional_object(self.claimed, "linux", "spec")
        masked = _strings(claimed, "maskedPaths", "linux")
        read_only = _strings(claimed, "readonlyPaths", "linux")
        open_kernel = not masked and not read_only and self.ask("privileged", "unmasked kernel files")
        linux: Json = {
            "cgroupsPath": cgroups_path,
            "namespaces": self._namespaces(claimed),
            "maskedPaths": [] if open_kernel else list(MASKED_PATHS),
            "readonlyPaths": [] if open_kernel else list(READONLY_PATHS),
            "resources": self._resources(claimed),
            "sysctl": self._sysctl(claimed),
        }
        if devices := self._devices(claimed):
            linux["devices"] = devices
        return linux

    def _namespaces(self, claimed: Mapping[str, Any]) -> list[Json]:
        has: dict[str, str] = {}
        for entry in _list(claimed, "namespaces", "linux"):
            namespace = _object(entry, "namespace")
            has[_string(namespace, "type", "namespace")] = _string(namespace, "path", "namespace")
        if "mount" not in has:
            _malformed("the container has no mount namespace")
        if "user" in has:
            raise IncompatibleError(
                "the checkpointed container had a user namespace, which cannot be restored yet",
                hint="run it without (nerdctl: no --userns) before the checkpoint",
            )
        own = ["mount"]
        for name, allowance in _SHAREABLE.items():
            if name not in has:
                if not self.ask(allowance, f"the host's {name} namespace"):
                    own.append(name)
                continue
            if has[name] and name != "network":
                raise IncompatibleError(
                    f"the checkpointed container shared the {name} namespace of another container",
                    hint="checkpoint a container that has its own",
                )
            own.append(name)
        own += [name for name in ("cgroup", "time") if name in has]
        return [{"type": name} for name in own]

    def _devices(self, claimed: Mapping[str, Any]) -> list[Json]:
        devices = []
        for entry in _list(claimed, "devices", "linux"):
            device = _object(entry, "device")
            path = _absolute(device.get("path"), "device.path")
            if _DEFAULT_DEVICE_PATH.fullmatch(path):
                continue
            self.ask("devices", f"device {path}")
            kept: Json = {"path": path, "type": _string(device, "type", "device")}
            if kept["type"] not in {"c", "b", "u", "p"}:
                _malformed(f"{path} is a device of type {kept['type']!r}")
            for name, largest in _DEVICE_NUMBERS:
                kept[name] = _integer(device, name, 0, largest, "device")
            if "fileMode" in device:
                kept["fileMode"] = _integer(device, "fileMode", 0, 0o777, "device")
            devices.append(kept)
        return devices

    def _resources(self, claimed: Mapping[str, Any]) -> Json:
        resources = _optional_object(claimed, "resources", "linux")
        kept: Json = {"devices": self._device_rules(resources)}
        for group, names in (
            ("memory", ("limit", "swap", "reservation")),
            ("cpu", ("shares", "quota", "period")),
            ("pids", ("limit",)),
        ):
            limits = _optional_object(resources, group, "resources")
            values = {
                name: _integer(limits, name, -1, 1 << 62, group)
                for name in names
                if limits.get(name) is not None
            }
            if values:
                kept[group] = values
        return kept

    def _device_rules(self, resources: Mapping[str, Any]) -> list[Json]:
        rules: list[Json] = [{"allow": False, "access": "rwm"}]
        rules += [_device_rule(kind, major, minor, "rwm") for kind, major, minor in _DEFAULT_DEVICES]
        for entry in _list(resources, "devices", "resources"):
            claimed = _object(entry, "device rule")
            if not _boolean(claimed, "allow", "device rule"):
                continue
            kind = _string(claimed, "type", "device rule") or "a"
            access = _string(claimed, "access", "device rule") or "rwm"
            major, minor = _device_number(claimed, "major"), _device_number(claimed, "minor")
            if kind not in {"a", "b", "c", "u"} or not set(access) <= set("rwm"):
                _malformed(f"a device rule for type {kind!r} with access {access!r}")
            ordinary = (kind, major, minor) in _DEFAULT_DEVICES or (kind, major) == ("c", 136)
            if ordinary or set(access) == {"m"}:
                continue
            shown = ":".join("*" if number is None else str(number) for number in (major, minor))
            self.ask("devices", f"access {access} to device {kind} {shown}")
            rules.append(_device_rule(kind, major, minor, access))
        return rules

    def _sysctl(self, claimed: Mapping[str, Any]) -> dict[str, str]:
        kept = {}
        for name, value in _optional_object(claimed, "sysctl", "linux").items():
            if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
                _malformed("a sysctl has a value that is not text")
            networked = name.startswith("net.")
            has_namespace = any(
                isinstance(n, dict) and n.get("type") == ("network" if networked else "ipc")
                for n in _list(claimed, "namespaces", "linux")
            )
            if _SYSCTL.fullmatch(name) and ".." not in name and has_namespace:
                kept[name] = value
        return kept

    def names(self) -> Json:
        kept = {}
        for name in ("hostname", "domainname"):
            value = _string(self.claimed, name, "spec")
            if not value:
                continue
            if not _HOST_NAME.fullmatch(value):
                _malformed(f"{value[:80]!r} is not a {name}")
            kept[name] = value
        return kept


def _some(reasons: Sequence[str]) -> str:
    more = f" and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
    return f"{', '.join(reasons[:_MAX_REASONS])}{more}"


def _mount_json(place: str, kind: str, source: str, options: Sequence[str]) -> Json:
    return {"destination": place, "type": kind, "source": source, "options": list(options)}


def _device_rule(kind: str, major: int | None, minor: int | None, access: str) -> Json:
    numbers = {"major": major, "minor": minor}
    given = {name: number for name, number in numbers.items() if number is not None}
    return {"allow": True, "type": kind, **given, "access": access}


def _device_number(rule: Mapping[str, Any], name: str) -> int | None:
    """The number a device rule names; None if it is for all (absent, or -1)."""
    number = _checked_integer(
        -1 if rule.get(name) is None else rule[name], -1, 1 << 20, f"device rule.{name}"
    )
    return None if number < 0 else number


def _malformed(what: str) -> NoReturn:
    raise ArtifactError(
        "the container spec in the checkpoint is malformed",
        hint="take the checkpoint again; do not trust this one",
        details=what,
    )


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        _malformed(f"{where} is not an object")
    return value


def _optional_object(parent: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = parent.get(name)
    return {} if value is None else _object(value, f"{where}.{name}")


def _list(parent: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = parent.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MAX_STRINGS:
        _malformed(f"{where}.{name} is not a list")
    return value


def _strings(parent: Mapping[str, Any], name: str, where: str) -> list[str]:
    values = _list(parent, name, where)
    if not all(isinstance(value, str) and "\0" not in value for value in values):
        _malformed(f"{where}.{name} holds something that is not text")
    if sum(map(len, values)) > _MAX_STRING_BYTES:
        _malformed(f"{where}.{name} is too long")
    return list(values)


def _string(parent: Mapping[str, Any], name: str, where: str) -> str:
    value = parent.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value or len(value) > 4096:
        _malformed(f"{where}.{name} is not text")
    return value


def _absolute(value: object, where: str) -> str:
    """An absolute path in its shortest form; one that climbs out of its place is refused."""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or len(value) > 4096:
        _malformed(f"{where} is not an absolute path")
    if ".." in value.split("/"):
        _malformed(f"{where} holds '..'")
    return posixpath.normpath("/" + value.lstrip("/"))


def _boolean(parent: Mapping[str, Any], name: str, where: str) -> bool:
    value = parent.get(name, False)
    if not isinstance(value, bool):
        _malformed(f"{where}.{name} is not a truth value")
    return value


def _integer(parent: Mapping[str, Any], name: str, least: int, largest: int, where: str) -> int:
    return _checked_integer(parent.get(name, 0), least, largest, f"{where}.{name}")


def _checked_integer(value: object, least: int, largest: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
        _malformed(f"{where} is not a number from {least} to {largest}")
    return value
