"""A container's changes with real overlay mounts: what is read from one is, applied, the same in another."""

from __future__ import annotations

import ctypes
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from runtime.difference import difference
from runtime.errors import CheckpointError
from runtime.layer import apply
from runtime.rootfs import OverlayDirs, overlay_dirs
from tests.tree import snapshot


class Overlays:
    def __init__(self, base: Path, stack: ExitStack) -> None:
        self.base, self.stack = base, stack
        self.image = base / "image"
        for path in ("etc", "usr/lib/deep", "var/cache", "opt/app/conf"):
            (self.image / path).mkdir(parents=True)
        for number, path in enumerate(("etc/a", "etc/b", "usr/lib/deep/c", "var/cache/d", "opt/app/conf/e")):
            (self.image / path).write_text(f"of the image {number}" * 1000)

    def mount(self, name: str, *options: str, lower: str = "") -> OverlayDirs:
        upper, work, point = (self.base / name / part for part in ("upper", "work", "merged"))
        for path in (upper, work, point):
            path.mkdir(parents=True, exist_ok=True)
        data = ",".join([f"lowerdir={lower or self.image}", f"upperdir={upper}", f"workdir={work}", *options])
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"overlay", os.fsencode(point), b"overlay", 0, data.encode()) != 0:
            pytest.fail(f"mount {data}: {os.strerror(ctypes.get_errno())}")
        self.stack.callback(subprocess.run, ["umount", "-l", str(point)], check=False)
        return overlay_dirs(point)

    def copied(self, source: OverlayDirs, *options: str, **layer: dict[str, Path]) -> OverlayDirs:
        """The difference of `source`, applied to an upper directory of its own and mounted."""
        body = b"".join(difference(source, layer.get("extra")))
        (self.base / "copy/upper").mkdir(parents=True)
        apply(io.BytesIO(body), self.base / "copy/upper", [self.image], user_xattr="userxattr" in options)
        return self.mount("copy", *options)


@pytest.fixture
def overlays(tmp_path: Path) -> Iterator[Overlays]:
    with ExitStack() as stack:
        yield Overlays(tmp_path, stack)


def merged(dirs: OverlayDirs) -> Path:
    assert dirs.merged is not None
    return dirs.merged


def change(root: Path) -> None:
    """What programs do to a root file system."""
    (root / "etc/a").write_text("changed")
    (root / "etc/b").unlink()
    os.link(root / "etc/a", root / "etc/a2")
    shutil.rmtree(root / "usr/lib/deep")
    (root / "usr/lib/deep").mkdir()
    (root / "usr/lib/deep/new").write_text("after all was removed")
    shutil.rmtree(root / "var")
    (root / "opt/app").chmod(0o2750)
    os.chown(root / "opt/app/conf/e", 1000, 1001)
    (root / "opt/app/link").symlink_to("/etc/a")
    os.mkfifo(root / "opt/app/fifo")
    os.mknod(root / "opt/app/null", 0o20666, os.makedev(1, 3))
    os.setxattr(root / "opt/app/conf/e", "user.mark", b"\0\1")
    os.setxattr(root / "opt/app/conf/e", "security.capability", bytes.fromhex("01000002" + "00" * 16))
    with (root / "opt/app/sparse").open("wb") as file:
        file.truncate(64 << 20)
    os.utime(root / "opt/app/conf", ns=(1, 1_234_567_890_123_456_789))


@pytest.mark.parametrize("options", [(), ("userxattr",), ("index=on",), ("redirect_dir=on",)], ids=str)
def test_a_container_sees_the_same_files_after_the_move(overlays: Overlays, options: tuple[str, ...]) -> None:
    source = overlays.mount("source", *options)
    change(merged(source))
    copy = overlays.copied(source, *options)
    assert snapshot(merged(copy)) == snapshot(merged(source))
    assert not (merged(copy) / "usr/lib/deep/c").exists()
    assert not (merged(copy) / "var").exists()


def test_an_unchanged_container_has_an_empty_difference(overlays: Overlays) -> None:
    source = overlays.mount("source")
    with tarfile.open(fileobj=io.BytesIO(b"".join(difference(source)))) as layer:
        assert layer.getnames() == ["."]


def test_a_renamed_directory_of_the_image_travels_whole(overlays: Overlays) -> None:
    source = overlays.mount("source", "redirect_dir=on")
    (merged(source) / "usr/lib").rename(merged(source) / "usr/moved")
    (merged(source) / "usr/moved/deep/new").write_text("below the new name")
    (merged(source) / "usr/lib").mkdir()
    assert not (source.upper / "usr/moved/deep/c").exists()
    copy = overlays.copied(source)
    assert snapshot(merged(copy)) == snapshot(merged(source))
    assert (merged(copy) / "usr/moved/deep/c").read_text() == (overlays.image / "usr/lib/deep/c").read_text()


