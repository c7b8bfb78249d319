"""What the processes of a dump may do, held against what the target's own spec allows.

CRIU gives every thread back the credentials its image names (criu, images/creds.proto); a hostile artifact
could name any. A thread may have no capability outside the spec's bounding set, and must have promised not to
gain privileges if the spec says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime import images
from runtime.errors import IncompatibleError, RestoreError

_CORE_MAGIC = 0x55053847
"""criu/include/magic.h, CORE_MAGIC."""
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
    "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
    "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
    "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
    "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
    "CHECKPOINT_RESTORE",
)  # fmt: skip
"""linux/capability.h, in the order of their numbers."""
_SETS = {9: "inheritable", 10: "permitted", 11: "effective", 12: "bounding", 19: "ambient"}
_NO_NEW_PRIVS = 18


def check(directory: Path, spec: Mapping[str, Any]) -> None:
    """Raise `IncompatibleError` if a thread of the dump in `directory` would have more than `spec` allows;
    `EngineError` on a malformed image."""
    process = spec.get("process") or {}
    capabilities = process.get("capabilities")
    allowed = None if capabilities is None else _bits(capabilities.get("bounding") or ())
    if odd := sorted(directory.glob("creds-*.img")):
        raise _malformed(odd[0])  # of a CRIU older than any we work with, which would believe them
    for path in sorted(directory.glob("core-*.img")):
        for message in images.messages(path, _CORE_MAGIC):
            thread = _only(message, 5, path)
            if thread is None:
                continue  # a zombie has none
            creds = _only(thread, 10, path)
            if creds is None:
                raise _malformed(path)
            if allowed is not None:
                _check_capabilities(creds, allowed, path)
            if process.get("noNewPrivileges") and not images.number(creds, _NO_NEW_PRIVS):
                raise IncompatibleError(
                    "the checkpoint's processes may gain privileges, which this container's may not",
                    hint="create the container without no-new-privileges, as the original was",
                )


def _check_capabilities(creds: images.Fields, allowed: int, path: Path) -> None:
    for field, name in _SETS.items():
        words = [word for word in creds.get(field, []) if isinstance(word, int)]
        if len(words) != len(creds.get(field, [])) or len(words) > 2:
            raise _malformed(path)
        extra = sum(word << 32 * index for index, word in enumerate(words)) & ~allowed
        if extra:
            named = [c for number, c in enumerate(_CAPABILITIES) if extra >> number & 1]
            raise IncompatibleError(
                f"the checkpoint's processes have {name} capabilities that this container lacks:"
                f" {', '.join(f'CAP_{c}' for c in named) or hex(extra)}",
                hint="create the container with them, if you trust the checkpoint (--cap-add)",
            )


def _bits(names: Any) -> int:
    known = {f"CAP_{name}": 1 << number for number, name in enumerate(_CAPABILITIES)}
    return sum(known.get(name, 0) for name in set(names))


def _only(message: images.Fields, field: int, path: Path) -> images.Fields | None:
    """The one message in `field`; None if there is none. A second would be merged into the first."""
    values = message.get(field, [])
    if not values:
        return None
    if len(values) > 1 or not isinstance(values[0], bytes):
        raise _malformed(path)
    return images.parse(values[0])


def _malformed(path: Path) -> RestoreError:
    return RestoreError(f"the checkpoint's {path.name} is not as CRIU writes it", hint="do not trust it")
