"""The command line containerd starts the shim with: Go's flag syntax, then an action."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class FlagError(Exception):
    """The command line is not one that a shim understands."""


@dataclass(frozen=True)
class Flags:
    namespace: str = ""
    id: str = ""
    address: str = ""
    """containerd's gRPC socket, which also names this containerd in the shim's socket address."""
    publish_binary: str = ""
    socket: str = ""
    debug_socket: str = ""
    bundle: str = ""
    debug: bool = False
    version: bool = False
    info: bool = False
    action: str = ""


_TEXT = ("namespace", "id", "address", "publish-binary", "socket", "debug-socket", "bundle")
_SWITCHES = {"debug": "debug", "v": "version", "version": "version", "info": "info"}
_TRUE = ("1", "t", "T", "true", "TRUE", "True")
_FALSE = ("0", "f", "F", "false", "FALSE", "False")


def parse(arguments: Sequence[str]) -> Flags:
    """`-name value`, `-name=value`, either with one dash or two; the first other word is the action."""
    values: dict[str, Any] = {}
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, has_value, value = word.lstrip("-").partition("=")
        if name in _SWITCHES:
            if has_value and value not in _TRUE + _FALSE:
                raise FlagError(f"invalid boolean value {value!r} for -{name}")
            values[_SWITCHES[name]] = not has_value or value in _TRUE
        elif name in _TEXT:
            if not has_value:
                if not words:
                    raise FlagError(f"flag needs an argument: -{name}")
                value = words.pop(0)
            values[name.replace("-", "_")] = value
        else:
            raise FlagError(f"flag provided but not defined: -{name}")
    return Flags(**values, action=words[0] if words else "")
