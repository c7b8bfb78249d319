"""The configuration of a command: `base.config`, containerd's own environment variables, then flags."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from base import config as configuration
from base.config import Config
from base.errors import UsageError

_CONTAINERD = {
    "CONTAINERD_ADDRESS": "CEDANA_CONTAINERD_ADDRESS",
    "CONTAINERD_NAMESPACE": "CEDANA_CONTAINERD_NAMESPACE",
}
"""What `ctr` and `nerdctl` read, and ours of the same meaning, which is stronger."""


def load(address: str = "", namespace: str = "", environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration with `address` and `namespace`, if given, from the command line."""
    known = {ours: environ[theirs] for theirs, ours in _CONTAINERD.items() if environ.get(theirs)}
    config = configuration.load({**known, **environ})
    config = replace(
        config,
        containerd_address=Path(re.sub(r"^unix:/+", "/", address or str(config.containerd_address))),
        containerd_namespace=namespace or config.containerd_namespace,
    )
    if not config.containerd_namespace.replace("-", "").replace(".", "").replace("_", "").isalnum():
        raise UsageError(f"{config.containerd_namespace[:80]!r} is not a containerd namespace")
    return config
