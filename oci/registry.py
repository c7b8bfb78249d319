"""A repository in a registry (distribution-spec 1.1) as a `Store`.

Blobs in memory go up as POST and PUT; streams as chunks (PATCH), each kept in memory until the registry
has it, so that a broken connection costs one chunk. Downloads continue with a range request where they
broke off.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

import urllib3

from base.config import Config
from base.errors import CedanaError, NotFoundError, UsageError
from oci.blobs import Verified
from oci.decode import dump_json, load_json
from oci.errors import DigestError, StoreError
from oci.http import DOCKER_HUB, Answer, Body, Client, ConnectionFailed, Scope, StatusError, finish
from oci.manifest import IMAGE_INDEX, IMAGE_MANIFEST, MANIFEST_TYPES, MAX_MANIFEST_BYTES
from oci.reference import Reference, is_digest, parse
from oci.store import BlobReader, Buffer, Descriptor, Store

PART_BYTES = 32 << 20
_OCTETS = {"Content-Type": "application/octet-stream"}
_PIECE = 1 << 20
_ATTEMPTS = 4
_MAX_TAGS = 1 << 17
_LOOKUPS = 8
_REFERRERS_TAG = re.compile(r"sha256-[0-9a-f]{64}")


class Repository:
    """The repository that `reference` names; its tag and digest play no part."""

    def __init__(self, reference: Reference, config: Config) -> None:
        self.registry = reference.registry
        self.repository = reference.repository
        self._client = Client(reference.registry, config)
        if self.registry == DOCKER_HUB and "/" not in self.repository:
            self.repository = f"library/{self.repository}"
        self._base = f"/v2/{self.repository}"
        self._pull = Scope(self.repository, "pull")
        self._push = Scope(self.repository, "pull,push")
        self._referrers_lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}"

    def manifest(self, name: str) -> tuple[Descriptor, bytes]:
        if not name:
            raise UsageError(f"{self} needs a tag or a digest", hint=f"{self}:TAG")
        answer = self._get_manifest(name)
        if answer is None:
            raise self._not_found(name)
        digest = f"sha256:{hashlib.sha256(answer.body).hexdigest()}"
        promised = name if is_digest(name) else answer.headers.get("docker-content-digest", digest)
        if digest != promised:
            raise DigestError(
                f"the manifest {name} of {self} has other content than its digest promises",
                hint="the registry's storage is damaged, or something between changed the answer",
                details=f"{digest}, not {promised}",
            )
        value = load_json(answer.body, f"the manifest {name} of {self}")
        default = IMAGE_INDEX if "manifests" in value else IMAGE_MANIFEST
        return Descriptor(str(value.get("mediaType") or default), digest, len(answer.body)), answer.body

    def exists(self, descriptor: Descriptor) -> bool:
        url = f"{self._base}/blobs/{descriptor.digest}"
        return self._client.fetch("HEAD", url, self._pull, "look for a blob", expect=(200, 404)).status == 200

    @contextmanager
    def open(
        self, descriptor: Descriptor, offset: int = 0, length: int | None = None
    ) -> Iterator[BlobReader]:
        end = descriptor.size if length is None else offset + length
        download = _Download(self._client, self._pull, f"{self._base}/blobs", descriptor, offset, end)
        try:
            yield Verified(download, descriptor) if offset == 0 and length is None else download
        finally:
            download.close()

    def write(
        self, media_type: str, chunks: Iterable[Buffer], annotations: Mapping[str, str] | None = None
    ) -> Descriptor:
        if isinstance(chunks, Sequence):
            digest, size = self._put_known(chunks)
        else:
            parts = _parts(chunks)
            first = next(parts, [])
            second = next(parts, None)
            if second is None:
                digest, size = self._put_known(first)
            else:
                digest, size = self._put_stream(self._start(), (first, second), parts)
        return Descriptor(media_type, digest, size, annotations or {})

    def copy_from(self, source: Store, descriptor: Descriptor, mount_from: str = "") -> None:
        if self.exists(descriptor):
            return
        location = self._mount(descriptor, self._mountable(source, mount_from))
        for attempt in range(1, _ATTEMPTS + 1):
            if location is None:
                return
            try:
                return self._copy(source, descriptor, location)
            except _UploadLost:
                if attempt == _ATTEMPTS:
                    raise
            location = self._start()

    def put_manifest(self, media_type: str, body: bytes, tag: str | None = None) -> Descriptor:
        descriptor = Descriptor(media_type, f"sha256:{hashlib.sha256(body).hexdigest()}", len(body))
        answer = self._client.fetch(
            "PUT",
            f"{self._base}/manifests/{tag or descriptor.digest}",
            self._push,
            f"put the manifest {tag or descriptor.digest} into {self.repository}",
            expect=(200, 201, 202),
            headers={"Content-Type": media_type},
            body=[body],
        )
        value = load_json(body, "the manifest")
        if value.get("subject") and "oci-subject" not in answer.headers:
            self._add_referrer(Descriptor.from_json(value["subject"]).digest, descriptor, value)
        return descriptor

    def tags(self) -> list[str]:
        url: str | None = f"{self._base}/tags/list?n=1000"
        found: list[str] = []
        while url is not None and len(found) < _MAX_TAGS:
            answer = self._client.fetch("GET", url, self._pull, f"list the tags of {self}", expect=(200, 404))
            if answer.status == 404:
                return []
            tags = load_json(answer.body, f"the list of tags of {self}").get("tags") or []
            found += [tag for tag in tags if isinstance(tag, str) and not _REFERRERS_TAG.fullmatch(tag)]
            url = _next_page(url, answer)
        return found

    def delete(self, name: str) -> None:
        descriptor, body = self.manifest(name)
        if not is_digest(name) and self._has_other_tag(name, descriptor.digest):
            self._delete_manifest(name, f"delete the tag {name} alone, of several of one checkpoint")
            return
        self._delete_manifest(descriptor.digest, f"delete {name} from {self}")
        if subject := load_json(body, "the manifest").get("subject"):
            self._remove_referrer(Descriptor.from_json(subject).digest, descriptor.digest)

    def referrers(self, digest: str) -> Sequence[Descriptor]:
        url: str | None = f"{self._base}/referrers/{digest}"
        found: list[Descriptor] = []
        while url is not None and len(found) < _MAX_TAGS:
            what = f"list what refers to {digest}"
            answer = self._client.fetch("GET", url, self._pull, what, expect=(200, 404))
            if answer.status == 404:
                return self._tagged_referrers(digest)
            found += _manifests(answer.body)
            url = _next_page(url, answer)
        return found

    def discard(self) -> None:
        """What no manifest refers to is the registry's own garbage collector's business."""

    def _get_manifest(self, name: str) -> Answer | None:
        answer = self._client.fetch(
            "GET",
            f"{self._base}/manifests/{name}",
            self._pull,
            f"get the manifest {name} of {self.repository}",
            expect=(200, 404),
            headers={"Accept": ", ".join(MANIFEST_TYPES)},
        )
        if len(answer.body) > MAX_MANIFEST_BYTES:
            raise StoreError(f"the manifest {name} of {self} is larger than {MAX_MANIFEST_BYTES} bytes")
        return answer if answer.status == 200 else None

    def _start(self) -> str:
        """Begin an upload; returns its location."""
        return self._location(
            self._client.fetch(
                "POST",
                f"{self._base}/blobs/uploads/",
                self._push,
                f"begin an upload to {self.repository}",
                expect=(202,),
            )
        )

    def _mount(self, descriptor: Descriptor, repository: str) -> str | None:
        """Have the registry take the blob from another repository of its own; the location of an
        ordinary upload where it does not."""
        if not repository:
            return self._start()
        query = urlencode({"mount": descriptor.digest, "from": repository})
        answer = self._client.fetch(
            "POST",
            f"{self._base}/blobs/uploads/?{query}",
            Scope(self.repository, "pull,push", repository),
            f"mount a blob of {repository} into {self.repository}",
            expect=(201, 202),
        )
        return None if answer.status == 201 else self._location(answer)

    def _mountable(self, source: Store, mount_from: str) -> str:
        if isinstance(source, Repository):
            return source.repository if source.registry == self.registry else ""
        with suppress(UsageError):
            reference = parse(mount_from)
            if isinstance(reference, Reference) and reference.registry == self.registry:
                return reference.repository if reference.repository != self.repository else ""
        return ""

    def _copy(self, source: Store, descriptor: Descriptor, location: str) -> None:
        with source.open(descriptor) as blob:
            pieces = iter(lambda: blob.read(_PIECE), b"")
            if descriptor.size <= PART_BYTES:
                self._put_known(list(pieces), location)
                return
            digest, _ = self._put_stream(location, (), _parts(pieces))
        if digest != descriptor.digest:
            raise DigestError(f"the blob {descriptor.digest} changed while it was copied")

    def _put_known(self, body: Body, location: str = "") -> tuple[str, int]:
        """Upload a blob that is in memory, from the beginning if need be."""
        hasher = hashlib.sha256()
        for part in body:
            hasher.update(part)
        digest, size = f"sha256:{hasher.hexdigest()}", sum(map(len, body))
        for attempt in range(1, _ATTEMPTS + 1):
            location = location or self._start()
            try:
                self._commit(location, digest, body)
                break
            except (ConnectionFailed, StatusError) as error:
                if attempt == _ATTEMPTS or not _worth_repeating(error):
                    self._cancel(location, error)
                    raise
            # The registry may have taken it and only the answer was lost.
            if self.exists(Descriptor("application/octet-stream", digest, size)):
                break
            location = ""
        return digest, size

    def _put_stream(self, location: str, first: Iterable[Body], rest: Iterator[Body]) -> tuple[str, int]:
        """Upload a blob part by part, whatever its size."""
        hasher = hashlib.sha256()
        size = 0
        try:
            for parts in (first, rest):
                for part in parts:
                    for buffer in part:
                        hasher.update(buffer)
                    length = sum(map(len, part))
                    location = self._put_part(location, part, size, length)
                    size += length
            digest = f"sha256:{hasher.hexdigest()}"
            self._commit(location, digest, ())
        except BaseException as error:
            self._cancel(location, error)
            raise
        return digest, size

    def _put_part(self, location: str, part: Body, start: int, length: int) -> str:
        """Upload [start, start + length) of a blob, continuing where a broken connection left it."""
        done = 0
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = self._client.fetch(
                    "PATCH",
                    location,
                    self._push,
                    f"upload to {self.repository}",
                    expect=(202, 204),
                    headers={**_OCTETS, "Content-Range": f"{start + done}-{start + length - 1}"},
                    body=_from(part, done),
                    attempts=1,
                )
                return self._location(answer)
            except (ConnectionFailed, StatusError) as error:
                if attempt == _ATTEMPTS or not _worth_repeating(error):
                    raise
                failure = error
            location, end = self._progress(location, failure)
            if not start <= end <= start + length:
                raise self._lost(failure) from failure
            done = end - start
            if done == length:
                return location
        raise AssertionError("not reached")

    def _progress(self, location: str, failure: StoreError) -> tuple[str, int]:
        """Where an upload that met `failure` goes on, and how many bytes the registry has."""
        what = f"ask how far an upload to {self.repository} got"
        try:
            answer = self._client.fetch("GET", location, self._push, what, expect=(204,))
        except StatusError as error:
            # docker-registry drops an upload that broke off inside a chunk.
            raise self._lost(failure) from error
        match = re.fullmatch(r"(?:bytes=)?0-(\d+)", answer.headers.get("range", ""))
        last = int(match[1]) if match else -1
        # "0-0" is both one byte and none; registries answer it for none.
        return self._location(answer), last + 1 if last > 0 else 0

    def _lost(self, failure: StoreError) -> _UploadLost:
        return _UploadLost(
            f"{self.registry} lost an upload under way: {failure.message}",
            hint="try again; the network or the registry is unreliable",
            details=failure.details,
        )

    def _commit(self, location: str, digest: str, body: Body) -> None:
        parts = urlsplit(location)
        query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), ("digest", digest)])
        self._client.fetch(
            "PUT",
            parts._replace(query=query).geturl(),
            self._push,
            f"upload a blob to {self.repository}",
            expect=(201, 204),
            headers=_OCTETS,
            body=body,
            attempts=1 if body else _ATTEMPTS,
        )

    def _cancel(self, location: str, failure: BaseException) -> None:
        """Have the registry drop an upload, unless `failure` says that it does not answer anyway."""
        if isinstance(failure, ConnectionFailed):
            return
        with suppress(CedanaError):
            self._client.fetch(
                "DELETE", location, self._push, "cancel an upload", expect=(204, 404), attempts=1
            )

    def _location(self, answer: Answer) -> str:
        location = answer.headers.get("location")
        if not location:
            raise StoreError(f"{self.registry} does not say where to upload to")
        return self._client.resolve(location)

    def _has_other_tag(self, name: str, digest: str) -> bool:
        def points_here(tag: str) -> bool:
            answer = self._client.fetch(
                "HEAD",
                f"{self._base}/manifests/{tag}",
                self._pull,
                f"look at the tag {tag} of {self}",
                expect=(200, 404),
                headers={"Accept": ", ".join(MANIFEST_TYPES)},
            )
            return answer.headers.get("docker-content-digest") == digest

        with ThreadPoolExecutor(_LOOKUPS) as pool:
            return any(pool.map(points_here, [tag for tag in self.tags() if tag != name]))

    def _delete_manifest(self, name: str, what: str) -> None:
        scope = Scope(self.repository, "delete,pull")
        scope = Scope(self.repository, "delete,pull")
        answer = self._client.fetch(
            "DELETE", f"{self._base}/manifests/{name}", scope, what, expect=(200, 202, 404)
        )
        if answer.status == 404:
            raise self._not_found(name)

    def _tagged_referrers(self, digest: str) -> list[Descriptor]:
        answer = self._get_manifest(_referrers_tag(digest))
        return _manifests(answer.body) if answer else []

    def _add_referrer(self, subject: str, descriptor: Descriptor, manifest: Mapping[str, Any]) -> None:
        """Note a manifest under the tag of its subject, as registries without the referrers API want it
        (distribution-spec, "Referrers Tag Schema")."""
        config = manifest.get("config") or {}
        entry = Descriptor(
            descriptor.media_type,
            descriptor.digest,
            descriptor.size,
            manifest.get("annotations") or {},
            manifest.get("artifactType") or config.get("mediaType") or "",
        )
        with self._referrers_lock:
            others = [d for d in self._tagged_referrers(subject) if d.digest != entry.digest]
            try:
                self._put_referrers(subject, [*others, entry])
            except StatusError as error:
                if error.status != 400:
                    raise
                # Some of the others were deleted, by someone who did not take them off the list.
                self._put_referrers(subject, [d for d in others if self._get_manifest(d.digest)] + [entry])

    def _remove_referrer(self, subject: str, digest: str) -> None:
        with self._referrers_lock:
            before = self._tagged_referrers(subject)
            after = [d for d in before if d.digest != digest and self._get_manifest(d.digest)]
            if len(after) < len(before):
                self._put_referrers(subject, after)

    def _put_referrers(self, subject: str, referrers: Sequence[Descriptor]) -> None:
        index = {
            "schemaVersion": 2,
            "mediaType": IMAGE_INDEX,
            "manifests": [descriptor.to_json() for descriptor in referrers],
        }
        self._client.fetch(
            "PUT",
            f"{self._base}/manifests/{_referrers_tag(subject)}",
            self._push,
            f"note in {self.repository} what refers to {subject}",
            expect=(200, 201, 202),
            headers={"Content-Type": IMAGE_INDEX},
            body=[dump_json(index)],
        )

    def _not_found(self, name: str) -> NotFoundError:
        separator = "@" if is_digest(name) else ":"
        return NotFoundError(
            f"there is no {self}{separator}{name}", hint=f"`cedana ls {self}` lists what is there"
        )


class _UploadLost(StoreError):
    """The registry no longer knows an upload that broke off: only the whole blob can be sent again."""


class _Download:
    """Bytes [offset, end) of a blob; a connection that breaks is made again where it broke off."""

    def __init__(
        self, client: Client, scope: Scope, blobs: str, descriptor: Descriptor, offset: int, end: int
    ) -> None:
        self._client = client
        self._scope = scope
        self._url = f"{blobs}/{descriptor.digest}"
        self._size = descriptor.size
        self._position = offset
        self._end = end
        self._failures = 0
        self._what = f"get the blob {descriptor.digest}"
        self._response: urllib3.BaseHTTPResponse | None = None

    def read(self, size: int = -1, /) -> bytes:
        wanted = self._end - self._position if size < 0 else min(size, self._end - self._position)
        parts: list[bytes] = []
        while wanted and (part := self._read_some(wanted)):
            parts.append(part)
            wanted -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        view = memoryview(buffer)[: self._end - self._position]
        done = 0
        while done < len(view):
            part = self._read_some(len(view) - done)
            view[done : done + len(part)] = part
            done += len(part)
        return done

    def close(self) -> None:
        if self._response is not None:
            finish(self._response)
            self._response = None

    def _read_some(self, size: int) -> bytes:
        """Between 1 and `size` bytes, connecting again as often as it seems worth it."""
        while True:
            try:
                if self._response is None:
                    self._response = self._connect()
                with self._client.translated(self._what):
                    part = self._response.read(size)
                if not part:
                    raise _ended_early(self._what)
                self._position += len(part)
                self._failures = 0
                return part
            except ConnectionFailed as error:
                self.close()
                self._failures += 1
                if not error.transient or self._failures == _ATTEMPTS:
                    raise

    def _connect(self) -> urllib3.BaseHTTPResponse:
        whole = self._position == 0 and self._end == self._size
        headers = {} if whole else {"Range": f"bytes={self._position}-{self._end - 1}"}
        try:
            response = self._client.request(
                "GET", self._url, self._scope, self._what, expect=(200, 206), headers=headers
            )
        except StatusError as error:
            if error.status == 404:
                raise StoreError(
                    f"{self._client.registry} does not have a blob of the checkpoint: could not {self._what}",
                    hint="the artifact is incomplete; push it again",
                ) from error
            raise
        skip = self._position if response.status == 200 else 0
        with self._client.translated(self._what):
            while skip and (skipped := response.read(min(skip, _PIECE))):
                skip -= len(skipped)
        return response


def _ended_early(what: str) -> ConnectionFailed:
    return ConnectionFailed(
        f"the registry ended its answer too early: could not {what}",
        hint="the registry's storage may be damaged; see its log",
        details="",
        transient=True,
    )


def _worth_repeating(error: ConnectionFailed | StatusError) -> bool:
    if isinstance(error, ConnectionFailed):
        return error.transient
    return error.status == 429 or error.status >= 500


def _parts(chunks: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """The chunks in groups of `PART_BYTES`, the last smaller; none is empty."""
    part: list[Buffer] = []
    size = 0
    for chunk in chunks:
        if not chunk:
            continue
        part.append(chunk)
        size += len(chunk)
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _from(part: Body, offset: int) -> Body:
    """The part without its first `offset` bytes."""
    rest: list[Buffer] = []
    for buffer in part:
        if offset < len(buffer):
            rest.append(memoryview(buffer)[offset:] if offset else buffer)
        offset = max(0, offset - len(buffer))
    return rest


def _manifests(body: bytes) -> list[Descriptor]:
    manifests = load_json(body, "the list of referrers").get("manifests") or []
    if not isinstance(manifests, list):
        raise StoreError("a list of referrers is malformed")
    return [Descriptor.from_json(manifest) for manifest in manifests]


def _referrers_tag(digest: str) -> str:
    return digest.replace(":", "-")


def _next_page(url: str, answer: Answer) -> str | None:
    """The URL of the next page of a list (RFC 5988 Link header), or None."""
    match = re.search(r"<([^>]*)>\s*;[^,]*rel=\"?next", answer.headers.get("link", ""))
    return urljoin(url, match[1]) if match else None
