"""An in-process containerd: the calls the agent makes, on a unix socket, with its state in dictionaries."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from agent.api import containerd_pb2 as api


@dataclass
class Space:
    """One namespace."""

    containers: dict[str, api.Container] = field(default_factory=dict)
    tasks: dict[str, api.Process] = field(default_factory=dict)
    images: dict[str, api.Image] = field(default_factory=dict)
    content: dict[str, bytes] = field(default_factory=dict)
    content_labels: dict[str, dict[str, str]] = field(default_factory=dict)
    snapshots: dict[str, str] = field(default_factory=dict)
    """Name or key → parent."""
    leases: dict[str, list[str]] = field(default_factory=dict)


class FakeContainerd:
    def __init__(self, directory: Path) -> None:
        self.address = directory / "containerd.sock"
        self.content_root = directory / "content"
        self.snapshot_root = directory / "snapshots"
        self.spaces: dict[str, Space] = {"default": Space()}
        self.failures: dict[str, tuple[grpc.StatusCode, str]] = {}
        """"Tasks/Start" → what it answers."""
        self.calls: list[str] = []
        self.metadata: list[dict[str, str]] = []
        self.layers: dict[str, str] = {}
        """Digest of a layer → its uncompressed digest, for Diff.Apply."""
        self.hooks: dict[str, Callable[[Any], None]] = {}
        self._lock = threading.Lock()
        self._server = grpc.server(ThreadPoolExecutor(8))
        for service, methods in self._services().items():
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(f"containerd.services.{service}", methods),)
            )
        self._server.add_insecure_port(f"unix:{self.address}")
        self._server.start()

    @property
    def space(self) -> Space:
        return self.spaces["default"]

    def stop(self) -> None:
        self._server.stop(None).wait()

    def _services(self) -> dict[str, dict[str, Any]]:
        unary, empty = self._unary, api.Empty
        return {
            "containers.v1.Containers": {
                "Get": unary("Containers/Get", api.GetContainerRequest, self._get_container),
                "List": unary("Containers/List", api.ListContainersRequest, self._list_containers),
                "Create": unary("Containers/Create", api.CreateContainerRequest, self._create_container),
                "Update": unary("Containers/Update", api.UpdateContainerRequest, self._update_container),
                "Delete": unary("Containers/Delete", api.DeleteContainerRequest, self._delete_container),
            },
            "tasks.v1.Tasks": {
                "Get": unary("Tasks/Get", api.GetTaskRequest, self._get_task),
                "Create": unary("Tasks/Create", api.CreateTaskRequest, self._create_task),
                "Start": unary("Tasks/Start", api.StartTaskRequest, self._start_task),
                "Kill": unary("Tasks/Kill", api.KillTaskRequest, lambda s, r: empty()),
                "Wait": unary("Tasks/Wait", api.WaitTaskRequest, lambda s, r: api.WaitTaskResponse()),
                "Delete": unary("Tasks/Delete", api.DeleteTaskRequest, self._delete_task),
            },
            "images.v1.Images": {
                "Get": unary("Images/Get", api.GetImageRequest, self._get_image),
                "List": unary(
                    "Images/List",
                    api.ListImagesRequest,
                    lambda s, r: api.ListImagesResponse(images=s.images.values()),
                ),
                "Create": unary("Images/Create", api.CreateImageRequest, self._create_image),
                "Delete": unary("Images/Delete", api.DeleteImageRequest, self._delete_image),
            },
            "content.v1.Content": {
                "Info": unary("Content/Info", api.ContentInfoRequest, self._content_info),
                "Update": unary("Content/Update", api.ContentUpdateRequest, self._content_update),
                "Abort": unary("Content/Abort", api.AbortContentRequest, lambda s, r: empty()),
                "Write": grpc.stream_stream_rpc_method_handler(
                    self._write,
                    request_deserializer=api.WriteContentRequest.FromString,
                    response_serializer=lambda m: m.SerializeToString(),
                ),
            },
            "snapshots.v1.Snapshots": {
                "Stat": unary("Snapshots/Stat", api.StatSnapshotRequest, self._stat_snapshot),
                "Prepare": unary("Snapshots/Prepare", api.PrepareSnapshotRequest, self._prepare_snapshot),
                "Mounts": unary("Snapshots/Mounts", api.MountsRequest, self._mounts),
                "Commit": unary("Snapshots/Commit", api.CommitSnapshotRequest, self._commit_snapshot),
                "Remove": unary("Snapshots/Remove", api.RemoveSnapshotRequest, self._remove_snapshot),
            },
            "diff.v1.Diff": {"Apply": unary("Diff/Apply", api.ApplyDiffRequest, self._apply)},
            "leases.v1.Leases": {
                "Create": unary("Leases/Create", api.CreateLeaseRequest, self._create_lease),
                "Delete": unary("Leases/Delete", api.DeleteLeaseRequest, self._delete_lease),
                "AddResource": unary("Leases/AddResource", api.AddLeaseResourceRequest, self._add_resource),
            },
            "introspection.v1.Introspection": {
                "Plugins": unary("Introspection/Plugins", api.PluginsRequest, self._plugins)
            },
            "namespaces.v1.Namespaces": {
                "List": unary("Namespaces/List", api.ListNamespacesRequest, self._list_namespaces)
            },
        }

    def _unary(self, name: str, request: Any, answer: Callable[[Space, Any], Any]) -> Any:
        def handle(message: Any, context: Any) -> Any:
            with self._lock:
                space = self._enter(name, context)
                if name in self.hooks:
                    self.hooks[name](message)
                try:
                    return answer(space, message)
                except KeyError as error:
                    context.abort(grpc.StatusCode.NOT_FOUND, f"{error.args[0]}: not found")
                except FileExistsError as error:
                    context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{error.args[0]}: already exists")

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=request.FromString,
            response_serializer=lambda m: m.SerializeToString(),
        )

    def _enter(self, name: str, context: Any) -> Space:
        metadata = dict(context.invocation_metadata())
        self.calls.append(name)
        self.metadata.append(metadata)
        if failure := self.failures.get(name):
            context.abort(*failure)
        return self.spaces.setdefault(metadata["containerd-namespace"], Space())

    def _get_container(self, space: Space, request: Any) -> Any:
        return api.GetContainerResponse(container=space.containers[request.id])

    def _list_containers(self, space: Space, request: Any) -> Any:
        found = [c for c in space.containers.values() if any(_matches(f, c) for f in request.filters)]
        return api.ListContainersResponse(containers=found if request.filters else space.containers.values())

    def _create_container(self, space: Space, request: Any) -> Any:
        if request.container.id in space.containers:
            raise FileExistsError(f"container {request.container.id}")
        space.containers[request.container.id] = request.container
        return api.CreateContainerResponse(container=request.container)

    def _update_container(self, space: Space, request: Any) -> Any:
        container = space.containers[request.container.id]
        for path in request.update_mask.paths:
            if path == "spec":
                container.spec.CopyFrom(request.container.spec)
            else:
                name = path.removeprefix("labels.")
                value = request.container.labels.get(name, "")
                if value:
                    container.labels[name] = value
                else:
                    container.labels.pop(name, None)
        return api.UpdateContainerResponse(container=container)

    def _delete_container(self, space: Space, request: Any) -> Any:
        del space.containers[request.id]
        return api.Empty()

    def _get_task(self, space: Space, request: Any) -> Any:
        return api.GetTaskResponse(process=space.tasks[request.container_id])

    def _create_task(self, space: Space, request: Any) -> Any:
        process = api.Process(id=request.container_id, status=api.CREATED)
        space.tasks[request.container_id] = process
        return api.CreateTaskResponse(container_id=request.container_id)

    def _start_task(self, space: Space, request: Any) -> Any:
        space.tasks[request.container_id].status = api.RUNNING
        space.tasks[request.container_id].pid = 4242
        return api.StartTaskResponse(pid=4242)

    def _delete_task(self, space: Space, request: Any) -> Any:
        del space.tasks[request.container_id]
        return api.DeleteTaskResponse()

    def _get_image(self, space: Space, request: Any) -> Any:
        return api.GetImageResponse(image=space.images[request.name])

    def _create_image(self, space: Space, request: Any) -> Any:
        if request.image.name in space.images:
            raise FileExistsError(f"image {request.image.name}")
        space.images[request.image.name] = request.image
        return api.CreateImageResponse(image=request.image)

    def _delete_image(self, space: Space, request: Any) -> Any:
        del space.images[request.name]
        return api.Empty()

    def _content_info(self, space: Space, request: Any) -> Any:
        body = space.content[request.digest]
        return api.ContentInfoResponse(info=api.ContentInfo(digest=request.digest, size=len(body)))

    def _content_update(self, space: Space, request: Any) -> Any:
        space.content[request.info.digest]
        space.content_labels.setdefault(request.info.digest, {}).update(request.info.labels)
        return api.ContentUpdateResponse(info=request.info)

    def _write(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        space = self._enter("Content/Write", context)
        body = b""
        for request in requests:
            body += request.data
            if request.action != api.COMMIT:
                continue
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            if digest in space.content:
                context.abort(grpc.StatusCode.ALREADY_EXISTS, f"content {digest}: already exists")
            if digest != request.expected or len(body) != request.total:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, "unexpected commit digest")
            space.content[digest] = body
            space.content_labels[digest] = dict(request.labels)
            yield api.WriteContentResponse(action=api.COMMIT, digest=digest)

    def _stat_snapshot(self, space: Space, request: Any) -> Any:
        parent = space.snapshots[request.key]
        return api.StatSnapshotResponse(info=api.SnapshotInfo(name=request.key, parent=parent))

    def _prepare_snapshot(self, space: Space, request: Any) -> Any:
        if request.key in space.snapshots:
            raise FileExistsError(f"snapshot {request.key}")
        if request.parent and request.parent not in space.snapshots:
            raise KeyError(f"snapshot {request.parent}")
        space.snapshots[request.key] = request.parent
        return api.PrepareSnapshotResponse(mounts=[self._mount(request.key)])

    def _mounts(self, space: Space, request: Any) -> Any:
        space.snapshots[request.key]
        return api.MountsResponse(mounts=[self._mount(request.key)])

    def _mount(self, key: str) -> api.Mount:
        upper = self.snapshot_root / key.replace(":", "-") / "fs"
        upper.mkdir(parents=True, exist_ok=True)
        lower = self.snapshot_root / "lower"
        lower.mkdir(exist_ok=True)
        work = upper.parent / "work"
        work.mkdir(exist_ok=True)
        options = [f"workdir={work}", f"upperdir={upper}", f"lowerdir={lower}"]
        return api.Mount(type="overlay", source="overlay", options=options)

    def _commit_snapshot(self, space: Space, request: Any) -> Any:
        if request.name in space.snapshots:
            raise FileExistsError(f"snapshot {request.name}")
        space.snapshots[request.name] = space.snapshots.pop(request.key)
        return api.Empty()

    def _remove_snapshot(self, space: Space, request: Any) -> Any:
        del space.snapshots[request.key]
        return api.Empty()

    def _apply(self, space: Space, request: Any) -> Any:
        space.content[request.diff.digest]
        return api.ApplyDiffResponse(applied=api.Descriptor(digest=self.layers[request.diff.digest]))

    def _create_lease(self, space: Space, request: Any) -> Any:
        space.leases[request.id] = []
        return api.CreateLeaseResponse(lease=api.Lease(id=request.id))

    def _delete_lease(self, space: Space, request: Any) -> Any:
        del space.leases[request.id]
        return api.Empty()

    def _add_resource(self, space: Space, request: Any) -> Any:
        space.leases[request.id].append(f"{request.resource.type} {request.resource.id}")
        return api.Empty()

    def _plugins(self, space: Space, request: Any) -> Any:
        plugin = api.Plugin(
            type="io.containerd.content.v1", id="content", exports={"root": str(self.content_root)}
        )
        return api.PluginsResponse(plugins=[plugin] if f"type=={plugin.type}" in request.filters else [])

    def _list_namespaces(self, space: Space, request: Any) -> Any:
        return api.ListNamespacesResponse(namespaces=[api.Namespace(name=name) for name in self.spaces])


def _matches(text: str, container: api.Container) -> bool:
    """The three forms of containerd's filter syntax that the agent writes."""
    if match := re.fullmatch(r"id==(\S+)", text):
        return bool(container.id == match[1])
    if match := re.fullmatch(r'id~="(\S+)"', text):
        return re.search(match[1], container.id) is not None
    if match := re.fullmatch(r'labels\."([^"]+)"==(\S+)', text):
        return bool(container.labels.get(match[1]) == match[2])
    raise AssertionError(f"not a filter the agent should write: {text}")
