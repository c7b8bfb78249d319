"""The tar format of OCI layers: POSIX.1-2001 (pax) headers, extended attributes, sparse files.

`header` writes what Go's archive/tar, GNU tar and bsdtar read: ustar fields, and a pax header where those
do not suffice; extended attributes as `SCHILY.xattr.*` records, sparse files in GNU's pax format 1.0.
`Reader` reads the same (and GNU long names) from an untrusted stream: everything it keeps is bounded.
"""

from __future__ import annotations

import base64
import os
import re
import struct
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from runtime.errors import RestoreError

BLOCK = 512
END = bytes(2 * BLOCK)
READ_BYTES = 1 << 20

_MAX_EXTENSION_BYTES = 4 << 20
"""A pax header: names of 4 KiB and extended attributes (64 KiB each; ext4 holds one block of them)."""
_MAX_EXTENSIONS = 8
"""Headers before an entry: writers use two at most."""
_MAX_SPARSE_MAP_BYTES = 4 << 20
_MAX_TRAILER_BYTES = 1 << 20
_MAX_PATH_BYTES = 4095
_XATTR = "SCHILY.xattr."
_ENCODED_XATTR = "LIBARCHIVE.xattr."
"""For names with `=`, which ends the key of a pax record: the name is URL-encoded, the value base64."""


class Kind(Enum):
    REGULAR = b"0"
    HARD_LINK = b"1"
    SYMLINK = b"2"
    CHARACTER_DEVICE = b"3"
    BLOCK_DEVICE = b"4"
    DIRECTORY = b"5"
    FIFO = b"6"


_KINDS = {kind.value: kind for kind in Kind}
_OCTAL = re.compile(rb"[0-7]*")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_TIME = re.compile(rb"(-?)([0-9]{1,11})(?:\.([0-9]{0,40}))?")
_RECORD = re.compile(rb"([1-9][0-9]{0,7}) ")

Segment = tuple[int, int]
"""(offset, length) of a stretch of data in a sparse file."""


@dataclass(frozen=True)
class Entry:
    path: str
    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    size_bytes: int = 0
    """Size of the file's content, holes included."""
    mtime_ns: int = 0
    link: str = ""
    device: tuple[int, int] = (0, 0)
    xattrs: Mapping[str, bytes] = field(default_factory=dict)
    segments: Sequence[Segment] | None = None
    """Where the data of a sparse file is; None when all of it is stored."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


# Writing


def header(entry: Entry) -> bytes:
    """The blocks before the entry's data, the map of a sparse file included."""
    name = os.fsencode(entry.path) + (b"/" if entry.kind is Kind.DIRECTORY else b"")
    link = os.fsencode(entry.link)
    records: list[tuple[bytes, bytes]] = []
    stored = entry.size_bytes
    sparse_map = b""
    if entry.segments is not None:
        sparse_map = _sparse_map(entry.segments)
        stored = len(sparse_map) + sum(length for _, length in entry.segments)
        records += [
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", name),
            (b"GNU.sparse.realsize", b"%d" % entry.size_bytes),
        ]
        directory, _, base = name.rpartition(b"/")
        name = b"/".join(part for part in (directory, b"GNUSparseFile.0", base) if part)
    records += _long_names(name, link)
    for key, value, limit in ((b"uid", entry.uid, 0o7777777), (b"gid", entry.gid, 0o7777777),
                              (b"size", stored, 0o77777777777)):  # fmt: skip
        if value > limit:
            records.append((key, b"%d" % value))
    seconds, nanoseconds = divmod(entry.mtime_ns, 10**9)
    if nanoseconds or not 0 <= seconds <= 0o77777777777:
        records.append((b"mtime", _decimal(entry.mtime_ns)))
    records += [_xattr_record(key, value) for key, value in sorted(entry.xattrs.items())]
    block = _ustar(
        name,
        entry.kind.value,
        entry.mode,
        (entry.uid, entry.gid),
        stored,
        max(seconds, 0),
        link,
        entry.device,
    )
    if not records:
        return block + sparse_map
    body = b"".join(_record(key, value) for key, value in records)
    extension = _ustar(b"PaxHeaders.0/" + name.rpartition(b"/")[2][:80], b"x", 0o644, (0, 0), len(body), 0)
    return extension + body + padding(len(body)) + block + sparse_map


