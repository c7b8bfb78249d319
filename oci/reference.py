"""The names of artifacts: `REGISTRY/REPOSITORY[:TAG][@DIGEST]` and `oci:DIR[:TAG|@DIGEST]`.

The grammar is that of the distribution specification; a registry is always named, never assumed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from base.errors import UsageError

_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_NAME}(?:/{_NAME})*")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_REGISTRY = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]+\])(?::[0-9]{{1,5}})?")
_MAX_REPOSITORY = 255

TAG = re.compile(_TAG)
DIGEST = re.compile(_DIGEST)


@dataclass(frozen=True)
class Reference:
    registry: str
    """host[:port]"""
    repository: str
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """What `Store.manifest` is asked for: the digest if there is one, else the tag; may be ''."""
        return self.digest or self.tag

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.registry}/{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


@dataclass(frozen=True)
class LayoutReference:
    directory: Path
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        return self.digest or self.tag

    def __str__(self) -> str:
        suffix = f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""
        return f"oci:{self.directory}{suffix}"


def parse(text: str) -> Reference | LayoutReference:
    """The reference `text` names; raises `UsageError` saying what is wrong with it."""
    if "\0" in text or any(c.isspace() for c in text):
        raise UsageError(f"the reference {text!r} contains white space")
    if text.startswith("oci:"):
        return _parse_layout(text)
    return _parse_registry(text)


def is_digest(name: str) -> bool:
    return DIGEST.fullmatch(name) is not None


def is_tag(name: str) -> bool:
    return TAG.fullmatch(name) is not None


def _parse_layout(text: str) -> LayoutReference:
    rest = text.removeprefix("oci:")
    tag = digest = ""
    if match := re.fullmatch(rf"(.*)@({_DIGEST})", rest):
        rest, digest = match[1], match[2]
    if match := re.fullmatch(rf"(.*):({_TAG})", rest):
        rest, tag = match[1], "" if digest else match[2]
    last = rest.rpartition("/")[2]
    if "@" in last or ":" in last:
        raise UsageError(
            f"the reference {text!r} ends in neither a tag nor a digest",
            hint="a layout is written oci:DIRECTORY, oci:DIRECTORY:TAG or oci:DIRECTORY@sha256:…",
        )
    if not rest:
        raise UsageError(f"the reference {text!r} names no directory", hint="write oci:DIRECTORY[:TAG]")
    return LayoutReference(Path(os.path.abspath(rest)), tag, digest)


def _parse_registry(text: str) -> Reference:
    if "://" in text:
        raise UsageError(
            f"the reference {text!r} must not have a scheme",
            hint="write REGISTRY/REPOSITORY:TAG; registries without TLS go into plain_http of config.toml",
        )
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise UsageError(f"the reference {text!r} has a malformed digest", hint="sha256: and 64 hex digits")
    registry, slash, path = rest.partition("/")
    if not slash or not (set(".:") & set(registry) or registry == "localhost"):
        raise UsageError(
            f"the reference {text!r} names no registry",
            hint=f"write REGISTRY/{rest or 'REPOSITORY:TAG'} (e.g. 127.0.0.1:5000/{rest or 'name:tag'}), "
            "or oci:DIRECTORY:TAG",
        )
    repository, colon, tag = path.partition(":")
    if not _REGISTRY.fullmatch(registry):
        raise UsageError(f"the reference {text!r} has a malformed registry {registry!r}", hint="HOST[:PORT]")
    if not _REPOSITORY.fullmatch(repository) or len(repository) > _MAX_REPOSITORY:
        raise UsageError(
            f"the reference {text!r} has a malformed repository {repository!r}",
            hint="lower-case letters, digits, and . _ - / between them",
        )
    if colon and not is_tag(tag):
        raise UsageError(
            f"the reference {text!r} has a malformed tag {tag!r}",
            hint="letters, digits, and . _ - after the first, 128 at most",
        )
    return Reference(registry, repository, tag, digest)
