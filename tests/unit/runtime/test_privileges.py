"""What the processes of a hostile dump may do: never more than the target's own spec says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime import privileges
from runtime.errors import IncompatibleError, RestoreError
from tests.unit.runtime.test_images import image, number, varint

CORE = 0x55053847
CHOWN, SYS_ADMIN, BPF = 0, 21, 39


def core(field: int, capabilities: int, no_new_privs: bool = False) -> bytes:
    creds = b"".join(number(field, capabilities >> shift & 0xFFFFFFFF) for shift in (0, 32))
    creds += number(18, int(no_new_privs))
    thread = varint(10 << 3 | 2) + varint(len(creds)) + creds
    return number(1, 1) + varint(5 << 3 | 2) + varint(len(thread)) + thread


def spec(*capabilities: str, **process: Any) -> dict[str, Any]:
    return {"process": {"capabilities": {"bounding": list(capabilities)}, **process}}


def write(directory: Path, *messages: bytes) -> Path:
    for pid, message in enumerate(messages, 1):
        (directory / f"core-{pid}.img").write_bytes(image(message, magic=CORE))
    return directory


def test_what_the_spec_allows_passes(tmp_path: Path) -> None:
    write(tmp_path, core(10, 1 << CHOWN), core(11, 0))
    privileges.check(tmp_path, spec("CAP_CHOWN"))
    privileges.check(tmp_path, {})


@pytest.mark.parametrize("field", [9, 10, 11, 12, 19])
@pytest.mark.parametrize(("bit", "name"), [(SYS_ADMIN, "CAP_SYS_ADMIN"), (BPF, "CAP_BPF"), (60, "0x1000")])
def test_a_capability_outside_the_bounding_set_is_refused(
    tmp_path: Path, field: int, bit: int, name: str
) -> None:
    write(tmp_path, core(10, 1 << CHOWN), core(field, 1 << CHOWN | 1 << bit))
    with pytest.raises(IncompatibleError, match=name):
        privileges.check(tmp_path, spec("CAP_CHOWN"))


def test_no_new_privileges_is_kept(tmp_path: Path) -> None:
    write(tmp_path, core(10, 0, no_new_privs=True))
    privileges.check(tmp_path, spec(noNewPrivileges=True))
    write(tmp_path, core(10, 0))
    with pytest.raises(IncompatibleError, match="gain privileges"):
        privileges.check(tmp_path, spec(noNewPrivileges=True))


def test_credentials_in_another_shape_are_refused(tmp_path: Path) -> None:
    good = core(10, 1 << CHOWN)
    packed = varint(10 << 3 | 2) + varint(2) + b"\x00\x01"
    thread = varint(10 << 3 | 2) + varint(len(packed)) + packed
    for message in (
        number(1, 1) + varint(5 << 3 | 2) + varint(0),
        good + good[2:],
        number(1, 1) + varint(5 << 3 | 2) + varint(len(thread)) + thread,
    ):
        write(tmp_path, message)
        with pytest.raises(RestoreError):
            privileges.check(tmp_path, spec("CAP_CHOWN"))
    write(tmp_path, good)
    (tmp_path / "creds-1.img").write_bytes(b"")
    with pytest.raises(RestoreError):
        privileges.check(tmp_path, spec("CAP_CHOWN"))