def test_a_file_of_which_only_the_owner_changed_travels_whole(overlays: Overlays) -> None:
    source = overlays.mount("source", "metacopy=on")
    os.chown(merged(source) / "opt/app/conf/e", 7, 8)
    assert "trusted.overlay.metacopy" in os.listxattr(source.upper / "opt/app/conf/e")
    copy = overlays.copied(source)
    assert snapshot(merged(copy)) == snapshot(merged(source))
    assert (merged(copy) / "opt/app/conf/e").read_text() == (overlays.image / "opt/app/conf/e").read_text()


@pytest.mark.parametrize("option", ["redirect_dir=on,metacopy=off", "metacopy=on"])
def test_what_only_the_mount_shows_is_refused_without_it(overlays: Overlays, option: str) -> None:
    source = overlays.mount("source", option)
    if "metacopy=on" in option:
        os.chown(merged(source) / "etc/a", 7, 8)
    else:
        (merged(source) / "usr/lib").rename(merged(source) / "usr/moved")
    unmounted = OverlayDirs(source.upper, source.lower, source.work)
    with pytest.raises(CheckpointError, match="only the mounted root file system shows"):
        list(difference(unmounted))


def test_an_open_file_without_its_name_stays_one_with_its_other_name(overlays: Overlays) -> None:
    source = overlays.mount("source")
    root = merged(source)
    for origin in ("etc/fresh", "opt/app/conf/e"):  # one of the container's own, one copied up
        with (root / origin).open("a") as held:
            held.write("written")
            held.flush()
            os.link(root / origin, root / "other")
            (root / origin).unlink()
            extra = {f"{origin}.remap": Path(f"/proc/self/fd/{held.fileno()}")}
            copy = overlays.copied(source, extra=extra)
        found = merged(copy)
        assert (found / f"{origin}.remap").samefile(found / "other")
        assert (found / "other").read_text() == (root / "other").read_text()
        (root / "other").unlink()
        overlays.stack.close()
        shutil.rmtree(overlays.base / "copy")
        source = overlays.mount("source")


def test_directories_with_odd_names_are_found(tmp_path: Path) -> None:
    with ExitStack() as stack:
        overlays = Overlays(tmp_path, stack)
        odd = tmp_path / "a b,c:d\\e\tf"
        odd.mkdir()
        lower = odd / "lower"
        shutil.copytree(overlays.image, lower)
        overlays.base = odd
        escaped = "".join(f"\\{c}" if c in ",:\\" else c for c in str(odd))
        upper, work, point = odd / "u", odd / "w", odd / "m"
        for path in (upper, work, point):
            path.mkdir()
        libc = ctypes.CDLL(None, use_errno=True)
        data = f"lowerdir={escaped}/lower:{overlays.image},upperdir={escaped}/u,workdir={escaped}/w"
        assert libc.mount(b"overlay", os.fsencode(point), b"overlay", 0, data.encode()) == 0
        stack.callback(subprocess.run, ["umount", "-l", str(point)], check=False)
        assert overlay_dirs(point) == OverlayDirs(upper, (lower, overlays.image), work, merged=point)


def test_a_long_list_of_relative_directories_is_found(tmp_path: Path) -> None:
    """containerd mounts more than a page of options from the snapshots' common directory."""
    with ExitStack() as stack:
        snapshots = tmp_path / "snapshots"
        for number in range(200):
            (snapshots / f"{number}/fs").mkdir(parents=True)
        (snapshots / "17/fs/from17").touch()
        upper, work, point = snapshots / "200/fs", snapshots / "200/work", tmp_path / "m"
        for path in (upper, work, point):
            path.mkdir(parents=True)
        lower = ":".join(f"{number}/fs" for number in range(200))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, point], check=True, cwd=snapshots)
        stack.callback(subprocess.run, ["umount", "-l", str(point)], check=False)
        found = overlay_dirs(point)
        assert found.lower[17] == snapshots / "17/fs"
        assert len(found.lower) == 200
        (point / "from17").chmod(0o600)
        assert b"from17" in b"".join(difference(found))


def test_a_large_file_is_never_in_memory_whole(overlays: Overlays) -> None:
    source = overlays.mount("source")
    block = os.urandom(1 << 20)
    with (merged(source) / "big").open("wb") as file:
        for _ in range(64):
            file.write(block)
    largest = 0
    for piece in difference(source):
        largest = max(largest, len(piece))
    assert largest <= 2 << 20
