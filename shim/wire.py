"""Just enough of the protobuf wire format for the short-lived commands.

Importing protobuf would cost them several times what they do; they read and write three small messages.
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """The bytes are no protobuf message."""


def decode(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of each field; values of length-delimited fields are bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, kind = key >> 3, key & 7
        if number == 0:
            raise WireError("field number 0")
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield number, value
            continue
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"wire type {kind}")
        if position + size > len(data):
            raise WireError("truncated field")
        yield number, data[position : position + size]
        position += size


def field(number: int, value: int | str | bytes) -> bytes:
    """One field; nothing for a value that is proto3's default."""
    if not value:
        return b""
    if isinstance(value, int):
        return _encode_varint(number << 3 | _VARINT) + _encode_varint(value & (1 << 64) - 1)
    body = value.encode() if isinstance(value, str) else value
    return _encode_varint(number << 3 | _BYTES) + _encode_varint(len(body)) + body


def any_message(type_url: str, value: bytes) -> bytes:
    """A google.protobuf.Any."""
    return field(1, type_url) + field(2, value)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while shift < 70:
        if position >= len(data):
            raise WireError("truncated varint")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & (1 << 64) - 1, position
        shift += 7
    raise WireError("varint too long")


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
