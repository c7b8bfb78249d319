"""Layers made to harm the node that applies them: every one is refused, and nothing outside is touched."""

from __future__ import annotations

import io
import os
import random
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import layer, tar
from runtime.errors import RestoreError
from runtime.layer import apply
from runtime.tar import Entry, Kind, Reader
from tests.tree import snapshot


def archive(*members: Entry) -> bytes:
    parts = []
    for entry in members:
        size = entry.size_bytes if entry.kind is Kind.REGULAR else 0
        parts.append(tar.header(entry) + b"x" * size + tar.padding(size))
    return b"".join(parts) + tar.END


def file(path: str, size: int = 5, **fields: object) -> Entry:
    return Entry(path, Kind.REGULAR, size_bytes=size, **fields)  # type: ignore[arg-type]


def directory(path: str) -> Entry:
    return Entry(path, Kind.DIRECTORY, mode=0o755)


def symlink(path: str, link: str) -> Entry:
    return Entry(path, Kind.SYMLINK, link=link)


def hard_link(path: str, link: str) -> Entry:
    return Entry(path, Kind.HARD_LINK, link=link)


def device(path: str, major: int, minor: int) -> Entry:
    return Entry(path, Kind.CHARACTER_DEVICE, device=(major, minor))


class Place:
    """An upper directory beside a file that nobody may touch."""

    def __init__(self, base: Path) -> None:
        self.upper, self.lower, self.outside = base / "upper", base / "lower", base / "outside"
        for path in (self.upper, self.lower, self.outside):
            path.mkdir()
        (self.outside / "secret").write_text("untouched")
        (self.outside / "empty").mkdir()
        self.before = snapshot(self.outside)

    def refuses(self, body: bytes) -> RestoreError:
        with pytest.raises(RestoreError) as raised:
            apply(io.BytesIO(body), self.upper, [self.lower])
        assert list(self.upper.iterdir()) == []
        self.check()
        return raised.value

    def check(self) -> None:
        assert snapshot(self.outside) == self.before


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


