"""An OCI image layout on disk (image-spec, image-layout.md): the default store, no server needed.

Any number of processes may read, write and delete in it at once:
- A blob is written under `.cedana/`, synced, then renamed to its digest: readers see whole blobs only.
- `index.json` is replaced by rename, by whoever holds the lock file `.cedana/lock`.
- Whoever writes holds a lock on a session file of its own. Deleting sweeps away the blobs nothing refers
  to, but spares those that were written, or found to be there already (and touched), since the oldest
  session still alive began. The kernel drops a dead process's lock.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from base.errors import NotFoundError
from oci.blobs import blob_path, open_blob, read_manifest_file
from oci.decode import load_json
from oci.errors import StoreError
from oci.manifest import IMAGE_INDEX, IMAGE_MANIFEST, MAX_MANIFEST_BYTES
from oci.reference import is_digest, is_tag
from oci.store import BlobReader, Buffer, Descriptor, Store

_REF_NAME = "org.opencontainers.image.ref.name"
_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
_OURS = frozenset({"oci-layout", "index.json", "blobs", ".cedana"})
_PIECE = 1 << 20
_MAX_INDEX_BYTES = 64 << 20
_MAX_DEPTH = 8
_IOV_MAX = 1024


class Layout:
    """The image layout in `directory`, which is made when something is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._blobs = directory / "blobs"
        self._private = directory / ".cedana"
        self._end_session: weakref.finalize[[Path, int], Layout] | None = None
        self._session_lock = threading.Lock()

    def __str__(self) -> str:
        return f"oci:{self.directory}"

    def manifest(self, name: str) -> tuple[Descriptor, bytes]:
        entry = next((e for e in self._entries() if name in (e.get("digest"), _tag(e))), None)
        digest = Descriptor.from_json(entry).digest if entry else name
        try:
            if not is_digest(digest):
                raise FileNotFoundError(digest)
            body = read_manifest_file(blob_path(self._blobs, digest), digest, MAX_MANIFEST_BYTES)
        except FileNotFoundError as error:
            raise self._not_found(name) from error
        except OSError as error:
            raise StoreError(f"cannot read {name} in {self}", details=str(error)) from error
        return Descriptor(_media_type(body), digest, len(body)), body

    def exists(self, descriptor: Descriptor) -> bool:
        return blob_path(self._blobs, descriptor.digest).exists()

    def open(
        self, descriptor: Descriptor, offset: int = 0, length: int | None = None
    ) -> AbstractContextManager[BlobReader]:
        return open_blob(blob_path(self._blobs, descriptor.digest), descriptor, offset, length)

    def write(
        self, media_type: str, chunks: Iterable[Buffer], annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        self._begin_session()
        digest = hashlib.sha256()
        if isinstance(chunks, Sequence):
            for chunk in chunks:
                digest.update(chunk)
            name, size = f"sha256:{digest.hexdigest()}", sum(map(len, chunks))
            if not self._missing([name]):
                return Descriptor(media_type, name, size, annotations or {})
        with self._new_file() as (fd, temporary):
            if isinstance(chunks, Sequence):
                _write_all(fd, chunks)
            else:
                size = 0
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    _write_all(fd, [chunk])
                name = f"sha256:{digest.hexdigest()}"
            os.fdatasync(fd)
            os.rename(temporary, blob_path(self._blobs, name))
        return Descriptor(media_type, name, size, annotations or {})

    def copy_from(self, source: Store, descriptor: Descriptor, mount_from: str = "") -> None:
        self._begin_session()
        if self._missing([descriptor.digest]):
            with source.open(descriptor) as blob:
                self.write(descriptor.media_type, iter(lambda: blob.read(_PIECE), b""))

    def put_manifest(self, media_type: str, body: bytes, tag: str | None = None) -> Descriptor:
        if tag is not None and not is_tag(tag):
            raise StoreError(f"{tag!r} cannot be a tag")
        self._begin_session()
        needed, subject = _references(body)
        if missing := self._missing(needed):
            raise StoreError(f"{self} lacks the blob {missing[0]} that a new manifest refers to")
        self._missing(subject)
        written = self.write(media_type, [body])
        if tag is not None:
            _sync_directory(self._blobs / "sha256")
            named = Descriptor(
                media_type, written.digest, written.size, {_REF_NAME: tag}, _artifact_type(body)
            )
            with self._locked():
                before = self._entries()
                kept = [entry for entry in before if _tag(entry) != tag]
                self._replace_entries([*kept, named.to_json()])
                if len(kept) < len(before):
                    self._sweep()
        return written

    def tags(self) -> list[str]:
        return sorted({tag for entry in self._entries() if (tag := _tag(entry))})

    def delete(self, name: str) -> None:
        if not self._entries():
            raise self._not_found(name)
        self._make()
        with self._locked():
            entries = self._entries()
            kept = [entry for entry in entries if name not in (entry.get("digest"), _tag(entry))]
            if len(kept) == len(entries):
                raise self._not_found(name)
            self._replace_entries(kept)
            self._sweep()

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        found: dict[str, Descriptor] = {}
        for entry in self._entries():
            descriptor, body = self.manifest(Descriptor.from_json(entry).digest)
            value = load_json(body, "the manifest")
            subject = value.get("subject")
            if isinstance(subject, dict) and subject.get("digest") == digest:
                found[descriptor.digest] = Descriptor.from_json(
                    {
                        **descriptor.to_json(),
                        "annotations": value.get("annotations"),
                        "artifactType": _artifact_type(body),
                    }
                )
        return list(found.values())

    def discard(self) -> None:
        if self._end_session is not None:
            self.close()
            with self._locked():
                self._sweep()

    def close(self) -> None:
        """End the writing session: what it wrote and nothing refers to is no longer spared. Happens by
        itself when the object goes away."""
        with self._session_lock:
            if self._end_session is not None:
                self._end_session()
                self._end_session = None

    def _begin_session(self) -> None:
        with self._session_lock:
            if self._end_session is not None:
                return
            self._make()
            with self._locked():
                path = self._private / f"session-{secrets.token_hex(8)}"
                fd = _create(path)
                fcntl.flock(fd, fcntl.LOCK_EX)
            self._end_session = weakref.finalize(self, _remove_session, path, fd)

    def _make(self) -> None:
        """Make the directories and files of an empty layout, where there are none."""
        if self._private.exists() and (self.directory / "oci-layout").exists():
            return
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (self.directory / "oci-layout").exists() and {*os.listdir(self.directory)} - _OURS:
                raise StoreError(
                    f"{self.directory} is neither empty nor an OCI image layout",
                    hint="name a new or empty directory",
                )
            for directory in (self._blobs, self._blobs / "sha256", self._private):
                directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from error
        with self._locked():
            if not (self.directory / "index.json").exists():
                self._replace_entries([])
            if not (self.directory / "oci-layout").exists():
                self._replace("oci-layout", _LAYOUT)

    @contextmanager
    def _locked(self, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        try:
            fd = os.open(self._private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._failed(error) from error
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)

    def _missing(self, digests: Iterable[str]) -> list[str]:
        """Which of the blobs are not here. Those that are, no sweep takes away before this session ends."""
        missing = []
        with self._locked(fcntl.LOCK_SH):
            for digest in digests:
                try:
                    os.utime(blob_path(self._blobs, digest))
                except FileNotFoundError:
                    missing.append(digest)
        return missing

    def _entries(self) -> list[dict[str, Any]]:
        """The descriptors in index.json, as they are there."""
        try:
            with (self.directory / "index.json").open("rb") as file:
                body = file.read(_MAX_INDEX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StoreError(f"cannot read {self}", details=str(error)) from error
        entries = load_json(body, f"the index of {self}").get("manifests")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise StoreError(f"the index of {self} is malformed", details=str(self.directory / "index.json"))
        return entries

    def _replace_entries(self, entries: Sequence[Mapping[str, Any]]) -> None:
        index = {"schemaVersion": 2, "mediaType": IMAGE_INDEX, "manifests": list(entries)}
        self._replace("index.json", json.dumps(index, indent=1).encode())

    def _replace(self, name: str, body: bytes) -> None:
        with self._new_file() as (fd, temporary):
            _write_all(fd, [body])
            os.fdatasync(fd)
            os.rename(temporary, self.directory / name)
            _sync_directory(self.directory)

    @contextmanager
    def _new_file(self) -> Iterator[tuple[int, Path]]:
        """A private file to be renamed; removed when that does not happen."""
        path = self._private / f"blob-{secrets.token_hex(8)}"
        fd = -1
        try:
            fd = _create(path)
            yield fd, path
        except OSError as error:
            path.unlink(missing_ok=True)
            raise self._failed(error) from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            if fd >= 0:
                os.close(fd)

    def _sweep(self) -> None:
        """Remove blobs that nothing refers to and no live session may need. The caller holds the lock."""
        try:
            kept = self._reachable()
        except StoreError:
            return  # A manifest that cannot be read may refer to anything.
        began = self._oldest_session()
        for directory, prefix in ((self._blobs / "sha256", "sha256:"), (self._private, "")):
            for file in os.scandir(directory):
                ours = bool(prefix) or file.name.startswith("blob-")
                if not ours or f"{prefix}{file.name}" in kept:
                    continue
                with suppress(FileNotFoundError):
                    if began is None or file.stat().st_mtime_ns < began:
                        os.unlink(file.path)

    def _reachable(self) -> set[str]:
        """Every digest index.json leads to: manifests, what they refer to, and their subjects."""
        reached: set[str] = set()
        level = {Descriptor.from_json(entry).digest for entry in self._entries()}
        while level:
            reached |= level
            following: set[str] = set()
            for digest in level:
                with suppress(NotFoundError):
                    blobs, manifests = _children(self.manifest(digest)[1])
                    reached |= blobs
                    following |= manifests
            level = following - reached
        return reached

    def _oldest_session(self) -> int | None:
        """When the oldest session still alive began, by its file's time; None when there is none."""
        times = []
        for path in self._private.glob("session-*"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                times.append(os.fstat(fd).st_mtime_ns)
            finally:
                os.close(fd)
        return min(times, default=None)

    def _not_found(self, name: str) -> NotFoundError:
        return NotFoundError(
            f"there is no {name or 'artifact without a name'} in {self}",
            hint=f"`cedana ls {self}` lists what is there",
        )

    def _failed(self, error: OSError) -> StoreError:
        hint = "free some space there, or name another store (--to)" if error.errno == errno.ENOSPC else ""
        return StoreError(
            f"cannot write to {self}: {os.strerror(error.errno or 0)}", hint=hint, details=str(error)
        )


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _remove_session(path: Path, fd: int) -> None:
    path.unlink(missing_ok=True)
    os.close(fd)


def _write_all(fd: int, chunks: Sequence[Buffer]) -> None:
    for first in range(0, len(chunks), _IOV_MAX):
        views = [memoryview(chunk) for chunk in chunks[first : first + _IOV_MAX]]
        while views:
            written = os.writev(fd, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if views:
                views[0] = views[0][written:]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _tag(entry: Mapping[str, Any]) -> str:
    annotations = entry.get("annotations")
    tag = annotations.get(_REF_NAME) if isinstance(annotations, dict) else None
    return tag if isinstance(tag, str) else ""


def _media_type(body: bytes) -> str:
    value = load_json(body, "the manifest")
    return str(value.get("mediaType") or (IMAGE_INDEX if "manifests" in value else IMAGE_MANIFEST))


def _artifact_type(body: bytes) -> str:
    artifact_type = load_json(body, "the manifest").get("artifactType")
    return artifact_type if isinstance(artifact_type, str) else ""


def _references(body: bytes) -> tuple[list[str], list[str]]:
    """What a manifest cannot be without, and the subject it may refer to."""
    value = load_json(body, "the manifest")
    blobs, manifests = _children(body)
    subject = value.get("subject")
    subjects = {Descriptor.from_json(subject).digest} if subject else set()
    return sorted(blobs | (manifests - subjects)), sorted(subjects)


def _children(body: bytes) -> tuple[set[str], set[str]]:
    """Digests of the blobs a manifest or index refers to, and of the manifests."""
    value = load_json(body, "the manifest")
    blobs = [value.get("config"), *(value.get("layers") or ())]
    manifests = [value.get("subject"), *(value.get("manifests") or ())]
    return (
        {Descriptor.from_json(blob).digest for blob in blobs if blob},
        {Descriptor.from_json(manifest).digest for manifest in manifests if manifest},
    )
