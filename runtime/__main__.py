"""The engine as a program: `python -m runtime VERB`, how the shim calls it.

One JSON object on stdin is the request; stdout carries JSON lines: `{"step": name}` as each step begins,
at last `{"result": {…}}` or `{"error": {"message", "hint", "details", "code"}}`. docs/architecture.md,
section 10, lists the verbs and their fields. Each imports what it needs: they are started in the middle of a
restore.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from base import config as configuration
from base.annotations import BRIDGE, TCP
from base.config import Config
from base.errors import CedanaError
from base.trace import Progress, Step, Trace
from runtime import fuse
from runtime.container import Container, Mount, load_spec, unique_id
from runtime.staging import Staging, mark_restored

Request = dict[str, Any]


def _container(request: Request) -> Container:
    bundle = Path(request["bundle"])
    return Container(
        id=request["id"],
        namespace=request["namespace"],
        bundle=bundle,
        pid=int(request.get("pid", 0)),
        runc_root=Path(request["runc_root"]),
        runc_binary=request["runc"],
        systemd_cgroup=bool(request.get("systemd_cgroup")),
        spec=load_spec(bundle),
    )


def _dump(request: Request, config: Config, trace: Trace) -> Request:
    from runtime.checkpoint import CheckpointOptions, dump
    from runtime.locks import exclusive
    from runtime.participants import participants

    options = CheckpointOptions(leave_running=bool(request["leave_running"]))
    images, work = Path(request["image_path"]), Path(request["work_path"])
    with exclusive(config, request["namespace"], request["id"]):
        dump(_container(request), images, work, options, participants(), config, trace)
    return {}


def _prepare(request: Request, config: Config, trace: Trace) -> Request:
    mounts = [
        Mount(m["type"], m["source"], m.get("target", ""), tuple(m.get("options", ())))
        for m in request["rootfs"]
    ]
    staging = Staging.of(config, request["namespace"], request["id"])
    if staging.ready_for(request["source"], mounts):
        return {"images": str(staging.images)}
    from runtime import fetch

    images = fetch.prepare(request["id"], request["namespace"], request["source"], mounts, config, trace)
    return {"images": str(images) if images else ""}


_WISHES = {TCP: "tcp", BRIDGE: "bridge"}
"""Annotations of the container that say how it wants to be restored."""


def _restore(request: Request, config: Config, trace: Trace) -> Request:
    from runtime.participants import participants
    from runtime.restore import RestoreRequest, restore

    first, second, third = request["stdio"]
    container = _container(request)
    annotations = container.spec.get("annotations") or {}
    restore_request = RestoreRequest(
        container=container,
        images=Path(request["images"]),
        work=Path(request["work_path"]),
        stdio=(first, second, third),
        console_socket=request.get("console_socket", ""),
        no_pivot=bool(request.get("no_pivot")),
        options={wish: annotations[name] for name, wish in _WISHES.items() if name in annotations},
    )
    staging = Staging.around(restore_request.images, config)
    with _memory_of(staging, config, trace) if staging else nullcontext():
        pid = restore(restore_request, participants(), config, trace)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it runs: there is nothing to undo any more
    if staging:
        mark_restored(container, staging)
        staging.discard_behind(config)
    return {"pid": pid}


@contextmanager
def _memory_of(staging: Staging, config: Config, trace: Trace) -> Iterator[None]:
    """The page images can be read, from whoever fetches the memory already or from here."""
    device = fuse.mount(staging.pages)
    try:
        if staging.hand_over(device):
            os.close(device)
            yield
            return
        from runtime import fetch

        with fetch.serving(device, staging, config, trace):
            yield
    finally:
        fuse.unmount(staging.pages)


def _discard(request: Request, config: Config, trace: Trace) -> Request:
    from hooks import netbuild

    netbuild.remove(unique_id(request["namespace"], request["id"]), config)
    Staging.of(config, request["namespace"], request["id"]).discard_behind(config)
    return {}


VERBS: dict[str, Callable[[Request, Config, Trace], Request]] = {
    "dump": _dump,
    "prepare": _prepare,
    "restore": _restore,
    "discard": _discard,
}


def _stop(*_: object) -> None:
    """End, undoing what was done; nothing may interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(130)


def main(argv: list[str]) -> int:
    """Run one verb; the exit status is the error's `exit_code`."""

    def tell(event: Step | Progress | str) -> None:
        if isinstance(event, str):
            _say({"step": event})

    if len(argv) != 2 or argv[1] not in VERBS:
        print(f"usage: python -m runtime {'|'.join(VERBS)}", file=sys.stderr)
        return 2
    os.umask(0o077)
    signal.signal(signal.SIGTERM, _stop)
    try:
        request = json.load(sys.stdin)
        _say({"result": VERBS[argv[1]](request, configuration.load(), Trace(tell))})
    except CedanaError as error:
        body = {"message": error.message, "hint": error.hint, "details": error.details}
        _say({"error": {**body, "code": error.exit_code}})
        return error.exit_code
    except Exception as error:
        traceback.print_exc()
        body = {"message": f"the engine failed: {error!r}", "hint": "report this with the shim's log"}
        _say({"error": {**body, "details": traceback.format_exc().splitlines()[-2].strip(), "code": 1}})
        return 1
    return 0


def _say(message: Request) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