def padding(size: int) -> bytes:
    """The zeros that fill the last block after `size` bytes."""
    return bytes(-size % BLOCK)


def _long_names(name: bytes, link: bytes) -> Iterator[tuple[bytes, bytes]]:
    pairs = ((b"path", name), (b"linkpath", link))
    if any(not _is_utf8(value) for _, value in pairs):
        yield b"hdrcharset", b"BINARY"
    for key, value in pairs:
        if len(value) > 100 or not value.isascii():
            yield key, value


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _xattr_record(key: str, value: bytes) -> tuple[bytes, bytes]:
    if "=" in key:
        quoted = urllib.parse.quote_from_bytes(os.fsencode(key), safe="")
        return (_ENCODED_XATTR + quoted).encode(), base64.b64encode(value)
    return os.fsencode(_XATTR + key), value


def _record(key: bytes, value: bytes) -> bytes:
    """A pax record, `LENGTH KEY=VALUE\\n`; the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _decimal(nanoseconds: int) -> bytes:
    sign = b"-" if nanoseconds < 0 else b""
    seconds, fraction = divmod(abs(nanoseconds), 10**9)
    return sign + (b"%d.%09d" % (seconds, fraction)).rstrip(b"0").rstrip(b".")


def _sparse_map(segments: Sequence[Segment]) -> bytes:
    numbers = [len(segments), *(number for segment in segments for number in segment)]
    body = b"".join(b"%d\n" % number for number in numbers)
    return body + padding(len(body))


def _ustar(
    name: bytes,
    kind: bytes,
    mode: int,
    owner: tuple[int, int],
    size: int,
    mtime_s: int,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
) -> bytes:
    uid, gid = (min(number, 0o7777777) for number in owner)
    block = bytearray(BLOCK)
    struct.pack_into(
        "100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s",
        block,
        0,
        name[:100],
        b"%07o\0" % mode,
        b"%07o\0" % uid,
        b"%07o\0" % gid,
        b"%011o\0" % min(size, 0o77777777777),
        b"%011o\0" % min(mtime_s, 0o77777777777),
        b" " * 8,
        kind,
        link[:100],
        b"ustar\0",
        b"00",
        b"",
        b"",
        b"%07o\0" % device[0],
        b"%07o\0" % device[1],
    )
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


# Reading


class Reader:
    """The entries of a tar stream, in order; raises `RestoreError` for anything malformed.

    The data of the current entry is read with `data`; what is not read is skipped.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._left = 0
        """Bytes of the current entry still in the stream, its padding not counted."""
        self._pad = 0
        self._entry: Entry | None = None

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self._next()) is not None:
            self._entry = entry
            yield entry
            for _ in self._stored():
                pass
        self._finish()

    def data(self) -> Iterator[tuple[int, bytes]]:
        """(offset in the file, bytes) of the current entry, in order; holes are left out."""
        assert self._entry is not None
        segments = self._entry.segments
        if segments is None:
            segments = ((0, self._entry.size_bytes),)
        for offset, length in segments:
            end = offset + length
            while offset < end:
                piece = self._read_some(min(READ_BYTES, end - offset))
                self._left -= len(piece)
                yield offset, piece
                offset += len(piece)

    def _next(self) -> Entry | None:
        records: dict[str, bytes] = {}
        for _ in range(_MAX_EXTENSIONS + 1):
            self._exactly(self._pad)
            block = self._exactly(BLOCK)
            if not any(block):
                if records:
                    raise _malformed("a pax header belongs to no entry")
                return None
            size = _checked_size(block)
            kind = block[156:157]
            self._pad = -size % BLOCK
            if kind not in (b"x", b"g", b"L", b"K"):
                self._left = size
                return self._described(block, kind, size, records)
            if size > _MAX_EXTENSION_BYTES:
                raise _malformed(f"a header of {size} bytes")
            body = self._exactly(size)
            if kind == b"x":
                records.update(_records(body))
            elif kind != b"g":
                records.setdefault("path" if kind == b"L" else "linkpath", body.rstrip(b"\0"))
        raise _malformed(f"more than {_MAX_EXTENSIONS} headers for one entry")

    def _described(self, block: bytes, kind: bytes, stored: int, records: Mapping[str, bytes]) -> Entry:
        known = _KINDS.get(b"0" if kind in (b"\0", b"7") else kind)
        if known is None:
            raise _malformed(f"an entry of type {kind!r}")
        if "size" in records:
            stored = _integer(records["size"], "size")
        if stored and known not in (Kind.REGULAR, Kind.HARD_LINK):
            raise _malformed(f"an entry of type {kind!r} with {stored} bytes of data")
        self._left = 0 if known is Kind.HARD_LINK else stored
        self._pad = -self._left % BLOCK
        name = records.get("path") or _name(block)
        size_bytes, segments = self._left, None
        if any(key.startswith("GNU.sparse.") for key in records):
            if (records.get("GNU.sparse.major"), records.get("GNU.sparse.minor")) != (b"1", b"0"):
                raise _malformed("a sparse file in a format other than pax 1.0")
            name = records.get("GNU.sparse.name", name)
            size_bytes = _integer(records.get("GNU.sparse.realsize", b""), "GNU.sparse.realsize")
            segments = self._read_sparse_map(size_bytes)
        uid = _integer(records["uid"], "uid") if "uid" in records else _number(block[108:116])
        gid = _integer(records["gid"], "gid") if "gid" in records else _number(block[116:124])
        device = (_number(block[329:337]), _number(block[337:345]))
        mtime_ns = _number(block[136:148], signed=True) * 10**9
        if "mtime" in records:
            mtime_ns = _nanoseconds(records["mtime"])
        if max(uid, gid) >= 1 << 32 or device[0] >= 1 << 12 or device[1] >= 1 << 20:
            raise _malformed(f"the owner {uid}:{gid} or device {device[0]}:{device[1]} of {name[:80]!r}")
        if abs(mtime_ns) >= 10**20:
            raise _malformed(f"the time of {name[:80]!r}")
        return Entry(
            path=_path(name),
            kind=known,
            mode=_number(block[100:108]) & 0o7777,
            uid=uid,
            gid=gid,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            link=_path(records.get("linkpath") or block[157:257].split(b"\0", 1)[0]),
            device=device,
            xattrs=_xattrs(records),
            segments=segments,
        )

    def _read_sparse_map(self, size_bytes: int) -> list[Segment]:
        """The map before the data: a count and that many pairs, one number a line, in whole blocks."""
        blocks = [self._exactly(min(BLOCK, self._left))]
        wanted = 1 + 2 * _integer(blocks[0].split(b"\n", 1)[0], "sparse map")
        lines = blocks[0].count(b"\n")
        while lines < wanted:
            if len(blocks) * BLOCK >= min(self._left, _MAX_SPARSE_MAP_BYTES):
                raise _malformed("a sparse map that does not end")
            blocks.append(self._exactly(BLOCK))
            lines += blocks[-1].count(b"\n")
        self._left -= len(blocks) * BLOCK
        numbers = [_integer(line, "sparse map") for line in b"".join(blocks).split(b"\n", wanted)[1:wanted]]
        segments = list(zip(numbers[::2], numbers[1::2], strict=True))
        end = 0
        for offset, length in segments:
            if offset < end or offset + length > size_bytes:
                raise _malformed("a sparse map out of order")
            end = offset + length
        if sum(length for _, length in segments) != self._left:
            raise _malformed("a sparse map that does not match its data")
        return segments

    def _stored(self) -> Iterator[bytes]:
        while self._left:
            piece = self._read_some(min(READ_BYTES, self._left))
            self._left -= len(piece)
            yield piece

    def _finish(self) -> None:
        """Read to the end of the stream, where its digest is checked."""
        trailer = 0
        while piece := self._stream.read(READ_BYTES):
            trailer += len(piece)
            if trailer > _MAX_TRAILER_BYTES:
                raise _malformed("data after its end")

    def _exactly(self, size: int) -> bytes:
        if not size:
            return b""
        pieces = [self._read_some(size)]
        missing = size - len(pieces[0])
        while missing:
            pieces.append(self._read_some(missing))
            missing -= len(pieces[-1])
        return b"".join(pieces)

    def _read_some(self, size: int) -> bytes:
        piece = self._stream.read(size)
        if not piece:
            raise _malformed("it ends early")
        return piece