Attack = Callable[[str], tuple[Entry, ...]]
ATTACKS: dict[str, Attack] = {
    "a path upwards": lambda out: (file("../outside/secret"),),
    "a path upwards from inside": lambda out: (directory("a"), file("a/../../outside/secret")),
    "a symbolic link to outside, then a file below it": lambda out: (symlink("a", out), file("a/secret")),
    "a relative symbolic link to outside": lambda out: (symlink("a", "../outside"), file("a/new")),
    "a symbolic link in the middle": lambda out: (directory("a"), symlink("a/b", out), file("a/b/empty/new")),
    "a symbolic link made a directory": lambda out: (symlink("a", out), directory("a")),
    "a symbolic link written through": lambda out: (symlink("a", f"{out}/secret"), file("a")),
    "a symbolic link to itself": lambda out: (symlink("a", "a"), file("a/b")),
    "a deletion through a symbolic link": lambda out: (symlink("a", out), file("a/.wh.secret", 0)),
    "an opaque mark through a symbolic link": lambda out: (symlink("a", out), file("a/.wh..wh..opq", 0)),
    "a device below a symbolic link": lambda out: (symlink("a", out), device("a/d", 8, 0)),
    "a hard link to outside": lambda out: (hard_link("a", "../outside/secret"),),
    "a hard link through a symbolic link": lambda out: (symlink("a", out), hard_link("b", "a/secret")),
    "a hard link to a directory": lambda out: (directory("a"), hard_link("b", "a")),
    "a hard link to the root": lambda out: (hard_link("b", "."),),
    "a hard link to nothing": lambda out: (hard_link("b", "nowhere/a"),),
    "a hard link to a deletion": lambda out: (file(".wh.a", 0), hard_link("b", "a")),
    "a file twice": lambda out: (file("a"), file("a")),
    "a hard link, then a file in its place": lambda out: (file("a"), hard_link("b", "a"), file("b")),
    "a directory in place of a file": lambda out: (file("a"), directory("a")),
    "a file in place of a directory": lambda out: (directory("a"), file("a")),
    "a file below a file": lambda out: (file("a"), file("a/b")),
    "a file that is the root": lambda out: (file("."),),
    "a symbolic link that is the root": lambda out: (symlink("./", out),),
    "a deletion of the parent": lambda out: (directory("a"), file("a/.wh...", 0)),
    "a deletion of itself": lambda out: (file("a/.wh..", 0),),
    "a deletion of no name": lambda out: (file("a/.wh.", 0),),
    "a file in a deleted directory": lambda out: (file(".wh.a/b", 0),),
    "a whiteout in disguise": lambda out: (device("a", 0, 0),),
    "a name longer than the kernel takes": lambda out: (file("a" * 256),),
    "a path longer than the kernel takes": lambda out: (file("a/" * 2048 + "a"),),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_an_entry_that_leads_outside_is_refused(place: Place, attack: Attack) -> None:
    place.refuses(archive(directory("."), *attack(str(place.outside))))


@pytest.mark.parametrize("attack", ["a", "a/b"])
def test_a_symbolic_link_of_the_image_is_not_followed(place: Place, attack: str) -> None:
    (place.lower / "a").symlink_to(place.outside)
    place.refuses(archive(file(f"{attack}/secret")))
    place.refuses(archive(hard_link("x", f"{attack}/secret")))


def test_only_files_of_the_image_are_copied_up(place: Place) -> None:
    os.mknod(place.lower / "disk", stat.S_IFBLK | 0o600, os.makedev(254, 0))
    (place.lower / "link").symlink_to(place.outside / "secret")
    os.mkfifo(place.lower / "fifo")
    for name in ("disk", "link", "fifo"):
        place.refuses(archive(hard_link("x", name)))


def test_an_absolute_path_is_one_inside(place: Place) -> None:
    apply(io.BytesIO(archive(file("/etc/passwd"), file("///etc/./x"))), place.upper)
    assert sorted(path.name for path in (place.upper / "etc").iterdir()) == ["passwd", "x"]


def test_emptying_an_upper_directory_stays_inside_it(place: Place) -> None:
    (place.upper / "a").symlink_to(place.outside)
    (place.upper / "b").mkdir()
    os.link(place.outside / "secret", place.upper / "b/c")
    layer.empty(place.upper)
    assert list(place.upper.iterdir()) == []
    place.check()


def test_marks_of_overlayfs_and_labels_of_the_node_are_left_out(place: Place) -> None:
    smuggled = {
        "trusted.overlay.redirect": b"/../../outside",
        "trusted.overlay.metacopy": b"",
        "trusted.overlay.opaque": b"y",
        "user.overlay.redirect": b"/x",
        "security.selinux": b"system_u:object_r:container_file_t:s0",
        "security.ima": b"\x01",
        "system.data": b"x",
        "trusted.overlay.overlay.opaque": b"y",
        "user.kept": b"1",
        "trusted.kept": b"2",
    }
    apply(io.BytesIO(archive(file("a", xattrs=smuggled), directory("d"))), place.upper)
    kept = set(os.listxattr(place.upper / "a"))
    assert kept == {"trusted.overlay.overlay.opaque", "user.kept", "trusted.kept"}


def test_a_capability_travels(place: Place) -> None:
    value = bytes.fromhex("0100000200200000000000000000000000000000")
    apply(io.BytesIO(archive(file("a", xattrs={"security.capability": value}))), place.upper)
    assert os.getxattr(place.upper / "a", "security.capability") == value


def test_more_than_fits_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def little(directory: Path) -> layer._Free:
        return layer._Free(size_bytes=10_000, entries=10)

    monkeypatch.setattr(layer, "_free_space", little)
    assert "does not fit" in place.refuses(archive(file("a", 6000), file("b", 6000))).message
    assert "does not fit" in place.refuses(archive(*(file(str(n), 0) for n in range(11)))).message
    deep = "/".join(str(n) for n in range(12))
    assert "does not fit" in place.refuses(archive(file(f"{deep}/a", 0))).message
    sparse = Entry("s", Kind.REGULAR, size_bytes=1 << 40, segments=((1 << 39, 11_000),))
    body = tar.header(sparse) + b"x" * 11_000 + tar.padding(11_000) + tar.END
    assert "does not fit" in place.refuses(body).message


class Endless:
    """A stream that never ends: a small compressed blob can be one."""

    def __init__(self, start: bytes, filler: bytes) -> None:
        self.start, self.filler, self.given = io.BytesIO(start), filler, 0

    def read(self, size: int, /) -> bytes:
        data = self.start.read(size) or (self.filler * (size // len(self.filler) + 1))[:size]
        self.given += len(data)
        assert self.given < 64 << 20, "it reads without end"
        return data


def pax(size: int) -> bytes:
    return tar._ustar(b"p", b"x", 0, (0, 0), size, 0)


@pytest.mark.parametrize(
    "stream",
    [
        Endless(b"", b"\1"),
        Endless(b"", pax(0)),
        Endless(tar.END, b"\0"),
        Endless(pax(1 << 33), b"9"),
        Endless(tar._ustar(b"p", b"L", 0, (0, 0), 1 << 33, 0), b"a"),
        Endless(pax(4 << 20), b"1"),
        Endless(
            tar.header(Entry("s", Kind.REGULAR, size_bytes=1 << 62, segments=[(0, 1 << 61)]))[:-512], b"9"
        ),
        Endless(
            tar.header(Entry("s", Kind.REGULAR, size_bytes=1 << 62, segments=[(0, 1 << 61)]))[:-512], b"1\n"
        ),
    ],
    ids=[
        "noise",
        "headers",
        "trailer",
        "pax header",
        "long name",
        "pax records",
        "sparse digits",
        "sparse map",
    ],
)
def test_a_stream_without_end_is_given_up(place: Place, stream: Endless) -> None:
    with pytest.raises(RestoreError):
        apply(stream, place.upper)
    assert list(place.upper.iterdir()) == []


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (tar._ustar(b"a", b"0", 0, (0, 0), 5, 0)[:-1] + b"\1", "checksum"),
        (tar._ustar(b"a", b"S", 0, (0, 0), 0, 0), "type b'S'"),
        (tar._ustar(b"a", b"5", 0, (0, 0), 512, 0), "512 bytes of data"),
        (tar._ustar(b"a", b"0", 0, (0, 0), 512, 0), "ends early"),
        (tar._ustar(b"a", b"3", 0, (0, 0), 0, 0, b"", (4096, 0)), "device"),
    ],
)
def test_a_header_that_is_wrong_is_refused(place: Place, header: bytes, said: str) -> None:
    assert said in place.refuses(header).message


def with_records(records: bytes) -> bytes:
    body = pax(len(records)) + records + tar.padding(len(records))
    return body + tar._ustar(b"a", b"0", 0, (0, 0), 0, 0) + tar.END


def test_records_that_are_right_are_taken(place: Place) -> None:
    apply(io.BytesIO(with_records(b"9 path=b\n" + tar._record(b"uid", b"70000"))), place.upper)
    assert (place.upper / "b").stat().st_uid == 70000


@pytest.mark.parametrize(
    "records",
    [b"99 path=a\n", b"0 path=a\n", b"9 path=aa\n", b"9 path=a\n12 x\n", b"5 abc\n", b"6 path=a\n", b"x"],
)
def test_broken_records_are_refused(place: Place, records: bytes) -> None:
    place.refuses(with_records(records))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"path", b"a\0b"),
        (b"path", b"a" * 5000),
        (b"linkpath", b"a" * 5000),
        (b"uid", b"-1"),
        (b"uid", b"99999999999"),
        (b"gid", b"99999999999999999999999"),
        (b"gid", b"\xd9\xa1"),
        (b"size", b"-100"),
        (b"size", b"99999999999999999999999"),
        (b"size", b"2000"),
        (b"mtime", b"never"),
        (b"mtime", b"1.2.3"),
        (b"mtime", b"1e9"),
        (b"GNU.sparse.major", b"0"),
        (b"GNU.sparse.map", b"0,10"),
        (b"GNU.sparse.size", b"10"),
        (b"LIBARCHIVE.xattr.user.a", b"????"),
        (b"SCHILY.xattr.user.a\0b", b"1"),
        (b"SCHILY.xattr.user." + b"a" * 300, b"1"),
        (b"SCHILY.xattr.user.a", b"1" * 70_000),
        (b"SCHILY.xattr.system.posix_acl_access", b"nonsense"),
    ],
)
def test_impossible_values_are_refused(place: Place, key: bytes, value: bytes) -> None:
    place.refuses(with_records(tar._record(key, value)))


