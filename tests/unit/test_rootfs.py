"""Layers to and from a directory: the tar format, and round trips of whole trees."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runtime import layer, tar
from runtime.container import Mount
from runtime.difference import difference
from runtime.errors import CheckpointError, IncompatibleError
from runtime.layer import apply
from runtime.rootfs import OverlayDirs, overlay_dirs
from runtime.tar import Entry, Kind, Reader
from tests.tree import WHITEOUT, snapshot

names = st.binary(min_size=1, max_size=255).filter(
    lambda name: not set(b"/\0") & set(name) and name not in (b".", b"..") and not name.startswith(b".wh.")
)
times = st.integers(-(2**33) * 10**9, 2**33 * 10**9)
owners = st.integers(0, 2**32 - 2)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    kind = draw(st.sampled_from(Kind))
    path = b"/".join(draw(st.lists(names, min_size=1, max_size=8)))
    link = draw(st.binary(min_size=1, max_size=4095).filter(lambda text: b"\0" not in text))
    attributes = st.dictionaries(
        st.text("abc=.é", min_size=1, max_size=20), st.binary(max_size=300), max_size=3
    )
    return Entry(
        path=os.fsdecode(path),
        kind=kind,
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(owners),
        gid=draw(owners),
        size_bytes=draw(st.integers(0, 3000)) if kind is Kind.REGULAR else 0,
        mtime_ns=draw(times),
        link=os.fsdecode(link) if kind in (Kind.HARD_LINK, Kind.SYMLINK) else "",
        device=draw(st.tuples(st.integers(0, 4095), st.integers(0, 2**20 - 1)))
        if kind in (Kind.CHARACTER_DEVICE, Kind.BLOCK_DEVICE)
        else (0, 0),
        xattrs=draw(attributes),
    )


def archive(*members: tuple[Entry, bytes]) -> bytes:
    return b"".join(tar.header(e) + data + tar.padding(len(data)) for e, data in members) + tar.END


def as_read(entry: Entry) -> Entry:
    path = entry.path + "/" if entry.kind is Kind.DIRECTORY else entry.path
    return Entry(**{**entry.__dict__, "path": path})


@given(st.lists(entries(), max_size=5))
def test_what_is_written_is_read_again(written: list[Entry]) -> None:
    body = archive(*((entry, bytes(entry.size_bytes)) for entry in written))
    assert list(Reader(io.BytesIO(body))) == [as_read(entry) for entry in written]


@given(entries().filter(lambda entry: "=" not in "".join(entry.xattrs)))
def test_pythons_tarfile_reads_the_same(entry: Entry) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive((entry, bytes(entry.size_bytes))))) as other:
        (member,) = other
    assert os.fsencode(member.name.rstrip("/")) == os.fsencode(entry.path.rstrip("/"))
    assert os.fsencode(member.linkname.rstrip("/")) == os.fsencode(entry.link.rstrip("/"))
    assert (member.mode, member.uid, member.gid, member.size) == (
        entry.mode, entry.uid, entry.gid, entry.size_bytes,
    )  # fmt: skip
    assert (member.devmajor, member.devminor) == entry.device


@st.composite
def segments(draw: st.DrawFn) -> tuple[list[tar.Segment], int]:
    found, end = [], 0
    for hole, length in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=200)):
        found.append((end + hole, length))
        end += hole + length
    return found, end + draw(st.integers(0, 1000))


@given(segments())
def test_sparse_files_are_read_again(drawn: tuple[list[tar.Segment], int]) -> None:
    where, size = drawn
    content = bytearray(size)
    for offset, length in where:
        content[offset : offset + length] = os.urandom(length)
    entry = Entry("dir/a", Kind.REGULAR, size_bytes=size, segments=where)
    stored = b"".join(bytes(content[offset : offset + length]) for offset, length in where)
    body = archive((entry, stored))

    reader = Reader(io.BytesIO(body))
    found = bytearray(size)
    for read in reader:
        assert (read.path, read.size_bytes, read.segments) == ("dir/a", size, where)
        for offset, piece in reader.data():
            found[offset : offset + len(piece)] = piece
    assert found == content

    with tarfile.open(fileobj=io.BytesIO(body)) as other:
        member = other.extractfile("dir/a")
        assert member is not None
        assert member.read() == content


def test_numbers_in_base_256_are_understood() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as out:
        member = tarfile.TarInfo("x" * 150)
        member.uid, member.mtime = 1 << 31, -5
        out.addfile(member)
    (entry,) = Reader(io.BytesIO(buffer.getvalue()))
    assert (entry.path, entry.uid, entry.mtime_ns) == ("x" * 150, 1 << 31, -5 * 10**9)


def test_reading_survives_a_stream_that_gives_a_byte_at_a_time() -> None:
    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 0, 1))

    entry = Entry("a" * 200, Kind.REGULAR, size_bytes=5, mtime_ns=1)
    reader = Reader(Trickle(archive((entry, b"hello"))))
    assert [b"".join(piece for _, piece in reader.data()) for _ in reader] == [b"hello"]


# Which directories


def test_containerds_mount_names_the_directories() -> None:
    options = ("index=off", "workdir=/s/3/work", "upperdir=/s/3/fs", "lowerdir=/s/2/fs:/s/1/fs")
    assert overlay_dirs([Mount("overlay", "overlay", options=options)]) == OverlayDirs(
        Path("/s/3/fs"), (Path("/s/2/fs"), Path("/s/1/fs")), Path("/s/3/work")
    )


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ([Mount("bind", "/s/1/fs", options=("rw", "rbind"))], "of type bind, not overlay"),
        ([Mount("btrfs", "/dev/sda")], "of type btrfs, not overlay"),
        ([Mount("overlay", "overlay", options=("lowerdir=/a:/b",))], "read-only"),
        ([Mount("erofs", "/a"), Mount("overlay", "overlay")], "2 mounts"),
        ([], "0 mounts"),
    ],
)
def test_what_is_no_writable_overlay_is_refused(mounts: list[Mount], said: str) -> None:
    with pytest.raises(IncompatibleError, match=said) as raised:
        overlay_dirs(mounts)
    assert raised.value.hint


def mounted(tmp_path: Path, options: str) -> OverlayDirs:
    point = tmp_path / "root fs"
    point.mkdir()
    escaped = str(point).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(
        f"22 1 0:21 / /proc rw - proc proc rw\n"
        f"30 22 0:30 / {escaped} rw,relatime shared:5 - overlay overlay rw,lowerdir=/old,upperdir=/old\n"
        f"31 22 0:31 / {escaped} rw,relatime - overlay overlay rw,{options}\n"
    )
    return overlay_dirs(point, table)


def test_the_topmost_mount_counts_and_escapes_are_undone(tmp_path: Path) -> None:
    found = mounted(
        tmp_path,
        r"lowerdir=/a\134:1:/b\134\0542,upperdir=/up\134\054p\134:e\134\134r\040x,workdir=/w,userxattr",
    )
    assert found.lower == (Path("/a:1"), Path("/b,2"))
    assert found.upper == Path("/up,p:e\\r x")
    assert found.user_xattr
    assert found.merged == tmp_path / "root fs"


def test_lower_directories_set_one_by_one_are_not_escaped(tmp_path: Path) -> None:
    found = mounted(tmp_path, r"lowerdir+=/l:1,lowerdir+=/l\0542,datadir+=/d,upperdir=/u,workdir=/w")
    assert found.lower == (Path("/l:1"), Path("/l,2"))


def test_lower_directories_that_hold_only_data_are_left_out(tmp_path: Path) -> None:
    assert mounted(tmp_path, "lowerdir=/a:/b::/c::/d,upperdir=/u,workdir=/w").lower == (
        Path("/a"),
        Path("/b"),
    )


def test_relative_lower_directories_are_found_beside_the_upper_one(tmp_path: Path) -> None:
    for number in range(130):
        (tmp_path / "snapshots" / str(number) / "fs").mkdir(parents=True)
    lower = ":".join(f"{number}/fs" for number in range(129))
    upper = tmp_path / "snapshots/129/fs"
    found = mounted(tmp_path, f"lowerdir={lower},upperdir={upper},workdir=/w")
    assert found.lower[128] == tmp_path / "snapshots/128/fs"
    with pytest.raises(IncompatibleError):
        overlay_dirs([Mount("overlay", "overlay", options=("lowerdir=nowhere/fs", f"upperdir={upper}"))])


def test_a_directory_that_is_no_mount_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="no file system is mounted"):
        overlay_dirs(tmp_path)


# Whole trees


def dirs(path: Path) -> OverlayDirs:
    return OverlayDirs(path, (), path)


def moved(upper: Path, target: Path) -> bytes:
    target.mkdir()
    body = b"".join(difference(dirs(upper)))
    apply(io.BytesIO(body), target)
    return body


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[bytes, str, object]]:
    """Things to make, in order: (path, what, detail)."""
    directories = [b""]
    made: list[tuple[bytes, str, object]] = []
    used = set()
    files: list[bytes] = []
    for _ in range(draw(st.integers(0, 12))):
        path = b"/".join(filter(None, (draw(st.sampled_from(directories)), draw(names))))
        if path in used:
            continue
        used.add(path)
        what = draw(
            st.sampled_from(
                ["dir", "file", "sparse", "link", "symlink", "fifo", "device", "whiteout", "opaque"]
            )
        )
        detail: object = None
        if what in ("dir", "opaque"):
            directories.append(path)
        elif what == "file":
            detail = draw(st.binary(max_size=2000)) * draw(st.sampled_from([1, 1, 1, 300]))
            files.append(path)
        elif what == "sparse":
            detail = (
                draw(st.lists(st.integers(0, 63), max_size=6, unique=True)),
                draw(st.integers(0, 1 << 22)),
            )
            files.append(path)
        elif what == "link":
            if not files:
                continue
            detail = draw(st.sampled_from(files))
        elif what == "symlink":
            detail = draw(st.binary(min_size=1, max_size=200).filter(lambda text: b"\0" not in text))
        elif what == "device":
            detail = draw(st.integers(1, 4095)), draw(st.integers(0, 2**20 - 1))
        made.append((path, what, detail))
    return made


def make(root: bytes, tree: list[tuple[bytes, str, object]], seed: int) -> None:
    for number, (name, what, detail) in enumerate(tree):
        path = os.path.join(root, name)
        match what, detail:
            case (("dir" | "opaque"), _):
                os.mkdir(path)
                if what == "opaque":
                    os.setxattr(path, "trusted.overlay.opaque", b"y")
            case "file", bytes(data):
                Path(os.fsdecode(path)).write_bytes(data)
            case "sparse", (list(blocks), int(size)):
                with open(path, "wb") as file:
                    file.truncate(size)
                    for block in blocks:
                        file.seek(block << 16)
                        file.write(b"x" * 100)
            case "link", bytes(target):
                os.link(os.path.join(root, target), path, follow_symlinks=False)
            case "symlink", bytes(target):
                os.symlink(target, path)
            case "fifo", _:
                os.mkfifo(path)
            case "device", (int(major), int(minor)):
                os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(major, minor))
            case _:
                os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
                continue
        os.chown(path, (seed * 7919 * number) % 70000, (seed * number) % (1 << 31), follow_symlinks=False)
        if what != "symlink":
            os.chmod(path, (seed * 31 + number * 577) & 0o7777)
        os.setxattr(path, "trusted.n", str(number).encode(), follow_symlinks=False)
        if what in ("file", "sparse"):
            os.setxattr(path, "user.a=b", b"\0\xff\n")
            os.setxattr(path, "user.c", b"")
    for name, what, _ in reversed(tree):
        if what != "whiteout":
            moment = (seed * len(name) * 123456789) % (1 << 61) // 1000
            os.utime(os.path.join(root, name), ns=(0, moment), follow_symlinks=False)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(trees(), st.integers(1, 1 << 20))
@example([(b".wh", "file", b""), (b"d", "dir", None), (b"d/e", "whiteout", None)], 3)
def test_a_tree_survives_the_round_trip(tree: list[tuple[bytes, str, object]], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        upper, target = Path(directory, "upper"), Path(directory, "target")
        upper.mkdir()
        make(os.fsencode(upper), tree, seed)
        body = moved(upper, target)
        assert snapshot(target) == snapshot(upper)
        assert b"".join(difference(dirs(target))) == body


def test_holes_stay_holes(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with (upper / "big").open("wb") as file:
        file.truncate(20 << 30)
        file.seek(10 << 30)
        file.write(b"in the middle")
    with (upper / "zeros").open("wb") as file:
        file.write(bytes(8 << 20))
    body = moved(upper, tmp_path / "target")
    assert len(body) < 10 << 20
    assert (tmp_path / "target/big").stat().st_size == 20 << 30
    assert (tmp_path / "target/big").stat().st_blocks * 512 < 1 << 20
    assert (tmp_path / "target/zeros").stat().st_blocks == 0
    with (tmp_path / "target/big").open("rb") as file:
        file.seek(10 << 30)
        assert file.read(13) == b"in the middle"


def test_a_small_hole_is_stored_as_zeros_every_tool_reads(tmp_path: Path) -> None:
    upper = tmp_path / "upper"
    upper.mkdir()
    with (upper / "a").open("wb") as file:
        file.truncate(500_000)
    assert b"GNU.sparse" not in b"".join(difference(dirs(upper)))


def test_applying_replaces_what_was_there(tmp_path: Path) -> None:
    upper, target = tmp_path / "upper", tmp_path / "target"
    upper.mkdir()
    (upper / "a").write_text("new")
    shutil.copytree(upper, target)
    (target / "a").write_text("old")
    deep = target
    for _ in range(300):
        deep = deep / "deep"
        deep.mkdir()
    apply(io.BytesIO(b"".join(difference(dirs(upper)))), target)
    assert snapshot(target) == snapshot(upper)


def test_a_stream_that_fails_leaves_nothing(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if data := super().read(size):
                return data
            raise ValueError("digest is wrong")

    body = archive((Entry("d/", Kind.DIRECTORY), b""), (Entry("d/a", Kind.REGULAR, size_bytes=3), b"abc"))
    with pytest.raises(ValueError, match="digest"):
        apply(Broken(body), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_whiteout_hides_the_image_and_not_the_layer(tmp_path: Path) -> None:
    body = archive(
        (Entry(".wh.first", Kind.REGULAR), b""),
        (Entry("first", Kind.DIRECTORY), b""),
        (Entry("second", Kind.DIRECTORY), b""),
        (Entry(".wh.second", Kind.REGULAR), b""),
        (Entry(".wh.file", Kind.REGULAR), b""),
        (Entry("file", Kind.REGULAR), b""),
        (Entry(".wh.gone", Kind.REGULAR), b""),
        (Entry(".wh..wh.plnk", Kind.DIRECTORY), b""),
        (Entry(".wh..wh.plnk/12.34", Kind.REGULAR), b""),
    )
    apply(io.BytesIO(body), tmp_path)
    found = snapshot(tmp_path)
    assert set(found) == {".", "first", "second", "file", "gone"}
    assert found["gone"] == WHITEOUT
    for name in ("first", "second"):
        assert os.getxattr(tmp_path / name, "trusted.overlay.opaque") == b"y"
    assert stat.S_ISREG((tmp_path / "file").stat().st_mode)


def test_marks_of_a_user_xattr_overlay_are_its_own(tmp_path: Path) -> None:
    body = archive((Entry("d", Kind.DIRECTORY), b""), (Entry("d/.wh..wh..opq", Kind.REGULAR), b""))
    apply(io.BytesIO(body), tmp_path, user_xattr=True)
    assert os.getxattr(tmp_path / "d", "user.overlay.opaque") == b"y"
    found = OverlayDirs(tmp_path, (), tmp_path, user_xattr=True)
    assert b"d/.wh..wh..opq" in b"".join(difference(found))


def test_a_directory_the_layer_leaves_out_is_as_in_the_image(tmp_path: Path) -> None:
    upper, lower, lowest = (tmp_path / name for name in ("upper", "lower", "lowest"))
    for path in (upper, lower, lowest / "etc/private"):
        path.mkdir(parents=True)
    os.chown(lowest / "etc/private", 12, 34)
    (lowest / "etc/private").chmod(0o2710)
    os.utime(lowest / "etc/private", ns=(1, 1_000_000_001))
    body = archive((Entry("etc/private/key", Kind.REGULAR, size_bytes=1), b"k"))
    apply(io.BytesIO(body), upper, [lower, lowest])
    info = (upper / "etc/private").stat()
    assert (info.st_mode & 0o7777, info.st_uid, info.st_gid, info.st_mtime_ns) == (
        0o2710,
        12,
        34,
        1_000_000_001,
    )


def test_a_hard_link_to_a_file_of_the_image_copies_it_up(tmp_path: Path) -> None:
    upper, lower = tmp_path / "upper", tmp_path / "lower"
    for path in (upper, lower / "usr/bin"):
        path.mkdir(parents=True)
    (lower / "usr/bin/tool").write_bytes(b"x" * 3_000_000)
    (lower / "usr/bin/tool").chmod(0o4755)
    apply(io.BytesIO(archive((Entry("tool2", Kind.HARD_LINK, link="usr/bin/tool"), b""))), upper, [lower])
    assert (upper / "tool2").samefile(upper / "usr/bin/tool")
    assert (upper / "tool2").read_bytes() == (lower / "usr/bin/tool").read_bytes()
    assert (upper / "tool2").stat().st_mode & 0o7777 == 0o4755


def test_files_without_a_name_are_added(tmp_path: Path) -> None:
    upper, target = tmp_path / "upper", tmp_path / "target"
    upper.mkdir()
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(b"still open")
        file.flush()
        held = Path(f"/proc/self/fd/{file.fileno()}")
        body = b"".join(difference(dirs(upper), {"/var/link_remap.1": held, "var/link_remap.2": held}))
    target.mkdir()
    apply(io.BytesIO(body), target)
    assert (target / "var/link_remap.1").read_bytes() == b"still open"
    assert (target / "var/link_remap.1").samefile(target / "var/link_remap.2")


def test_a_name_that_means_a_deletion_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/.wh.x").touch()
    with pytest.raises(CheckpointError, match=r"d/\.wh\.x"):
        list(difference(dirs(tmp_path)))


def test_a_path_longer_than_the_kernel_takes_is_refused(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("n" * 250, dir_fd=here)
        here, old = os.open("n" * 250, os.O_RDONLY, dir_fd=here), here
        os.close(old)
    os.close(here)
    with pytest.raises(CheckpointError):
        list(difference(dirs(tmp_path)))
    layer.empty(tmp_path)


def test_sockets_are_left_out(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert b"".join(difference(dirs(tmp_path))).count(b"ustar") <= 2
