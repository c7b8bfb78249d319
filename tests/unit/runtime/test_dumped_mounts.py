"""What a dump may ask CRIU to mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import mounts
from runtime.errors import RestoreError
from runtime.restore import _absent_mounts
from tests.unit.runtime.test_images import image, number, varint

MNTS = 0x55563928
PROC, TMPFS, AUTO, OVERLAY = 1, 5, 16, 17

SPEC = {
    "mounts": [
        {"destination": "/proc", "type": "proc"},
        {"destination": "/sys", "type": "sysfs", "options": ["nosuid", "ro"]},
    ],
    "linux": {},
}
COVERED = {
    **SPEC,
    "linux": {"readonlyPaths": ["/proc/sys", "/proc/none"], "maskedPaths": ["/proc/keys", "/proc/none"]},
}


def entry(point: str, kind: int, external: str = "", source: str = "x", flags: int = 0) -> bytes:
    texts = {6: "/", 7: point, 8: source, 9: "", 18: external}
    fields = b"".join(varint(k << 3 | 2) + varint(len(v)) + v.encode() for k, v in texts.items() if v)
    return number(1, kind) + number(2, 7) + number(5, flags) + fields


def write(directory: Path, *entries: bytes) -> Path:
    (directory / "mountpoints-12.img").write_bytes(image(*entries, magic=MNTS))
    return directory


def test_a_containers_own_file_systems_and_its_binds_are_fine(tmp_path: Path) -> None:
    write(
        tmp_path,
        entry("./", OVERLAY),
        entry("./proc", PROC),
        entry("./run", TMPFS),
        entry("./data", AUTO, external="/data"),
        entry("./proc/keys", TMPFS, external="/dev/null"),
    )
    assert mounts.check(tmp_path, SPEC) == {"/data", "/dev/null"}


@pytest.mark.parametrize("kind", [0, 3, 4, 7, 8, 9, 10, 11, 13, 15, AUTO, OVERLAY, 18, 19, 99])
def test_a_checkpoint_cannot_mount_what_is_the_hosts(tmp_path: Path, kind: int) -> None:
    write(tmp_path, entry("./", OVERLAY), entry("./host", kind, source="/dev/sda1"))
    with pytest.raises(RestoreError, match="/host"):
        mounts.check(tmp_path, SPEC)


def test_mounts_the_target_lacks_are_named() -> None:
    needed = {"/data", "/logs", "/dev/null", "/sys/fs/cgroup/cpu"}
    spec = {"mounts": [{"destination": "/data"}, {"destination": "/sys/fs/cgroup", "type": "cgroup"}]}
    assert _absent_mounts(needed, spec) == ["/logs"]
    assert _absent_mounts(needed, {"mounts": [{"destination": "/data"}]}) == ["/logs", "/sys/fs/cgroup/cpu"]


def test_what_the_spec_covers_must_be_covered(tmp_path: Path) -> None:
    proc, keys = entry("./proc", PROC), entry("./proc/keys", TMPFS, external="/dev/null")
    write(tmp_path, proc, keys, entry("./proc/sys", PROC, flags=1))
    mounts.check(tmp_path, COVERED)
    for wrong, what in (
        ([proc, keys], "/proc/sys writable"),
        ([proc, keys, entry("./proc/sys", PROC)], "/proc/sys"),
        ([proc, entry("./proc/sys", PROC, flags=1)], "/proc/keys visible"),
        ([proc, entry("./proc/sys", PROC, flags=1), entry("./proc/keys", PROC, flags=1)], "/proc/keys"),
    ):
        write(tmp_path, *wrong)
        with pytest.raises(RestoreError, match=what):
            mounts.check(tmp_path, COVERED)


@pytest.mark.parametrize(
    "extra",
    [
        entry("./mnt", PROC),
        entry("./mnt", PROC, flags=1),
        entry("./proc/acpi", PROC),
        entry("./proc", PROC),
        entry("./sys", 2),
        entry("./x/../proc", TMPFS),
        entry("./sys/fs/cgroup", 23),
    ],
)
def test_the_kernels_file_systems_are_only_where_the_spec_has_them(tmp_path: Path, extra: bytes) -> None:
    write(tmp_path, entry("./proc", PROC), extra)
    with pytest.raises(RestoreError):
        mounts.check(tmp_path, SPEC)
