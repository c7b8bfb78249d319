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


def entry(point: str, kind: int, external: str = "", source: str = "x") -> bytes:
    texts = {6: "/", 7: point, 8: source, 9: "", 18: external}
    fields = b"".join(varint(k << 3 | 2) + varint(len(v)) + v.encode() for k, v in texts.items() if v)
    return number(1, kind) + number(2, 7) + fields


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
    assert mounts.check(tmp_path) == {"/data", "/dev/null"}


@pytest.mark.parametrize("kind", [0, 3, 4, 7, 8, 9, 10, 11, 13, 15, AUTO, OVERLAY, 18, 19, 99])
def test_a_checkpoint_cannot_mount_what_is_the_hosts(tmp_path: Path, kind: int) -> None:
    write(tmp_path, entry("./", OVERLAY), entry("./host", kind, source="/dev/sda1"))
    with pytest.raises(RestoreError, match="/host"):
        mounts.check(tmp_path)


def test_mounts_the_target_lacks_are_named() -> None:
    needed = {"/data", "/logs", "/dev/null", "/sys/fs/cgroup/cpu"}
    spec = {"mounts": [{"destination": "/data"}, {"destination": "/sys/fs/cgroup", "type": "cgroup"}]}
    assert _absent_mounts(needed, spec) == ["/logs"]
    assert _absent_mounts(needed, {"mounts": [{"destination": "/data"}]}) == ["/logs", "/sys/fs/cgroup/cpu"]
