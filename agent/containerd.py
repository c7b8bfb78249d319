"""containerd's gRPC API, as far as the agent needs it: one method of `Client` per call.

Messages are those of agent/api/containerd.proto. Errors come out as `ContainerdError` with containerd's own
words in `details`; no other module imports grpc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from agent.api import containerd_pb2 as api
from agent.errors import (
    AlreadyExistsError,
    ContainerdError,
    ContainerdNotFoundError,
    FailedPreconditionError,
)

_MAX_MESSAGE_BYTES = 16 << 20
"""containerd's own limit (defaults.DefaultMaxRecvMsgSize)."""
_CHUNK_BYTES = 1 << 20
_QUICK_S = 30.0
"""For calls that only read or write containerd's database. Calls whose work scales have no limit."""

Reply = TypeVar("Reply", bound=Message)


class Client:
    """A connection to containerd, acting in one of its namespaces."""

    def __init__(self, address: Path, namespace: str) -> None:
        self.address = address
        self.namespace = namespace
        self._lease = ""
        self._channel = grpc.insecure_channel(
            f"unix:{address}",
            options=[
                # The default authority is the socket's path, which Go's servers refuse.
                ("grpc.default_authority", "localhost"),
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ],
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    @contextmanager
    def lease(self, labels: Mapping[str, str] | None = None) -> Iterator[None]:
        """Keep everything created inside the block from containerd's garbage collector."""
        expires = datetime.now(UTC) + timedelta(hours=24)
        request = api.CreateLeaseRequest(
            id=f"cedana-{expires.timestamp():.6f}",
            labels={"containerd.io/gc.expire": expires.isoformat(timespec="seconds"), **(labels or {})},
        )
        reply = self._call("leases.v1.Leases/Create", request, api.CreateLeaseResponse)
        self._lease = reply.lease.id
        try:
            yield
        finally:
            lease, self._lease = self._lease, ""
            self._call("leases.v1.Leases/Delete", api.DeleteLeaseRequest(id=lease), api.Empty)

    def keep(self, kind: str, name: str) -> None:
        """Add an existing object, such as ("snapshots/overlayfs", key), to the lease."""
        resource = api.LeaseResource(id=name, type=kind)
        request = api.AddLeaseResourceRequest(id=self._lease, resource=resource)
        self._call("leases.v1.Leases/AddResource", request, api.Empty)

    # Namespaces, plugins

    def namespaces(self) -> list[str]:
        request = api.ListNamespacesRequest()
        reply = self._call("namespaces.v1.Namespaces/List", request, api.ListNamespacesResponse)
        return [namespace.name for namespace in reply.namespaces]

    def plugin_root(self, kind: str) -> Path:
        """The directory of the first plugin of the type `kind` that says where its own is."""
        request = api.PluginsRequest(filters=[f"type=={kind}"])
        reply = self._call("introspection.v1.Introspection/Plugins", request, api.PluginsResponse)
        for plugin in reply.plugins:
            if root := plugin.exports.get("root"):
                return Path(root)
        raise ContainerdError(f"containerd at {self.address} has no plugin of type {kind} on this machine")

    # Containers

    def container(self, container_id: str) -> api.Container:
        request = api.GetContainerRequest(id=container_id)
        reply = self._call("containers.v1.Containers/Get", request, api.GetContainerResponse)
        return reply.container

    def containers(self, *filters: str) -> list[api.Container]:
        """The containers that match any of `filters` (containerd's filter syntax); all without one."""
        request = api.ListContainersRequest(filters=filters)
        reply = self._call("containers.v1.Containers/List", request, api.ListContainersResponse)
        return list(reply.containers)

    def create_container(self, container: api.Container) -> None:
        request = api.CreateContainerRequest(container=container)
        self._call("containers.v1.Containers/Create", request, api.CreateContainerResponse)

    def update_container(self, container: api.Container, *paths: str) -> None:
        """Write the fields `paths` ("spec", "labels.NAME"); an empty label is removed."""
        request = api.UpdateContainerRequest(container=container, update_mask=api.FieldMask(paths=paths))
        self._call("containers.v1.Containers/Update", request, api.UpdateContainerResponse)

    def update_labels(self, container_id: str, labels: Mapping[str, str]) -> None:
        container = api.Container(id=container_id, labels=labels)
        self.update_container(container, *(f"labels.{name}" for name in labels))

    def delete_container(self, container_id: str) -> None:
        request = api.DeleteContainerRequest(id=container_id)
        self._call("containers.v1.Containers/Delete", request, api.Empty)

    # Tasks

    def task(self, container_id: str) -> api.Process | None:
        """The container's task; None when it has none."""
        request = api.GetTaskRequest(container_id=container_id)
        try:
            return self._call("tasks.v1.Tasks/Get", request, api.GetTaskResponse).process
        except ContainerdNotFoundError:
            return None

    def create_task(self, request: api.CreateTaskRequest) -> None:
        self._call("tasks.v1.Tasks/Create", request, api.CreateTaskResponse, timeout_s=None)

    def start_task(self, container_id: str) -> int:
        """Start the task; returns init's pid."""
        request = api.StartTaskRequest(container_id=container_id)
        return self._call("tasks.v1.Tasks/Start", request, api.StartTaskResponse, timeout_s=None).pid

    def kill_task(self, container_id: str, signal: int) -> None:
        request = api.KillTaskRequest(container_id=container_id, signal=signal, all=True)
        self._call("tasks.v1.Tasks/Kill", request, api.Empty)

    def wait_task(self, container_id: str, timeout_s: float) -> None:
        """Return once the task's init has ended."""
        request = api.WaitTaskRequest(container_id=container_id)
        self._call("tasks.v1.Tasks/Wait", request, api.WaitTaskResponse, timeout_s=timeout_s)

    def delete_task(self, container_id: str) -> None:
        request = api.DeleteTaskRequest(container_id=container_id)
        self._call("tasks.v1.Tasks/Delete", request, api.DeleteTaskResponse, timeout_s=None)

    # Images and content

    def image(self, name: str) -> api.Image | None:
        try:
            request = api.GetImageRequest(name=name)
            return self._call("images.v1.Images/Get", request, api.GetImageResponse).image
        except ContainerdNotFoundError:
            return None

    def images(self) -> list[api.Image]:
        request = api.ListImagesRequest()
        return list(self._call("images.v1.Images/List", request, api.ListImagesResponse).images)

    def create_image(self, name: str, target: api.Descriptor) -> None:
        request = api.CreateImageRequest(image=api.Image(name=name, target=target))
        self._call("images.v1.Images/Create", request, api.CreateImageResponse)

    def delete_image(self, name: str) -> None:
        """Remove the record, and wait until what only it needed is collected."""
        self._call("images.v1.Images/Delete", api.DeleteImageRequest(name=name, sync=True), api.Empty)

    def has_content(self, digest: str) -> bool:
        try:
            request = api.ContentInfoRequest(digest=digest)
            self._call("content.v1.Content/Info", request, api.ContentInfoResponse)
        except ContainerdNotFoundError:
            return False
        return True

    def label_content(self, digest: str, labels: Mapping[str, str]) -> None:
        request = api.ContentUpdateRequest(
            info=api.ContentInfo(digest=digest, labels=labels),
            update_mask=api.FieldMask(paths=[f"labels.{name}" for name in labels]),
        )
        self._call("content.v1.Content/Update", request, api.ContentUpdateResponse)

    def write_content(
        self, digest: str, size: int, chunks: Iterable[bytes], labels: Mapping[str, str] | None = None
    ) -> None:
        """Store a blob; containerd checks the digest. Does nothing if it has the blob already."""
        reference = f"cedana-{digest}"
        self._abort_write(reference)
        written = 0

        def requests() -> Iterator[api.WriteContentRequest]:
            nonlocal written
            for chunk in chunks:
                for start in range(0, len(chunk), _CHUNK_BYTES):
                    piece = chunk[start : start + _CHUNK_BYTES]
                    yield api.WriteContentRequest(
                        action=api.WRITE, ref=reference, offset=written, data=piece, total=size
                    )
                    written += len(piece)
            yield api.WriteContentRequest(
                action=api.COMMIT, ref=reference, offset=written, total=size, expected=digest, labels=labels
            )

        source = _Source(requests())
        call = self._channel.stream_stream(
            "/containerd.services.content.v1.Content/Write",
            request_serializer=_serialize,
            response_deserializer=api.WriteContentResponse.FromString,
        )
        try:
            for _ in call(source, metadata=self._metadata()):
                pass
        except grpc.RpcError as error:
            if source.error is not None:
                self._abort_write(reference)
                raise source.error from None
            failure = self._failure("content.v1.Content/Write", error)
            if not isinstance(failure, AlreadyExistsError):
                self._abort_write(reference)
                raise failure from error

    def _abort_write(self, reference: str) -> None:
        with suppress(ContainerdNotFoundError):
            self._call("content.v1.Content/Abort", api.AbortContentRequest(ref=reference), api.Empty)

    # Snapshots

    def snapshot_parent(self, snapshotter: str, key: str) -> str | None:
        """The name of the snapshot's parent ('' if it has none); None if there is no such snapshot."""
        request = api.StatSnapshotRequest(snapshotter=snapshotter, key=key)
        try:
            reply = self._call("snapshots.v1.Snapshots/Stat", request, api.StatSnapshotResponse)
        except ContainerdNotFoundError:
            return None
        return reply.info.parent

    def prepare_snapshot(self, snapshotter: str, key: str, parent: str) -> list[api.Mount]:
        request = api.PrepareSnapshotRequest(snapshotter=snapshotter, key=key, parent=parent)
        reply = self._call("snapshots.v1.Snapshots/Prepare", request, api.PrepareSnapshotResponse)
        return list(reply.mounts)

    def snapshot_mounts(self, snapshotter: str, key: str) -> list[api.Mount]:
        request = api.MountsRequest(snapshotter=snapshotter, key=key)
        return list(self._call("snapshots.v1.Snapshots/Mounts", request, api.MountsResponse).mounts)

    def commit_snapshot(self, snapshotter: str, name: str, key: str) -> None:
        request = api.CommitSnapshotRequest(snapshotter=snapshotter, name=name, key=key)
        self._call("snapshots.v1.Snapshots/Commit", request, api.Empty)

    def remove_snapshot(self, snapshotter: str, key: str) -> None:
        request = api.RemoveSnapshotRequest(snapshotter=snapshotter, key=key)
        self._call("snapshots.v1.Snapshots/Remove", request, api.Empty, timeout_s=None)

    def apply_layer(self, layer: api.Descriptor, mounts: Sequence[api.Mount]) -> str:
        """Unpack a layer from the content store into `mounts`; returns its uncompressed digest."""
        request = api.ApplyDiffRequest(diff=layer, mounts=mounts)
        reply = self._call("diff.v1.Diff/Apply", request, api.ApplyDiffResponse, timeout_s=None)
        return reply.applied.digest

    def _call(
        self, path: str, request: Message, reply: type[Reply], timeout_s: float | None = _QUICK_S
    ) -> Reply:
        call: Callable[..., Any] = self._channel.unary_unary(
            f"/containerd.services.{path}",
            request_serializer=_serialize,
            response_deserializer=reply.FromString,
        )
        try:
            answer: Reply = call(request, metadata=self._metadata(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._failure(path, error) from error
        return answer

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        namespace = ("containerd-namespace", self.namespace)
        return (namespace, ("containerd-lease", self._lease)) if self._lease else (namespace,)

    def _failure(self, path: str, error: Any) -> ContainerdError:
        code, details = error.code(), error.details() or ""
        service, _, method = path.partition("/")
        what = f"{service.rpartition('.')[2]}.{method}"
        match code:
            case grpc.StatusCode.NOT_FOUND:
                return ContainerdNotFoundError(f"containerd, {what}: {details}")
            case grpc.StatusCode.ALREADY_EXISTS:
                return AlreadyExistsError(f"containerd, {what}: {details}")
            case grpc.StatusCode.FAILED_PRECONDITION:
                return FailedPreconditionError(f"containerd refused {what}", details=details)
            case grpc.StatusCode.UNAVAILABLE:
                return ContainerdError(
                    f"containerd does not answer at {self.address}",
                    hint="start it, or name its socket: containerd_address in /etc/cedana/config.toml, or"
                    " CONTAINERD_ADDRESS",
                    details=details,
                )
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return ContainerdError(
                    f"containerd at {self.address} did not answer {what} in time",
                    hint="look at containerd's log: it may be waiting for its disk",
                )
        return ContainerdError(f"containerd refused {what}", details=details)


class _Source:
    """An iterator that remembers what it raised: grpc reports only that its input failed."""

    def __init__(self, requests: Iterator[api.WriteContentRequest]) -> None:
        self._requests = requests
        self.error: BaseException | None = None

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> api.WriteContentRequest:
        try:
            return next(self._requests)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
