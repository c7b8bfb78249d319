"""Reads JSON that may be hostile: bounded, finite, proper Unicode, into frozen dataclasses by their types.

Keys a dataclass does not know are ignored (they may come from a later version of the same format); a
value of another type than the field's is an `ArtifactError` naming the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from oci.errors import ArtifactError

MAX_STRING = 1 << 20
MAX_ITEMS = 1 << 20
_MAX_INTEGER = 1 << 63

T = TypeVar("T")


def load_json(body: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `body`; raises `ArtifactError` for anything else."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{what} is not valid JSON", details=str(error)[:200]) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{what} is not a JSON object")
    return value


def dump_json(value: Mapping[str, Any]) -> bytes:
    """Compact JSON; what is no Unicode (in a process's arguments, say) becomes "?"."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "replace")


def decode(cls: type[T], value: object, where: str) -> T:
    """An instance of the dataclass `cls` from the JSON object `value`."""
    if not isinstance(value, dict):
        raise ArtifactError(f"{where} is not an object")
    arguments: dict[str, Any] = {}
    for field, hint in _fields(cls):  # type: ignore[arg-type]
        if field.name in value:
            arguments[field.name] = _convert(hint, value[field.name], f"{where}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ArtifactError(f"{where} has no {field.name}")
    return cls(**arguments)


@cache
def _fields(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _convert(hint: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return decode(hint, value, where)  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise ArtifactError(f"{where} is not a list, or too long a one")
        return tuple(_convert(get_args(hint)[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict) or len(value) > MAX_ITEMS:
            raise ArtifactError(f"{where} is not an object, or too large a one")
        inner = get_args(hint)[1]
        return {_convert(str, key, where): _convert(inner, item, where) for key, item in value.items()}
    if hint is Any:
        return value
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float and type(value) in (int, float) and _finite(value):
        return float(value)  # type: ignore[arg-type]
    if hint is int and type(value) is int and -_MAX_INTEGER <= value < _MAX_INTEGER:
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and len(value) <= MAX_STRING and _unicode(value):
        return value
    kind = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}[hint]
    raise ArtifactError(f"{where} is not {kind}, or out of range")


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