def _checked_size(block: bytes) -> int:
    total = sum(block) - sum(block[148:156]) + 8 * ord(" ")
    if _number(block[148:156]) != total:
        raise _malformed("a header's checksum is wrong")
    return _number(block[124:136])


def _name(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and (prefix := block[345:500].split(b"\0", 1)[0]):
        return prefix + b"/" + name
    return name


def _number(text: bytes, *, signed: bool = False) -> int:
    """An octal field, or GNU's base 256 (the first bit set, two's complement after it)."""
    if text[0] & 0x80:
        value = int.from_bytes(text, "big", signed=False) - (1 << (8 * len(text) - 1))
        if text[0] & 0x40:
            value -= 1 << (8 * len(text) - 1)
        if value < 0 and not signed:
            raise _malformed("a negative number")
        return value
    digits = text.strip(b" \0")
    if not _OCTAL.fullmatch(digits):
        raise _malformed(f"the number {text!r}")
    return int(digits or b"0", 8)


def _integer(text: bytes, what: str) -> int:
    if not _DECIMAL.fullmatch(text) or int(text) >= 1 << 63:
        raise _malformed(f"the value {text[:40]!r} of {what}")
    return int(text)


def _nanoseconds(text: bytes) -> int:
    match = _TIME.fullmatch(text)
    if not match:
        raise _malformed(f"the time {text[:40]!r}")
    value = int(match[2]) * 10**9 + int((match[3] or b"")[:9].ljust(9, b"0"))
    return -value if match[1] else value


def _path(name: bytes) -> str:
    if b"\0" in name or len(name) > _MAX_PATH_BYTES:
        raise _malformed(f"the name {name[:80]!r}")
    return os.fsdecode(name)


def _records(body: bytes) -> Iterator[tuple[str, bytes]]:
    offset = 0
    while offset < len(body):
        match = _RECORD.match(body, offset)
        end = offset + int(match[1]) if match else 0
        if not match or end > len(body) or end <= match.end() or body[end - 1 : end] != b"\n":
            raise _malformed("a broken pax header")
        key, equals, value = body[match.end() : end - 1].partition(b"=")
        if not equals:
            raise _malformed("a broken pax header")
        yield os.fsdecode(key), value
        offset = end


def _xattrs(records: Mapping[str, bytes]) -> dict[str, bytes]:
    xattrs = {}
    for key, value in records.items():
        if key.startswith(_XATTR):
            xattrs[key.removeprefix(_XATTR)] = value
        elif key.startswith(_ENCODED_XATTR):
            name = os.fsdecode(urllib.parse.unquote_to_bytes(key.removeprefix(_ENCODED_XATTR)))
            try:
                xattrs[name] = base64.b64decode(value, validate=True)
            except ValueError:
                raise _malformed("an extended attribute that is not base64") from None
    if any("\0" in name for name in xattrs):
        raise _malformed("an extended attribute's name")
    return xattrs


def _malformed(what: str) -> RestoreError:
    return RestoreError(
        f"the checkpoint's root file system difference is malformed: {what}",
        hint="the artifact is damaged or was not made by cedana",
    )
