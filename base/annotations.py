"""What a container's spec says to Cedana: the names that the shim, the engine and the agent agree on."""

from __future__ import annotations

RESTORE_FROM = "ai.cedana.restore-from"
"""The checkpoint to start from: an artifact reference."""
ON_INCOMPATIBLE = "ai.cedana.on-incompatible"
"""`COLD_START`: begin anew where the checkpoint cannot be restored."""
COLD_START = "cold-start"
TCP = "ai.cedana.tcp"
"""What becomes of TCP connections: `established` or `close`."""
BRIDGE = "ai.cedana.bridge"
"""The bridge of this node to join."""
ALLOW_CHANGED = "ai.cedana.allow-changed"
"""Comma-separated paths that may differ from what they were at the checkpoint."""

ENV_MARKER = "CEDANA_CHECKPOINT"
"""The environment variable by which a container's image is known to be a checkpoint."""
