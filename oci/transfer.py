"""Copies a checkpoint between stores: `cedana push` and `cedana pull`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from base.trace import Trace
from oci.artifact import ARTIFACT_TYPE, Artifact
from oci.manifest import Manifest
from oci.store import Descriptor, Store, worker_count

STEP = "copy"


def copy(source: Store, name: str, target: Store, tag: str, trace: Trace) -> Descriptor:
    """Copy the checkpoint `name` and the manifest of its base image into `target`, as `tag` (the id of
    the checkpoint, when '').

    What the target has already is not copied again. The manifests are put last, so that a copy that
    fails leaves nothing visible.
    """
    artifact = Artifact.open(source, name)
    manifest, body = source.manifest(artifact.manifest.digest)
    blobs = {blob.digest: blob for blob in [*artifact.blobs(), *artifact.base_blobs()]}
    with trace.step(STEP):
        try:
            _copy_blobs(source, list(blobs.values()), target, trace)
            if artifact.base is not None:
                base, base_body = source.manifest(artifact.base.digest)
                Manifest.parse(base_body)
                target.put_manifest(base.media_type, base_body)
            copied = target.put_manifest(manifest.media_type, body, tag or artifact.record.id)
        except BaseException:
            target.discard()
            raise
    return replace(copied, artifact_type=ARTIFACT_TYPE)


def _copy_blobs(source: Store, blobs: Sequence[Descriptor], target: Store, trace: Trace) -> None:
    """Copy the blobs, large ones first, several at a time; the first failure stops the rest."""
    total = sum(blob.size for blob in blobs)
    done = 0
    lock = threading.Lock()
    failed = threading.Event()

    def copy_one(blob: Descriptor) -> None:
        nonlocal done
        if failed.is_set():
            return
        try:
            target.copy_from(source, blob)
        except BaseException:
            failed.set()
            raise
        with lock:
            done += blob.size
        trace.progress(STEP, done, total)

    with ThreadPoolExecutor(worker_count()) as pool:
        jobs = [pool.submit(copy_one, blob) for blob in sorted(blobs, key=lambda blob: -blob.size)]
        for job in jobs:
            job.result()
