"""What the command line can ask of a node: one function per command, called in-process.

Each takes what the person wrote, and returns what there is to show. Modules are imported by the function
that needs them: `cedana ls` must not pay for gRPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent import references
from agent.references import AnyReference
from base.config import Config
from base.errors import CedanaError
from base.trace import Trace
from oci import open_store
from oci.artifact import Artifact

if TYPE_CHECKING:
    from agent.checkpoint import Checkpointed
    from agent.restore import Restored, RestoreOptions
    from oci.store import Descriptor, Store
    from runtime.checkpoint import CheckpointOptions
    from runtime.features import Feature

_READERS = 8


@dataclass(frozen=True)
class Copied:
    source: AnyReference
    target: AnyReference
    manifest: Descriptor


@dataclass(frozen=True)
class Entry:
    """One tag of a store: a checkpoint, or why it cannot be read as one."""

    tag: str
    artifact: Artifact | None
    error: str = ""


@dataclass(frozen=True)
class Inspection:
    reference: AnyReference
    artifact: Artifact


def checkpoint(
    container: str, target: str, options: CheckpointOptions, config: Config, trace: Trace
) -> Checkpointed:
    """Save a container; see `agent.checkpoint`."""
    from agent import checkpoint as command

    return command.checkpoint(container, target, options, config, trace)


def restore(reference: str, options: RestoreOptions, config: Config, trace: Trace) -> Restored:
    """Bring a checkpoint back as a container; see `agent.restore`."""
    from agent import restore as command

    return command.restore(reference, options, config, trace)


def push(source: str, target: str, config: Config, trace: Trace) -> Copied:
    """Copy a checkpoint to where `target` says, under its tag there or else the tag it has here."""
    origin = references.existing(source, config)
    return _copy(origin, references.store_of(target, config), origin.tag, config, trace)


def pull(source: str, target: str, config: Config, trace: Trace) -> Copied:
    """Copy a checkpoint to `target`; '' is this node's own layout, under the container's name."""
    origin = references.existing(source, config)
    return _copy(origin, references.store_of(target, config), "", config, trace)


def ls(store_text: str, config: Config) -> tuple[AnyReference, list[Entry]]:
    """The checkpoints of a store, newest last; '' is this node's own layout."""
    reference = replace(references.store_of(store_text, config), tag="", digest="")
    store = open_store(reference, config)
    tags = store.tags()
    with ThreadPoolExecutor(_READERS) as readers:
        entries = list(readers.map(lambda tag: _entry(store, tag), tags))
    return reference, sorted(entries, key=lambda e: (e.artifact.record.created if e.artifact else "", e.tag))


def inspect(text: str, config: Config) -> Inspection:
    reference = references.existing(text, config)
    return Inspection(reference, Artifact.open(open_store(reference, config), reference.name))


def rm(names: Sequence[str], config: Config) -> list[AnyReference]:
    """Delete checkpoints; raises at the first that cannot be."""
    deleted = []
    for name in names:
        reference = references.existing(name, config)
        open_store(reference, config).delete(reference.name)
        deleted.append(reference)
    return deleted


def check(config: Config) -> list[Feature]:
    """What this node can do, and what to do about what it cannot."""
    from runtime import features

    return features.check(config)


def _copy(source: AnyReference, target: AnyReference, tag: str, config: Config, trace: Trace) -> Copied:
    from oci.transfer import copy

    origin = open_store(source, config)
    with trace.step("open"):
        artifact = Artifact.open(origin, source.name)
    tag = target.tag or tag or references.tag_of(artifact.record)
    target = replace(target, tag=tag, digest="")
    destination = open_store(target, config)
    manifest = copy(origin, artifact.manifest.digest, destination, tag, trace)
    return Copied(source, target, manifest)


def _entry(store: Store, tag: str) -> Entry:
    try:
        return Entry(tag, Artifact.open(store, tag))
    except CedanaError as error:
        return Entry(tag, None, error.message)
