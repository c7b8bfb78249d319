"""What a person may write where a checkpoint is meant, beyond `oci.reference`: the bare name of one.

Bare names are tags of this node's own layout (`layout_dir`), where checkpoints go without `--to`. A tag is
the container's name and the time; the container's name alone means its newest checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from base.config import Config
from base.errors import NotFoundError, UsageError
from oci import open_store
from oci.errors import ArtifactError
from oci.record import CheckpointRecord
from oci.reference import LayoutReference, Reference, is_digest, is_tag, parse

AnyReference = Reference | LayoutReference
_TIME = "%Y%m%dT%H%M%SZ"
_MAX_NAME = 128 - len("-20260101T000000Z")


def new_tag(container_name: str, when: datetime | None = None) -> str:
    """The tag of a checkpoint taken `when`, or now."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", container_name).lstrip(".-")[:_MAX_NAME] or "container"
    return f"{name}-{(when or datetime.now(UTC)).astimezone(UTC).strftime(_TIME)}"


def tag_of(record: CheckpointRecord) -> str:
    """The tag a checkpoint would have got on the node it was taken on."""
    try:
        return new_tag(record.container.name, datetime.fromisoformat(record.created))
    except ValueError as error:
        raise ArtifactError("the checkpoint says no proper time of its making") from error


def target(text: str, container_name: str, config: Config) -> AnyReference:
    """Where a checkpoint goes: the reference with a tag; without a text, the default layout."""
    reference = _parse(text, config) if text else LayoutReference(config.layout_dir)
    if reference.digest:
        raise UsageError(
            f"{text} is a digest: a checkpoint gets its digest when it is written", hint="use a tag"
        )
    return reference if reference.tag else replace(reference, tag=new_tag(container_name))


def existing(text: str, config: Config) -> AnyReference:
    """The checkpoint `text` means, with a tag or digest; raises `UsageError` or `NotFoundError`."""
    reference = _parse(text, config)
    if reference.name and not (_is_bare(text) and not is_digest(text)):
        return reference
    if isinstance(reference, Reference):
        return replace(reference, tag="latest")
    if not reference.directory.is_dir():
        raise NotFoundError(f"there is no checkpoint {text!r}: {reference.directory} does not exist")
    tags = open_store(reference, config).tags()
    if reference.tag:
        return replace(reference, tag=_newest(reference.tag, tags))
    if len(tags) != 1:
        raise UsageError(
            f"{text} holds {len(tags)} checkpoints",
            hint=f"say which: {', '.join(sorted(tags)[-4:]) or 'none'}",
        )
    return replace(reference, tag=tags[0])


def store_of(text: str, config: Config) -> AnyReference:
    """The store `text` means, whatever tag it names; this node's layout for ''."""
    return _parse(text, config) if text else LayoutReference(config.layout_dir)


def _parse(text: str, config: Config) -> AnyReference:
    if _is_bare(text):
        layout = LayoutReference(config.layout_dir)
        return replace(layout, digest=text) if is_digest(text) else replace(layout, tag=text)
    return parse(text)


def _is_bare(text: str) -> bool:
    return is_digest(text) or is_tag(text)


def _newest(name: str, tags: Iterable[str]) -> str:
    tags = list(tags)
    if name in tags:
        return name
    dated = re.compile(re.escape(name) + r"-\d{8}T\d{6}Z")
    if found := sorted(filter(dated.fullmatch, tags)):
        return found[-1]
    raise NotFoundError(f"there is no checkpoint {name!r} on this node", hint="`cedana ls` lists them")