@pytest.mark.parametrize(
    "text",
    [
        b"1\n0\n",
        b"2\n0\n5\n3\n5\n",
        b"1\n6\n5\n",
        b"1\n0\n6\n",
        b"-1\n",
        b"x\n",
        b"99999999999999999999\n",
        b"",
    ],
)
def test_a_sparse_map_that_is_wrong_is_refused(place: Place, text: bytes) -> None:
    good = tar.header(Entry("s", Kind.REGULAR, size_bytes=10, segments=[(0, 5)]))
    body = good[:-512] + text.ljust(512, b"\0") + b"x" * 5 + tar.padding(5) + tar.END
    place.refuses(body)


def sample() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as out:
        for number, kind in enumerate((tarfile.DIRTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"d/{'ü' * 60}{number}" if number else "d")
            member.type, member.linkname, member.mtime = kind, "../../outside/secret", 1.5
            member.pax_headers = {"SCHILY.xattr.user.a": "1"} if kind != tarfile.SYMTYPE else {}
            member.size = 700 if kind == tarfile.REGTYPE else 0
            out.addfile(member, io.BytesIO(b"y" * 700))
    sparse = Entry("s", Kind.REGULAR, size_bytes=5000, segments=[(100, 600), (4000, 10)])
    end = buffer.getvalue().rstrip(b"\0")
    body = end + bytes(-len(end) % 512)
    return body + tar.header(sparse) + b"z" * 610 + tar.padding(610) + tar.END


def test_a_stream_cut_anywhere_is_refused(place: Place) -> None:
    body = sample()
    apply(io.BytesIO(body.replace(b"SCHILY.xattr.user", b"SCHILY.xattr.xxxx")), place.upper)
    for end in [*range(0, len(body) - 1024, 512), *range(1, len(body) - 1024, 1009)]:
        place.refuses(body[:end])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_a_damaged_stream_never_reaches_outside(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    chance = random.Random(seed)
    body = bytearray(sample())
    for _ in range(chance.randint(1, 20)):
        at = chance.randrange(len(body))
        body[at : at + chance.randint(1, 8)] = chance.choice(
            [chance.randbytes(4), b"\0", b"../", b"/", b"\n", b"999", b".wh.", b"-1", b"1", b"2", b"5"]
        )
    for start in range(0, len(body) - 512, 512):
        if body[start + 257 : start + 262] == b"ustar":  # most headers reach past the checksum
            body[start + 148 : start + 156] = b" " * 8
            body[start + 148 : start + 156] = b"%06o\0 " % sum(body[start : start + 512])
    place = Place(tmp_path_factory.mktemp("fuzz"))
    try:
        apply(io.BytesIO(bytes(body)), place.upper)
    except RestoreError:
        assert list(place.upper.iterdir()) == []
    place.check()


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=4096))
def test_noise_is_refused(noise: bytes) -> None:
    def read() -> Iterator[Entry]:
        yield from Reader(io.BytesIO(noise))

    try:
        list(read())
    except RestoreError:
        return
    assert not noise[:512].strip(b"\0")
