"""The restore sequence: from CRIU images on this node to a running container, read from top to bottom.

`restore` runs inside the shim's Start (as the subprocess `python -m runtime restore`); the images come
from `runtime.fetch`, or from containerd when an orchestrator hands its own checkpoint. The container's
devices, mounts, capabilities and profiles are those of the target's own bundle, never the artifact's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.annotations import ALLOW_CHANGED
from base.config import Config
from base.trace import Trace
from hooks.participant import CriuSettings, Participant, Target
from runtime import criu, mounts, privileges
from runtime.attempt import Attempt
from runtime.container import Container
from runtime.errors import IncompatibleError, RestoreError
from runtime.manifest import DumpManifest
from runtime.probe import changed_files
from runtime.recover import recover
from runtime.runc import last_error
from runtime.scratch import private_directory
from runtime.stop import refuse


@dataclass(frozen=True)
class RestoreRequest:
    container: Container
    """The target: `pid` is 0, `spec` its own config.json."""
    images: Path
    work: Path
    stdio: tuple[int, int, int] = (0, 1, 2)
    """Descriptors the restored init gets as 0, 1 and 2 (ignored where it had no pipe there)."""
    console_socket: str = ""
    no_pivot: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def restore(
    request: RestoreRequest, participants: Sequence[Participant], config: Config, trace: Trace
) -> int:
    """Bring the processes back; returns init's pid on the host.

    Raises `IncompatibleError` before anything is touched, `RestoreError` after everything was undone.
    """
    container = request.container
    manifest = DumpManifest.read(request.images)
    with ExitStack() as cleanup, ExitStack() as undo:
        recover(config)
        name = f"restore-{container.namespace}-{container.id}"
        scratch = cleanup.enter_context(private_directory(config, name))
        settings = manifest.criu_settings()
        target = Target(
            container_id=container.unique_id,
            spec=json.loads(json.dumps(container.spec)),
            bundle=container.bundle,
            rootfs=container.bundle / "rootfs",
            scratch=scratch,
            options={**manifest.options, **request.options},
        )
        with trace.step("probe"):
            privileges.check(request.images, container.spec)
            _probe(target, manifest, mounts.check(request.images, container.spec), participants, settings)
        with trace.step("prepare"):
            for participant in participants:
                undo.callback(participant.abort_target, target)
                participant.prepare(target, manifest.participants.get(participant.name, {}), settings)
            _write_bundle(target, settings, undo)
        with trace.step("restore"):
            pid = _run(request, target, config, scratch, undo)
        with trace.step("resume"):
            for participant in reversed(participants):
                participant.resume_target(target, manifest.participants.get(participant.name, {}))
        undo.pop_all()
    return pid


def _probe(
    target: Target,
    manifest: DumpManifest,
    needed_mounts: Collection[str],
    participants: Sequence[Participant],
    settings: CriuSettings,
) -> None:
    findings = [
        finding
        for participant in participants
        for finding in participant.probe_target(
            target, manifest.participants.get(participant.name, {}), settings
        )
    ]
    refuse(findings, f"container {target.container_id} cannot be restored here")
    allowed = set(target.spec.get("annotations", {}).get(ALLOW_CHANGED, "").split(","))
    missing = [
        mount["source"]
        for mount in target.spec.get("mounts", [])
        if {"bind", "rbind"} & set(mount.get("options", [])) and not os.path.exists(mount["source"])
    ]
    if missing:
        raise IncompatibleError(
            f"the source of a bind mount is missing on this node: {', '.join(missing)}",
            hint="create it, or mount another source",
        )
    if absent := _absent_mounts(needed_mounts, target.spec):
        raise IncompatibleError(
            f"the checkpoint has mounts that this container lacks: {', '.join(absent)}",
            hint="give the container the same mount points (the sources may differ)",
        )
    changed = changed_files(manifest.processes, target.rootfs, target.spec)
    if blocking := [sentence for path, sentence in changed.items() if path not in allowed]:
        raise IncompatibleError(
            f"files differ from what they were at the checkpoint: {'; '.join(blocking[:5])}",
            hint=f"put them back, or list them in the annotation {ALLOW_CHANGED}",
        )


def _absent_mounts(needed: Collection[str], spec: Mapping[str, Any]) -> list[str]:
    """Those of `needed` that runc will not give CRIU for `spec`: it names binds by their destination,
    masked paths /dev/null, and the cgroup hierarchies by where they are."""
    given = {mount["destination"] for mount in spec.get("mounts", [])} | {"/dev/null"}
    cgroup = next((m["destination"] for m in spec.get("mounts", []) if m.get("type") == "cgroup"), None)
    return sorted(
        name for name in needed if name not in given and not (cgroup and name.startswith(f"{cgroup}/"))
    )


def _write_bundle(target: Target, settings: CriuSettings, undo: ExitStack) -> None:
    """Give the bundle the prepared spec, with CRIU's configuration file named in it."""
    criu_config = target.bundle / "criu.conf"
    criu.write_config(
        criu_config,
        CriuSettings(
            settings.flags,
            [*settings.values, ("network-lock", "skip"), ("manage-cgroups", "ignore")],
        ),
    )
    target.spec.setdefault("annotations", {})[criu.CONFIG_ANNOTATION] = str(criu_config)
    path = target.bundle / "config.json"
    before = path.read_bytes()
    undo.callback(path.write_bytes, before)
    path.write_text(json.dumps(target.spec))


