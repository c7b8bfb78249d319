"""Mounting a root filesystem: the options' meaning, and the real thing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime import syscalls
from runtime.container import Mount
from shim import mounts
from shim.errors import TaskError


@pytest.fixture
def rootfs(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "rootfs"
    made.mkdir()
    yield made
    mounts.unmount_recursive(made)


def _overlay(base: Path, layers: int, *options: str) -> Mount:
    for name in ("upper", "work"):
        (base / name).mkdir(parents=True)
    lower = []
    for number in range(layers):
        layer = base / "snapshots" / f"{number:040}" / "fs"
        layer.mkdir(parents=True)
        (layer / f"file{number}").touch()
        lower.append(str(layer))
    data = (f"lowerdir={':'.join(lower)}", f"upperdir={base / 'upper'}", f"workdir={base / 'work'}")
    return Mount("overlay", "overlay", options=(*data, *options))


def test_an_overlay_is_mounted_and_unmounted(tmp_path: Path, rootfs: Path) -> None:
    mounts.mount_all([_overlay(tmp_path / "o", 2)], rootfs)
    assert sorted(os.listdir(rootfs)) == ["file0", "file1"]
    mounts.unmount_recursive(rootfs)
    assert os.listdir(rootfs) == []


def test_more_layers_than_fit_in_a_page(tmp_path: Path, rootfs: Path) -> None:
    before = os.getcwd()
    mounts.mount_all([_overlay(tmp_path / "o", 60)], rootfs)
    assert len(os.listdir(rootfs)) == 60
    assert os.getcwd() == before


def test_a_bind_is_read_only_when_it_should_be(tmp_path: Path, rootfs: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    mounts.mount_all([Mount("bind", str(source), options=("rbind", "ro"))], rootfs)
    with pytest.raises(OSError, match="Read-only"):
        (rootfs / "x").touch()


def test_ids_are_mapped(tmp_path: Path, rootfs: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").touch()
    mapping = ("uidmap=0:100000:65536", "gidmap=0:100000:65536")
    mounts.mount_all([Mount("bind", str(source), options=("rbind", "rw", *mapping))], rootfs)
    assert (rootfs / "file").stat().st_uid == 100000


def test_an_overlays_layers_are_mapped(tmp_path: Path, rootfs: Path) -> None:
    mapping = ("uidmap=0:100000:65536", "gidmap=0:100000:65536")
    mounts.mount_all([_overlay(tmp_path / "o", 2, *mapping)], rootfs)
    assert (rootfs / "file1").stat().st_uid == 100000
    assert not list(Path("/tmp").glob("ovl-idmapped*"))


def test_a_second_mount_that_fails_takes_the_first_with_it(tmp_path: Path, rootfs: Path) -> None:
    good = _overlay(tmp_path / "o", 1)
    with pytest.raises(TaskError, match="failed to mount rootfs component"):
        mounts.mount_all([good, Mount("nofs", "none")], rootfs)
    assert os.listdir(rootfs) == []


def test_a_target_stays_inside(rootfs: Path) -> None:
    with pytest.raises(TaskError, match="leaves the root filesystem"):
        mounts.mount_all([Mount("tmpfs", "tmpfs", target="../../etc")], rootfs)


@pytest.mark.parametrize(
    ("words", "flags", "data"),
    [
        (("ro", "nosuid", "size=1m"), syscalls.MS_RDONLY | syscalls.MS_NOSUID, ("size=1m",)),
        (("ro", "rw"), 0, ()),
        (("rbind", "defaults"), syscalls.MS_BIND | syscalls.MS_REC, ()),
        (("noatime", "atime", "index=off"), 0, ("index=off",)),
    ],
)
def test_options_become_flags_and_data(words: tuple[str, ...], flags: int, data: tuple[str, ...]) -> None:
    parsed = mounts._parse(words)
    assert (parsed.flags, parsed.data) == (flags, data)


@pytest.mark.parametrize("word", ["loop", "X-containerd.mkfs"])
def test_options_we_cannot_do_are_refused(word: str) -> None:
    with pytest.raises(TaskError, match="not supported"):
        mounts._parse((word,))


def test_propagation_is_set_apart() -> None:
    parsed = mounts._parse(("rbind", "rprivate"))
    assert parsed.propagation == syscalls.MS_PRIVATE | syscalls.MS_REC