def _run(request: RestoreRequest, target: Target, config: Config, scratch: Path, undo: ExitStack) -> int:
    container = request.container
    pid_file = container.bundle / "init.pid"
    log = scratch / "runc.log"
    runc = [
        config.tool(container.runc_binary),
        *("--root", str(container.runc_root), "--log", str(log), "--log-format", "json"),
        *(["--systemd-cgroup"] if container.systemd_cgroup else []),
    ]
    argv = [
        *runc,
        *("restore", "--detach", "--no-subreaper"),
        *("--image-path", str(request.images), "--work-path", str(request.work)),
        *("--bundle", str(container.bundle), "--pid-file", str(pid_file)),
        *(["--console-socket", request.console_socket] if request.console_socket else []),
        *(["--no-pivot"] if request.no_pivot else []),
        container.id,
    ]
    request.work.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = criu.environment(config)

    attempt = Attempt.begin(
        delete=[*runc, "delete", "--force", container.id],
        environment=environment,
        state_dir=container.state_dir,
        work=request.work,
        cgroup=str((target.spec.get("linux") or {}).get("cgroupsPath") or ""),
    )
    attempt.write(scratch)
    undo.callback(attempt.undo, scratch)
    status = _spawn(argv, request.stdio, environment)
    if status != 0:
        name = f"{container.namespace}-{container.id}-restore"
        runc_error = last_error(log) or f"runc ended with status {status}"
        failure = criu.failure(request.work / "restore.log", config.log_dir, name, runc_error)
        raise RestoreError(
            f"CRIU could not restore container {container.name or container.id}: {runc_error}",
            hint=f"{failure.hint or 'the log says more'} (whole log: {failure.log})"
            if failure.log
            else failure.hint,
            details=failure.line,
        )
    return int(pid_file.read_text())


def _spawn(argv: Sequence[str], stdio: tuple[int, int, int], environment: Mapping[str, str]) -> int:
    """Run `argv` with `stdio` as its 0, 1 and 2; returns its exit status.

    Not subprocess: a restored init may hold these descriptors for ever, and nothing may wait for them.
    """
    high = [os.dup(fd) for fd in stdio]
    try:
        actions: list[Any] = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(high)]
        pid = os.posix_spawn(argv[0], list(argv), dict(environment), file_actions=actions)
    finally:
        for fd in high:
            os.close(fd)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)  # what it makes can be undone only when it has ended
        raise
